"""What a GPU does while a model decodes; without one, a plan in which nothing looks measured."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from localrt.bench import gpu
from localrt.bench.gpu import GpuShares, forecast, gpu_for, use_line, wants_forecast, what_helps
from localrt.bench.report import to_json, to_table
from localrt.bench.workload import BenchOptions, Workload
from localrt.cli import main
from localrt.common.errors import MemoryBudgetError, OptionError
from localrt.common.settings import Settings
from localrt.offload import hardware
from localrt.offload.hardware import GpuFacts
from localrt.planning.forecast import Change
from localrt.planning.machine import typical_machine


@pytest.fixture
def options(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> BenchOptions:
    monkeypatch.setattr(hardware, "gpus", lambda: ())
    monkeypatch.setattr(gpu, "machine_here", lambda *_: (typical_machine(), ""))
    return BenchOptions(
        path=tiny_folder,
        engines=("native",),
        workload=Workload(prompt_tokens=20, tokens=10),
        gpu_memory=8_000_000_000,
    )


def test_wants_forecast(options: BenchOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wants_forecast(options)
    assert not wants_forecast(replace(options, gpu_memory=None))
    assert not wants_forecast(replace(options, device="cuda"))
    monkeypatch.setattr(hardware, "gpus", lambda: (GpuFacts("RTX 4090"),))
    assert not wants_forecast(options)  # a larger one is capped by the engine


def test_gpu_for() -> None:
    assert gpu_for(8_000_000_000).name == "RTX 4060 8GB"
    assert gpu_for(12_000_000_000).vram_bytes == 12 << 30
    assert gpu_for(4_000_000_000).vram_bytes == 4 << 30
    assert gpu_for(5_000_000_000).vram_bytes == 6 << 30
    with pytest.raises(OptionError, match="no known one has 40 GB"):
        gpu_for(40_000_000_000)


def test_forecast_is_labelled_simulated(options: BenchOptions) -> None:
    outcome = forecast(options, Settings.from_environment({}))
    table = to_table(outcome, options, name="m", machine=hardware.probe())
    assert table.startswith("SIMULATED")
    assert "RTX 4060 8GB" in table
    assert "native (simulated)" in table
    assert "median" not in table
    report = to_json(outcome, options)
    (result,) = report["results"]
    assert result["simulated"] is True
    assert result["best"] is True
    assert result["decode_tok_s"] == result["predicted_tok_s"] > 0
    assert result["peak_vram_bytes"] <= 8_000_000_000
    assert json.loads(json.dumps(report))["plan"]["prediction"]["tok_s"] > 0


def test_forecast_does_not_fit(options: BenchOptions) -> None:
    with pytest.raises(MemoryBudgetError):
        forecast(replace(options, gpu_memory=1000, ram=1000), Settings.from_environment({}))


def test_command_without_gpu(options: BenchOptions, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--prompt-tokens", "20", "--tokens", "10", "--gpu-memory", "8GB"]
    assert main(["bench", str(options.path), *sizes]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("SIMULATED")
    assert "nothing runs" in shown.err
    assert main(["bench", str(options.path), *sizes, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["simulated"] is True
    assert report["gpu"]["name"] == "RTX 4060 8GB"
    assert main(["bench", str(options.path), *sizes, "--trace", "t.json"]) == 2


def test_what_helps() -> None:
    changes = [Change("4 GB more GPU memory", 21.0, 1.6), Change("a faster disk", 14.0, 1.1)]
    assert what_helps({"gpu": 0.3, "link": 0.93}, changes) == (
        "Busiest is the link to the GPU, 93%. Best change: 4 GB more GPU memory, about 21.0"
        " tok/s (1.6 times)."
    )
    assert "wait for one another" in what_helps({"gpu": 0.3, "cpu": 0.4}, [])
    assert (
        use_line(asdict(GpuShares({}, "Nothing."))) == "busy while decoding: not measured. Nothing."
    )
