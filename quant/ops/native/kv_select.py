"""Moving rows of the native KV cache: what verification keeps of a tree, side by side.

It knows the insides of a block (``quant/csrc/kv.h``) and nothing of caches: keys lie in tiles of 16
tokens, values token by token, scales in planes of 256 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["move_rows"]

_BLOCK, _TILE, _CHUNK = 256, 16, 32

Bytes = npt.NDArray[np.uint8]


def move_rows(
    data: Bytes, groups: int, width: int, kv_format: str, first: int, rows: Sequence[int]
) -> None:
    """Put token ``first + rows[i]`` where token ``first + i`` is, in place.

    ``data`` (blocks, layers, bytes of a block) holds layers of ``groups`` heads of ``width``.
    ``rows`` ascend, so that rows[i] >= i.
    """
    moved = [i for i, row in enumerate(rows) if row != i]
    if not moved or not groups:  # a layer may have no heads of its own
        return
    to = first + np.array(moved, np.intp)
    source = first + np.array([rows[i] for i in moved], np.intp)
    for plane, tiled in _planes(data, groups, width, kv_format):
        at, old = (_place(tokens, tiled) for tokens in (to, source))
        plane[at] = plane[old]  # the right side is a copy


def _place(tokens: npt.NDArray[np.intp], tiled: bool) -> tuple[Any, ...]:
    """An index of a plane's tokens: its block, and in it a token or a tile's lane."""
    block, at = tokens // _BLOCK, tokens % _BLOCK
    everything = slice(None)
    if tiled:
        return block, everything, everything, at // _TILE, ..., at % _TILE
    return block, everything, everything, everything, at


def _planes(
    data: Bytes, groups: int, width: int, kv_format: str
) -> Iterator[tuple[npt.NDArray[Any], bool]]:
    """The arrays of a block: those of keys are (blocks, layers, groups, 16 tiles, ..., 16), True.

    The others are (blocks, layers, groups, numbers, 256, ...), False, with the tokens on axis 4.
    """
    blocks, layers = data.shape[:2]
    if kv_format.startswith("latent-"):  # rows, token by token, then a scale for each
        size = 2 if kv_format == "latent-bf16" else 1
        rows, scales = data[..., : _BLOCK * size * width], data[..., _BLOCK * size * width :]
        yield rows.reshape(blocks, layers, groups, 1, _BLOCK, size * width), False
        if scales.shape[-1]:
            yield scales.view(np.uint32).reshape(blocks, layers, groups, 1, _BLOCK), False
        return
    chunks = -(-width // _CHUNK)
    tiles = _BLOCK // _TILE
    # Bytes of a token's key, value, and what each of them is scaled by.
    if kv_format == "bf16":
        key, value, scale = 2 * width, 2 * width, 0
    elif kv_format == "int8":
        key, value, scale = width, width, 4
    else:
        key, value, scale = 24 * chunks, 16 * chunks, 2 * chunks
    pieces = data.reshape(blocks, layers, groups, _BLOCK * (key + value + 2 * scale))
    keys = pieces[..., : _BLOCK * key]
    if kv_format == "int4":
        coded = keys.reshape(blocks, layers, groups, tiles, chunks, 24 * _TILE)
        low = coded[..., : 16 * _TILE]
        yield low.reshape(blocks, layers, groups, tiles, chunks, 16, _TILE), True
        upper = coded[..., 16 * _TILE :].view(np.uint32)
        yield upper.reshape(blocks, layers, groups, tiles, chunks, 2, _TILE), True
    else:
        number: Any = np.uint16 if kv_format == "bf16" else np.uint8
        yield keys.view(number).reshape(blocks, layers, groups, tiles, width, _TILE), True
    values = pieces[..., _BLOCK * key : _BLOCK * (key + value)]
    yield values.reshape(blocks, layers, groups, 1, _BLOCK, value), False
    if scale:
        wide: Any = np.uint32 if kv_format == "int8" else np.uint16
        rest = pieces[..., _BLOCK * (key + value) :].view(wide)
        yield rest.reshape(blocks, layers, groups, -1, _BLOCK), False
