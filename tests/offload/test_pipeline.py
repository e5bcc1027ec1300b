"""Parts of the pipeline: rows of tables on the SSD, pieces of units, segments, busy times."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.common.errors import CheckpointError
from localrt.common.files import PAGE
from localrt.models.checkpoints import StoreCheckpoint, open_checkpoint
from localrt.models.checkpoints.store.checkpoint import UnitMemory
from localrt.models.checkpoints.store.manifest import StoredUnit
from localrt.models.registry import read_config
from localrt.offload.pipeline.split import split_unit
from localrt.offload.pipeline.tables import CACHE_BYTES, RowTable
from localrt.offload.reading.files import StoreFiles
from localrt.quant.formats import unpack
from localrt.quant.formats.tiled import untile
from localrt.quant.ops.arrays import aligned_buffer
from localrt.quant.ops.protocol import Batch
from tests.offload.placed import Model, needs_kernels, pack_synthetic, pack_tiny

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


# One or two tensors of gates, or none; norms before, behind, or both.
MODELS = ["llama", "phi3", "gemma2", "nemotron-h"]


@pytest.fixture(scope="module", params=MODELS)
def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> StoreCheckpoint:
    folder = pack_tiny(request.param, tmp_path_factory.mktemp("tiny"))
    with closing(open_checkpoint(folder)) as store:
        assert isinstance(store, StoreCheckpoint)
        yield store


@given(gpu=st.floats(0.001, 0.998), link=st.floats(0, 0.9))
def test_split_unit(store: StoreCheckpoint, gpu: float, link: float) -> None:
    config = read_config(store)
    layer = next(n for n in range(config.layers) if config.has_mlp(n))
    unit = next(u for u in store.manifest.units if u.name == f"layers.{layer}.mlp")
    whole = store._files[unit.file].read(unit.offset, unit.nbytes)
    pieces = split_unit(config, layer, unit, (gpu, min(link, 0.999 - gpu)))
    found: dict[str, list[np.ndarray]] = {}
    for piece in filter(lambda each: each.rows[0], pieces):
        data = aligned_buffer(piece.unit.nbytes)
        piece.take(whole, data)
        memory = UnitMemory(Path(), "", piece.unit, data)
        for name, info in memory.tensors.items():
            if len(info.shape) == 1:
                assert np.array_equal(unpack(memory.read(name)).ravel(), vector(store, name))
                continue
            for block in memory.blocks(name):
                found.setdefault(name, []).append(unpack(untile(block)))
                if block.name != name:
                    assert np.array_equal(
                        found[name][-1], stored_rows(store, name)[piece.rows_by_tensor[block.name]]
                    )
    assert len(pieces) == 3
    assert min(pieces[0].rows + pieces[2].rows) > 0
    assert min(pieces[1].rows) > 0 or pieces[1].rows == (0, 0)
    assert sum(piece.rows[0] for piece in pieces) == config.inner_size(layer)
    assert sum(piece.rows[1] for piece in pieces) == config.hidden_size
    for name, values in found.items():
        assert sum(map(len, values)) == len(stored_rows(store, name))


def stored_rows(store: StoreCheckpoint, name: str) -> np.ndarray:
    return unpack(store.read(name, 0, store.tensors[name].shape[0]))


def vector(store: StoreCheckpoint, name: str) -> np.ndarray:
    return unpack(store.read(name)).ravel()
