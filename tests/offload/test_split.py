"""Pieces of units: together they have every row once, in order."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.models.checkpoints import StoreCheckpoint, open_checkpoint
from localrt.models.checkpoints.store.checkpoint import UnitMemory
from localrt.models.registry import read_config
from localrt.offload.pipeline.split import split_unit
from localrt.quant.formats import unpack
from localrt.quant.formats.tiled import untile
from localrt.quant.ops.arrays import aligned_buffer
from tests.offload.placed import pack_tiny

# One or two tensors of gates, or none; norms before, behind, or both.
MODELS = ["llama", "phi3", "gemma2", "olmo2", "qwen3", "nemotron-h"]


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
                        found[name][-1], rows(store, name)[piece.rows_by_tensor[block.name]]
                    )
    assert len(pieces) == 3
    assert min(pieces[0].rows + pieces[2].rows) > 0
    assert min(pieces[1].rows) > 0 or pieces[1].rows == (0, 0)
    assert sum(piece.rows[0] for piece in pieces) == config.inner_size(layer)
    assert sum(piece.rows[1] for piece in pieces) == config.hidden_size
    for name, values in found.items():
        assert sum(map(len, values)) == len(rows(store, name))


def rows(store: StoreCheckpoint, name: str) -> np.ndarray:
    return unpack(store.read(name, 0, store.tensors[name].shape[0]))


def vector(store: StoreCheckpoint, name: str) -> np.ndarray:
    return unpack(store.read(name)).ravel()
