"""What kernels compute, in numpy and float64: activations, and rows of a sequence in passes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.quant.ops.experts import ExpertSpec
from localrt.quant.ops.protocol import BEST, BEST_COUNT, MlpSpec


def sigmoid(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Of any number."""
    return 1 / (1 + np.exp(-np.clip(x, -500, 500)))


def gated(
    gate: npt.NDArray[Any], up: npt.NDArray[Any], spec: ExpertSpec | MlpSpec
) -> npt.NDArray[Any]:
    """activation(gate) * up, or activation(up) where there is no gate."""
    if spec.activation == "relu2":
        return np.maximum(up, 0) ** 2
    if isinstance(spec, ExpertSpec) and spec.activation == "swiglu_oai":
        gate, up = np.minimum(gate, spec.limit), np.clip(up, -spec.limit, spec.limit)
        return gate * sigmoid(1.702 * gate) * (up + 1)
    up = np.clip(up, -spec.limit, spec.limit)
    if spec.activation == "gelu_tanh":
        inner = 0.7978845608028654 * (gate + 0.044715 * gate**3)
        return np.minimum(0.5 * gate * (1 + np.tanh(inner)), spec.limit) * up
    if isinstance(spec, MlpSpec):
        gate = gate * spec.gate_scale
    return np.minimum(gate * sigmoid(gate), spec.limit) * up


def read_in(layer: Any, x: npt.NDArray[np.float32], cuts: Iterable[int]) -> npt.NDArray[np.float32]:
    """What a layer makes of the rows of one sequence, in passes of so many."""
    cache, ends = layer.cache(), accumulate(cuts, initial=0)
    return np.concatenate([layer.run((cache, x[start:stop])) for start, stop in pairwise(ends)])


def best_of(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.void]:
    """``BEST`` of logits (n, V), by sorting all: NaN, then descending values, then tokens."""
    found = np.empty((len(logits), min(BEST_COUNT, logits.shape[1])), BEST)
    for row, values in zip(found, logits, strict=True):
        order = np.lexsort((np.arange(len(values)), -values, ~np.isnan(values)))[: len(row)]
        row["token"], row["value"] = order, values[order]
    return found
