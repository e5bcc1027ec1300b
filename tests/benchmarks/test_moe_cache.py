"""The trace benchmark: it replays what was recorded, and its simulated times are in proportion."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.moe import cache
from benchmarks.moe.costs import CONFIGS, layer_costs
from benchmarks.moe.schedulers import SCHEDULERS, simulate
from benchmarks.moe.synthetic import synthetic_trace
from localrt.offload.planner.cards import parse_card
from localrt.offload.planner.machine import typical_machine
from tests.offload.experts.routing import random_trace


def run(out: Path, *arguments: str) -> int:
    return cache.main([*arguments, "--json", str(out)])


def test_a_recorded_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random_trace(passes=(20, *(1,) * 30), layers=2).save(tmp_path / "run.npz")
    out = tmp_path / "out.json"
    assert run(out, str(tmp_path / "run.npz"), "--cpu", "typical") == 0
    record = json.loads(out.read_text())
    assert str(tmp_path) not in out.read_text()
    assert record["simulated"]
    assert all(result["simulated"] for result in record["results"])
    assert {result["phase"] for result in record["results"]} == {"decode", "prompt"}
    for row in record["hit_rates"]:
        assert row["tokens"] == 30
        best = row["hit_rates"].pop("belady")
        assert all(rate <= best for rate in row["hit_rates"].values())
    shown = capsys.readouterr().out
    assert "| run.npz | 25 % |" in shown
    assert "Simulated tok/s, prompt" in shown


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    for arguments in (
        [str(tmp_path / "none.npz")],
        ["--synthetic", "none"],
        ["--cache", "2"],
        ["--cpu", "none"],
    ):
        assert run(out, "--cpu", "typical", *arguments) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert not out.exists()


def test_hybrid_is_faster_than_any_fixed_way() -> None:
    card = parse_card("RTX 4060 8GB")
    machine = replace(typical_machine(), gpu=card.profile, link_bytes_s=12e9)
    decode = synthetic_trace("qwen3-30b", tokens=40, layers=6)
    prompt = synthetic_trace("qwen3-30b", prompt=256, tokens=0, layers=6)
    for trace, rows, least in ((decode, 1, 1.4), (prompt, 256, 1.3)):
        costs = layer_costs("qwen3-30b", machine, rows=rows, held=100, format="int4-g32")
        seconds = {
            name: simulate(
                SCHEDULERS[name],
                trace,
                costs,
                slots=6 * 32,
                known=trace,
                warm_up=len(trace.passes()) // 2,
            ).seconds
            for name in ("static", "all CPU", "all streamed", "hybrid, fills")
        }
        assert seconds["static"] > least * seconds["hybrid, fills"]
        assert min(seconds.values()) == seconds["hybrid, fills"]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_shape_has_costs(name: str) -> None:
    card = parse_card("RTX 4060 8GB")
    machine = replace(typical_machine(), gpu=card.profile, link_bytes_s=12e9)
    costs = layer_costs(name, machine, rows=1, held=0, format="int4-g32")
    assert 0 < costs.experts.gpu.at(1) < costs.experts.cpu.at(1) < costs.experts.fetch
    assert (costs.shared > 2e-5) == (name in ("deepseek-v2-lite", "qwen2-57b"))
