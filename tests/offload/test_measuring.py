"""What is known of a machine is kept, and measured again only where it has to be."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from localrt.common.settings import Settings
from localrt.machine import measuring
from localrt.machine.measuring import machine_profile
from localrt.offload.planner.machine import typical_machine
from localrt.offload.reading.disk_speed import DiskProfile
from localrt.offload.reading.files import ReadMode

PROFILE = DiskProfile(ReadMode(direct=True, threads=3, block=1 << 20), 2e9, 1e-10)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    home = {"XDG_DATA_HOME": str(tmp_path / "data"), "LOCALRT_CACHE": str(tmp_path / "cache")}
    return Settings.from_environment(home)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[list[Path]]:
    """The files of each measurement of a disk; nothing is really measured."""
    calls: list[list[Path]] = []

    def measure_disk(paths: list[Path]) -> DiskProfile:
        calls.append(paths)
        return PROFILE

    def measure_machine(folder: Path, *, disk_speed: Any, **_: Any) -> Any:
        disk_speed(folder)
        return typical_machine()

    monkeypatch.setattr(measuring, "measure_disk", measure_disk)
    monkeypatch.setattr(measuring, "measure_machine", measure_machine)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no processes here")

    monkeypatch.setattr(subprocess, "run", refuse)
    return calls


def store(folder: Path) -> Path:
    folder.mkdir()
    for name, size in (("b.safetensors", 2 << 20), ("a.safetensors", 1 << 20), ("m.json", 10)):
        (folder / name).write_bytes(b"x" * size)
    return folder


def test_a_disk_is_measured_once_by_its_large_files(
    settings: Settings, measured: list[list[Path]], tmp_path: Path
) -> None:
    folder = store(tmp_path / "store")
    for _ in range(3):
        disk, _ = machine_profile(folder, settings)
        assert disk == PROFILE
    assert [[path.name for path in paths] for paths in measured] == [
        ["a.safetensors", "b.safetensors"]
    ]
    machine_profile(folder, settings, remeasure=True)
    assert len(measured) == 2


def test_measuring_one_disk_again_keeps_the_others(
    settings: Settings, measured: list[list[Path]], tmp_path: Path
) -> None:
    path = settings.cache_dir / "disks.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"another": PROFILE.to_dict()}))
    machine_profile(store(tmp_path / "store"), settings, remeasure=True)
    assert "another" in json.loads(path.read_text())


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"%s": 3}', '{"%s": {"mode": []}}', '{"%s": {"mode": {"x": 1}}}'],
)
def test_a_damaged_cache_is_as_good_as_none(
    settings: Settings, measured: list[list[Path]], tmp_path: Path, text: str
) -> None:
    folder = store(tmp_path / "store")
    path = settings.cache_dir / "disks.json"
    path.parent.mkdir(parents=True)
    path.write_text(text.replace("%s", str(folder.stat().st_dev)))
    assert machine_profile(folder, settings)[0] == PROFILE
    assert measured


def test_a_cache_that_cannot_be_written_is_done_without(
    measured: list[list[Path]], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    settings = Settings.from_environment({"LOCALRT_CACHE": str(tmp_path / "file" / "cache")})
    assert machine_profile(store(tmp_path / "store"), settings)[0] == PROFILE


def test_without_room_to_measure_the_machine_is_assumed(
    settings: Settings, measured: list[list[Path]], tmp_path: Path
) -> None:
    disk, machine = machine_profile(store(tmp_path / "s"), settings, room=40 << 20)
    assert not measured
    assert disk == DiskProfile.assumed()
    assert machine == typical_machine()
    assert machine_profile(tmp_path / "s", settings, room=1 << 30)[0] == PROFILE
