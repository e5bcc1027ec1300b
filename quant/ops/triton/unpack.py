"""Device functions: bytes of a tile to the exact bf16 values of their codes, and their scales.

Codes are unpacked four bytes at a time in registers: byte permutations, three-input logic and bf16
arithmetic on pairs take 1.5 to 2.5 instructions per weight, where plain Triton takes 5 and more.
That is inline PTX, which is elementwise here (nothing depends on how Triton groups elements).
Triton's interpreter does not run PTX: with ``compiled`` False the same values are computed plainly.

Formats are described by the numbers of ``triton_formats.TritonLayout``.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

from localrt.quant.formats.nf4 import NF4_LEVELS
from localrt.quant.ops.triton.formats import CODES, SCALES

__all__ = [
    "E4M3",
    "E8M0",
    "Q4_K",
    "Q6_K",
    "e4m3",
    "e8m0",
    "half_scales",
    "high_words",
    "nibbles",
    "ones_like",
    "q4_k_scales",
    "q6_k_scale",
    "row_bytes",
    "signed_bytes",
    "tile_bytes",
    "wide_words",
]

_E2M1 = tl.constexpr(CODES["e2m1"])
_NF4 = tl.constexpr(CODES["nf4"])
E8M0 = tl.constexpr(SCALES["e8m0"])
E4M3 = tl.constexpr(SCALES["e4m3"])
Q4_K = tl.constexpr(SCALES["q4_k"])
Q6_K = tl.constexpr(SCALES["q6_k"])

# A code below 128 or-ed into bf16's 128.0 (0x4300) is 128 + code; 128 + zero is taken off again.
_SPREAD = """
    .reg .b32 p, q, s, t, one, off;
    mov.b32 one, 0x3F803F80;
    prmt.b32 p, {word}, 0, 0x4140;
    prmt.b32 q, {word}, 0, 0x4342;"""


def _pair(half: int) -> str:
    return f"0x{half:04X}{half:04X}"


def _nibble_asm(zero: int) -> str:
    lines = [_SPREAD.format(word="$4"), f"mov.b32 off, {_pair(0xC300 + zero)};"]
    lines += ["shr.u32 s, p, 4;", "shr.u32 t, q, 4;"]
    for out, register in enumerate("pqst"):
        lines.append(f"lop3.b32 {register}, {register}, {_pair(15)}, {_pair(0x4300)}, 0xEA;")
        lines.append(f"fma.rn.bf16x2 ${out}, {register}, one, off;")
    return "{" + "\n    ".join(lines) + "}"


def _word_asm(zero: int) -> str:
    """Four byte codes of one word to two pairs of bf16, each pair as a word."""
    lines = [_SPREAD.format(word="$2"), f"mov.b32 off, {_pair(0xC300 + zero)};"]
    for out, register in enumerate("pq"):
        lines.append(f"lop3.b32 {register}, {register}, {_pair(127)}, {_pair(0x4300)}, 0xEA;")
        lines.append(f"fma.rn.bf16x2 ${out}, {register}, one, off;")
    return "{" + "\n    ".join(lines) + "}"


def _signed_asm() -> str:
    # The top bit decides whether 128 or 256 is taken off: -256.0 is 0xC380, -128.0 is 0xC300.
    lines = [_SPREAD.format(word="$2")]
    for out, register in enumerate("pq"):
        lines.append(f"lop3.b32 off, {register}, {_pair(128)}, {_pair(0xC380)}, 0x6A;")
        lines.append(f"lop3.b32 {register}, {register}, {_pair(127)}, {_pair(0x4300)}, 0xEA;")
        lines.append(f"fma.rn.bf16x2 ${out}, {register}, one, off;")
    return "{" + "\n    ".join(lines) + "}"


def _e2m1_asm() -> str:
    """Sign to bit 15, the other three bits to where bf16 has its last two exponent bits and first
    fraction bit; that is the value times 2^-126, subnormal ones too, and 2^126 is exact.
    """
    lines = [".reg .b32 p, q, s, t, u, up, off;"]
    lines += ["mov.b32 up, 0x7E807E80;", "mov.b32 off, 0x80008000;"]
    lines += ["prmt.b32 p, $4, 0, 0x1404;", "prmt.b32 q, $4, 0, 0x3424;"]  # bytes to upper halves
    lines += ["shl.b32 s, p, 4;", "shl.b32 t, q, 4;"]
    for out, register in enumerate("stpq"):
        lines.append(f"shr.u32 u, {register}, 6;")
        lines.append(f"and.b32 u, u, {_pair(0x01C0)};")
        lines.append(f"lop3.b32 u, {register}, {_pair(0x8000)}, u, 0xEA;")
        lines.append(f"fma.rn.bf16x2 ${out}, u, up, off;")
    return "{" + "\n    ".join(lines) + "}"


def _table_asm(levels: np.ndarray) -> str:
    """Sixteen bf16 levels looked up by ``prmt``: eight bytes a time, then one of two results.

    The high and the low bytes of the levels are two tables; codes below and from 8 are looked up
    apart and chosen between by bit 3.
    """
    bits = levels.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 & 0xFFFF
    lines = [".reg .b32 s<2>, t<2>, a<2>, b<2>, l<2>, h<2>, k;"]
    lines += ["and.b32 s0, $4, 0x77777777;", "shr.u32 t0, $4, 1;"]
    lines += ["lop3.b32 t0, t0, 0x44444444, 0x32103210, 0xEA;"]
    lines += ["shr.u32 s1, s0, 16;", "shr.u32 t1, t0, 16;"]
    for name, plane in (("l", rounded & 255), ("h", rounded >> 8)):
        words = [int(plane[i : i + 4].astype("<u1").view("<u4")[0]) for i in (0, 4, 8, 12)]
        for found, first, second in (("a", *words[:2]), ("b", *words[2:])):
            lines.append(f"mov.b32 k, {first:#010x};")
            lines += [f"prmt.b32 {found}{i}, k, {second:#010x}, s{i};" for i in (0, 1)]
        lines += [f"prmt.b32 {name}{i}, a{i}, b{i}, t{i};" for i in (0, 1)]
    for i in (0, 1):
        lines += [f"prmt.b32 ${i}, l{i}, h{i}, 0x6240;", f"prmt.b32 ${2 + i}, l{i}, h{i}, 0x7351;"]
    return "{" + "\n    ".join(lines) + "}"


_NIBBLES_0 = tl.constexpr(_nibble_asm(0))
_NIBBLES_8 = tl.constexpr(_nibble_asm(8))
_WORDS_0 = tl.constexpr(_word_asm(0))
_WORDS_16 = tl.constexpr(_word_asm(16))
_WORDS_32 = tl.constexpr(_word_asm(32))
_SIGNED = tl.constexpr(_signed_asm())
_E2M1_ASM = tl.constexpr(_e2m1_asm())
_NF4_ASM = tl.constexpr(_table_asm(NF4_LEVELS))


@triton.jit
def nibbles(data, codes: tl.constexpr, zero: tl.constexpr, compiled: tl.constexpr):
    """The values of the low and of the high nibbles of uint8 ``data``, two tensors of its shape.

    bf16 when compiled, else float32 of the same values. NF4's levels are rounded to bf16.
    """
    if not compiled:
        low = _level((data & 15).to(tl.int32), codes, zero)
        high = _level((data >> 4).to(tl.int32), codes, zero)
    elif codes == _E2M1:
        low, high = _nibbles_by(_E2M1_ASM, data)
    elif codes == _NF4:
        low, high = _nibbles_by(_NF4_ASM, data)
    elif zero == 8:
        low, high = _nibbles_by(_NIBBLES_8, data)
    else:
        tl.static_assert(zero == 0)
        low, high = _nibbles_by(_NIBBLES_0, data)
    return low, high


@triton.jit
def _nibbles_by(asm: tl.constexpr, data):
    return tl.inline_asm_elementwise(
        asm,
        "=r,=r,=r,=r,r",
        [data],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def signed_bytes(data, compiled: tl.constexpr):
    """uint8 codes minus 128; types as in ``nibbles``."""
    if compiled:
        value = tl.inline_asm_elementwise(
            _SIGNED, "=r,=r,r", [data], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        value = data.to(tl.float32) - 128.0
    return value


@triton.jit
def ones_like(values, compiled: tl.constexpr):
    """Ones in the shape, and in the registers, of ``values``: for sums of activations.

    A plain constant would be given another register layout than the codes, and the activations
    would then be brought to the tensor cores twice.
    """
    if compiled:
        ones = tl.inline_asm_elementwise(
            "mov.b32 $0, 0x3F803F80;", "=r,r", [values], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        ones = values * 0.0 + 1.0
    return ones


@triton.jit
def wide_words(low, high, zero: tl.constexpr, compiled: tl.constexpr):
    """5- and 6-bit codes, four to a word: (..., 4) words to (..., 4, 2, 2) values, in order.

    ``low`` has the codes' low nibbles in its bytes, ``high`` their upper bits, in place.
    """
    words = (low & 0x0F0F0F0F) | high
    if compiled:
        if zero == 16:
            first, second = _words_by(_WORDS_16, words)
        elif zero == 32:
            first, second = _words_by(_WORDS_32, words)
        else:
            tl.static_assert(zero == 0)
            first, second = _words_by(_WORDS_0, words)
        v0 = first.to(tl.int16).to(tl.bfloat16, bitcast=True)
        v1 = (first >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        v2 = second.to(tl.int16).to(tl.bfloat16, bitcast=True)
        v3 = (second >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        v0 = (words & 255).to(tl.float32) - zero
        v1 = ((words >> 8) & 255).to(tl.float32) - zero
        v2 = ((words >> 16) & 255).to(tl.float32) - zero
        v3 = ((words >> 24) & 255).to(tl.float32) - zero
    return tl.join(tl.join(v0, v2), tl.join(v1, v3))


@triton.jit
def _words_by(asm: tl.constexpr, words):
    return tl.inline_asm_elementwise(
        asm, "=r,=r,r", [words], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
    )


@triton.jit
def high_words(w32, at, row, v, half: tl.constexpr, bits: tl.constexpr, mask):
    """Bits 4 and up of the codes of column 16 * half + 4v to 4v + 3, in the bytes of a word.

    ``at`` is where the step begins, ``row`` the row in its tile: tensors that broadcast. Words are
    read whole, as copies to shared memory need.
    """
    if bits == 5:  # four bits a row, eight rows to a word
        word = tl.load(w32 + (at + (256 + 32 * half)) // 4 + 2 * v + row // 8, mask=mask, other=0)
        four = (word >> (4 * (row % 8))) & 15
        words = (four * 0x02040810) & 0x10101010  # bit i to bit 4 of byte i
    else:
        word = tl.load(w32 + (at + (256 + 64 * half)) // 4 + row, mask=mask, other=0)
        words = ((word >> (2 * v)) & 0x03030303) << 4
    return words


@triton.jit
def row_bytes(w, at, row, mask):
    """A head's field of one byte a row: int32. ``at`` is where the field begins."""
    return tl.load(w + at + row, mask=mask, other=0).to(tl.int32)


