"""Latent attention on torch: projections of both sides, and the sums over latents in between.

The textbook of ``latent.py``, and the oracle of the compiled one. It knows tensors and one layer's
cache; norms, products and rotary tables are its caller's.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from localrt.quant.ops.attention import LatentSpec, LatentWeights
from localrt.quant.ops.torch.kv import TorchKVCache

__all__ = ["attend_latents", "latent_queries", "latent_values"]

_SCORES = 1 << 24  # numbers held at once: query rows are taken a few at a time


class _Steps(Protocol):
    """What ``TorchOps`` lends."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...

    def _norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...


def latent_queries(
    ops: _Steps, x: Tensor, weights: LatentWeights, spec: LatentSpec, turns: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Queries against cached rows (R, H, P + L), and the new rows (R, 1, P + L).

    ``turns`` are cos and sin of the pass, (R, 1, P / 2).
    """
    wide = ops.linear(ops._norm(x, weights.norm, spec.eps), weights.down)
    sizes = [spec.down_rows - spec.head_dim, spec.latent, spec.rope_dim]
    q, latent, key = torch.split(wide, sizes, dim=-1)
    if weights.query_up is not None:
        q = ops.linear(ops._norm(q, weights.query_norm, spec.latent_eps), weights.query_up)
    q = q.reshape(-1, spec.heads, spec.nope + spec.rope_dim)
    plain, turned = torch.split(q, [spec.nope, spec.rope_dim], dim=-1)
    key_up = weights.key_up.view(spec.heads, spec.latent, spec.nope)
    absorbed = torch.einsum("rhn,hln->rhl", plain, key_up)
    queries = torch.cat((_rotate(turned, turns, spec), absorbed), dim=-1)
    latent = ops._norm(latent, weights.latent_norm, spec.latent_eps)
    rows = torch.cat((_rotate(key[:, None], turns, spec), latent[:, None]), dim=-1)
    return queries, rows


def attend_latents(
    q: Tensor, cache: TorchKVCache, layer: int, mask: Tensor | None, spec: LatentSpec
) -> Tensor:
    """q (n, H, P + L), just appended, over the layer's rows: what is seen of latents, (n, H, L).

    ``mask`` (n, length) is True where seen; None where all is.
    """
    rows = cache.view(layer, q.shape[0])[0][0]  # (length, P + L)
    latents = rows[:, spec.rope_dim :]
    step = max(1, _SCORES // (spec.heads * len(rows)))
    parts = []
    for start in range(0, q.shape[0], step):
        scores = (q[start : start + step] @ rows.T).float() * spec.scale  # (n, H, length)
        if mask is not None:
            scores.masked_fill_(~mask[start : start + step, None, :], float("-inf"))
        parts.append(scores.softmax(-1).to(rows.dtype) @ latents)
    return torch.cat(parts)


def latent_values(seen: Tensor, weights: LatentWeights, spec: LatentSpec) -> Tensor:
    """Each head's values of what it has seen (R, H, L), side by side: (R, H V)."""
    value_up = weights.value_up.view(spec.heads, spec.value, spec.latent)
    return torch.einsum("rhl,hvl->rhv", seen, value_up).reshape(len(seen), -1)


def _rotate(x: Tensor, turns: tuple[Tensor, Tensor], spec: LatentSpec) -> Tensor:
    """x (R, heads, P) turned, as halves."""
    cos, sin = turns
    a, b = (x[..., 0::2], x[..., 1::2]) if spec.interleaved else x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
