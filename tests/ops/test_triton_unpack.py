"""The inline PTX, which Triton's interpreter skips, run by a small emulator on every byte."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from localrt.quant.formats.fp4 import E2M1
from localrt.quant.formats.nf4 import NF4_LEVELS
from localrt.quant.ops.triton import unpack as triton_unpack
from tests.ops.triton_target import DEVICE

assert DEVICE  # Triton is imported as the other tests want it

MASK = 0xFFFFFFFF


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Round to nearest even: bits, uint16."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def prmt(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    source = [(x >> 8 * i) & 255 for x in (a, b) for i in range(4)]
    out = np.zeros_like(a)
    for place in range(4):
        pick = (selector >> 4 * place) & 15
        byte = np.choose(pick & 7, source)
        sign = np.where(byte & 128, 255, 0)
        out |= np.where(pick & 8, sign, byte) << 8 * place
    return out


def lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    out = np.zeros_like(a)
    for index in range(8):
        terms = [x if index >> bit & 1 else ~x & MASK for x, bit in ((a, 2), (b, 1), (c, 0))]
        out |= np.where((table >> index) & 1, terms[0] & terms[1] & terms[2], 0)
    return out


def fma_bf16x2(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    out = np.zeros_like(a)
    for shift in (0, 16):
        x, y, z = (from_bf16((v >> shift & 0xFFFF).astype(np.uint16)) for v in (a, b, c))
        exact = x.astype(np.float64) * y + z  # fits a float64, and then a float32
        out |= to_bf16(exact).astype(np.int64) << shift
    return out


OPS: dict[str, Callable[..., np.ndarray]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "shl.b32": lambda a, b: (a << b) & MASK,
    "shr.u32": lambda a, b: a >> b,
    "prmt.b32": prmt,
    "lop3.b32": lop3,
    "fma.rn.bf16x2": fma_bf16x2,
}


def run(asm: str, word: np.ndarray, outputs: int) -> list[np.ndarray]:
    registers = {f"${outputs}": word.astype(np.int64)}
    for statement in asm.strip("{} \n").split(";"):
        parts = re.split(r"[\s,]+", statement.strip())
        if not parts[0] or parts[0] == ".reg":
            continue
        operands = [
            registers[p] if p in registers else np.full(len(word), int(p, 0), np.int64)
            for p in parts[2:]
        ]
        registers[parts[1]] = OPS[parts[0]](*operands)
    return [registers[f"${i}"] for i in range(outputs)]


def halves(words: list[np.ndarray]) -> np.ndarray:
    """Pairs of bf16 in words, low first: (n, 2 * words)."""
    columns = [from_bf16((w >> s & 0xFFFF).astype(np.uint16)) for w in words for s in (0, 16)]
    return np.stack(columns, 1)


# Every byte in every place, and random words.
BYTES = np.concatenate(
    [
        np.stack([np.roll(np.arange(256), 37 * i) for i in range(4)], 1),
        np.random.default_rng(0).integers(0, 256, (1000, 4)),
    ]
)
WORDS = (BYTES << np.arange(0, 32, 8)).sum(1)


@pytest.mark.parametrize(
    ("asm", "levels"),
    [
        (triton_unpack._NIBBLES_0, np.arange(16)),
        (triton_unpack._NIBBLES_8, np.arange(16) - 8),
        (triton_unpack._E2M1_ASM, E2M1),
        (triton_unpack._NF4_ASM, from_bf16(to_bf16(NF4_LEVELS))),
    ],
    ids=["from 0", "from -8", "e2m1", "nf4"],
)
def test_nibbles(asm: object, levels: np.ndarray) -> None:
    found = run(str(getattr(asm, "value", asm)), WORDS, 4)
    assert np.array_equal(halves(found[:2]), levels[BYTES & 15])
    assert np.array_equal(halves(found[2:]), levels[BYTES >> 4])


@pytest.mark.parametrize("zero", [0, 16, 32])
def test_codes_of_up_to_seven_bits(zero: int) -> None:
    asm = getattr(triton_unpack, f"_WORDS_{zero}")
    codes = BYTES & 127
    words = (codes << np.arange(0, 32, 8)).sum(1)
    assert np.array_equal(halves(run(str(asm.value), words, 2)), codes - zero)


def test_bytes() -> None:
    asm = triton_unpack._SIGNED
    assert np.array_equal(halves(run(str(asm.value), WORDS, 2)), BYTES - 128)
