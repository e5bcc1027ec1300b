"""Attention to chosen tokens: torch against transformers, kernels against torch, and their bits."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from localrt.quant.cpu.ops import NativeOps
from localrt.quant.ops.attention import IndexSpec
from localrt.quant.reference.ops import TorchOps
from tests.conftest import needs_kernels
from tests.ops.layers import (
    EPS,
    HIDDEN,
    SHAPES,
    IndexedLayer,
    Shape,
    check_tree,
    random_rows,
    random_tensors,
)
from tests.ops.oracles import read_in
from tests.ops.test_native_matmul import ISAS

# 24 numbers are what the kernels do not take. With few heads, blocks without a score are tied.
ODD = {
    "by-4": Shape(heads=6, kv_heads=2, index_heads=7, index_dim=24, block=4, budget=12),
    "by-3": Shape(heads=6, kv_heads=2, index_heads=7, index_dim=24, block=3, budget=12),
}
ROWS = 60
CUTS = {"whole": [ROWS], "chunks": [7, 20, 1, 1, 2, 29], "tokens": [1] * ROWS}
FORMATS = ["bf16", "int8", "int4"]
NAMES = sorted(SHAPES)
ALL_LAYERS = st.sampled_from([(name, kv) for name in NAMES for kv in FORMATS])


def torch_layer(shape: Shape, **options: Any) -> IndexedLayer:
    return IndexedLayer(shape, TorchOps(compute_format="f32"), **options)


def native_layer(name: str, *, threads: int = 2, isa: str = "", kv: Any = "bf16") -> IndexedLayer:
    return IndexedLayer(SHAPES[name], NativeOps(threads=threads, isa=isa, kv_format=kv))


@pytest.fixture(scope="module")
def native() -> dict[tuple[str, str], IndexedLayer]:
    return {(name, kv): native_layer(name, kv=kv) for name in NAMES for kv in FORMATS}


def theirs(shape: Shape, x: np.ndarray, cuts: list[int]) -> np.ndarray:
    """The same layer in transformers, over the same passes."""
    modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
    config = modeling.Qwen4ExpTextConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        layer_types=["full_attention"],
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=16,
        rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        indexer_n_heads=shape.index_heads,
        indexer_kv_heads=1,
        indexer_head_dim=shape.index_dim,
        indexer_budget=shape.budget,
        indexer_compress_ratio=shape.block,
    )
    config._attn_implementation = "eager"
    module = modeling.Qwen4ExpTextAttention(config, 0)
    module.load_state_dict(
        {f"{name}.weight": torch.from_numpy(t) for name, t in random_tensors(shape).items()}
    )
    turns, cache, parts = (
        modeling.Qwen4ExpTextRotaryEmbedding(config),
        modeling.DynamicCache(config=config),
        [],
    )
    for start, stop in pairwise(accumulate(cuts, initial=0)):
        rows = torch.from_numpy(x[start:stop])[None]
        seen = torch.arange(stop) <= torch.arange(start, stop)[:, None]
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        places = turns(rows, torch.arange(stop)[None, None])
        with torch.inference_mode():
            parts.append(module(rows, places, mask[None, None], cache)[0][0].numpy())
    return np.concatenate(parts)


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("shape", ODD.values(), ids=ODD)
def test_torch_gives_what_transformers_gives(shape: Shape, cuts: list[int]) -> None:
    x = random_rows(ROWS)
    found, wanted = read_in(torch_layer(shape), x, cuts), theirs(shape, x, cuts)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def rows_alike(layer: IndexedLayer, oracle: IndexedLayer) -> np.ndarray:
    """Which rows of the last pass saw the same tokens."""
    return np.array([a == b for a, b in zip(layer.picks(), oracle.picks(), strict=True)])


@needs_kernels
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", NAMES)
def test_kernels_give_what_torch_gives(name: str, isa: str) -> None:
    """Where rounded keys of a near tie choose another block, rows see other tokens."""
    layer, oracle = native_layer(name, isa=isa), torch_layer(SHAPES[name])
    x = random_rows(400)
    found, wanted = (each.run((each.cache(), x)) for each in (layer, oracle))
    alike = rows_alike(layer, oracle)
    assert alike.mean() > 0.6 if name == "long" else alike.mean() > 0.9
    np.testing.assert_allclose(found[alike], wanted[alike], rtol=0.02, atol=0.02)


@needs_kernels
@pytest.mark.parametrize(("kv", "least"), [("int8", 0.9), ("int4", 0.75)])
def test_keys_of_few_bits_choose_mostly_the_same(kv: str, least: float) -> None:
    layer, oracle = native_layer("by-4", kv=kv), torch_layer(SHAPES["by-4"])
    for each in (layer, oracle):
        each.run((each.cache(), random_rows(200)))
    shares = [
        len(set(found) & set(wanted)) / len(wanted)
        for found, wanted in zip(layer.picks(), oracle.picks(), strict=True)
    ]
    assert np.mean(shares) > least


@pytest.mark.parametrize("make", [torch_layer, pytest.param(IndexedLayer, marks=needs_kernels)])
def test_ties_go_to_earlier_blocks(make: Any) -> None:
    shape = SHAPES["by-4"]
    tensors = random_tensors(shape)
    tensors["indexer.q_layernorm"][:] = -1  # all scores are 0
    options = () if make is torch_layer else (NativeOps(threads=2),)
    layer = make(shape, *options, tensors=tensors)
    layer.run((layer.cache(), random_rows(30)))
    for row, picks in enumerate(layer.picks()):
        tail = (row + 1) // 4 * 4
        assert picks == [*range(min(12, tail)), *range(tail, row + 1)]


@needs_kernels
@pytest.mark.parametrize("kv", FORMATS)
def test_row_that_sees_all(kv: str) -> None:
    shape, x = SHAPES["long"], random_rows(302)
    sparse, dense = (
        IndexedLayer(shape, NativeOps(threads=2, kv_format=kv), sees_all=sees_all)
        for sees_all in (False, True)
    )
    found, wanted = (each.run((each.cache(), x)) for each in (sparse, dense))
    np.testing.assert_array_equal(found, wanted)


@needs_kernels
@given(case=ALL_LAYERS, cuts=st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_passes_of_any_size(
    native: dict[tuple[str, str], IndexedLayer], case: tuple[str, str], cuts: list[int]
) -> None:
    layer, x = native[case], random_rows(sum(cuts))
    np.testing.assert_array_equal(read_in(layer, x, cuts), layer.run((layer.cache(), x)))


@needs_kernels
@pytest.mark.parametrize("kv", FORMATS)
@pytest.mark.parametrize("name", NAMES)
def test_threads_and_sequences(name: str, kv: str) -> None:
    x, y = random_rows(400), random_rows(333, seed=3)
    alone, many = native_layer(name, threads=1, kv=kv), native_layer(name, threads=4, kv=kv)
    wanted = [alone.run((alone.cache(), rows)) for rows in (x, y)]
    one, two = many.cache(), many.cache()
    first = many.run((two, y[:300]), (one, x[:399]))
    last = many.run((two, y[300:]), (one, x[399:]))  # one row: its blocks are shared out
    np.testing.assert_array_equal(np.concatenate([first[300:], last[33:]]), wanted[0])
    np.testing.assert_array_equal(np.concatenate([first[:300], last[:33]]), wanted[1])


@needs_kernels
@given(
    case=ALL_LAYERS,
    held=st.sampled_from([0, 1, 14, 31, 250, 333]),
    parents=st.lists(st.integers(0, 99), min_size=1, max_size=12),
    first=st.integers(1, 12),
)
def test_tree(
    native: dict[tuple[str, str], IndexedLayer],
    case: tuple[str, str],
    held: int,
    parents: list[int],
    first: int,
) -> None:
    check_tree(native[case], held, parents, first)


@pytest.mark.parametrize("make", [torch_layer, pytest.param(IndexedLayer, marks=needs_kernels)])
def test_a_sequence_may_go_back(make: Any) -> None:
    options = () if make is torch_layer else (NativeOps(threads=2),)
    layer, x, y = make(SHAPES["by-3"], *options), random_rows(40), random_rows(20, seed=2)
    cache, straight = layer.cache(), layer.cache()
    layer.run((cache, x))
    assert cache.trim(25) == 25
    layer.run((straight, x[:25]))
    np.testing.assert_allclose(layer.run((cache, y)), layer.run((straight, y)), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_heads": 2}, "indexer_kv_heads must be 1, is 2"),
        ({"budget": 10}, "must be a multiple of its blocks of 4 tokens, is 10"),
        ({"block": 0}, "must be a multiple of its blocks"),
    ],
)
def test_sizes_that_do_not_fit_are_named(change: dict[str, int], words: str) -> None:
    sizes = {"heads": 4, "kv_heads": 1, "head_dim": 16, "block": 4, "budget": 12}
    with pytest.raises(ValueError, match=words):
        IndexSpec(scale=1.0, eps=EPS, rope=None, **(sizes | change))
