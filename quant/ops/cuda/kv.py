"""How a card keeps a token's key or value of one head: the formats of ``quant/cuda/kv.cuh``.

int8 is a scale for each token and head. Its rows are kept times a Hadamard matrix, as on the CPU
(``quant/ops/native/kv.py``); unlike there, keys keep the bias of their projection.
"""

from __future__ import annotations

from typing import Literal

__all__ = ["FORMATS", "CardKvFormat", "numbers", "row_nbytes", "turned_block"]

CardKvFormat = Literal["bf16", "int8"]
FORMATS: tuple[CardKvFormat, ...] = ("bf16", "int8")

_MOST_TURNED = 128


def row_nbytes(kv_format: CardKvFormat, size: int) -> int:
    """Bytes of ``size`` numbers with their scale."""
    return 2 * size if kv_format == "bf16" else size + 4


def numbers(kv_format: CardKvFormat, size: int) -> str:
    """The C++ type."""
    return f"{kv_format.capitalize()}Numbers<{size}>"


def turned_block(kv_format: CardKvFormat, size: int) -> int:
    """Numbers that are rotated together: 1 is none."""
    return 1 if kv_format == "bf16" else min(_MOST_TURNED, size & -size)
