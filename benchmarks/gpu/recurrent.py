"""Checks and speeds of recurrent layers, without their projections.

Compares each with a plain torch version on the CPU, and checks that a row has the same bits alone
and in a longer pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from benchmarks.gpu.attention import tree_of
from benchmarks.gpu.configs import largest_error
from benchmarks.gpu.exchange import there
from benchmarks.gpu.timing import Check, Values
from localrt.quant.cuda.device import Device
from localrt.quant.cuda.driver import device_of
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.cuda.recurrent import SequenceTable, mix_rows
from localrt.quant.cuda.tensor import Tensor
from localrt.quant.cuda.weight import RecurrentWeights as GpuWeights
from localrt.quant.ops import recurrent
from localrt.quant.ops.hybrid_cache import begin_states, states_of
from localrt.quant.ops.kv import KVCache
from localrt.quant.ops.protocol import Span
from localrt.quant.ops.recurrent import RecurrentSpec
from localrt.quant.reference.ops import TorchOps
from localrt.quant.reference.recurrent import mix_rows as textbook
from localrt.quant.reference.weights import RecurrentWeights

BOUND = 0.01


def check_recurrent(device: str) -> Iterator[Check]:
    """Check one small layer of every kind."""
    for name in _SHAPES:
        yield name, partial(_compared, _spec(name), device)


# Kind, heads, key heads, key and value size, other options.
_SHAPES: dict[str, tuple[Any, ...]] = {
    "delta (Qwen3-Next)": ("delta", 4, 2, 128, 128, {}),
    "delta, channels (Kimi Linear)": (
        "delta", 4, 2, 128, 128, {"channel_decay": True, "gate": "sigmoid"},
    ),
    "ssm (Nemotron-H)": ("ssm", 4, 2, 128, 64, {"gate_first": True}),
    "conv (LFM2)": ("conv", 1, 1, 1, 1, {"width": 2048}),
}  # fmt: skip


def _spec(name: str) -> RecurrentSpec:
    kind, heads, key_heads, key, value, more = _SHAPES[name]
    if kind != "conv":
        more = {**more, "norm_size": value}
    return RecurrentSpec(
        kind=kind, heads=heads, key_heads=key_heads, key_size=key, value_size=value, taps=4,
        eps=1e-6, **more,
    )  # fmt: skip


def _weights(spec: RecurrentSpec) -> RecurrentWeights:
    """Random torch weights, without the projections."""

    def vector(size: int, scale: float = 0.5, offset: float = 0.0) -> torch.Tensor:
        return torch.randn(size) * scale + offset

    stateful = spec.kind != "conv"
    width = spec.value_size if spec.kind == "delta" else spec.inner
    nothing: Any = None
    return recurrent.RecurrentWeights(
        norm=None,
        mix=nothing,
        taps=vector(spec.taps * spec.channels),
        out=nothing,
        decay=-vector(spec.heads).exp() if stateful else None,
        decay_bias=vector(spec.factors - spec.heads) if stateful else None,
        skip=vector(spec.heads) if spec.kind == "ssm" else None,
        out_norm=vector(width, 0.1, 1.0) if spec.norm_size else None,
    )


def _on(gpu: Device, weights: RecurrentWeights) -> GpuWeights:
    """The weights on a device."""
    vectors: dict[str, Any] = {each.name: getattr(weights, each.name) for each in fields(weights)}
    moved: dict[str, Any] = {
        k: there(v, gpu) for k, v in vectors.items() if isinstance(v, torch.Tensor)
    }
    return cast(GpuWeights, replace(weights, **moved))


class _Pass:
    """A started pass of ``rows`` rows, which can be run repeatedly."""

    def __init__(self, cache: KVCache, rows: int, mask: Any, gpu: Device) -> None:
        cache.reserve(cache.length + rows)
        self.spans = (Span(cache, rows, mask),)
        self.states = begin_states(self.spans)
        table, self._cache = SequenceTable.of(self.spans), states_of(cache)
        table.fill(self.spans, self.states)
        self.sequences = table.split(table.upload(gpu))

    def run(self, mixed: Tensor, weights: GpuWeights, layer: int = 0) -> np.ndarray:
        """Run our kernels."""
        layout = self._cache.layout
        places = layout.states[layer], layout.rows[layer]
        spec = layout.specs[layer]
        return mix_rows(mixed, weights, spec, self.sequences, layer, places).to_host()

    def done(self) -> None:
        """End the pass: its rows are then in the cache."""
        for layer in range(len(self._cache.layout.specs)):
            self._cache.layer_done(layer)
        (span,) = self.spans
        span.cache.advance(span.rows)


def _compared(spec: RecurrentSpec, device: str) -> Values:
    """Compare a prompt, single rows and a tree with torch."""
    gpu, plain = device_of(device), _weights(spec)
    weights, tree = _on(gpu, plain), tree_of(7).numpy()
    mixed = torch.randn(26, spec.projected_rows)
    ours, alone = (CudaOps(device=device).kv_cache([spec], 64) for _ in range(2))
    theirs = TorchOps(compute_format="f32", device="cpu").kv_cache([spec], 64)
    worst, same = 0.0, True
    for first, stop, mask in ((0, 17, None), (17, 18, None), (18, 19, None), (19, 26, tree)):
        rows = mixed[first:stop]
        given = there(rows, gpu)
        step = _Pass(ours, len(rows), mask, gpu)
        found = step.run(given, weights)
        step.done()
        spans = (Span(theirs, len(rows), mask),)
        theirs.reserve(stop)
        wanted = textbook(rows, plain, spec, spans, begin_states(spans), 0).numpy()
        theirs.advance(len(rows))
        worst = max(worst, largest_error(found, wanted))
        if mask is not None:
            continue
        for row in range(len(rows)):
            one = _Pass(alone, 1, None, gpu)
            bits = one.run(given[row : row + 1], weights)[0]
            same = same and np.array_equal(bits, found[row])
            one.done()
    return {"ok": worst < BOUND and same, "worst": worst, "same_bits": same}
