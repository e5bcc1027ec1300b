"""Tables whose rows lie on the SSD: the right ones, each page read once, and only if it must be."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.common.errors import CheckpointError
from localrt.common.files import PAGE
from localrt.models.checkpoints.store.manifest import StoredUnit
from localrt.offload.pipeline.tables import CACHE_BYTES, RowTable
from localrt.offload.reading.files import StoreFiles
from localrt.quant.ops.protocol import Batch
from tests.offload.placed import Model, needs_kernels, pack_synthetic

pytestmark = needs_kernels

NAME = "model.embed_tokens.weight"
VOCAB = 1500
TILE = 16 * 64 // 32 * 34  # bytes, in q8_0


class CountingFiles(StoreFiles):
    """Remembers where it read, as direct reads could."""

    reads: list[int]

    def read_into(self, name: str, offset: int, out: np.ndarray) -> None:
        assert offset % PAGE == len(out) % PAGE == out.ctypes.data % PAGE == 0
        self.reads.append(offset)
        super().read_into(name, offset, out)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    folder = pack_synthetic(tmp_path_factory.mktemp("rows"), vocab=VOCAB, layers=1, hidden=64)
    with closing(Model(folder)) as model:
        yield model


def open_table(
    model: Model, *, direct: bool = False, **options: int
) -> tuple[RowTable, CountingFiles]:
    store, names = model.store, [unit.file for unit in model.store.manifest.units]
    files = CountingFiles(store.path, names, direct=direct)
    files.reads = []
    return RowTable(store, NAME, files, lambda name: None, refuse, **options), files


def refuse(unit: StoredUnit, data: np.ndarray) -> None:
    raise CheckpointError(f"{unit.name} is damaged")


def rows(model: Model, table: RowTable, ids: list[int]) -> np.ndarray:
    wanted = np.array(ids, np.int64)
    cache = model.ops.kv_cache(model.config.attention, 64)
    step = model.ops.begin(Batch.extend([(cache, ids)]))
    return np.array(table.begin_read(model.ops, step, wanted)())


@given(passes=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8), max_size=12))
def test_kept_tiles(model: Model, passes: list[list[int]]) -> None:
    kept, _ = open_table(model)
    with closing(kept):
        for ids in passes:
            fresh, _ = open_table(model, direct=True, cache_bytes=0)
            with closing(fresh):
                assert np.array_equal(rows(model, kept, ids), rows(model, fresh, ids))


@pytest.mark.parametrize(
    ("keep", "passes", "reads"),
    [
        (CACHE_BYTES, [[5, 700, 5], [700, 6]], [2, 0]),  # 6 lies in the tile of 5
        (CACHE_BYTES, [[0, 16]], [1]),  # two tiles of a page
        (0, [[5, 700, 5], [700, 6]], [2, 2]),
        (3 * TILE, [[0], [160], [320], [0], [480], [0], [160]], [1, 1, 1, 0, 1, 0, 1]),
    ],
)
def test_reads(model: Model, keep: int, passes: list[list[int]], reads: list[int]) -> None:
    table, files = open_table(model, cache_bytes=keep)
    with closing(table):
        for ids, count in zip(passes, reads, strict=True):
            before = len(files.reads)
            found = rows(model, table, ids)
            assert len(files.reads) - before == count
            whole = {token: found[at] for at, token in enumerate(ids)}
            assert all(np.array_equal(found[at], whole[n]) for at, n in enumerate(ids))
        assert table.bytes_read >= PAGE * len(files.reads)


def test_damaged_tile(tmp_path: Path) -> None:
    """Nothing is made of it; other tiles are read as before."""
    with closing(Model(pack_synthetic(tmp_path, vocab=VOCAB, layers=1, hidden=64))) as model:
        table, files = open_table(model, cache_bytes=0)
        with closing(table):
            before = rows(model, table, [5, 700])
            unit = next(u for u in model.store.manifest.units if u.name == "embedding")
            path = model.store.path / unit.file
            data = bytearray(path.read_bytes())
            data[unit.offset + 700 // 16 * TILE + 3] ^= 1
            path.write_bytes(data)
            assert np.array_equal(rows(model, table, [5]), before[:1])
            with pytest.raises(CheckpointError, match="embedding is damaged"):
                rows(model, table, [5, 700])

            def mend(unit: StoredUnit, whole: np.ndarray) -> None:
                whole[700 // 16 * TILE + 3] ^= 1

            mended = RowTable(model.store, NAME, files, lambda name: None, mend)
            with closing(mended):
                assert np.array_equal(rows(model, mended, [5, 700]), before)


def test_files_cut_short(tmp_path: Path) -> None:
    with closing(Model(pack_synthetic(tmp_path, vocab=VOCAB, layers=1, hidden=64))) as model:
        table, _ = open_table(model)
        with closing(table):
            path = model.store.path / "embedding.safetensors"
            os.truncate(path, path.stat().st_size - 2 * PAGE)
            with pytest.raises(CheckpointError, match="was cut short"):
                rows(model, table, [VOCAB - 1])
