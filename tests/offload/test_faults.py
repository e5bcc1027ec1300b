"""A store that changes, is damaged, or lies on a bad disk: one line, and the next pass works."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localrt.common.errors import CancelledError, CheckpointError
from localrt.common.files import PAGE
from localrt.models.decoder import Decoder
from localrt.offload.reading.files import StoreFiles
from localrt.offload.reading.reader import POLL_S
from localrt.quant.ops.kv import KVCache
from localrt.quant.ops.protocol import Batch
from tests.offload.placed import (
    Model,
    extend,
    needs_kernels,
    pack_synthetic,
    passing,
    tokens,
)
from tests.waits import naps, open_files, wait_for

pytestmark = needs_kernels
TEXT = tokens(12)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_synthetic(tmp_path_factory.mktemp("packed"), vocab=700, layers=2)


@pytest.fixture
def store(packed: Path, tmp_path: Path) -> Path:
    return shutil.copytree(packed, tmp_path / "store")


@pytest.fixture
def model(store: Path) -> Iterator[Model]:
    with closing(Model(store)) as model:
        yield model


class BadFiles:
    """The store's files; ``fault`` gets file, offset and length before each read."""

    def __init__(self, store: Path, names: set[str]) -> None:
        self.fault: Callable[[str, int, int], None] | None = None
        self._files = StoreFiles(store, names)

    def read_into(self, name: str, offset: int, out: Any) -> None:
        if self.fault is not None:
            self.fault(name, offset, len(out))
        self._files.read_into(name, offset, out)

    def check_unchanged(self) -> None:
        self._files.check_unchanged()

    def close(self) -> None:
        self._files.close()


def bad_files(model: Model) -> BadFiles:
    return BadFiles(model.store.path, {unit.file for unit in model.store.manifest.units})


def expected(model: Model) -> np.ndarray:
    return extend(model.resident, model.resident.cache(50), TEXT)


def run_out(decoder: Decoder, cache: KVCache, check: Callable[[], None] | None = None) -> None:
    """Passes until what was read ahead is used up."""
    for _ in range(9):
        decoder.forward(Batch.extend([(cache, [1])]), check=check)


def damage(model: Model, name: str) -> None:
    """Flip a bit in the middle of a unit; keep the time of change."""
    unit = next(unit for unit in model.store.manifest.units if unit.name == name)
    path = model.store.path / unit.file
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(unit.offset + unit.nbytes // 2)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 16]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def threads_and_files() -> tuple[int, int]:
    others = ("localrt-kv-keeper", "localrt-live", "localrt-serve")  # of models of other tests
    names = [t.name for t in threading.enumerate() if t.name.startswith("localrt-")]
    names = [name for name in names if not name.startswith(others)]
    return len(names), open_files()


def settled(before: tuple[int, int]) -> None:
    """There are no more threads and files than before; idle threads take a moment."""
    wait_for(lambda: all(a <= b for a, b in zip(threads_and_files(), before, strict=True)), 30)


@pytest.mark.parametrize("change", ["touch", "truncate", "append"])
def test_changed_store(model: Model, change: str) -> None:
    with model.placed(passing(model.store)) as decoder:
        cache = decoder.cache(50)
        before = extend(decoder, cache, TEXT)
        path = model.store.path / "layer-0001.safetensors"
        size, times = path.stat().st_size, path.stat()
        if change == "touch":
            os.utime(path)
        else:
            os.truncate(path, size - PAGE if change == "truncate" else size + PAGE)
        fails(decoder, cache, r"layer-0001\S* was changed .* again", len(TEXT))
        if change == "touch":
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            cache.trim(0)
            assert np.array_equal(extend(decoder, cache, TEXT), before)


def fails(decoder: Decoder, cache: KVCache, message: str, length: int) -> None:
    """A pass ends with one line, and leaves the cache as it was."""
    with pytest.raises(CheckpointError, match=message) as caught:
        extend(decoder, cache, TEXT)
    assert "\n" not in str(caught.value)
    assert cache.length == length


@pytest.mark.parametrize("name", ["layers.1.mlp", "head.0", "embedding"])
def test_damage_in_a_resident_unit(model: Model, name: str) -> None:
    damage(model, name)
    before = threads_and_files()
    with (
        pytest.raises(CheckpointError, match=rf"unit {name} .* is damaged .*again"),
        model.placed(["layers.0.mlp"]),
    ):
        pass
    settled(before)


@pytest.mark.parametrize("name", ["layers.0.attention", "head.0"])
def test_damage_in_a_streamed_unit(model: Model, name: str) -> None:
    damage(model, name)
    with model.placed(passing(model.store)) as decoder:
        cache = decoder.cache(50)
        for _ in range(2):
            fails(decoder, cache, rf"unit {name} .* is damaged", 0)
    with model.placed(passing(model.store), verify=False) as decoder:
        extend(decoder, decoder.cache(50), TEXT)


@pytest.mark.parametrize("error", [CancelledError("cancelled"), CheckpointError("cannot be read")])
def test_loading_ends_early(model: Model, error: Exception) -> None:
    before = threads_and_files()
    loaded = 0

    def count(nbytes: int) -> None:
        nonlocal loaded
        loaded += nbytes
        if loaded > 50_000:
            raise error

    with pytest.raises(type(error)), model.placed(["layers.0.mlp"], on_bytes=count):
        pass
    settled(before)


@pytest.mark.parametrize("what", ["layer", "embedding"])
def test_stalled_disk(model: Model, what: str) -> None:
    files, right = bad_files(model), expected(model)
    awake = threading.Event()
    streamed = [*passing(model.store), "embedding"]
    with model.placed(streamed, files=files) as decoder:
        cache = decoder.cache(100)
        extend(decoder, cache, TEXT[:3])
        pipeline = decoder.weights
        assert pipeline.cpu.reader is not None

        def stall(name: str, _offset: int, _count: int) -> None:
            if name.startswith(what):
                awake.wait(60)

        files.fault = stall
        pipeline.cpu.reader._stall_s = pipeline.embedding._stall_s = 0.3
        with pytest.raises(CheckpointError, match="the disk has not answered"):
            run_out(decoder, cache)
        # A machine that is slow is not this test's business.
        pipeline.cpu.reader._stall_s = pipeline.embedding._stall_s = 60
        files.fault = None
        awake.set()
        cache.trim(0)
        assert np.array_equal(extend(decoder, cache, TEXT), right)


@pytest.mark.parametrize("what", ["layer", "embedding"])
def test_cancel_while_stalled(model: Model, what: str) -> None:
    files = bad_files(model)
    awake, cancel = threading.Event(), threading.Event()

    def check() -> None:
        if cancel.is_set():
            raise CancelledError("stop")

    def stall(name: str, _offset: int, _count: int) -> None:
        if name.startswith(what):
            awake.wait(60)

    with model.placed([*passing(model.store), "embedding"], files=files) as decoder:
        cache = decoder.cache(100)
        files.fault = stall
        timer = threading.Timer(0.2, cancel.set)
        timer.start()
        with naps() as found, pytest.raises(CancelledError):
            run_out(decoder, cache, check)
        assert 0 < max(found) <= POLL_S <= 0.05  # at once, but for what a busy machine adds
        timer.join()
        awake.set()
