"""The sums of the products with packed tiles: device functions that several kernels share.

The steps of 32 columns are dealt out to 16 chains. A chain unpacks its steps in registers to exact
bf16 codes, multiplies them with rows of activations on the tensor cores and adds the group's scale
times the product to float32 sums of its own; at the end the chains are added in a written order.
``linear.py`` says why. Where tiles and rows lie is the kernel's business.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from localrt.quant.ops.triton.unpack import (
    E4M3,
    E8M0,
    Q4_K,
    Q6_K,
    e4m3,
    e8m0,
    half_scales,
    high_words,
    nibbles,
    ones_like,
    q4_k_scales,
    q6_k_scale,
    signed_bytes,
    tile_bytes,
    wide_words,
)

__all__ = ["GATES", "activations", "chain_sums", "folded", "step_codes", "step_scales", "store"]

GATES = {"silu": 1, "gelu_tanh": 2, "swiglu_oai": 3}


@triton.jit
def folded(acc, rows: tl.constexpr, columns: tl.constexpr):
    """(16, rows, columns) to (rows, columns), added in a written order.

    ``tl.sum`` would leave the order to the compiler, which may choose it by the tensor's shape.
    """
    pairs = tl.permute(tl.reshape(acc, (2, 8, rows, columns)), (1, 2, 3, 0))
    low, high = tl.split(pairs)
    last = tl.permute(tl.reshape(low + high, (2, 2, 2, rows, columns)), (3, 4, 0, 1, 2))
    even, odd = tl.split(last)
    c04, c26 = tl.split(even)
    c15, c37 = tl.split(odd)
    c0, c4 = tl.split(c04)
    c2, c6 = tl.split(c26)
    c1, c5 = tl.split(c15)
    c3, c7 = tl.split(c37)
    return ((c0 + c1) + (c2 + c3)) + ((c4 + c5) + (c6 + c7))


@triton.jit
def _operand(data, count: tl.constexpr, tiles: tl.constexpr):
    """(count, tiles, 256) bytes, whole steps or halves of 8-bit ones: (count, tiles * 16, 16)."""
    quads = tl.permute(tl.reshape(data, (count, tiles, 4, 16, 4)), (0, 1, 3, 2, 4))
    return tl.reshape(quads, (count, tiles * 16, 16))


@triton.jit
def _tile_at(t, beside, apart, own: tl.constexpr):
    """Where tile t of a program begins: ``own`` of one matrix, then as many of the other."""
    return t * apart if own == 1 else t % own * beside + t // own * apart


@triton.jit
def step_codes(
    w,  # the program's first tile, uint8
    w32,  # the same as int32
    at,  # (count,): where each step begins in a tile, in bytes
    live,  # (count,)
    beside,  # bytes from a tile to the next of its matrix
    apart,  # bytes from one matrix to the other
    left,  # tiles that there are of a matrix
    count: tl.constexpr,
    tiles: tl.constexpr,
    own: tl.constexpr,  # of them, of one matrix
    bits: tl.constexpr,
    codes: tl.constexpr,
    zero: tl.constexpr,
    compiled: tl.constexpr,
):
    """The codes of ``count`` steps, first 16 columns and last: (count, tiles * 16, 16) each."""
    if bits == 4 or bits == 8:
        tile = tl.arange(0, tiles)
        inner = tl.arange(0, 256)
        data_at = _tile_at(tile, beside, apart, own)[None, :, None] + inner[None, None, :]
        places = w + data_at + at[:, None, None]
        data_live = live[:, None, None] & (tile % own < left)[None, :, None]
        data = tl.load(places, mask=data_live, other=0)
        if bits == 8:
            a0 = signed_bytes(_operand(data, count, tiles), compiled)
            upper = tl.load(places + 256, mask=data_live, other=0)
            a1 = signed_bytes(_operand(upper, count, tiles), compiled)
        else:
            a0, a1 = nibbles(_operand(data, count, tiles), codes, zero, compiled)
    else:
        r = tl.arange(0, tiles * 16)
        at3 = _tile_at(r // 16, beside, apart, own)[None, :, None] + at[:, None, None]
        row3 = (r % 16)[None, :, None]
        live3 = live[:, None, None] & (r // 16 % own < left)[None, :, None]
        v = tl.arange(0, 4)[None, None, :]
        words = tl.load(w32 + at3 // 4 + 16 * v + row3, mask=live3, other=0)
        h0 = high_words(w32, at3, row3, v, 0, bits, live3)
        h1 = high_words(w32, at3, row3, v, 1, bits, live3)
        a0 = wide_words(words, h0, zero, compiled)
        a1 = wide_words(words >> 4, h1, zero, compiled)
        a0 = tl.reshape(a0, (count, tiles * 16, 16))
        a1 = tl.reshape(a1, (count, tiles * 16, 16))
    return a0, a1


@triton.jit
def activations(x, at, mask, compiled: tl.constexpr):
    """bf16 for the tensor cores; the interpreter multiplies float32."""
    found = tl.load(x + at, mask=mask, other=0.0)
    if not compiled:
        found = found.to(tl.float32)
    return found


@triton.jit
def store(
    total,  # (rows of the program, columns)
    y,
    y_at,  # (columns,): where each row of y begins, in elements
    live,  # (columns,)
    bias,  # a pointer, or None
    first,  # of the program's rows
    rows,  # of y
    limit,
    gate: tl.constexpr,
):
    """The epilogue: bias and gate, rounding to y's type. Gate rows come before up rows."""
    if gate:
        half: tl.constexpr = total.shape[0] // 2
        columns: tl.constexpr = total.shape[1]
        both = tl.permute(tl.reshape(total, (2, half, columns)), (1, 2, 0))
        g, up = tl.split(both)
        r = first + tl.arange(0, half)
        if bias is not None:
            g += tl.load(bias + r, mask=r < rows, other=0.0).to(tl.float32)[:, None]
            up += tl.load(bias + rows + r, mask=r < rows, other=0.0).to(tl.float32)[:, None]
        if gate == 1:
            total = g * tl.sigmoid(g) * up
        elif gate == 2:  # 0.5 * (1 + tanh(z)) is sigmoid(2 z)
            total = g * tl.sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g)) * up
        else:
            g = tl.minimum(g, limit, propagate_nan=tl.PropagateNan.ALL)
            up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
            up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
            total = g * tl.sigmoid(1.702 * g) * (up + 1.0)
    else:
        r = first + tl.arange(0, total.shape[0])
        if bias is not None:
            total += tl.load(bias + r, mask=r < rows, other=0.0).to(tl.float32)[:, None]
    places = y + y_at[None, :] + r[:, None]
    mask = live[None, :] & (r < rows)[:, None]
    tl.store(places, total.to(y.dtype.element_ty), mask=mask)


