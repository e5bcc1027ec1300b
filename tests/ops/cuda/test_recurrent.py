"""The kernels of recurrent layers against the textbook, and bits that depend on the past alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from localrt.quant.cuda.linear import reads_records
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.cuda.recurrent import SequenceTable, mix_and_project, mix_rows
from localrt.quant.formats.packed import Floats
from localrt.quant.ops.hybrid_cache import begin_states, states_of
from localrt.quant.ops.protocol import Batch, Span
from localrt.quant.ops.recurrent import RecurrentSpec
from localrt.quant.reference.ops import TorchOps
from localrt.quant.reference.recurrent import mix_rows as textbook
from tests.ops.cuda.target import DEVICE, back, there
from tests.ops.layers import (
    HIDDEN,
    SPECS,
    Layer,
    check_cancelled,
    check_sequences,
    check_tree,
    random_rows,
    tree_mask,
)
from tests.ops.oracles import read_in
from tests.ops.packed import random_tensor

NAMES = sorted(SPECS)


class GpuLayer(Layer):
    """The same on a GPU. The products round; between them there is no difference to be seen."""

    def __init__(self, spec: str | RecurrentSpec) -> None:
        super().__init__(spec, CudaOps(device=str(DEVICE)))

    def run(self, *parts: tuple[Any, ...], cancelled: bool = False) -> Floats:
        """See ``Layer``."""
        spans = tuple(Span(cache, len(x), *mask) for cache, x, *mask in parts)
        x = np.concatenate([x for _, x, *_ in parts])
        batch = Batch(np.zeros(len(x), np.int64), np.arange(len(x)), spans)
        with self.ops.scope():
            step = self.ops.begin(batch)
            rows, norm = torch.from_numpy(x), back(self.weights.norm)
            normed = torch.nn.functional.rms_norm(rows, (HIDDEN,), norm, 1e-6)
            out = mix_and_project(there(normed.bfloat16()), self.weights, self.spec, step, 0)
        if not cancelled:
            for span in spans:
                span.cache.advance(span.rows)
        return out.to_host()


def torch_layer(spec: str | RecurrentSpec) -> Layer:
    """The same on torch."""
    return Layer(spec, TorchOps(compute_format="f32"))


def widened(mixed: torch.Tensor, spec: RecurrentSpec) -> torch.Tensor:
    """Rows as projected, as ``wide_rows`` says; the first projection of two is not read again."""
    if not spec.low_rank:
        return mixed
    sizes = [spec.channels, spec.inner, spec.heads, spec.factors - spec.heads]
    channels, gates, strengths, decays = torch.split(mixed, sizes, dim=1)
    unread = mixed.new_full((len(mixed), spec.low_rank), float("nan"))
    return torch.cat([channels, unread, strengths, unread, gates, decays], dim=1)


@pytest.mark.parametrize("name", NAMES)
def test_kernels_give_what_torch_gives(name: str) -> None:
    layer, oracle, mask = GpuLayer(name), torch_layer(name), tree_mask([-1, 0, 0, 2, 1, 3, 5, 0])
    spec = layer.spec
    mixed = torch.randn(30, spec.projected_rows, generator=torch.Generator().manual_seed(1))
    ours, theirs = layer.cache(), oracle.cache()
    for first, stop, tree in ((0, 9, None), (9, 10, None), (10, 18, mask), (18, 30, None)):
        rows = mixed[first:stop]
        wide = widened(rows, spec)
        for cache in (ours, theirs):
            cache.reserve(stop)
        spans = [(Span(cache, len(rows), tree),) for cache in (ours, theirs)]
        passes = begin_states(spans[0])
        table = SequenceTable.of(spans[0])
        table.fill(spans[0], passes)
        sequences = table.split(table.upload(DEVICE))
        found = mix_rows(there(wide), layer.weights, spec, sequences, 0, (0, 0))
        states_of(ours).layer_done(0)
        wanted = textbook(rows, oracle.weights, spec, spans[1], begin_states(spans[1]), 0)
        torch.testing.assert_close(back(found).float(), wanted, rtol=1e-2, atol=1e-3)
        for cache in (ours, theirs):
            cache.advance(len(rows))
            if tree is not None:
                cache.select(10, [0, 2, 3, 5])
    # States and rows in float32.
    for kept, same in zip(*(states_of(cache).saved() for cache in (ours, theirs)), strict=True):
        assert (kept.position, kept.length) == (same.position, same.length)
        numbers, oracles = (each.data.view(np.float32) for each in (kept, same))
        np.testing.assert_allclose(numbers, oracles, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "scaled"), [*((name, False) for name in NAMES), ("ssm", True), ("delta", True)]
)
def test_projections_are_torchs(name: str, scaled: bool) -> None:
    """Those in two steps too, and those times factors."""
    layers = GpuLayer(name), torch_layer(name)
    if scaled:
        factors = np.geomspace(0.25, 4, layers[0].spec.mix_rows, dtype=np.float32)
        shuffled = np.random.default_rng(2).permutation(factors)
        for layer in layers:
            layer.weights = replace(layer.weights, mix_scale=layer.ops.vector(shuffled))
    assert_same_results(*layers)


def test_packed_second_projections() -> None:
    """They read records of some columns of a row."""
    spec = replace(SPECS["delta-low-rank"], low_rank=32)
    layers = GpuLayer(spec), torch_layer(spec)
    rows = {"gate_up": spec.inner, "decay_up": spec.factors - spec.heads}
    for layer in layers:
        packed = {
            name: layer.ops.weight((count, 32), [random_tensor("q8_0", count, 32)])
            for name, count in rows.items()
        }
        layer.weights = replace(layer.weights, **packed)
    gate_up: Any = layers[0].weights.gate_up
    assert reads_records(gate_up, 6)
    assert_same_results(*layers)


def assert_same_results(layer: Layer, oracle: Layer) -> None:
    found, wanted = (read_in(each, random_rows(9), [6, 1, 2]) for each in (layer, oracle))
    assert np.linalg.norm(found - wanted) < 0.02 * np.linalg.norm(wanted)


@pytest.mark.parametrize("name", NAMES)
def test_passes_of_any_size(name: str) -> None:
    layer, x = GpuLayer(name), random_rows(24)
    whole = read_in(layer, x, [24])
    for cuts in ([1, 1, 2, 5, 1, 14], [12, 3, 9]):
        np.testing.assert_array_equal(read_in(layer, x, cuts), whole)


@pytest.mark.parametrize(
    "name",
    [
        *("conv", "delta-channels", "ssm"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("delta", "delta-low-rank", "delta-strong", "delta-tiled", "ssm-bounded")
        ),
    ],
)
def test_trees_sequences_and_cancelled_passes(name: str) -> None:
    layer = GpuLayer(name)
    check_tree(layer, 6, [0, 1, 2, 1, 4, 3, 0], 3)
    check_sequences(layer)
    check_cancelled(layer)
