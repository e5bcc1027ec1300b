"""This machine's rates: kept for what they depend on, and measured again only where they must."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from localrt.common.settings import Settings
from localrt.offload import hardware
from localrt.offload.reading.disk_speed import DiskProfile
from localrt.offload.reading.files import ReadMode
from localrt.planning import measure
from localrt.planning.machine import MachineProfile, typical_machine
from localrt.planning.measure import machine_profile
from localrt.quant.cpu.abi import find_library

PROFILE = DiskProfile(ReadMode(direct=True, threads=3, block=1 << 20), 2e9, 1e-10)
RATES = {"ram_bytes_s": 3e10, "call_s": 1e-5, "attention": [1e-10, 1e-11]}

pytestmark = pytest.mark.skipif(find_library() is None, reason="the CPU kernels are not built")


class Measured:
    """What was measured, in order; each call is quick and its result made up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.files: list[str] = []
        self.busy, self.disk, self.cpu = False, PROFILE, "cpu"
        monkeypatch.setattr(measure, "DEFAULT_FORMATS", ("q8_0",))
        monkeypatch.setattr(measure, "is_busy", lambda: self.busy)
        monkeypatch.setattr(measure, "measure_disk", self._disk)
        monkeypatch.setattr(measure, "measure_kernel", self._kernel)
        for name, value in (("memory", 3e10), ("call", 1e-5), ("attention", [1e-10, 1e-11])):
            monkeypatch.setattr(measure, f"_measure_{name}", lambda *_, value=value: value)
        monkeypatch.setattr(measure, "_SAMPLE_BYTES", 4 << 20)
        monkeypatch.setattr(hardware, "identity", lambda: [self.cpu])
        monkeypatch.setattr(subprocess, "run", _refuse)

    def _disk(self, paths: list[Path], **_: Any) -> DiskProfile:
        self.calls.append("disk")
        self.files = [path.name for path in paths]
        return self.disk

    def _kernel(self, ops: object, name: str, size: int) -> list[float]:
        self.calls.append(name)
        return [1e-12 * number for number in range(1, 8)]

    def since(self) -> list[str]:
        """What was measured since the last call."""
        calls, self.calls = self.calls, []
        return calls


def _refuse(*_: Any, **__: Any) -> None:
    raise OSError("not here")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    return Measured(monkeypatch)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.from_environment({"LOCALRT_CACHE": str(tmp_path / "cache")})


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    folder.mkdir()
    for name, size in (("b.safetensors", 2 << 20), ("a.safetensors", 1 << 20), ("m.json", 10)):
        (folder / name).write_bytes(b"x" * size)
    return folder


def test_measured_once(settings: Settings, measured: Measured, store: Path) -> None:
    disk, machine = machine_profile(store, settings)
    assert measured.since() == ["q8_0", "disk"]
    assert measured.files == ["a.safetensors", "b.safetensors"]  # those that are large
    assert disk == PROFILE
    assert (machine.ssd_bytes_s, machine.ssd_cpu_s) == (2e9, 1e-10)
    assert machine.kernels["q8_0"].at(1) == 1e-12
    assert machine.sources["kernels"] == "measured"
    assert machine_profile(store, settings) == (disk, machine)
    assert measured.since() == []
    machine_profile(store, settings, formats=["q8_0", "int4-g32", "no such format"])
    assert measured.since() == ["int4-g32"]  # only what is missing
    machine_profile(store, settings, remeasure=True)
    assert measured.since() == ["q8_0", "disk"]
    measured.cpu = "another"
    machine_profile(store, settings)
    assert measured.since() == ["q8_0"]
    assert {path.name for path in settings.cache_dir.iterdir()} == {"machine.json", "disks.json"}


def test_a_process_measures(
    settings: Settings, measured: Measured, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["-c", command[-1]])
        measure.main()
        assert measured.since() == ["q8_0", "disk"]
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    assert machine_profile(store, settings)[0] == PROFILE
    assert measured.since() == []  # not here


