"""Rotary with the append to the KV cache.

Every row is computed by programs of its own, in an order that no other row changes. Numbers that
change from pass to pass (positions, tokens held) come from device memory, so that a recorded CUDA
graph can be replayed.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["rope_append"]


def rope_append(
    qkv: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    held: Tensor,
    *,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    joint: bool = False,
) -> None:
    """Per-head norms and rotary on qkv (n, (H + 2G) * E); q goes to q (n, H, E), k and v behind the
    ``held`` tokens (one int64 on the device) of the caches (G, allocated, E).

    cos and sin (n, rotary / 2) are float32; None is no rotary. ``joint`` norms go over all heads at
    once: their weights are (H * E,) and (G * E,).
    """
    n, heads, size = q.shape
    groups = k_cache.shape[0]
    scales = None
    if joint:
        scales = torch.empty(n, 2, dtype=torch.float32, device=q.device)
        _joint_kernel[(n, 2)](
            qkv,
            scales,
            eps,
            qkv.stride(0),
            heads * size,
            groups * size,
            block=triton.next_power_of_2(heads * size),
            num_warps=4,
            enable_fp_fusion=True,
        )
    _rope_kernel[(n, heads + 2 * groups)](
        qkv,
        q,
        k_cache,
        v_cache,
        held,
        cos,
        sin,
        q_norm,
        k_norm,
        scales,
        eps,
        qkv.stride(0),
        k_cache.stride(0),
        heads=heads,
        groups=groups,
        size=size,
        half=0 if cos is None else cos.shape[1],
        block=triton.next_power_of_2(size),
        num_warps=1,
        enable_fp_fusion=True,
    )


@triton.jit
def _joint_kernel(qkv, scales, eps, row_stride, queries, keys, block: tl.constexpr):
    """1 / RMS of a row's queries, or of its keys."""
    row = tl.program_id(0)
    part = tl.program_id(1)  # 0: queries
    i = tl.arange(0, block)
    width = tl.where(part == 0, queries, keys)
    at = qkv + row.to(tl.int64) * row_stride + part * queries
    value = tl.load(at + i, mask=i < width, other=0.0).to(tl.float32)
    tl.store(scales + 2 * row + part, 1.0 / tl.sqrt(tl.sum(value * value, 0) / width + eps))


@triton.jit
def _rope_kernel(
    qkv,
    q,
    k_cache,
    v_cache,
    held,
    cos,
    sin,
    q_norm,
    k_norm,
    scales,  # (n, 2) of joint norms, or None
    eps,
    row_stride,
    group_stride,
    heads: tl.constexpr,
    groups: tl.constexpr,
    size: tl.constexpr,
    half: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    i = tl.arange(0, block)
    mask = i < size
    # The element that rotary pairs each one with: half a turn away; itself where there is none.
    turned = i < 2 * half
    other = tl.where(turned, tl.where(i < half, i + half, i - half), i)
    source = qkv + row.to(tl.int64) * row_stride + head * size
    value = tl.load(source + i, mask=mask, other=0.0).to(tl.float32)
    if head < heads + groups:
        partner = tl.load(source + other, mask=mask, other=0.0).to(tl.float32)
        if q_norm is not None:
            weight = q_norm if head < heads else k_norm
            if scales is not None:
                scale = tl.load(scales + 2 * row + tl.where(head < heads, 0, 1))
                weight += tl.where(head < heads, head, head - heads) * size
            else:
                scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / size + eps)
            value = value * scale * tl.load(weight + i, mask=mask, other=0.0)
            partner = partner * scale * tl.load(weight + other, mask=mask, other=0.0)
        if half > 0:
            angle = row * half + tl.where(i < half, i, i - half)
            c = tl.load(cos + angle, mask=turned, other=1.0)
            s = tl.load(sin + angle, mask=turned, other=0.0)
            value = value * c + tl.where(i < half, -partner, partner) * s
    if head < heads:
        tl.store(q + (row * heads + head) * size + i, value.to(tl.bfloat16), mask=mask)
    else:
        slot = (tl.load(held) + row).to(tl.int64) * size
        if head < heads + groups:
            place = k_cache + (head - heads).to(tl.int64) * group_stride + slot
        else:
            place = v_cache + (head - heads - groups).to(tl.int64) * group_stride + slot
        tl.store(place + i, value.to(tl.bfloat16), mask=mask)
