"""Samples of this machine, and of counters in a folder that stands for ``/``."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localrt.bench.mix.sampling import Energy, Gpus, Sampler
from tests.waits import wait_for


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
    assert s.found.joules is None
    assert s.found.cpu_s > 0


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
    watts = [sample["watts"] for sample in sampler.found.samples]
    assert sum(each > 0 for each in watts) == 1
    assert sum(sample["memory_bytes_s"] > 0 for sample in sampler.found.samples) == 1


def test_energy_of_packages_and_their_memory(tmp_path: Path) -> None:
    _zone(tmp_path, "intel-rapl:0", "package-0", 990)
    _zone(tmp_path, "intel-rapl:0:0", "core", 0)
    _zone(tmp_path, "intel-rapl:0:1", "dram", 1)
    _zone(tmp_path, "intel-rapl:1", "psys", 7)
    _zone(tmp_path, "intel-rapl-mmio:0", "package-0", 990)
    energy = Energy(tmp_path)
    assert energy.step() is None
    _zone(tmp_path, "intel-rapl:0", "package-0", 20)  # it wrapped around
    _zone(tmp_path, "intel-rapl:0:1", "dram", 3)
    assert energy.step() == pytest.approx(30 + 2)
    (tmp_path / "sys/class/powercap/intel-rapl:0:1/energy_uj").unlink()  # no longer readable
    assert energy.step() is None


class FakeNvml:
    """Two GPUs, of which the second does not count its energy."""

    class NVMLError(Exception):
        pass

    joules = 10.0

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(gpu=30 + 20 * handle)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(used=100)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:  # noqa: N802
        return 2500

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> float:  # noqa: N802
        if handle == 1:
            raise self.NVMLError
        return self.joules * 1000


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    gpus = Gpus()
    assert gpus.sample() == {"busy": 0.5, "bytes": 200, "watts": 5.0}
    assert gpus.joules() == [None, None]
    library.joules = 14.0
    assert gpus.joules() == [4.0, None]


def test_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Gpus().sample() is None
    assert Gpus().joules() == []
