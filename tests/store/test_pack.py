"""Packing: the same values, aligned units, bounded memory; damaged units are made again."""

from __future__ import annotations

import hashlib
import tracemalloc
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.common.errors import CheckpointError, UnsupportedModelError
from localrt.models.checkpoints import Checkpoint, StoreCheckpoint, TensorInfo, open_checkpoint
from localrt.models.registry import read_config
from localrt.models.units import Unit, list_units
from localrt.offload.store import pack_store
from localrt.offload.store.pack import mend_unit, tiled_pieces
from localrt.quant.formats import F32, PackedTensor
from localrt.quant.formats.tiled import TiledTensor, tile, tile_tensor
from localrt.quant.methods import restore
from tests.models.tiny import save_tiny
from tests.ops.packed import random_tensor
from tests.store.synthetic import SyntheticCheckpoint


def values(checkpoint: Checkpoint, name: str) -> np.ndarray:
    return np.concatenate([restore(block) for block in checkpoint.blocks(name)])


def packed(source: Checkpoint, out: Path) -> StoreCheckpoint:
    store = open_checkpoint(pack_store(source, out, tiler=tile_tensor))
    assert isinstance(store, StoreCheckpoint)
    return store


@pytest.mark.parametrize("tied", [False, True])
def test_values_and_rows(tmp_path: Path, tied: bool) -> None:
    source = SyntheticCheckpoint(
        tmp_path,
        vocab=5003,
        hidden=256,
        inner=512,
        tied=tied,
        formats={"q_proj": "q4_0", "k_proj": "f16", "v_proj": "bf16", "o_proj": "q6_k",
                 "gate_proj": "q4_k", "up_proj": "mxfp4", "down_proj": "nf4", "lm_head": "q5_k"},
    )  # fmt: skip
    with closing(packed(source, tmp_path / "out")) as store:
        assert set(store.tensors) == set(source.tensors)
        for name, info in source.tensors.items():
            assert store.tensors[name].shape == info.shape
            assert store.tensors[name].format == info.format
            np.testing.assert_array_equal(values(store, name), values(source, name))
        name = "model.embed_tokens.weight" if tied else "lm_head.weight"
        (block,) = store.blocks(name)
        assert isinstance(block, TiledTensor)
        for start, stop in ((0, 1), (15, 17), (4990, 5003), (700, 700)):
            rows = store.read(name, start, stop)
            np.testing.assert_array_equal(rows.data, source.read(name, start, stop).data)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> SyntheticCheckpoint:
    """A head of several blocks and units."""
    return SyntheticCheckpoint(tmp_path_factory.mktemp("large"), vocab=9000)


@pytest.fixture(scope="module")
def large_store(large: SyntheticCheckpoint) -> Iterator[StoreCheckpoint]:
    """``large``, packed."""
    with closing(packed(large, large.path / "out")) as store:
        yield store


def test_ranges_and_digests(large_store: StoreCheckpoint) -> None:
    store = large_store
    ends: dict[str, int] = {}
    for unit in store.manifest.units:
        assert unit.offset % 4096 == 0
        assert unit.nbytes % 4096 == 0
        assert unit.offset >= ends.get(unit.file, 0)
        ends[unit.file] = unit.offset + unit.nbytes
        data = (store.path / unit.file).read_bytes()[unit.offset : ends[unit.file]]
        assert hashlib.sha256(data).hexdigest() == unit.sha256
        assert all(tensor.offset % 64 == 0 for tensor in unit.tensors)
    for file, end in ends.items():
        assert (store.path / file).stat().st_size == end
    assert sorted(ends) == [
        "embedding.safetensors",
        "head.safetensors",
        "layer-0000.safetensors",
        "layer-0001.safetensors",
    ]


@given(
    rows=st.integers(1, 70),
    cuts=st.lists(st.integers(0, 70), max_size=6),
    name=st.sampled_from(["q4_0", "q8_0", "bf16", "q6_k"]),
)
def test_blocks_of_any_size(rows: int, cuts: list[int], name: str) -> None:
    whole = random_tensor(name, rows, 256)
    bounds = [0, *sorted(cut for cut in cuts if cut < rows), rows]
    blocks = [
        PackedTensor("w", whole.format, (stop - start, 256), whole.data[start:stop])
        for start, stop in pairwise(bounds)
    ]
    pieces = list(tiled_pieces(blocks, tile_tensor))
    assert all(piece.shape[0] % 16 == 0 for piece in pieces[:-1])
    np.testing.assert_array_equal(np.concatenate([p.data for p in pieces]), tile(whole))


@pytest.mark.slow
def test_bounded_memory(tmp_path: Path) -> None:
    source = SyntheticCheckpoint(tmp_path, vocab=16_000, hidden=256, inner=512, layers=1)
    biggest = 0

    def counting(tensor: PackedTensor) -> TiledTensor:
        nonlocal biggest
        biggest = max(biggest, tensor.nbytes)
        return tile_tensor(tensor)

    embedding = source.tensors["model.embed_tokens.weight"].nbytes
    tracemalloc.start()
    try:
        pack_store(source, tmp_path / "out", tiler=counting)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert biggest <= max(source.blocks_read) + 16 * 272
    assert peak < embedding / 3


def units_of(checkpoint: SyntheticCheckpoint) -> tuple[Unit, ...]:
    return list_units(checkpoint.tensors, read_config(checkpoint))


def test_stray_and_missing_tensors() -> None:
    checkpoint = SyntheticCheckpoint(Path("m"))
    stray = TensorInfo("model.layers.0.mlp.extra.weight", (3, 4), F32, 48)
    checkpoint.tensors[stray.name] = stray
    with pytest.raises(UnsupportedModelError, match=r"mlp\.extra\.weight is not part"):
        units_of(checkpoint)
    del checkpoint.tensors[stray.name]
    del checkpoint.tensors["model.layers.1.self_attn.o_proj.weight"]
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.o_proj\.weight is missing"):
        units_of(checkpoint)


def packed_model(model: Path, out: Path) -> StoreCheckpoint:
    with closing(open_checkpoint(model)) as source:
        store = open_checkpoint(pack_store(source, out))
    assert isinstance(store, StoreCheckpoint)
    return store


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_mend(name: str, tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "store"
    model.mkdir()
    save_tiny(name, model)
    with closing(packed_model(model, out)) as store:
        units = store.manifest.units
    for unit in {unit.name.split(".")[-1]: unit for unit in units}.values():
        path = out / unit.file
        whole, time = path.read_bytes(), path.stat().st_mtime_ns
        broken = bytearray(whole)
        broken[unit.offset : unit.offset + unit.nbytes] = bytes(unit.nbytes)
        path.write_bytes(broken)
        data = np.full(unit.nbytes, 255, np.uint8)
        mend_unit(model, out, unit, data)
        assert unit.is_whole(data)
        assert path.read_bytes() == whole
        assert path.stat().st_mtime_ns >= time


def test_another_model(tmp_path: Path) -> None:
    models = [tmp_path / "one", tmp_path / "other"]
    for seed, folder in enumerate(models):
        folder.mkdir()
        save_tiny("llama", folder, seed)
    out = tmp_path / "store"
    with closing(packed_model(models[0], out)) as store:
        unit = store.manifest.units[1]
    whole = (out / unit.file).read_bytes()
    with pytest.raises(CheckpointError, match=r"not the model that was packed.*load the model"):
        mend_unit(models[1], out, unit, np.zeros(unit.nbytes, np.uint8))
    assert (out / unit.file).read_bytes() == whole
    with pytest.raises(CheckpointError):
        open_checkpoint(out)
