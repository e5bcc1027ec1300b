"""The kernels of recurrent layers against the textbook, and bits that depend on the past alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from localrt.quant.cuda.ops import CudaOps
from localrt.quant.cuda.recurrent import mix_and_project
from localrt.quant.formats.packed import Floats
from localrt.quant.ops.protocol import Batch, Span
from localrt.quant.ops.recurrent import RecurrentSpec
from localrt.quant.reference.ops import TorchOps
from tests.ops.cuda.target import DEVICE, back, there
from tests.ops.layers import (
    HIDDEN,
    SPECS,
    Layer,
    check_cancelled,
    check_sequences,
    check_tree,
    random_rows,
)
from tests.ops.oracles import read_in

NAMES = sorted(SPECS)
FEW = [pytest.param(n, marks=() if n == "ssm" else pytest.mark.slow) for n in NAMES]


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
    found, wanted = (read_in(each, random_rows(30), [9, 1, 20]) for each in layers)
    assert np.linalg.norm(found - wanted) < 0.02 * np.linalg.norm(wanted)


@pytest.mark.parametrize("name", FEW)
def test_passes_of_any_size(name: str) -> None:
    layer, x = GpuLayer(name), random_rows(24)
    whole = read_in(layer, x, [24])
    for cuts in ([1, 1, 2, 5, 1, 14], [12, 3, 9]):
        np.testing.assert_array_equal(read_in(layer, x, cuts), whole)


@pytest.mark.parametrize("name", FEW)
def test_trees_sequences_and_cancelled_passes(name: str) -> None:
    layer = GpuLayer(name)
    check_tree(layer, 6, [0, 1, 2, 1, 4, 3, 0], 3)
    check_sequences(layer)
    check_cancelled(layer)
