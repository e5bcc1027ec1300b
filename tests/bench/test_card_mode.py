"""``localrt bench --gpu-memory SIZE`` without a GPU: a named card, nothing that looks measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from localrt.bench import card_mode
from localrt.bench.card_mode import card_for, simulate_card, wants_card
from localrt.bench.outcome import BenchOptions
from localrt.bench.report import to_json, to_table
from localrt.bench.workload import Workload
from localrt.cli import main
from localrt.errors import MemoryBudgetError, OptionError
from localrt.machine import hardware
from localrt.machine.hardware import Gpu
from localrt.offload.planner.machine import typical_machine
from localrt.settings import Settings
from tests.bench.test_hf_folder import tiny_gguf


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BenchOptions:
    monkeypatch.setattr(hardware, "gpus", lambda: ())
    monkeypatch.setattr(card_mode, "machine_of", lambda *_: (typical_machine(), ""))
    return BenchOptions(
        path=tiny_gguf(tmp_path, "qwen2"),
        engines=("native",),
        workload=Workload(prompt_tokens=20, tokens=10),
        gpu_memory=8_000_000_000,
    )


def test_only_gpu_memory_without_a_gpu_asks_for_a_card(
    options: BenchOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert wants_card(options)
    assert not wants_card(replace(options, gpu_memory=None))
    assert not wants_card(replace(options, device="virtual:8GB@12GB/s,256GB/s,20TFLOPS"))
    monkeypatch.setattr(hardware, "gpus", lambda: (Gpu("RTX 4090"),))
    assert not wants_card(options)  # a larger card is capped by the engine


def test_the_card_is_the_smallest_with_that_memory() -> None:
    assert card_for(8_000_000_000).name == "RTX 4060 8GB"
    assert card_for(12_000_000_000).vram_bytes == 12 << 30
    assert card_for(4_000_000_000).vram_bytes == 4 << 30
    assert card_for(5_000_000_000).vram_bytes == 6 << 30
    with pytest.raises(OptionError, match="no card with 40 GB"):
        card_for(40_000_000_000)


def test_everything_says_simulated(options: BenchOptions) -> None:
    run = simulate_card(options, Settings.from_environment({}))
    assert run.text.startswith("SIMULATED")
    assert "RTX 4060 8GB" in run.text
    table = to_table(run.outcome, options, name="m", machine=hardware.probe())
    assert "native (simulated)" in table
    assert "median" not in table
    report = to_json(
        run.outcome, options, name="m", machine=hardware.probe(), versions={}, command=""
    )
    (result,) = report["results"]
    assert result["simulated"] is True
    assert result["best"] is True
    assert result["decode_tok_s"] == result["predicted_tok_s"] > 0
    assert result["peak_vram_bytes"] <= 8_000_000_000
    assert json.loads(json.dumps(run.to_dict()))["plan"]["prediction"]["tok_s"] > 0


def test_what_cannot_fit_fails_with_the_planners_words(options: BenchOptions) -> None:
    with pytest.raises(MemoryBudgetError):
        simulate_card(replace(options, gpu_memory=1000, ram=1000), Settings.from_environment({}))


def test_the_command_prints_the_plan_and_runs_nothing(
    options: BenchOptions, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--prompt-tokens", "20", "--tokens", "10", "--gpu-memory", "8GB"]
    assert main(["bench", str(options.path), *sizes]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("SIMULATED")
    assert "nothing runs" in shown.err
    assert main(["bench", str(options.path), *sizes, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["simulated"] is True
    assert report["card"]["name"] == "RTX 4060 8GB"
    assert main(["bench", str(options.path), *sizes, "--trace", "t.json"]) == 2
