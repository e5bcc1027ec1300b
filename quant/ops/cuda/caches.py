"""A card's caches: keys and values in bf16 or rows of bytes, latents in bf16, states in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from localrt.quant.ops.attention import AttentionSpec, LatentSpec
from localrt.quant.ops.cuda.kernels.kv import CardKvFormat, row_nbytes
from localrt.quant.ops.hybrid_cache import split_layers
from localrt.quant.ops.kv import KVCache, grown_capacity
from localrt.quant.ops.protocol import LayerSpec
from localrt.quant.ops.states import StateLayout
from localrt.quant.ops.torch.kv import sequence_cache


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
