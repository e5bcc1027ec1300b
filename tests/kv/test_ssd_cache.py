"""Keys and values on an SSD: the same results as in RAM, and what faults leave behind."""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localrt import system
from localrt.common.errors import MemoryBudgetError, OptionError, StorageError
from localrt.common.files import PAGE
from localrt.models.checkpoints import open_checkpoint
from localrt.models.decoder import Decoder
from localrt.models.registry import load_decoder, read_config
from localrt.offload.kv.cache import KvTier
from localrt.offload.kv.file import KvFile
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.ops.kv_formats import KV_FORMATS, CacheFormat
from localrt.quant.ops.protocol import Batch
from tests.conftest import needs_kernels
from tests.models.tiny import save_tiny, tokens
from tests.waits import open_files

pytestmark = needs_kernels

CAPACITY = 1500


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("qwen2", "gemma3", "gemma4"):
        (folder / name).mkdir()
        save_tiny(name, folder / name)
    return folder


class Pair:
    """The same model with its keys and values in RAM, and as ``places`` says."""

    def __init__(
        self,
        path: Path,
        folder: Path,
        *,
        kv_format: CacheFormat = "bf16",
        on_ssd: tuple[int, ...] | None = None,
        slots: int = 2,
    ) -> None:
        self.ram, self.ssd = (_load(path, kv_format) for _ in range(2))
        specs = self.ssd.config.attention
        layers = range(len(specs)) if on_ssd is None else on_ssd
        places: Any = ["ssd" if layer in layers else "ram" for layer in range(len(specs))]
        self.tier = KvTier(
            specs, places, folder, capacity=CAPACITY, kv_format=kv_format, slots=slots
        )
        assert isinstance(self.ssd.ops, NativeOps)
        self.ssd.ops.kv_maker = self.tier

    def close(self) -> None:
        self.tier.close()


def _load(path: Path, kv_format: CacheFormat) -> Decoder:
    with closing(open_checkpoint(path)) as checkpoint:
        config = read_config(checkpoint, context=CAPACITY)
        return load_decoder(checkpoint, NativeOps(threads=1, kv_format=kv_format), config)


@pytest.fixture
def pairs(checkpoints: Path, tmp_path: Path) -> Iterator[Any]:
    made: list[Pair] = []

    def make(name: str = "qwen2", **options: Any) -> Pair:
        made.append(Pair(checkpoints / name, tmp_path, **options))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


def extend(decoder: Decoder, *sequences: tuple[Any, list[int]]) -> Any:
    return decoder.forward(Batch.extend(list(sequences)))


@pytest.mark.parametrize(
    ("name", "kv_format"),
    [*(("qwen2", each) for each in KV_FORMATS), ("gemma3", "bf16")],  # the last has windows
)
def test_bits_are_those_of_ram(
    name: str, kv_format: CacheFormat, pairs: Any, tmp_path: Path
) -> None:
    pair = pairs(name, kv_format=kv_format)
    caches = [pair.ram.cache(CAPACITY), pair.ssd.cache(CAPACITY)]
    ids = tokens(CAPACITY)

    def check(start: int, stop: int, seed: int = 0) -> None:
        part = ids[start:stop] if not seed else tokens(stop - start, seed=seed)
        one, two = (extend(d, (c, part)) for d, c in zip((pair.ram, pair.ssd), caches, strict=True))
        assert np.array_equal(one, two)

    def trim(length: int) -> None:
        for cache in caches:
            cache.trim(length)

    check(0, 700)
    for at in range(700, 710):
        check(at, at + 1)
    check(710, 769)  # into the next block by one
    trim(765)  # in the block in RAM, then over its edge, then deep into the file
    trim(760)
    check(760, 790, seed=3)
    trim(300)
    check(300, 301, seed=4)
    check(301, 1400, seed=5)
    trim(0)
    check(0, 30, seed=6)
    assert caches[1].length == 30
    assert pair.tier.read_bytes > 0
    assert not list(tmp_path.iterdir())  # the file has no name


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_order(data: st.DataObject, pairs: Any) -> None:
    """Several sequences, buffers, layers on the SSD, trims and passes that were given up."""
    count = data.draw(st.integers(1, 3))
    pair = pairs(
        kv_format=data.draw(st.sampled_from(KV_FORMATS)),
        on_ssd=data.draw(st.sampled_from([None, (0,), (1, 2)])),
        slots=data.draw(st.integers(count, 6)),
    )
    rams = [pair.ram.cache(CAPACITY) for _ in range(count)]
    ssds = [pair.ssd.cache(CAPACITY) for _ in range(count)]
    for number in range(data.draw(st.integers(2, 8))):
        chosen = data.draw(st.sets(st.integers(0, count - 1), min_size=1))
        lengths = {n: data.draw(st.sampled_from([1, 3, 40, 255, 256, 300])) for n in chosen}
        lengths = {n: rows for n, rows in lengths.items() if rams[n].length + rows <= CAPACITY}
        if not lengths:
            continue
        parts = {n: tokens(rows, seed=number + n) for n, rows in lengths.items()}
        if data.draw(st.booleans()):
            give_up(pair.ssd, [(ssds[n], part[::-1]) for n, part in parts.items()])
        one = extend(pair.ram, *((rams[n], part) for n, part in parts.items()))
        two = extend(pair.ssd, *((ssds[n], part) for n, part in parts.items()))
        assert np.array_equal(one, two)
        for n in range(count):
            if data.draw(st.booleans()):
                length = data.draw(st.integers(0, rams[n].length))
                rams[n].trim(length)
                ssds[n].trim(length)


