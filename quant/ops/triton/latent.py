"""Latent attention of 1 to 64 new rows (DeepSeek), over one cached row.

A cached row is the rotary key that all heads share, and the latent behind it, which is key and
value at once: it is loaded once for both. Programs take 16 heads of new rows and a fixed run of 128
rows of the cache; runs are joined in order. It knows tensors; projections are its caller's.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from localrt.quant.ops.triton import device as triton_device

__all__ = ["attend_latent_rows", "latent_append"]

_RUN = 128  # keys of one program; part of what a result's bits depend on
_ROWS = 16
_KEYS = 32  # at once
_SCRATCH_BYTES = 128 << 20


def latent_append(
    q: Tensor,
    wide: Tensor,
    queries: Tensor,
    cache: Tensor,
    held: Tensor,
    *,
    cos: Tensor,
    sin: Tensor,
    norm: Tensor,
    eps: float,
    interleaved: bool,
) -> None:
    """Rotary on each head's last P columns of q (n, H, N + P): the first of queries (n, H, P + L).

    ``wide`` (n, L + P) are latents and keys: normed and rotated, they go behind the ``held`` rows
    of cache (allocated, P + L), the rotary part first. cos and sin are (n, P / 2).
    """
    n, heads, width = q.shape
    half = cos.shape[1]
    latent = wide.shape[1] - 2 * half
    _latent_append_kernel[(n, heads + 1)](
        q,
        wide,
        queries,
        cache,
        held,
        cos,
        sin,
        norm,
        eps,
        q.stride(0),
        wide.stride(0),
        heads=heads,
        width=width,
        half=half,
        latent=latent,
        turn=triton.next_power_of_2(2 * half),
        block=triton.next_power_of_2(latent),
        interleaved=interleaved,
        num_warps=4,
        enable_fp_fusion=True,
    )


def attend_latent_rows(
    q: Tensor,
    cache: Tensor,
    held: Tensor,
    *,
    rope: int,
    scale: float,
    mask: Tensor | None,
    longest: int,
) -> Tensor:
    """q (n, H, P + L) over cache (allocated, P + L), P being ``rope``: what is seen, (n, H, L).

    ``held`` (one int64 on the device) tokens lie in the cache, and behind them the n new rows.
    ``mask`` (n, n) int8 says which new row sees which; None is causal. ``longest`` bounds held + n.
    """
    n, heads, width = q.shape
    latent = width - rope
    runs = -(-longest // _RUN)
    out = torch.empty(n, heads, latent, dtype=q.dtype, device=q.device)
    chunk = max(1, min(n, _SCRATCH_BYTES // (runs * heads * (latent + 2) * 4)))
    partial = torch.empty(runs, chunk * heads, latent, dtype=torch.float32, device=q.device)
    stats = torch.empty(2, runs, chunk * heads, dtype=torch.float32, device=q.device)
    for first in range(0, n, chunk):
        rows = min(chunk, n - first)
        _latent_runs_kernel[(runs, -(-rows * heads // _ROWS))](
            q[first:],
            cache,
            held,
            mask,
            partial,
            stats,
            n,
            first,
            rows,
            scale,
            partial.stride(0),
            runs,
            heads=heads,
            rope=rope,
            latent=latent,
            turn=max(16, triton.next_power_of_2(rope)),
            block=max(16, triton.next_power_of_2(latent)),
            rows_block=_ROWS,
            run=_RUN,
            keys_block=_KEYS,
            compiled=triton_device.compiled(q),
            num_warps=8,
            num_stages=1,
            enable_fp_fusion=False,
        )
        _join_kernel[(rows * heads,)](
            partial,
            stats,
            held,
            out[first:],
            n,
            partial.stride(0),
            runs,
            size=latent,
            block=triton.next_power_of_2(latent),
            run=_RUN,
            most=triton.next_power_of_2(runs),
            num_warps=1,
            enable_fp_fusion=False,
        )
    return out


@triton.jit
def _latent_append_kernel(
    q,
    wide,
    queries,
    cache,
    held,
    cos,
    sin,
    norm,
    eps,
    q_stride,
    wide_stride,
    heads: tl.constexpr,
    width: tl.constexpr,
    half: tl.constexpr,
    latent: tl.constexpr,
    turn: tl.constexpr,
    block: tl.constexpr,
    interleaved: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    size: tl.constexpr = 2 * half + latent
    if head < heads:
        out = queries + (row.to(tl.int64) * heads + head) * size
        source = q + row.to(tl.int64) * q_stride + head * width + (width - 2 * half)
        _turn(source, out, cos, sin, row, half, turn, interleaved)
    else:
        out = cache + (tl.load(held) + row).to(tl.int64) * size
        source = wide + row.to(tl.int64) * wide_stride
        _turn(source + latent, out, cos, sin, row, half, turn, interleaved)
        i = tl.arange(0, block)
        mask = i < latent
        value = tl.load(source + i, mask=mask, other=0.0).to(tl.float32)
        value = value * (1.0 / tl.sqrt(tl.sum(value * value, 0) / latent + eps))
        value = value * tl.load(norm + i, mask=mask, other=0.0)
        tl.store(out + 2 * half + i, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _turn(
    source, out, cos, sin, row, half: tl.constexpr, turn: tl.constexpr, interleaved: tl.constexpr
):
    """Pairs of ``source``, turned, as halves of ``out``."""
    i = tl.arange(0, turn)
    mask = i < 2 * half
    low = i < half
    angle = tl.where(low, i, i - half)
    if interleaved:
        own = 2 * angle + tl.where(low, 0, 1)
        other = 2 * angle + tl.where(low, 1, 0)
    else:
        own = i
        other = tl.where(low, i + half, i - half)
    value = tl.load(source + own, mask=mask, other=0.0).to(tl.float32)
    partner = tl.load(source + other, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos + row * half + angle, mask=mask, other=1.0)
    s = tl.load(sin + row * half + angle, mask=mask, other=0.0)
    value = value * c + tl.where(low, -partner, partner) * s
    tl.store(out + i, value.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n", "first", "rows", "runs"])
def _latent_runs_kernel(
    q,
    cache,
    held,
    tree,
    partial,
    stats,
    n,
    first,
    rows,
    scale,
    run_stride,
    runs,
    heads: tl.constexpr,
    rope: tl.constexpr,
    latent: tl.constexpr,
    turn: tl.constexpr,
    block: tl.constexpr,
    rows_block: tl.constexpr,
    run: tl.constexpr,
    keys_block: tl.constexpr,
    compiled: tl.constexpr,
):
    size: tl.constexpr = rope + latent
    begin = tl.program_id(0) * run
    place = tl.program_id(1) * rows_block + tl.arange(0, rows_block)
    row = place // heads  # among the rows of this call; first + row among the new rows
    live = row < rows
    p = tl.arange(0, turn)
    p_live = p < rope
    e = tl.arange(0, block)
    e_live = e < latent
    old = tl.load(held).to(tl.int32)
    total = old + n
    turned = tl.load(
        q + place[:, None] * size + p[None, :], mask=live[:, None] & p_live[None, :], other=0.0
    )
    absorbed = tl.load(
        q + place[:, None] * size + rope + e[None, :],
        mask=live[:, None] & e_live[None, :],
        other=0.0,
    )
    end = tl.minimum(begin + run, total)
    highest = tl.full((rows_block,), float("-inf"), tl.float32)
    weight = tl.full((rows_block,), 0.0, tl.float32)
    acc = tl.full((rows_block, block), 0.0, tl.float32)
    for start in range(begin, end, keys_block):
        key = start + tl.arange(0, keys_block)
        known = key < total
        at = key[:, None].to(tl.int64) * size
        keys = tl.load(cache + at + p[None, :], mask=known[:, None] & p_live[None, :], other=0.0)
        latents = tl.load(
            cache + at + rope + e[None, :], mask=known[:, None] & e_live[None, :], other=0.0
        )
        if not compiled:
            turned = turned.to(tl.float32)
            absorbed = absorbed.to(tl.float32)
            keys = keys.to(tl.float32)
            latents = latents.to(tl.float32)
        score = tl.dot(absorbed, tl.trans(latents), tl.dot(turned, tl.trans(keys))) * scale
        new = key - old  # index among the new rows; negative for those held
        if tree is not None:
            fresh = (new >= 0) & known
            seen_at = (first + row)[:, None] * n + new[None, :]
            seen = tl.load(tree + seen_at, mask=live[:, None] & fresh[None, :], other=0) != 0
            seen = seen | (new < 0)[None, :]
        else:
            seen = new[None, :] <= (first + row)[:, None]
        score = tl.where(seen & known[None, :], score, float("-inf"))
        top = tl.maximum(highest, tl.max(score, 1))
        base = tl.where(top == float("-inf"), 0.0, top)  # nothing seen so far
        share = tl.exp(score - base[:, None])
        decay = tl.exp(highest - base)
        weight = tl.fma(weight, decay, tl.sum(share, 1))
        acc = acc * decay[:, None]
        shares = share.to(tl.bfloat16)
        if not compiled:
            shares = shares.to(tl.float32)
        acc = tl.dot(shares, latents, acc)
        highest = top
    base_at = tl.program_id(0).to(tl.int64) * run_stride
    out_live = live[:, None] & e_live[None, :]
    tl.store(partial + base_at + place[:, None] * latent + e[None, :], acc, mask=out_live)
    stat_at = tl.program_id(0) * (run_stride // latent) + place
    tl.store(stats + stat_at, highest, mask=live)
    tl.store(stats + runs * (run_stride // latent) + stat_at, weight, mask=live)


@triton.jit(do_not_specialize=["n", "runs"])
def _join_kernel(
    partial,
    stats,
    held,
    out,
    n,
    run_stride,
    runs,
    size: tl.constexpr,
    block: tl.constexpr,
    run: tl.constexpr,
    most: tl.constexpr,
):
    which = tl.program_id(0)
    used = (tl.load(held).to(tl.int32) + n + run - 1) // run
    width = run_stride // size
    e = tl.arange(0, block)
    e_live = e < size
    r = tl.arange(0, most)
    highest = tl.load(stats + r * width + which, mask=r < used, other=float("-inf"))
    top = tl.max(highest, 0)
    acc = tl.full((block,), 0.0, tl.float32)
    weight = 0.0
    found = partial + which * size + e
    for i in range(0, used):
        at = i * width + which
        share = tl.exp(tl.load(stats + at) - top)
        weight += share * tl.load(stats + runs * width + at)
        acc += share * tl.load(found, mask=e_live, other=0.0)
        found += run_stride
    tl.store(out + which * size + e, (acc / weight).to(tl.bfloat16), mask=e_live)
