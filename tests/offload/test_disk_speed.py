"""Measuring a disk by the files that lie on it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from localrt.common.errors import CheckpointError
from localrt.common.files import PAGE
from localrt.offload.reading.disk_speed import DiskProfile, measure_disk
from localrt.offload.reading.files import ReadMode
from tests.waits import open_files


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / name for name in ("a.bin", "b.bin")]
    for path in paths:
        path.write_bytes(np.random.default_rng(0).bytes(3 * (1 << 20) + 5))
    return paths


def test_measure_disk(files: list[Path]) -> None:
    before = open_files()
    profile = measure_disk(files, sample=2 << 20, rounds=2)
    assert profile.read_bytes_s > 1e6
    assert profile.cpu_s_per_byte >= 0
    assert profile.mode.block % PAGE == 0
    assert profile.mode.threads >= 1
    assert open_files() == before


def test_sample_larger_than_files(files: list[Path]) -> None:
    assert measure_disk(files[:1], sample=64 << 20, rounds=1).read_bytes_s > 0


def test_unreadable_file(files: list[Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.bin cannot be read: No such file"):
        measure_disk([*files, tmp_path / "none.bin"])


def test_profile_as_json() -> None:
    profile = DiskProfile(ReadMode(direct=True, threads=4, block=1 << 20), 1.5e9, 1e-10)
    assert DiskProfile.from_dict(json.loads(json.dumps(profile.to_dict()))) == profile


@pytest.mark.parametrize("names", [[], ["small"]])
def test_nothing_to_read(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"x" * 100)
    profile = measure_disk([tmp_path / name for name in names])
    assert profile.read_bytes_s > 0
    assert not profile.mode.direct
