"""The formats of the KV cache (``kv_format``): their names, and the bytes that a token takes.

``KV_FORMATS`` are bf16; int8 with a float32 scale for each token and head; int4 in chunks of 32
neighbours of a head with a scale in bf16, values in 4 bits and keys in 6. Quantized keys and values
are kept times a Hadamard matrix, behind the rotary embedding and over the largest power of two that
divides the head's size, at most 128.

This module imports nothing heavy: commands list the names.
"""

from __future__ import annotations

from typing import Literal, get_args

from localrt.common.errors import OptionError
from localrt.common.option_names import option

KvFormat = Literal["bf16", "int8", "int4"]
KV_FORMATS: tuple[KvFormat, ...] = get_args(KvFormat)
CacheFormat = Literal["bf16", "int8", "int4", "latent-bf16", "latent-int8"]
LATENT_FORMATS: dict[CacheFormat, CacheFormat] = {"bf16": "latent-bf16", "int8": "latent-int8"}
"""Of latent attention, by what they keep a number as: a token's row is key and value at once."""

KV_CHUNK = 32
"""Numbers of a head that share a scale in int4."""

BLOCK_TOKENS = 256
"""Tokens of a block, and of a step of growth."""

_KEY_BYTES, _VALUE_BYTES = 24 + 2, 16 + 2  # of a chunk in int4: codes and their scale


def parse_kv_format(name: str | None) -> KvFormat:
    """The format called ``name``; bf16 for None.

    Raises:
        OptionError: there is no such format.
    """
    for known in KV_FORMATS:
        if name in (known, None):
            return known
    raise OptionError(f"{option('kv_format')} must be one of {', '.join(KV_FORMATS)}, is {name!r}")


def head_nbytes(kv_format: CacheFormat, size: int) -> tuple[int, int]:
    """Bytes of a token's key and of its value of ``size`` numbers, with their scales."""
    if kv_format == "int4":
        chunks = -(-size // KV_CHUNK)
        return _KEY_BYTES * chunks, _VALUE_BYTES * chunks
    number = 2 * size if kv_format.endswith("bf16") else size + 4
    return number, 0 if kv_format in LATENT_FORMATS.values() else number


def block_nbytes(groups: int, size: int, kv_format: CacheFormat) -> int:
    """Bytes of one layer's keys and values of a block: ``groups`` heads of ``size``."""
    return BLOCK_TOKENS * groups * sum(head_nbytes(kv_format, size))