def give_up(decoder: Decoder, sequences: list[tuple[Any, list[int]]]) -> None:
    calls = iter((False, True))

    def check() -> None:
        if next(calls):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decoder.forward(Batch.extend(sequences), check=check)


def test_too_many_sequences(pairs: Any) -> None:
    pair = pairs(slots=2)
    caches = [pair.ssd.cache(CAPACITY) for _ in range(3)]
    with pytest.raises(MemoryBudgetError, match="2 sequences"):
        extend(pair.ssd, *((cache, [1, 2]) for cache in caches))
    fresh = extend(pair.ram, (pair.ram.cache(CAPACITY), [1, 2]))
    assert np.array_equal(extend(pair.ssd, (caches[2], [1, 2])), fresh)


@pytest.mark.parametrize("fault", ["write", "read"])
def test_failing_disk(fault: str, pairs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pairs()
    caches = [pair.ram.cache(CAPACITY), pair.ssd.cache(CAPACITY)]
    ids, other = tokens(600), tokens(300, seed=1)
    for decoder, cache in zip((pair.ram, pair.ssd), caches, strict=True):
        extend(decoder, (cache, ids))
    others = pair.ssd.cache(CAPACITY)
    extend(pair.ssd, (others, other))  # takes the buffers

    def broken(*_: object) -> int:
        raise OSError(errno.EIO if fault == "read" else errno.ENOSPC, "the disk says no")

    with monkeypatch.context() as patch:
        patch.setattr(system, "read_at", broken)
        patch.setattr(system, "write_at", broken)
        with pytest.raises(StorageError, match=r"cannot be .*the disk says no"):
            extend(pair.ssd, (caches[1], other))
    assert caches[1].length == 600
    one = extend(pair.ram, (caches[0], other))
    assert np.array_equal(one, extend(pair.ssd, (caches[1], other)))


def test_close(checkpoints: Path, tmp_path: Path) -> None:
    gc.collect()  # what tests before have left
    threads, files = set(threading.enumerate()), open_files()
    for closed_first in (False, True):
        pair = Pair(checkpoints / "qwen2", tmp_path)
        cache = pair.ssd.cache(CAPACITY)
        extend(pair.ssd, (cache, tokens(600)))
        if closed_first:
            pair.close()
            with pytest.raises(StorageError, match="closed"):
                extend(pair.ssd, (cache, tokens(300)))
        del cache
        gc.collect()
        pair.close()
    assert not set(threading.enumerate()) - threads
    assert open_files() <= files


def test_without_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = system.open_temporary

    def cached(folder: Path, prefix: str) -> tuple[int, int]:
        descriptor, direct = opened(folder, prefix)
        if direct >= 0:
            os.close(direct)
        return descriptor, -1

    monkeypatch.setattr(system, "open_temporary", cached)
    file = KvFile(tmp_path)
    data = np.arange(3 * PAGE, dtype=np.uint8)
    file.reserve(0, 4 * PAGE)
    file.write(PAGE, data)
    out = np.empty_like(data)
    file.read_into(PAGE, out)
    assert np.array_equal(out, data)
    assert file.read_bytes == data.nbytes
    with pytest.raises(StorageError, match="shorter"):
        file.read_into(3 * PAGE, out)
    file.close()


def test_shared_layers_stay_in_ram(pairs: Any) -> None:
    """Layer 0 of six has a cache that no other layer reads."""
    pair = pairs("gemma4", on_ssd=(0,))
    caches = [pair.ram.cache(CAPACITY), pair.ssd.cache(CAPACITY)]
    for part in (tokens(700), tokens(1, seed=1), tokens(100, seed=2)):
        one, two = (extend(d, (c, part)) for d, c in zip((pair.ram, pair.ssd), caches, strict=True))
        assert np.array_equal(one, two)
    with pytest.raises(OptionError, match="in RAM"):
        pairs("gemma4")