@pytest.mark.parametrize("file", ["machine.json", "disks.json"])
@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"%s": 3}', '{"%s": {"mode": []}}', '{"kernels": 3}'],
)
def test_damaged_cache(
    settings: Settings, measured: Measured, store: Path, file: str, text: str
) -> None:
    machine_profile(store, settings)
    measured.since()
    (settings.cache_dir / file).write_text(text.replace("%s", str(store.stat().st_dev)))
    assert measure.known_machine(settings.cache_dir, store) is None
    assert machine_profile(store, settings)[0] == PROFILE
    assert measured.since() == (["q8_0"] if file == "machine.json" else ["disk"])


def test_cache_that_cannot_be_written(measured: Measured, store: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings = Settings.from_environment({"LOCALRT_CACHE": str(tmp_path / "file" / "cache")})
    assert machine_profile(store, settings)[0] == PROFILE


def test_other_disks_are_kept(settings: Settings, measured: Measured, store: Path) -> None:
    path = settings.cache_dir / "disks.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"another": PROFILE.to_dict()}))
    machine_profile(store, settings, remeasure=True)
    assert "another" in json.loads(path.read_text("utf-8"))


def test_sample_of_a_disk(settings: Settings, measured: Measured, store: Path) -> None:
    def speed(now: float, *, sample: bool) -> float:
        measured.disk = DiskProfile(ReadMode(), now, 0.0)
        return machine_profile(store, settings, sample=sample)[1].ssd_bytes_s

    assert speed(1e9, sample=True) == speed(2e9, sample=True) == 1e9
    assert measured.files[0].startswith(".localrt-speed-")
    assert not list(store.glob(".localrt*"))
    # A model's own files tell better.
    assert speed(3e9, sample=False) == speed(4e9, sample=True) == 3e9


def test_busy_machine(settings: Settings, measured: Measured, store: Path) -> None:
    def source(*, busy: bool) -> str:
        measured.busy = busy
        return machine_profile(store, settings)[1].sources["kernels"]

    assert source(busy=True) == source(busy=True) == "measured while busy"
    assert source(busy=False) == source(busy=True) == "measured"


def test_little_room(settings: Settings, measured: Measured, store: Path) -> None:
    def profile(room: int) -> tuple[DiskProfile, MachineProfile]:
        return machine_profile(store, settings, room=room)

    assert profile(40 << 20) == (DiskProfile.assumed(), typical_machine())
    assert measured.since() == []
    profile(160 << 20)
    assert measured.since() == ["q8_0", "disk"]
    profile(1 << 30)
    assert measured.since() == ["q8_0"]  # with more memory


def test_real_rates(
    settings: Settings, tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "DEFAULT_FORMATS", ("q8_0",))
    monkeypatch.setattr(measure, "_BUDGET_S", 0.0)
    _, machine = measure.measure(store, tmp_path, [], False, 8 << 20, False)
    assert machine.kernels["q8_0"].at(1) > 0
    assert machine.attention.at(1) > 0
    assert machine.ram_bytes_s > 1e8
    assert machine.call_s > 0


@pytest.mark.parametrize(
    ("later", "busy"),
    [
        ("cpu  180 0 10 910 100 0 0 0 80 0", True),  # a guest's ticks are its user's, too
        ("cpu  110 0 10 990 100 0 0 0 0 0", False),
        ("cpu  110 0 10 910 180 0 0 0 0 0", False),  # waiting for a disk
        ("cpu  110 0 10 900 100 0 0 80 0 0", True),  # another machine has the core
        ("cpu  100 0 10 900 100 0 0 0 0 0", False),  # no tick since
    ],
)
def test_is_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: str, busy: bool) -> None:
    stat = tmp_path / "proc" / "stat"
    stat.parent.mkdir()
    stat.write_text("cpu  100 0 10 900 100 0 0 0 0 0\ncpu0 1 2 3 4\n", encoding="ascii")
    monkeypatch.setattr(time, "sleep", lambda _: stat.write_text(later, encoding="ascii"))
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert measure.is_busy(tmp_path) == busy
