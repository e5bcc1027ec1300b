"""The benchmark of KV formats: tokens are compared one by one, and a run goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.kv import __main__ as kv
from benchmarks.kv.tables import kv_table
from benchmarks.kv.windows import compare_window, joined, summary
from localrt import load
from localrt.evaluate import Tally, log_softmax
from localrt.quant.ops.native.abi import find_library
from tests.benchmarks.test_quality import passages

pytestmark = pytest.mark.skipif(find_library() is None, reason="the CPU kernels are not built")


def test_a_window_is_scored_as_an_evaluation_scores_it(tiny_folder: Path) -> None:
    window = [int(i) for i in np.random.default_rng(0).integers(0, 200, 100)]
    tally = Tally()
    with load(tiny_folder, kv_format="bf16") as bf16, load(tiny_folder, kv_format="int4") as int4:
        parts = [compare_window({"bf16": bf16, "int4": int4}, part) for part in (window, window)]
        for ours, theirs in zip(int4.logits(window[:-1]), bf16.logits(window[:-1]), strict=True):
            targets = np.array(window[1 + tally.count :][: len(ours)])
            tally.add(log_softmax(ours), targets, log_softmax(theirs))
    same = summary(joined(part["bf16"] for part in parts))
    assert same["change"] == same["kl"] == 0
    assert same["top1"] == 1
    found, expected = summary(parts[0]["int4"]), tally.comparison()
    assert found["perplexity"] == pytest.approx(tally.perplexity()[0], rel=1e-4)
    assert found["change"] == pytest.approx(expected["perplexity_change"], rel=1e-2, abs=1e-5)
    assert found["change_error"] == pytest.approx(expected["perplexity_change_error"], rel=1e-2)
    assert found["kl"] == pytest.approx(expected["kl_divergence"], rel=1e-2, abs=1e-6)
    assert summary(joined(part["int4"] for part in parts))["tokens"] == 2 * 99


def test_a_run_goes_on_where_it_was(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "prose.txt"
    text.write_text(passages(60))
    out = tmp_path / "kv.json"
    common = ["--models", str(tiny_folder), "--text", str(text), "--ctx", "64", "--json", str(out)]
    assert kv.main([*common, "--tokens", "128"]) == 0
    (first,) = json.loads(out.read_text())["models"]
    assert [window["text"] for window in first["windows"]] == [0, 1]
    assert kv.main([*common, "--tokens", "256"]) == 0
    record = json.loads(out.read_text())
    (second,) = record["models"]
    assert second["windows"][:2] == first["windows"]
    assert second["formats"]["int8"]["tokens"] == 4 * 63
    assert capsys.readouterr().out.count(" 2/2: ") == 1
    shown = kv_table(record)
    assert f"| int4 | {second['bits']['int4']:.2f} |" in shown
    assert "252 |" in shown
    assert str(tmp_path) not in shown
    assert kv.main([*common, "--ctx", "32"]) == 2
    assert "choose another --json" in capsys.readouterr().err
