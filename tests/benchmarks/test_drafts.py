"""The benchmark of drafts, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.drafts.__main__ import main
from localrt.quant.cpu.abi import find_library
from tests.models.test_heads import TinyEagle3
from tests.models.tiny import edited

pytestmark = pytest.mark.skipif(find_library() is None, reason="the CPU kernels are not built")


def test_a_heads_row(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "head").mkdir()
    TinyEagle3(tmp_path / "head", 64, 259)
    edited(tmp_path / "head", eagle_config=None, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    (tmp_path / "code.jsonl").write_text(json.dumps({"prompt": "def add(a, b):"}))
    words = [str(tiny_folder), "--draft", str(tmp_path / "head"), "--code"]
    words += [
        str(tmp_path / "code.jsonl"),
        "--tokens",
        "12",
        "--runs",
        "1",
        "--json",
        str(tmp_path / "drafts.json"),
    ]
    assert main(words) == 0
    (row,) = json.loads((tmp_path / "drafts.json").read_text("utf-8"))["rows"]
    plain, ours = row["contestants"]
    assert (plain["draft"], ours["draft"]) == ("off", "head")
    assert plain["ratio"] == 1.0
    assert ours["trees"].keys() == {"8", "64"}
    assert "| code | head |" in capsys.readouterr().out
