"""What a GPU and this machine do while a model decodes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from localrt.bench import gpu
from localrt.bench.gpu import lacks_gpu
from localrt.bench.sampling import joules_between, read_energy
from localrt.bench.workload import BenchOptions
from localrt.cli import main
from localrt.offload import hardware
from localrt.offload.hardware import GpuFacts
from tests.bench.fake_nvml import FOLDER, FakeNvml, take


def test_gpu_memory_without_a_gpu(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hardware, "gpus", lambda: ())
    options = BenchOptions(path=tiny_folder, engines=("native",), gpu_memory=8_000_000_000)
    assert lacks_gpu(options)
    assert not lacks_gpu(replace(options, gpu_memory=None))
    assert not lacks_gpu(replace(options, device="cuda"))
    words = ["--engines", "native", "--gpu-memory", "8GB", "--tokens", "2", "--prompt-tokens", "8"]
    assert main(["bench", str(tiny_folder), *words]) == 2
    assert "there is no GPU here for --gpu-memory: a plan" in capsys.readouterr().err
    monkeypatch.setattr(hardware, "gpus", lambda: (GpuFacts("RTX 4090"),))
    assert not lacks_gpu(options)


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
