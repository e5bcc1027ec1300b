"""Counts of compiled kernels: a stopped run continues, and other sources are counted anew."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks.gpu import compiled
from benchmarks.gpu.machine_code import TARGETS, Build, ManyBuild


def test_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[tuple[str, int]]()

    def few(format_: str, target: int) -> Build:
        made.append((format_, target))
        return Build("linear", format_, 1, False, target, target, 0, 1024, 100, 0.05)

    def many(format_: str, target: int) -> ManyBuild:
        return ManyBuild(format_, target, 128, 8 if target == 120 else 0, 2048, 18.0, target / 10)

    monkeypatch.setattr(compiled, "VARIANTS", {"one row": few, "many rows": many})
    monkeypatch.setattr(compiled, "toolchain", lambda: ("13.0", "one"))
    words = ["--json", str(tmp_path / "compiled.json"), "--formats"]
    for formats, count in (("q4_0", 1), ("q4_0,q8_0", 2), ("q4_0,q8_0", 2)):
        assert compiled.main([*words, formats]) == 0
        assert len(made) == count * len(TARGETS)
    record = json.loads((tmp_path / "compiled.json").read_text())
    rows = {row["name"]: row for row in record["rows"]}
    assert list(rows) == ["q4_0, many rows", "q4_0, one row", "q8_0, many rows", "q8_0, one row"]
    assert rows["q4_0, one row"]["registers"] == list(TARGETS)
    assert rows["q8_0, many rows"]["unpacking"] == 8.9
    assert record["nvrtc"] == "13.0"
    monkeypatch.setattr(compiled, "toolchain", lambda: ("13.0", "other"))
    compiled.main([*words, "q8_0"])
    record = json.loads((tmp_path / "compiled.json").read_text())
    assert [row["name"] for row in record["rows"]] == ["q8_0, many rows", "q8_0, one row"]