@triton.jit
def step_scales(
    w16,
    w32,
    span_at,  # (count,): where each step's span begins in a tile, in bytes
    step,  # (count,)
    live,  # (count,)
    beside,
    apart,
    left,
    half: tl.constexpr,
    tiles: tl.constexpr,
    own: tl.constexpr,
    bits: tl.constexpr,
    scales: tl.constexpr,
    minimum: tl.constexpr,
    halves: tl.constexpr,
    span_steps: tl.constexpr,
):
    """Scale and offset of 16 or all 32 columns of each step: (count, tiles * 16)."""
    rows: tl.constexpr = tiles * 16
    r = tl.arange(0, rows)
    r4 = tl.arange(0, tiles * 4)  # four rows to a word, where scales are bytes
    at = _tile_at(r // 16, beside, apart, own)[None, :] + span_at[:, None]
    at4 = (_tile_at(r4 // 4, beside, apart, own) + r4 % 4 * 4)[None, :] + span_at[:, None]
    row = (r % 16)[None, :]
    mask = live[:, None] & (r // 16 % own < left)[None, :]
    mask4 = live[:, None] & (r4 // 4 % own < left)[None, :]
    if scales == E8M0:
        scale = e8m0(tile_bytes(w32, at4, mask4, rows))
        offset = scale
    elif scales == E4M3:
        scale = e4m3(tile_bytes(w32, at4 + half * 16, mask4, rows))
        offset = scale
    elif scales == Q4_K:
        scale, offset = q4_k_scales(w16, w32, at, row, step[:, None] % span_steps, mask)
    elif scales == Q6_K:
        fine_at = at4 + (32 + 16 * half) + step[:, None] % span_steps * 32
        scale = q6_k_scale(w16, at, row, mask, tile_bytes(w32, fine_at, mask4, rows))
        offset = scale
    else:
        scale, offset = half_scales(w16, at, row, mask, half, bits, minimum, halves)
    return scale, offset


@triton.jit
def chain_sums(
    x,
    w,  # the program's first tile, uint8
    w16,  # the same as float16
    w32,  # the same as int32
    x_rows,  # (columns,): where each row of x begins, in elements
    live_rows,  # (columns,)
    beside,  # bytes from a tile to the next of its matrix
    apart,  # bytes from one matrix to the other
    left,  # tiles that there are of a matrix
    steps,  # columns of the weights / 32
    bits: tl.constexpr,
    codes: tl.constexpr,
    zero: tl.constexpr,
    scales: tl.constexpr,
    minimum: tl.constexpr,
    halves: tl.constexpr,
    span_steps: tl.constexpr,
    head: tl.constexpr,
    tiles: tl.constexpr,
    own: tl.constexpr,  # of them, of one matrix
    columns: tl.constexpr,
    unroll: tl.constexpr,
    stages: tl.constexpr,
    compiled: tl.constexpr,
):
    """Products of ``tiles`` tiles with rows of x: (tiles * 16, columns), float32."""
    step_bytes: tl.constexpr = 64 * bits
    span_bytes: tl.constexpr = head + span_steps * step_bytes
    chain = tl.arange(0, 16)
    k = tl.arange(0, 16)
    x_at = x_rows[None, None, :] + k[None, :, None]
    x_live = live_rows[None, None, :]

    acc = tl.full((16, tiles * 16, columns), 0.0, tl.float32)
    for start in tl.range(0, steps, 16 * unroll, num_stages=stages):
        for part in tl.static_range(unroll):
            step = start + part * 16 + chain
            live = step < steps
            span_at = step // span_steps * span_bytes
            at = span_at + head + step % span_steps * step_bytes
            xs_at = x_at + (step * 32)[:, None, None]
            xs_live = live[:, None, None] & x_live
            x0 = activations(x, xs_at, xs_live, compiled)
            x1 = activations(x, xs_at + 16, xs_live, compiled)
            a0, a1 = step_codes(
                w, w32, at, live, beside, apart, left,
                16, tiles, own, bits, codes, zero, compiled,
            )  # fmt: skip
            scale, offset = step_scales(
                w16, w32, span_at, step, live, beside, apart, left,
                0, tiles, own, bits, scales, minimum, halves, span_steps,
            )  # fmt: skip
            product = tl.dot(a0, x0)
            if minimum:
                ones = ones_like(a0, compiled)
            if halves:
                acc = tl.fma(product, scale[:, :, None], acc)
                if minimum:
                    acc = tl.fma(tl.dot(ones, x0), offset[:, :, None], acc)
                scale, offset = step_scales(
                    w16, w32, span_at, step, live, beside, apart, left,
                    1, tiles, own, bits, scales, minimum, halves, span_steps,
                )  # fmt: skip
                acc = tl.fma(tl.dot(a1, x1), scale[:, :, None], acc)
                if minimum:
                    acc = tl.fma(tl.dot(ones, x1), offset[:, :, None], acc)
            else:
                acc = tl.fma(tl.dot(a1, x1, product), scale[:, :, None], acc)
                if minimum:
                    sums = tl.dot(ones, x1, tl.dot(ones, x0))
                    acc = tl.fma(sums, offset[:, :, None], acc)

    return folded(acc, tiles * 16, columns)
