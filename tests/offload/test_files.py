"""Ranges of files: direct where it works, whole or an error of one line; a disk's speed."""

from __future__ import annotations

import errno
import os
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from localrt import system
from localrt.common.errors import CheckpointError
from localrt.common.files import PAGE
from localrt.offload.reading.disk_speed import measure_disk
from localrt.offload.reading.files import StoreFiles
from localrt.quant.ops.arrays import aligned_buffer
from tests.waits import open_files

SIZE = 6 * PAGE


def write(folder: Path, name: str = "a.bin", size: int = SIZE) -> bytes:
    data = np.random.default_rng(len(name)).integers(0, 256, size, dtype=np.uint8).tobytes()
    (folder / name).write_bytes(data)
    return data


@pytest.mark.parametrize("direct", [False, True])
def test_ranges_are_what_lies_there(tmp_path: Path, direct: bool) -> None:
    whole = {name: write(tmp_path, name) for name in ("a.bin", "bb.bin")}
    with closing(StoreFiles(tmp_path, ["a.bin", "bb.bin", "a.bin"], direct=direct)) as files:
        for name, data in whole.items():
            for start, count in ((0, SIZE), (PAGE, 2 * PAGE), (5 * PAGE, PAGE)):
                out = aligned_buffer(count)
                files.read_into(name, start, out)
                assert out.tobytes() == data[start : start + count]


def test_direct_open_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, real = write(tmp_path), os.open

    def refuse(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    with closing(StoreFiles(tmp_path, ["a.bin"], direct=True)) as files:
        out = aligned_buffer(PAGE)
        files.read_into("a.bin", PAGE, out)
        assert out.tobytes() == data[PAGE : 2 * PAGE]


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("direct", [False, True])
def test_failing_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool, gone: bool
) -> None:
    data = write(tmp_path)
    with closing(StoreFiles(tmp_path, ["a.bin"], direct=direct)) as files:
        out = aligned_buffer(PAGE)
        with monkeypatch.context() as patch:

            def fail(*_: object) -> int:
                raise OSError(errno.EIO, "Input/output error")

            patch.setattr(system, "read_at", fail)
            if gone:
                (tmp_path / "a.bin").unlink()
            with pytest.raises(CheckpointError, match=r"a\.bin cannot be read"):
                files.read_into("a.bin", 0, out)
        if not gone:
            files.read_into("a.bin", 0, out)
            assert out.tobytes() == data[:PAGE]


@pytest.mark.parametrize("direct", [False, True])
def test_truncated_file(tmp_path: Path, direct: bool) -> None:
    write(tmp_path)
    with closing(StoreFiles(tmp_path, ["a.bin"], direct=direct)) as files:
        files.check_unchanged()
        os.truncate(tmp_path / "a.bin", 3 * PAGE)
        files.read_into("a.bin", PAGE, aligned_buffer(2 * PAGE))
        with pytest.raises(CheckpointError, match=r"a\.bin was cut short while it was in use"):
            files.read_into("a.bin", 2 * PAGE, aligned_buffer(2 * PAGE))
        with pytest.raises(CheckpointError, match=r"a\.bin was changed .* load the model again"):
            files.check_unchanged()


def test_a_unit_that_is_being_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file has another time for a moment."""
    write(tmp_path)
    path = tmp_path / "a.bin"
    kept = path.stat()
    with closing(StoreFiles(tmp_path, ["a.bin"])) as files:
        os.utime(path, ns=(0, 0))
        give_back = partial(os.utime, path, ns=(kept.st_atime_ns, kept.st_mtime_ns))
        monkeypatch.setattr(time, "sleep", lambda seconds: give_back())
        files.check_unchanged()


def test_a_read_may_come_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, real = write(tmp_path), system.read_at

    def little(descriptor: int, view: memoryview, offset: int) -> int:
        return real(descriptor, view[:1000], offset)

    monkeypatch.setattr(system, "read_at", little)
    with closing(StoreFiles(tmp_path, ["a.bin"])) as files:
        out = aligned_buffer(SIZE)
        files.read_into("a.bin", 0, out)
        assert out.tobytes() == data


def test_missing_file(tmp_path: Path) -> None:
    write(tmp_path)
    before = open_files()
    with pytest.raises(CheckpointError, match=r"none\.bin cannot be read: No such file"):
        StoreFiles(tmp_path, ["a.bin", "none.bin"])
    assert open_files() == before


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / name for name in ("a.bin", "b.bin")]
    for path in paths:
        path.write_bytes(np.random.default_rng(0).bytes(3 * (1 << 20) + 5))
    return paths


@pytest.mark.parametrize("sample", [2 << 20, 64 << 20])  # more than there is
def test_measure_disk(files: list[Path], sample: int) -> None:
    before = open_files()
    profile = measure_disk(files, sample=sample, rounds=2)
    assert profile.read_bytes_s > 0
    assert profile.cpu_s_per_byte >= 0
    assert profile.mode.block % PAGE == 0
    assert profile.mode.threads >= 1
    assert open_files() == before
