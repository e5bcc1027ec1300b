"""How a card keeps a token's key or value of one head: the formats of ``quant/cuda/src/kv.cuh``.

int8 has a scale for each token and head; int4 one for 32 numbers, keys in 6 bits and values in 4.
Rows of both are kept times a Hadamard matrix, as on the CPU
(``quant/cpu/kv.py``); unlike there, keys keep the bias of their projection.
"""

from __future__ import annotations

from typing import Literal

CardKvFormat = Literal["bf16", "int8", "int4"]
FORMATS: tuple[CardKvFormat, ...] = ("bf16", "int8", "int4")

_MOST_TURNED = 128


def row_nbytes(kv_format: CardKvFormat, size: int) -> tuple[int, int]:
    """Bytes of a key and of a value of ``size`` numbers with their scales."""
    if kv_format == "int4":
        chunks = -(-size // 32)
        return -(-26 * chunks // 4) * 4, -(-18 * chunks // 4) * 4
    row = 2 * size if kv_format == "bf16" else size + 4
    return row, row


def numbers(kv_format: CardKvFormat, size: int) -> tuple[str, str]:
    """The C++ types of keys and of values."""
    if kv_format == "int4":
        return f"SmallNumbers<{size}, true>", f"SmallNumbers<{size}, false>"
    name = f"{kv_format.capitalize()}Numbers<{size}>"
    return name, name


def turned_block(kv_format: CardKvFormat, size: int) -> int:
    """Numbers that are rotated together: 1 is none."""
    return 1 if kv_format == "bf16" else min(_MOST_TURNED, size & -size)
