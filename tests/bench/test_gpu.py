"""What a GPU and this machine do while a model decodes; without a GPU, a plan that says so."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from localrt.bench import gpu
from localrt.bench.gpu import forecast, gpu_for, wants_forecast
from localrt.bench.report import to_json, to_table
from localrt.bench.sampling import joules_between, read_energy
from localrt.bench.workload import BenchOptions, Workload
from localrt.common.errors import MemoryBudgetError, OptionError
from localrt.common.settings import Settings
from localrt.offload import hardware
from localrt.offload.hardware import GpuFacts
from localrt.planning.machine import typical_machine
from tests.bench.fake_nvml import FOLDER, FakeNvml, take

# -- a plan in the place of a GPU ------------------------------------------------------------------


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


def test_what_is_forecast(options: BenchOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wants_forecast(options)
    assert not wants_forecast(replace(options, gpu_memory=None))
    assert not wants_forecast(replace(options, device="cuda"))
    monkeypatch.setattr(hardware, "gpus", lambda: (GpuFacts("RTX 4090"),))
    assert not wants_forecast(options)  # a larger one is capped by the engine
    assert gpu_for(8_000_000_000).name == "RTX 4060 8GB"
    assert gpu_for(5_000_000_000).vram_bytes == 6 << 30
    with pytest.raises(OptionError, match="no known one has 40 GB"):
        gpu_for(40_000_000_000)
    with pytest.raises(MemoryBudgetError):
        forecast(replace(options, gpu_memory=1000, ram=1000), Settings.from_environment({}))


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


# -- samples ---------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "library", lambda: None)


def _write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name("written")
    written.write_text(f"{value}\n")
    written.replace(path)  # a reader never sees half a file


def _zone(root: Path, zone: str, name: str, joules: float, most: int = 1000) -> None:
    folder = root / "sys/class/powercap" / zone
    _write(folder / "name", name)
    _write(folder / "energy_uj", int(joules * 1e6))
    _write(folder / "max_energy_range_uj", int(most * 1e6))


def test_energy(tmp_path: Path) -> None:
    """Packages are counted once, and counters may start again."""
    assert read_energy(tmp_path) == {}
    _zone(tmp_path, "intel-rapl:0", "package-0", 999)
    _zone(tmp_path, "intel-rapl:0:0", "core", 4)
    _zone(tmp_path, "intel-rapl:0:1", "dram", 1)
    before = read_energy(tmp_path)
    # That of the memory is no part of the package's energy.
    assert before == {"intel-rapl:0": (999.0, 1000.0), "intel-rapl:0:1": (1.0, 1000.0)}
    _zone(tmp_path, "intel-rapl:0", "package-0", 2)
    _zone(tmp_path, "intel-rapl:0:1", "dram", 3.5)
    assert joules_between(before, read_energy(tmp_path)) == pytest.approx(3 + 2.5)


@pytest.mark.parametrize("lists", [True, False])
def test_peak_memory(lists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a process, or where it is not listed what all have taken meanwhile."""
    monkeypatch.setattr(gpu, "library", lambda: FakeNvml(tmp_path, lists=lists))
    (tmp_path / "1").write_text("1000")
    with gpu.Peaks(os.getpid()) as peaks:
        assert peaks.vram is None
        monkeypatch.setenv(FOLDER, str(tmp_path))
        take(5000)
        (tmp_path / "1").write_text("3000")
        (tmp_path / str(os.getpid())).unlink()
    assert peaks.vram == 5000
    assert (peaks.ram or 0) > 1 << 20
