"""Attention to chosen tokens: torch against transformers, kernels against torch, and their bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.quant.cpu.ops import NativeOps
from localrt.quant.reference.ops import TorchOps
from tests.conftest import needs_kernels
from tests.ops.layers import SHAPES, IndexedLayer, Shape, check_tree, random_rows, random_tensors
from tests.ops.test_native_matmul import ISAS

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
