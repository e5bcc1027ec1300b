"""Writing: whole or to be gone on with, whatever ends it and wherever."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from localrt import system
from localrt.common.errors import CheckpointError, OptionError, StorageError
from localrt.common.files import locked
from localrt.models.checkpoints import open_checkpoint
from localrt.offload.store import pack_store, partial_folder
from localrt.quant.formats.tiled import tile_tensor
from tests.store.synthetic import SyntheticCheckpoint


class KilledError(BaseException):
    """Nothing in the code expects it."""


@pytest.fixture(scope="module")
def source() -> SyntheticCheckpoint:
    return SyntheticCheckpoint(Path("model"))


@pytest.fixture(scope="module")
def finished(source: SyntheticCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_store(source, tmp_path_factory.mktemp("whole") / "store", tiler=tile_tensor)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def fail_at(monkeypatch: pytest.MonkeyPatch, call: int, error: BaseException) -> Callable[[], int]:
    """The ``call``-th time that a file or folder is made durable raises; returns how many there
    were so far.
    """
    count = 0
    fsync = os.fsync

    def counted(descriptor: int | None) -> None:
        nonlocal count
        count += 1
        if count == call:
            raise error
        if descriptor is not None:
            fsync(descriptor)

    monkeypatch.setattr(os, "fsync", counted)
    monkeypatch.setattr(system, "sync_folder", lambda _: counted(None))  # by another name there
    return lambda: count


def test_end_at_any_step(
    source: SyntheticCheckpoint, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, ended = 0, True
    while ended:
        step += 1
        out = tmp_path / str(step)
        with monkeypatch.context() as patch:
            fail_at(patch, step, KilledError())
            try:
                pack_store(source, out, tiler=tile_tensor)
                ended = False
            except KilledError:
                # The very last sync is of the parent folder: by then the store has its name.
                if not out.exists():
                    partial = partial_folder(out)
                    if not (partial / "manifest.json").exists():
                        with pytest.raises(CheckpointError, match=r"not finished|is an empty"):
                            open_checkpoint(partial)
        if not out.exists():
            pack_store(source, out, tiler=tile_tensor)
        assert contents(out) == contents(finished)
        assert [path.name for path in tmp_path.iterdir()] == [out.name]
        shutil.rmtree(out)
    assert step > 10


def test_resume(
    source: SyntheticCheckpoint, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "store"
    with monkeypatch.context() as patch:
        fail_at(patch, 13, KilledError())
        with pytest.raises(KilledError):
            pack_store(source, out, tiler=tile_tensor)
    first, second = (partial_folder(out) / f"layer-000{n}.safetensors" for n in (0, 1))
    assert second.exists()
    data = bytearray(first.read_bytes())
    data[5000] ^= 1
    first.write_bytes(data)
    written: list[str] = []
    pack_store(
        source, out, tiler=tile_tensor, progress=lambda _done, _all, name: written.append(name)
    )
    assert "layer-0000.safetensors" in written
    assert "layer-0001.safetensors" not in written
    assert contents(out) == contents(finished)


def test_too_little_room(
    source: SyntheticCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=1000))
    with pytest.raises(StorageError, match=r"needs .* more and the disk has 1 kB free"):
        pack_store(source, tmp_path / "store", tiler=tile_tensor)


def test_another_writer(source: SyntheticCheckpoint, finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with locked(partial_folder(out), 0.0), pytest.raises(StorageError, match="another process"):
        pack_store(source, out, tiler=tile_tensor)
    assert contents(pack_store(source, out, tiler=tile_tensor)) == contents(finished)
    assert list(tmp_path.iterdir()) == [out]


def test_existing_folders(source: SyntheticCheckpoint, finished: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="exists already"):
        pack_store(source, finished, tiler=tile_tensor)
    foreign = partial_folder(tmp_path / "store")
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("precious")
    with pytest.raises(StorageError, match="in the way and not localrt's"):
        pack_store(source, tmp_path / "store", tiler=tile_tensor)
    assert (foreign / "thesis.txt").read_text("utf-8") == "precious"
