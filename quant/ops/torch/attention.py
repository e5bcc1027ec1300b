"""Attention on torch: which keys a row sees, and the sums over them. It knows no weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from localrt.quant.ops.protocol import AttentionSpec, Span
from localrt.quant.ops.torch.kv import TorchKVCache

__all__ = ["attend_rows", "visible_keys"]

# Query rows whose scores over the whole context are held at once on the textbook path.
_QUERY_BLOCK = 64


def visible_keys(
    held: int,
    span: Span,
    window: int | None,
    positions: Tensor,
    index: int,
    spans: Sequence[Span],
) -> Tensor | None:
    """Which keys each of a span's rows sees, (n, held + n) bool; None where it sees them all.

    ``positions`` are those of all rows of the pass, ``index`` is the span's among ``spans``.
    """
    rows = span.rows
    device = positions.device
    if rows == 1 and span.mask is None and (window is None or held < window):
        return None
    start = sum(other.rows for other in spans[:index])
    query = positions[start : start + rows]
    seen = torch.ones(rows, held + rows, dtype=torch.bool, device=device)
    keys = torch.arange(held + rows, device=device).expand(rows, -1)
    if span.mask is None:
        seen[:, held:] = torch.ones(rows, rows, dtype=torch.bool, device=device).tril()
    else:
        mask = torch.from_numpy(span.mask).to(device)
        base = held + rows - mask.shape[1]
        seen[:, base:] = mask
        # What a row sees of a tree are its ancestors, one behind the other from ``base`` on.
        keys = torch.cat([keys[:, :base], base - 1 + mask.cumsum(1)], dim=1)
    if window is not None:
        seen &= query[:, None] - keys < window
    return seen


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
