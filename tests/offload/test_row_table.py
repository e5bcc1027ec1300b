"""The embedding table whose rows lie on the SSD: the right ones, each tile read when it must be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrt.offload.pipeline import tables
from localrt.offload.pipeline.tables import RowTable
from localrt.offload.reading.files import StoreFiles
from localrt.quant.ops.protocol import Batch
from tests.offload.placed import Model, needs_kernels, pack_synthetic

pytestmark = needs_kernels

NAME = "model.embed_tokens.weight"
VOCAB = 1500


class CountingFiles(StoreFiles):
    """Remembers where it read."""

    reads: list[int]

    def read_into(self, name: str, offset: int, out: np.ndarray) -> None:
        self.reads.append(offset)
        super().read_into(name, offset, out)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    folder = pack_synthetic(tmp_path_factory.mktemp("rows"), vocab=VOCAB, layers=1, hidden=128)
    with closing(Model(folder)) as model:
        yield model


def open_table(model: Model) -> tuple[RowTable, CountingFiles]:
    store = model.store
    files = CountingFiles(store.path, [unit.file for unit in store.manifest.units])
    files.reads = []
    return RowTable(store, NAME, files, lambda name: None), files


def rows(model: Model, table: RowTable, ids: list[int]) -> np.ndarray:
    wanted = np.array(ids, np.int64)
    cache = model.ops.kv_cache(model.config.attention, 64)
    step = model.ops.begin(Batch.extend([(cache, ids)]))
    return np.array(table.embed(model.ops, step, wanted, 1.0))


@settings(max_examples=20)
@given(passes=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8), max_size=12))
def test_rows_do_not_depend_on_what_was_kept(model: Model, passes: list[list[int]]) -> None:
    table, _ = open_table(model)
    with closing(table):
        for ids in passes:
            fresh, _ = open_table(model)
            with closing(fresh):
                assert np.array_equal(rows(model, table, ids), rows(model, fresh, ids))


def test_a_repeated_token_is_read_once(model: Model) -> None:
    table, files = open_table(model)
    with closing(table):
        first = rows(model, table, [5, 700, 5])
        assert len(files.reads) == 2
        again = rows(model, table, [700, 6])  # 6 lies in the tile of 5
        assert len(files.reads) == 2
        assert np.array_equal(first[1], again[0])


def test_the_oldest_tiles_make_room(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    table, files = open_table(model)
    with closing(table):
        monkeypatch.setattr(tables, "KEPT_BYTES", 3 * table._tile)
        for token in (0, 16, 32, 0, 48, 0, 16):
            rows(model, table, [token])
        tiles = [(offset - min(files.reads)) // table._tile for offset in files.reads]
        assert tiles == [0, 1, 2, 3, 1]
