from pathlib import Path

import pytest

from localrt.bench import energy
from localrt.bench.energy import joules_between, read_energy


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "nvml", lambda: None)


def _zone(root: Path, zone: str, name: str, microjoules: int) -> None:
    folder = root / "sys/class/powercap" / zone
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    (folder / "max_energy_range_uj").write_text("1000000000\n")


def test_packages_are_counted_once(tmp_path: Path) -> None:
    _zone(tmp_path, "intel-rapl:0", "package-0", 5_000_000)
    _zone(tmp_path, "intel-rapl:0:0", "core", 4_000_000)
    _zone(tmp_path, "intel-rapl:0:1", "dram", 1_000_000)
    _zone(tmp_path, "intel-rapl:1", "psys", 9_000_000)
    assert read_energy(tmp_path) == {
        "intel-rapl:0": (5.0, 1000.0),
        "intel-rapl:0:1": (1.0, 1000.0),  # is no part of the package's energy
    }


def test_a_counter_that_starts_again(tmp_path: Path) -> None:
    _zone(tmp_path, "intel-rapl:0", "package-0", 999_000_000)
    _zone(tmp_path, "intel-rapl:1", "package-1", 10_000_000)
    before = read_energy(tmp_path)
    _zone(tmp_path, "intel-rapl:0", "package-0", 2_000_000)
    _zone(tmp_path, "intel-rapl:1", "package-1", 12_500_000)
    assert joules_between(before, read_energy(tmp_path)) == pytest.approx(3 + 2.5)


def test_no_counter(tmp_path: Path) -> None:
    (tmp_path / "sys/class/powercap/intel-rapl:0").mkdir(parents=True)  # nothing may be read
    assert read_energy(tmp_path) == {}
    assert joules_between({}, {}) is None