@triton.jit
def tile_bytes(w32, at, mask, rows: tl.constexpr):
    """The same of whole tiles, read four rows to a word, as copies to shared memory need.

    ``at`` (n, rows / 4) is where each word lies, in bytes; the result is (n, rows).
    """
    words = tl.load(w32 + at // 4, mask=mask, other=0)
    shift = (8 * tl.arange(0, 4))[None, None, :]
    return tl.reshape((words[:, :, None] >> shift) & 255, (at.shape[0], rows))


@triton.jit
def half_scales(
    w16,
    at,
    row,
    mask,
    half: tl.constexpr,
    bits: tl.constexpr,
    minimum: tl.constexpr,
    halves: tl.constexpr,
):
    """Scale and offset stored as float16: of span ``at`` (bytes), for 16 columns of its step."""
    groups: tl.constexpr = 2 if halves else 1
    scale = tl.load(w16 + at // 2 + half * 16 + row, mask=mask, other=0.0).to(tl.float32)
    offset = scale
    if minimum:
        place = w16 + at // 2 + (groups + half) * 16 + row
        offset = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        if bits == 8:  # codes come minus 128
            offset += 128.0 * scale
    return scale, offset


@triton.jit
def e8m0(byte):
    """2^(byte - 127). Exponent 0 is a denormal of float32."""
    return tl.maximum(byte << 23, 0x00400000).to(tl.float32, bitcast=True)


@triton.jit
def e4m3(byte):
    """An unsigned scale: the same fields in float32's exponent, whose bias is 120 larger."""
    return ((byte & 127) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def q6_k_scale(w16, at, row, mask, fine):
    """float16 times a signed byte."""
    d = tl.load(w16 + at // 2 + row, mask=mask, other=0.0).to(tl.float32)
    return d * ((fine << 24) >> 24).to(tl.float32)


@triton.jit
def q4_k_scales(w16, w32, at, row, sub, mask):
    """Scale and offset of step ``sub`` of eight: six bits each, under two float16."""
    d = tl.load(w16 + at // 2 + row, mask=mask, other=0.0).to(tl.float32)
    d_min = tl.load(w16 + at // 2 + 16 + row, mask=mask, other=0.0).to(tl.float32)
    # Number j of sixteen is 6 bits of word j // 5; the last minimum is the words' top bits.
    low = tl.load(w32 + at // 4 + 16 + row, mask=mask, other=0)
    middle = tl.load(w32 + at // 4 + 32 + row, mask=mask, other=0)
    top = tl.load(w32 + at // 4 + 48 + row, mask=mask, other=0)
    six = tl.where(sub < 5, low, middle) >> (6 * (sub % 5))
    least = tl.where(sub < 2, middle, top) >> (6 * ((sub + 3) % 5))
    last = ((low >> 30) & 3) | (((middle >> 30) & 3) << 2) | (((top >> 30) & 3) << 4)
    least = tl.where(sub == 7, last, least & 63)
    return d * (six & 63).to(tl.float32), -(d_min * least.to(tl.float32))


@triton.jit
def _level(code, codes: tl.constexpr, zero: tl.constexpr):
    if codes == _E2M1:
        exponent = (code >> 1) & 3
        fraction = (code & 1).to(tl.float32) * 0.5
        size = tl.exp2((exponent - 1).to(tl.float32)) * (1.0 + fraction)
        size = tl.where(exponent == 0, fraction, size)
        value = tl.where(code >= 8, -size, size)
    elif codes == _NF4:
        value = _nf4(code).to(tl.bfloat16).to(tl.float32)
    else:
        value = (code - zero).to(tl.float32)
    return value


@triton.jit
def _nf4(code):
    value = tl.where(code == 1, -0.6961928009986877, -1.0)
    value = tl.where(code == 2, -0.5250730514526367, value)
    value = tl.where(code == 3, -0.39491748809814453, value)
    value = tl.where(code == 4, -0.28444138169288635, value)
    value = tl.where(code == 5, -0.18477343022823334, value)
    value = tl.where(code == 6, -0.09105003625154495, value)
    value = tl.where(code == 7, 0.0, value)
    value = tl.where(code == 8, 0.07958029955625534, value)
    value = tl.where(code == 9, 0.16093020141124725, value)
    value = tl.where(code == 10, 0.24611230194568634, value)
    value = tl.where(code == 11, 0.33791524171829224, value)
    value = tl.where(code == 12, 0.44070982933044434, value)
    value = tl.where(code == 13, 0.5626170039176941, value)
    value = tl.where(code == 14, 0.7229568362236023, value)
    return tl.where(code == 15, 1.0, value)
