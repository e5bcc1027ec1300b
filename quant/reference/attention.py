"""Attention on torch: which keys a row sees, the sums over them, choosing tokens, and latents.

The textbook of ``quant/ops/attention.py``, and the oracle of the kernels. It knows tensors and one
layer's cache; norms, products and rotary tables are its caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from localrt.quant.ops.attention import AttentionSpec, IndexSpec, LatentSpec, LatentWeights
from localrt.quant.ops.hybrid_cache import kv_of
from localrt.quant.ops.protocol import Span, ranges
from localrt.quant.reference.kv import TorchKVCache

# Query rows whose scores over the whole context are held at once on the textbook path.
_QUERY_BLOCK = 64


def visible_keys(span: Span, spec: AttentionSpec, device: torch.device) -> Tensor | None:
    """Which keys each of a span's rows sees, (n, held + n) bool; None where it sees them all.

    A window ends with the last of them.
    """
    held, rows, window = span.cache.length, span.rows, spec.window
    if rows == 1 and span.mask is None and (window is None or held < window):
        return None
    seen = torch.ones(rows, held + rows, dtype=torch.bool, device=device)
    keys = torch.arange(held + rows, device=device).expand(rows, -1)
    last = keys[0, held:]
    if span.mask is None:
        seen[:, held:] = torch.ones(rows, rows, dtype=torch.bool, device=device).tril()
        if span.ahead is not None and not (span.windows_only and window is None):
            reach = torch.arange(rows) + torch.from_numpy(span.ahead)
            seen[:, held:] |= (torch.arange(rows)[None] <= reach[:, None]).to(device)
    else:
        mask = torch.from_numpy(span.mask).to(device)
        base = held + rows - mask.shape[1]
        seen[:, base:] = mask
        # What a row sees of a tree are its ancestors, one behind the other from ``base`` on.
        keys = torch.cat([keys[:, :base], base - 1 + mask.cumsum(1)], dim=1)
        last = keys[:, -1]
    if window is not None and spec.chunked:
        seen &= keys >= last[:, None] // window * window
    elif window is not None:
        seen &= last[:, None] - keys < window
    return seen


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate-half on the first 2 * cos.shape[-1] elements of x (R, heads, E)."""
    half = cos.shape[-1]
    a, b = x[..., :half], x[..., half : 2 * half]
    rotated = (a * cos - b * sin, b * cos + a * sin)
    if 2 * half == x.shape[-1]:
        return torch.cat(rotated, dim=-1)
    return torch.cat((*rotated, x[..., 2 * half :]), dim=-1)


def grown(q: Tensor, spec: AttentionSpec, positions: Tensor) -> Tensor:
    """q (R, H, E) times the temperature's factors, if there is one."""
    if (temperature := spec.temperature) is None:
        return q
    steps = (positions + temperature.offset) // temperature.length
    factors = 1 + temperature.beta * torch.log1p(steps)
    return q * factors.to(q.dtype)[:, None, None]


def append(k: Tensor, v: Tensor, spans: Sequence[Span], layer: int) -> None:
    """Write new keys and values (R, G, E) to the caches of their sequences."""
    for first, stop, span in ranges(spans):
        kv_of(span, TorchKVCache).write(layer, k[first:stop], v[first:stop])


def attend_rows(
    q: Tensor,
    cache: TorchKVCache,
    layer: int,
    mask: Tensor | None,
    spec: AttentionSpec,
    sinks: Tensor | None = None,
) -> Tensor:
    """q (n, H, E), just appended, over the layer's keys and values: (n, H * E). ``sinks`` (H,)."""
    n = q.shape[0]
    if n == 1 or spec.softcap is not None or sinks is not None:
        # oneDNN keeps a compiled kernel per shape it has seen: rounded lengths keep those few.
        k, v = cache.view(layer, n, rounded=True)
        length = cache.length + n
        if mask is None:
            return _attend_plainly(q, k, v, length, None, spec, sinks)
        parts = zip(torch.split(q, _QUERY_BLOCK), torch.split(mask, _QUERY_BLOCK), strict=True)
        return torch.cat([_attend_plainly(rows, k, v, length, m, spec, sinks) for rows, m in parts])
    k, v = cache.view(layer, n)
    y = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k[None],
        v[None],
        attn_mask=None if mask is None else mask[None, None],
        scale=spec.scale,
        enable_gqa=spec.heads != spec.kv_heads,
    )
    return y[0].transpose(0, 1).reshape(n, -1)


