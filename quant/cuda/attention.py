"""The steps of attention on a card: new rows join the caches, and see what they hold.

A card's caches: keys and values in bf16 or rows of bytes, latents in bf16, states in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from localrt.quant.cuda.kernels.attention import attend, fits_records, rope_append
from localrt.quant.cuda.kernels.kv import CardKvFormat, row_nbytes
from localrt.quant.cuda.kernels.products import empty_records
from localrt.quant.cuda.kernels.steps import norm, norm_gate
from localrt.quant.cuda.linear import linear, normed_for, reads_records
from localrt.quant.cuda.stream import CudaPass, Stream
from localrt.quant.ops.attention import (
    AttentionSpec,
    AttentionWeights,
    LatentSpec,
    Rope,
)
from localrt.quant.ops.hybrid_cache import split_layers
from localrt.quant.ops.kv import KVCache, grown_capacity
from localrt.quant.ops.protocol import LayerSpec, Span
from localrt.quant.ops.states import StateLayout
from localrt.quant.reference.kv import kv_of, sequence_cache


class Rotations:
    """The rotary tables of a device's passes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._frequencies: dict[Rope, Tensor] = {}

    def of(self, rope: Rope | None, step: CudaPass) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """cos and sin of the pass, (R, len(inv_freq)) float32, once per pass."""
        if rope is None:
            return None, None
        if rope not in step.tables:
            if rope not in self._frequencies:
                values = torch.tensor(rope.inv_freq, dtype=torch.float32, device=self._device)
                self._frequencies[rope] = values
            angles = step.positions.float()[:, None] * self._frequencies[rope]
            step.tables[rope] = angles.cos() * rope.scale, angles.sin() * rope.scale
        return step.tables[rope]


class AttentionSteps:
    """A part of ``CudaOps``."""

    kv_format: CardKvFormat
    _rotations: Rotations

    def norm_qkv_rope_append(
        self,
        x: Stream,
        weights: AttentionWeights,
        spec: AttentionSpec,
        step: CudaPass,
        layer: int,
    ) -> Tensor:
        """(R, H, E); keys and values are written to the caches."""
        h = normed_for(x, weights.norm, spec.eps, weights.qkv)
        qkv = linear(h, weights.qkv, weights.qkv_bias)
        rows = len(qkv)
        shape = (2 * rows if spec.has_gates else rows, spec.heads, spec.head_dim)
        q = torch.empty(shape, dtype=torch.bfloat16, device=x.values.device)
        if spec.has_gates:
            q[rows:] = _gates(qkv, spec)
        cos, sin = self._rotations.of(spec.rope, step)
        for index, (first, stop, span) in enumerate(ranges(step.spans)):
            k, v = kv_of(span).view(layer, span.rows)
            rope_append(
                qkv[first:stop],
                q[first:stop],
                k,
                v,
                step.held[index:],
                cos=None if cos is None else cos[first:stop],
                sin=None if sin is None else sin[first:stop],
                q_norm=weights.q_norm,
                k_norm=weights.k_norm,
                eps=spec.eps,
                joint=spec.joint_norms,
                norms_last=spec.norms_last,
                gated=spec.gated,
                kv_format=self.kv_format,
            )
        if spec.temperature is not None:
            q[:rows] *= step.factors(spec.temperature)
        return q

    def attention_output(
        self,
        q: Tensor,
        weights: AttentionWeights,
        spec: AttentionSpec,
        step: CudaPass,
        layer: int,
        chosen: None = None,
    ) -> Tensor:
        """(R, D), float32."""
        q, gates = q.chunk(2) if spec.has_gates else (q, None)
        # Where the product that follows reads records, they are written at once.
        direct = fits_records(spec.heads, spec.value_dim) and reads_records(weights.out, len(q))
        width, fine = spec.heads * spec.value_dim, weights.out.fine
        records = empty_records(1, len(q), width, q.device, fine=fine) if direct else None
        attended = records if gates is None else None
        outputs = []
        for index, (first, stop, span) in enumerate(ranges(step.spans)):
            k, v = kv_of(span).view(layer, span.rows)
            outputs.append(
                attend(
                    q[first:stop],
                    k,
                    v,
                    step.held[index:],
                    step.positions[first:stop],
                    scale=spec.scale,
                    window=spec.window,
                    softcap=spec.softcap,
                    mask=step.trees[index],
                    longest=step.longest[index],
                    sinks=weights.sinks,
                    kv_format=self.kv_format,
                    records=attended,
                    row=first,
                )
            )
        seen = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        if gates is not None:
            seen = norm_gate(seen, gates.flatten(1), records=records)
        y = linear(records or seen, weights.out, weights.out_bias, dtype=torch.float32)
        if weights.post_norm is None:
            return y
        return norm(y, weights.post_norm, spec.eps, out=torch.float32)


def ranges(spans: Sequence[Span]) -> Iterator[tuple[int, int, Span]]:
    """First row, end, span."""
    first = 0
    for span in spans:
        yield first, first + span.rows, span
        first += span.rows


def _gates(qkv: Tensor, spec: AttentionSpec) -> Tensor:
    """(R, H, E), or (R, H, 1) of heads."""
    if spec.head_gates:
        return qkv[:, -spec.heads :, None]
    both = qkv[:, : 2 * spec.heads * spec.head_dim]
    return both.view(len(qkv), spec.heads, 2, spec.head_dim)[:, :, 1]


def cache_nbytes(layers: Sequence[LayerSpec], length: int, kv_format: CardKvFormat) -> int:
    """Bytes of keys, values and states once grown to ``length`` tokens."""
    attending, states = split_layers(layers)
    shapes, dtype = _kept(attending, kv_format)
    row = sum(groups * sum(widths) for groups, *widths in shapes)
    in_states = StateLayout(states).sequence_nbytes(length)
    return in_states + row * grown_capacity(length) * dtype.itemsize


def new_cache(
    layers: Sequence[LayerSpec], capacity: int, kv_format: CardKvFormat, device: torch.device
) -> KVCache:
    """An empty one."""
    attending, states = split_layers(layers)
    return sequence_cache(*_kept(attending, kv_format), states, capacity, device)


def _kept(
    layers: Sequence[AttentionSpec], kv_format: CardKvFormat
) -> tuple[list[tuple[int, int, int]], torch.dtype]:
    """Each layer's heads, and what a key and a value of each are in memory; and in what type."""
    latent = any(isinstance(spec, LatentSpec) for spec in layers)
    if latent or kv_format == "bf16":
        shapes = [(spec.cached_heads, spec.head_dim, spec.value_dim) for spec in layers]
        return shapes, torch.bfloat16
    return [
        (spec.cached_heads, *row_nbytes(kv_format, spec.head_dim)) for spec in layers
    ], torch.uint8
