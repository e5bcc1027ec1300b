"""The steps of attention on a card: new rows join the caches, and see what they hold.

A card's caches: keys and values in bf16 or rows of bytes, latents in bf16, states in float32.

The steps of latent attention (DeepSeek) on a card.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from localrt.quant.cuda.kernels.attention import attend, fits_records, rope_append
from localrt.quant.cuda.kernels.kv import CardKvFormat, row_nbytes
from localrt.quant.cuda.kernels.latent import attend_latent_rows, latent_append
from localrt.quant.cuda.kernels.products import MOST_ROWS, empty_records
from localrt.quant.cuda.kernels.steps import norm, norm_gate
from localrt.quant.cuda.products import linear, multiply_heads, normed_for, reads_records
from localrt.quant.cuda.stream import CudaPass, Stream
from localrt.quant.ops.attention import (
    AttentionSpec,
    AttentionWeights,
    LatentSpec,
    LatentWeights,
    Rope,
)
from localrt.quant.ops.hybrid_cache import split_layers
from localrt.quant.ops.kv import KVCache, grown_capacity
from localrt.quant.ops.protocol import LayerSpec, Span
from localrt.quant.ops.states import StateLayout
from localrt.quant.reference.attention import attend_latents, visible_keys
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


class LatentSteps:
    """A part of ``CudaOps``."""

    _rotations: Rotations

    def norm_latent_append(
        self, x: Stream, weights: LatentWeights, spec: LatentSpec, step: CudaPass, layer: int
    ) -> Tensor:
        """(R, H, P + L); the latents are written to the caches."""
        kind = torch.bfloat16 if weights.query_up is None else torch.float32
        h = normed_for(x, weights.norm, spec.eps, weights.down)
        wide = linear(h, weights.down, dtype=kind)
        q, latents = wide[:, : -spec.head_dim], wide[:, -spec.head_dim :]
        if weights.query_up is not None:
            ranked = norm(q, weights.query_norm, spec.latent_eps, out=torch.bfloat16)
            q = linear(ranked, weights.query_up)
        q = q.view(len(q), spec.heads, -1)  # (R, H, N + P)
        shape = (len(q), spec.heads, spec.head_dim)
        queries = torch.empty(shape, dtype=torch.bfloat16, device=q.device)
        absorbed = queries[..., spec.rope_dim :].transpose(0, 1)
        multiply_heads(q[..., : spec.nope].transpose(0, 1), weights.key_up, absorbed)
        cos, sin = self._rotations.of(spec.rope, step)
        assert cos is not None, "latent attention rotates a part of its keys"
        assert sin is not None, "as cos"
        for index, (first, stop, span) in enumerate(ranges(step.spans)):
            rows = slice(first, stop)
            latent_append(
                q[rows],
                latents[rows],
                queries[rows],
                kv_of(span).view(layer, span.rows)[0][0],
                step.held[index:],
                cos=cos[rows],
                sin=sin[rows],
                norm=weights.latent_norm,
                eps=spec.latent_eps,
                interleaved=spec.interleaved,
            )
        return queries

    def latent_output(
        self, q: Tensor, weights: LatentWeights, spec: LatentSpec, step: CudaPass, layer: int
    ) -> Tensor:
        """(R, D), float32."""
        parts = []
        for index, (first, stop, span) in enumerate(ranges(step.spans)):
            rows = q[first:stop]
            if span.rows > MOST_ROWS:
                mask = _mask(index, span, step)
                parts.append(attend_latents(rows, kv_of(span), layer, mask, spec))
                continue
            parts.append(
                attend_latent_rows(
                    rows,
                    kv_of(span).view(layer, span.rows)[0][0],
                    step.held[index:],
                    step.positions[first:stop],
                    rope=spec.rope_dim,
                    scale=spec.scale,
                    mask=step.trees[index],
                    longest=step.longest[index],
                )
            )
        seen = parts[0] if len(parts) == 1 else torch.cat(parts)  # (R, H, L)
        shape = (len(seen), spec.heads, spec.value)
        values = torch.empty(shape, dtype=torch.bfloat16, device=q.device)
        multiply_heads(seen.transpose(0, 1), weights.value_up, values.transpose(0, 1))
        return linear(values.flatten(1), weights.out, dtype=torch.float32)


def _mask(index: int, span: Span, step: CudaPass) -> Tensor | None:
    if index not in step.masks:
        held = span.cache.length
        step.masks[index] = visible_keys(held, span, None, step.positions, index, step.spans)
    return step.masks[index]