def _attend_plainly(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    length: int,
    mask: Tensor | None,
    spec: AttentionSpec,
    sinks: Tensor | None,
) -> Tensor:
    """The textbook path: quicker than SDPA for one row, and alone knows softcaps and sinks.

    k, v (G, L, E) count up to ``length``; mask (n, length).
    """
    n = q.shape[0]
    groups, per = spec.kv_heads, spec.heads // spec.kv_heads
    # Rows of one key/value group side by side: (G, n * per, E).
    grouped = q.view(n, groups, per, -1).transpose(0, 1).reshape(groups, n * per, -1)
    scores = torch.bmm(grouped, k.transpose(1, 2)).float() * spec.scale  # (G, n * per, L)
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    scores[..., length:] = float("-inf")
    if mask is not None:
        hidden = ~mask[:, None, :].expand(n, per, length).reshape(n * per, length)
        scores[..., :length].masked_fill_(hidden, float("-inf"))
    if sinks is not None:  # one more score, whose share goes to no value
        own = sinks.float().view(groups, 1, per).expand(groups, n, per).reshape(groups, -1, 1)
        shares = torch.cat([scores, own], -1).softmax(-1)[..., :-1]
    else:
        shares = scores.softmax(-1)
    y = torch.bmm(shares.to(v.dtype), v)  # (G, n * per, E)
    return y.view(groups, n, per, -1).transpose(0, 1).reshape(n, -1)


Finish = Callable[[Tensor, int], Tensor]
"""A block's mean (E,) normed, and rotated at a position."""


def choose_rows(
    q: Tensor,
    keys: Tensor,
    spec: IndexSpec,
    span: Span,
    positions: Tensor,
    layer: int,
    finish: Finish,
) -> Tensor:
    """(rows, held + rows), True where a row of a sequence sees a token.

    ``q`` (rows, H, E) are normed and rotated, ``keys`` (rows, E) as projected.
    """
    cache, held = kv_of(span, TorchKVCache), span.cache.length
    cache.write(layer, keys[:, None], torch.zeros_like(keys)[:, None])
    own, blocks = (part[0] for part in cache.view(layer, span.rows))
    chosen = torch.zeros(span.rows, held + span.rows, dtype=torch.bool, device=q.device)
    for row, path in enumerate(span.paths()):
        whole = len(path) // spec.block
        if len(path) % spec.block == 0:
            mean = own[path[-spec.block :]].float().mean(0).to(own.dtype)
            blocks[held + row] = finish(mean, int(positions[row]) - spec.block + 1)
        if whole > spec.most_blocks:
            finished = blocks[path[spec.block - 1 :: spec.block]]
            scores = F.relu(q[row].float() @ finished.float().T).sum(0)
            best = torch.sort(scores, descending=True, stable=True).indices[: spec.most_blocks]
            kept = path[: whole * spec.block].reshape(whole, -1)[np.sort(best.cpu().numpy())]
            path = np.concatenate([kept.reshape(-1), path[whole * spec.block :]])
        chosen[row, path] = True
    return chosen


_SCORES = 1 << 24  # numbers held at once: query rows are taken a few at a time


class _Steps(Protocol):
    """What ``TorchOps`` lends."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...

    def _norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor: ...


def latent_queries(
    ops: _Steps, x: Tensor, weights: LatentWeights, spec: LatentSpec, turns: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Queries against cached rows (R, H, P + L), each with its head's gate behind if there are any,
    and the new rows (R, 1, P + L).

    ``turns`` are cos and sin of the pass, (R, 1, P / 2).
    """
    wide = ops.linear(ops._norm(x, weights.norm, spec.eps), weights.down)
    gates = spec.gate_rows
    sizes = [spec.down_rows - spec.head_dim - gates, gates, spec.latent, spec.rope_dim]
    q, opening, latent, key = torch.split(wide, sizes, dim=-1)
    if weights.query_up is not None:
        q = ops.linear(ops._norm(q, weights.query_norm, spec.latent_eps), weights.query_up)
    q = q.reshape(-1, spec.heads, spec.nope + spec.rope_dim)
    plain, turned = torch.split(q, [spec.nope, spec.rope_dim], dim=-1)
    key_up = weights.key_up.view(spec.heads, spec.latent, spec.nope)
    absorbed = torch.einsum("rhn,hln->rhl", plain, key_up)
    parts = [_rotate(turned, turns, spec), absorbed, *([opening[..., None]] if gates else ())]
    queries = torch.cat(parts, dim=-1)
    latent = ops._norm(latent, weights.latent_norm, spec.latent_eps)
    rows = torch.cat((_rotate(key[:, None], turns, spec), latent[:, None]), dim=-1)
    return queries, rows


def attend_latents(q: Tensor, rows: Tensor, mask: Tensor | None, spec: LatentSpec) -> Tensor:
    """q (n, H, P + L), just appended, over cached rows (length, P + L): what is seen, (n, H, L).

    ``mask`` (n, length) is True where seen; None where all is.
    """
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
