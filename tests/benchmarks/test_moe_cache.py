"""The trace benchmark: it replays what was recorded, of the fixture where there is nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.moe import cache
from benchmarks.moe.fixture_gguf import FIXTURE
from benchmarks.moe.record_trace import record_trace
from tests.offload.experts.routing import random_trace
from tests.offload.placed import needs_kernels


def run(out: Path, *arguments: str) -> int:
    return cache.main([*arguments, "--json", str(out)])


def test_a_recorded_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random_trace(passes=(20, *(1,) * 30), layers=2).save(tmp_path / "run.npz")
    out = tmp_path / "out.json"
    assert run(out, str(tmp_path / "run.npz")) == 0
    record = json.loads(out.read_text())
    assert str(tmp_path) not in out.read_text()
    assert [(row["tokens"], row["slots"]) for row in record["hit_rates"]] == [(30, 4), (30, 8)]
    assert "| run | 25 % | 30 |" in capsys.readouterr().out


@needs_kernels
def test_on_real_routing_scores_beat_recency(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "record_trace", lambda path: record_trace(path, 400))
    assert run(tmp_path / "out.json", "--cache", "0.25") == 0
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["traces"][0]["model"] == f"{FIXTURE.name}-moe.gguf"
    (row,) = record["hit_rates"]
    assert row["hit_rates"]["learned"] > row["hit_rates"]["lru"] + 0.05


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    for arguments in ([str(tmp_path / "none.npz")], ["--cache", "2"], ["--cache", "much"]):
        assert run(out, *arguments) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert not out.exists()
