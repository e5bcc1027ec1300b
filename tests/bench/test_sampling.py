"""Samples of this machine, and of counters in a folder that stands for ``/``."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from localrt import system
from localrt.bench import gpu
from localrt.bench.sampling import Sampler, joules_between, read_energy
from tests.bench.fake_nvml import FOLDER, FakeNvml, take
from tests.waits import wait_for


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


def test_packages_are_counted_once(tmp_path: Path) -> None:
    _zone(tmp_path, "intel-rapl:0", "package-0", 5)
    _zone(tmp_path, "intel-rapl:0:0", "core", 4)
    _zone(tmp_path, "intel-rapl:0:1", "dram", 1)
    _zone(tmp_path, "intel-rapl:1", "psys", 9)
    assert read_energy(tmp_path) == {
        "intel-rapl:0": (5.0, 1000.0),
        "intel-rapl:0:1": (1.0, 1000.0),  # is no part of the package's energy
    }


def test_a_counter_that_starts_again(tmp_path: Path) -> None:
    _zone(tmp_path, "intel-rapl:0", "package-0", 999)
    _zone(tmp_path, "intel-rapl:1", "package-1", 10)
    before = read_energy(tmp_path)
    _zone(tmp_path, "intel-rapl:0", "package-0", 2)
    _zone(tmp_path, "intel-rapl:1", "package-1", 12.5)
    assert joules_between(before, read_energy(tmp_path)) == pytest.approx(3 + 2.5)


def test_no_counter(tmp_path: Path) -> None:
    (tmp_path / "sys/class/powercap/intel-rapl:0").mkdir(parents=True)  # nothing may be read
    assert read_energy(tmp_path) == {}
    assert joules_between({}, {}) is None


def test_samples_of_this_machine(tmp_path: Path) -> None:
    started = time.perf_counter()
    owners = {"own": os.getpid(), "gone": 2**22 + 1}
    with Sampler(owners, lambda: time.perf_counter() - started, root=tmp_path, every_s=0.01) as s:
        wait_for(lambda: len(s.found.samples) >= 3)
    first, second = s.found.samples[:2]
    assert 0 < first["at_s"] < second["at_s"]
    assert 0 <= first["cpu"] <= 1
    assert first["owners"]["own"] > 1 << 20
    assert first["owners"]["gone"] is None
    assert first["free_bytes"] > 0
    assert first["watts"] is None  # the folder has no counters
    assert first["memory_bytes_s"] is None
    assert first["gpu"] is None
    assert s.found.joules is None
    assert s.found.cpu_s > 0 or system.IS_WINDOWS  # whose clock of a process ticks every 16 ms


@pytest.mark.skipif(system.IS_WINDOWS, reason="reads Linux' files")
def test_sampled_energy_and_traffic(tmp_path: Path) -> None:
    _zone(tmp_path, "intel-rapl:0", "package-0", 5)
    traffic = tmp_path / "sys/fs/resctrl/mon_data/mon_L3_00/mbm_total_bytes"
    _write(traffic, 100)
    with Sampler({}, time.perf_counter, root=tmp_path, every_s=0.01) as sampler:
        wait_for(lambda: len(sampler.found.samples) >= 1)
        _zone(tmp_path, "intel-rapl:0", "package-0", 8)
        _write(traffic, 400)
        wait_for(lambda: any(each["memory_bytes_s"] for each in sampler.found.samples))
        wait_for(lambda: any(each["watts"] for each in sampler.found.samples))
    assert sampler.found.joules == pytest.approx(3)
    assert sampler.found.counters == ["intel-rapl:0"]
    watts = [sample["watts"] for sample in sampler.found.samples]
    assert sum(each > 0 for each in watts) == 1
    assert sum(sample["memory_bytes_s"] > 0 for sample in sampler.found.samples) == 1


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeNvml()
    monkeypatch.setattr(gpu, "library", lambda: library)
    assert gpu.use() == {"busy": 0.5, "bytes": 100}
    before = read_energy(system.ROOT / "none")
    library.millijoules = 2500
    assert joules_between(before, read_energy(system.ROOT / "none")) == 2.5


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


def test_no_peaks() -> None:
    with gpu.Peaks(2**22 + 1) as peaks:
        pass
    assert (peaks.ram, peaks.vram) == (None, None)
