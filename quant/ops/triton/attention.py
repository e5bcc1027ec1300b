"""Attention of 1 to 64 new rows over a KV cache, split over the keys (flash decoding).

A program computes 16 query rows of one key/value group over a fixed run of keys, and leaves a
maximum, a sum and a weighted sum of values; a second kernel joins the runs in order. Runs begin at
multiples of 128 keys whatever the length, and rows that are padding or belong to others change
nothing, so a row's result is bitwise the same for any number of rows.

Grouped queries, a sliding window, a soft cap, sinks and a mask among the new rows (a token tree)
are all one kernel. Lengths come from device memory: a recorded CUDA graph stays valid as the cache
fills.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from localrt.quant.ops.triton import device as triton_device

__all__ = ["RUN", "SCRATCH_BYTES", "attend", "join_runs"]

RUN = 128  # keys of one program; part of what a result's bits depend on
_ROWS = 16  # query rows of one program
SCRATCH_BYTES = 128 << 20


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    held: Tensor,
    positions: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    mask: Tensor | None,
    longest: int,
    sinks: Tensor | None = None,
) -> Tensor:
    """q (n, H, E) over keys and values (G, allocated, E): (n, H * E), bf16.

    The cache has ``held`` tokens (one int64 on the device), at positions 0 to held - 1, and behind
    them the n new rows, at ``positions`` (n,) int64. ``mask`` (n, n) int8 says which new row sees
    which; None is causal. ``longest`` bounds held + n; the grid is cut for it.
    """
    n, heads, size = q.shape
    groups = k.shape[0]
    runs = -(-longest // RUN)
    out = torch.empty(n, heads * size, dtype=q.dtype, device=q.device)
    # Partial results of so many rows at once that they stay small.
    chunk = max(1, min(n, SCRATCH_BYTES // (runs * heads * (size + 2) * 4)))
    partial = torch.empty(runs, chunk * heads, size, dtype=torch.float32, device=q.device)
    stats = torch.empty(2, runs, chunk * heads, dtype=torch.float32, device=q.device)
    for first in range(0, n, chunk):
        rows = min(chunk, n - first)
        per = heads // groups
        _runs_kernel[(runs, groups, -(-rows * per // _ROWS))](
            q[first:],
            k,
            v,
            held,
            positions,
            mask,
            partial,
            stats,
            n,
            first,
            rows,
            scale,
            window or 0,
            softcap or 0.0,
            k.stride(0),
            partial.stride(0),
            runs,
            heads=heads,
            per=per,
            size=size,
            block=triton.next_power_of_2(size),
            rows_block=_ROWS,
            run=RUN,
            keys_block=_keys_block(size),
            windowed=window is not None,
            capped=softcap is not None,
            compiled=triton_device.compiled(q),
            num_warps=4,
            num_stages=1,
            enable_fp_fusion=False,
        )
        join_runs(partial, stats, held, out[first:], n, rows * heads, heads, size, sinks)
    return out


def join_runs(
    partial: Tensor,
    stats: Tensor,
    held: Tensor,
    out: Tensor,
    n: int,
    count: int,
    heads: int,
    size: int,
    sinks: Tensor | None = None,
) -> None:
    """out: ``count`` rows of ``size`` from their runs' sums (runs, rows, size) and ``stats``.

    ``stats`` (2, runs, rows) are each run's maximum and sum; the cache has ``held`` + n rows.
    """
    runs = partial.shape[0]
    _join_kernel[(count,)](
        partial,
        stats,
        held,
        sinks,
        out,
        n,
        partial.stride(0),
        runs,
        heads=heads,
        size=size,
        block=triton.next_power_of_2(size),
        run=RUN,
        most=triton.next_power_of_2(runs),
        num_warps=1,
        enable_fp_fusion=False,
    )


def _keys_block(size: int) -> int:
    """Keys at once: keys and values of so many are in shared memory together."""
    return RUN if size <= 128 else 64 if size <= 256 else 32


@triton.jit(do_not_specialize=["n", "first", "rows", "window", "runs"])
def _runs_kernel(
    q,
    k,
    v,
    held,
    positions,
    tree,
    partial,
    stats,
    n,
    first,
    rows,
    scale,
    window,
    softcap,
    group_stride,
    run_stride,
    runs,
    heads: tl.constexpr,
    per: tl.constexpr,
    size: tl.constexpr,
    block: tl.constexpr,
    rows_block: tl.constexpr,
    run: tl.constexpr,
    keys_block: tl.constexpr,
    windowed: tl.constexpr,
    capped: tl.constexpr,
    compiled: tl.constexpr,
):
    begin = tl.program_id(0) * run
    group = tl.program_id(1)
    place = tl.program_id(2) * rows_block + tl.arange(0, rows_block)
    row = place // per  # among the rows of this call; first + row among the new rows
    head = group * per + place % per
    live = row < rows
    e = tl.arange(0, block)
    e_live = e < size
    old = tl.load(held).to(tl.int32)
    total = old + n
    q_at = (row * heads + head)[:, None] * size + e[None, :]
    queries = tl.load(q + q_at, mask=live[:, None] & e_live[None, :], other=0.0)
    q_position = tl.load(positions + first + row, mask=live, other=0).to(tl.int32)
    k += group.to(tl.int64) * group_stride
    v += group.to(tl.int64) * group_stride
    if windowed:  # blocks that end before the first row's window would change nothing
        earliest = tl.min(tl.where(live, q_position, 2147483647), 0) - window + 1
        begin += tl.maximum(earliest - begin, 0) // keys_block * keys_block
    end = tl.minimum(tl.program_id(0) * run + run, total)

    highest = tl.full((rows_block,), float("-inf"), tl.float32)
    weight = tl.full((rows_block,), 0.0, tl.float32)
    acc = tl.full((rows_block, block), 0.0, tl.float32)
    for start in range(begin, end, keys_block):
        key = start + tl.arange(0, keys_block)
        known = key < total
        at = key[:, None].to(tl.int64) * size + e[None, :]
        kv_live = known[:, None] & e_live[None, :]
        keys = tl.load(k + at, mask=kv_live, other=0.0)
        values = tl.load(v + at, mask=kv_live, other=0.0)
        if not compiled:
            queries = queries.to(tl.float32)
            keys = keys.to(tl.float32)
            values = values.to(tl.float32)
        score = tl.dot(queries, tl.trans(keys)) * scale
        if capped:  # softcap * tanh(score / softcap)
            score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
        new = key - old  # index among the new rows; negative for those held
        fresh = (new >= 0) & known
        if tree is not None:
            seen_at = (first + row)[:, None] * n + new[None, :]
            seen_live = live[:, None] & fresh[None, :]
            seen = tl.load(tree + seen_at, mask=seen_live, other=0) != 0
            seen = seen | (new < 0)[None, :]
        else:
            seen = new[None, :] <= (first + row)[:, None]
        if windowed:
            position = tl.load(positions + new, mask=fresh, other=0).to(tl.int32)
            position = tl.where(new < 0, key, position)
            seen = seen & (q_position[:, None] - position[None, :] < window)
        seen = seen & known[None, :]
        score = tl.where(seen, score, float("-inf"))
        top = tl.maximum(highest, tl.max(score, 1))
        # Nothing seen so far: any finite number, so that exp gives zero and not NaN.
        base = tl.where(top == float("-inf"), 0.0, top)
        share = tl.exp(score - base[:, None])
        decay = tl.exp(highest - base)
        weight = tl.fma(weight, decay, tl.sum(share, 1))
        acc = acc * decay[:, None]
        if compiled:
            acc = tl.dot(share.to(tl.bfloat16), values, acc)
        else:
            acc = tl.dot(share.to(tl.bfloat16).to(tl.float32), values, acc)
        highest = top
    which = row * heads + head
    base_at = tl.program_id(0).to(tl.int64) * run_stride
    out_live = live[:, None] & e_live[None, :]
    tl.store(partial + base_at + which[:, None] * size + e[None, :], acc, mask=out_live)
    stat_at = tl.program_id(0) * (run_stride // size) + which
    tl.store(stats + stat_at, highest, mask=live)
    tl.store(stats + runs * (run_stride // size) + stat_at, weight, mask=live)


@triton.jit(do_not_specialize=["n", "runs"])
def _join_kernel(
    partial,
    stats,
    held,
    sinks,  # (heads,) or None
    out,
    n,
    run_stride,
    runs,
    heads: tl.constexpr,
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
    if sinks is not None:
        sink = tl.load(sinks + which % heads).to(tl.float32)
        top = tl.maximum(top, sink)
        weight += tl.exp(sink - top)
    found = partial + which * size + e
    for i in range(0, used):
        at = i * width + which
        share = tl.exp(tl.load(stats + at) - top)
        weight += share * tl.load(stats + runs * width + at)
        acc += share * tl.load(found, mask=e_live, other=0.0)
        found += run_stride
    tl.store(out + which * size + e, (acc / weight).to(tl.bfloat16), mask=e_live)
