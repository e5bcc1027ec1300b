"""Paged KV cache in RAM: blocks of 256 tokens, whose insides ``quant/cpu/csrc/kv.h`` describes.

Quantized keys leave out their projection's bias, which attention adds exactly. Memory is mapped for
the whole capacity at once and becomes resident as tokens are written: growth copies nothing, and
what is resident is never more than ``nbytes``. ``move_rows`` keeps what verification keeps of a
tree, side by side: keys lie in tiles of 16 tokens, values token by token, scales in planes of 256
tokens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from localrt import system
from localrt.common.errors import MemoryBudgetError, OptionError
from localrt.quant.formats.packed import Bytes
from localrt.quant.ops.attention import HOST_SPECS, AttentionSpec
from localrt.quant.ops.kv import GrowingCache, ReadBlocks, TokenRows, grown_capacity
from localrt.quant.ops.kv_formats import (
    BLOCK_TOKENS,
    KV_CHUNK,
    LATENT_FORMATS,
    CacheFormat,
    block_nbytes,
)

_TILE = 16  # tokens


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
    block, at = tokens // BLOCK_TOKENS, tokens % BLOCK_TOKENS
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
        end = BLOCK_TOKENS * size * width
        rows, scales = data[..., :end], data[..., end:]
        yield rows.reshape(blocks, layers, groups, 1, BLOCK_TOKENS, size * width), False
        if scales.shape[-1]:
            yield scales.view(np.uint32).reshape(blocks, layers, groups, 1, BLOCK_TOKENS), False
        return
    chunks = -(-width // KV_CHUNK)
    tiles = BLOCK_TOKENS // _TILE
    # Bytes of a token's key, value, and what each of them is scaled by.
    if kv_format == "bf16":
        key, value, scale = 2 * width, 2 * width, 0
    elif kv_format == "int8":
        key, value, scale = width, width, 4
    else:
        key, value, scale = 24 * chunks, 16 * chunks, 2 * chunks
    pieces = data.reshape(blocks, layers, groups, BLOCK_TOKENS * (key + value + 2 * scale))
    keys = pieces[..., : BLOCK_TOKENS * key]
    if kv_format == "int4":
        coded = keys.reshape(blocks, layers, groups, tiles, chunks, 24 * _TILE)
        low = coded[..., : 16 * _TILE]
        yield low.reshape(blocks, layers, groups, tiles, chunks, 16, _TILE), True
        upper = coded[..., 16 * _TILE :].view(np.uint32)
        yield upper.reshape(blocks, layers, groups, tiles, chunks, 2, _TILE), True
    else:
        number: Any = np.uint16 if kv_format == "bf16" else np.uint8
        yield keys.view(number).reshape(blocks, layers, groups, tiles, width, _TILE), True
    values = pieces[..., BLOCK_TOKENS * key : BLOCK_TOKENS * (key + value)]
    yield values.reshape(blocks, layers, groups, 1, BLOCK_TOKENS, value), False
    if scale:
        wide: Any = np.uint32 if kv_format == "int8" else np.uint16
        rest = pieces[..., BLOCK_TOKENS * (key + value) :].view(wide)
        yield rest.reshape(blocks, layers, groups, -1, BLOCK_TOKENS), False


_LAYOUTS: dict[CacheFormat, int] = {"int8": 2, "int4": 2}
"""Of a block's insides, 1 where none is named; another number for another meaning of bytes."""


def cache_format(layers: Sequence[AttentionSpec], kv_format: CacheFormat) -> CacheFormat:
    """The layers' cache format for a wanted ``kv_format``, or for one that this function returned.

    Raises:
        OptionError: latents are not kept in so few bits.
    """
    if all(spec.value_dim for spec in layers) or kv_format in LATENT_FORMATS.values():
        return kv_format
    if kv_format != "bf16" and any(isinstance(spec, HOST_SPECS) for spec in layers):
        raise OptionError(f"kv_format {kv_format} is not for chosen or compressed tokens: use bf16")
    if kv_format not in LATENT_FORMATS:
        raise OptionError(
            f"kv_format {kv_format} is not for latent attention, whose cache is small as it is: "
            f"use {' or '.join(LATENT_FORMATS)}"
        )
    return LATENT_FORMATS[kv_format]


def token_nbytes(shapes: Sequence[tuple[int, int]], kv_format: CacheFormat) -> int:
    """Bytes that one token takes in all layers. ``shapes`` gives (kv heads, head size) of each."""
    return sum(block_nbytes(groups, width, kv_format) for groups, width in shapes) // BLOCK_TOKENS


def map_zeros(nbytes: int, *, large_pages: bool = False) -> npt.NDArray[np.uint8]:
    """Page-aligned zeros that are not resident before they are written.

    Raises:
        MemoryBudgetError: the system refuses the allocation.
    """
    with _refused(nbytes):
        return np.frombuffer(system.map_zeros(max(nbytes, 1), large_pages=large_pages), np.uint8)


@contextmanager
def _refused(nbytes: int) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryBudgetError(
            f"there is no memory for a KV cache of {nbytes} bytes: use a smaller context"
        ) from error


def map_floats(count: int) -> npt.NDArray[np.float32]:
    """The same, for so many float32 numbers."""
    return map_zeros(4 * max(1, count), large_pages=True).view(np.float32)[:count]


class NativeKVCache(GrowingCache):
    """See the ``KVCache`` protocol. ``shapes`` gives (kv heads, head size) per layer.

    A step of 256 tokens holds one block of each layer, so that growth goes on at the end.
    """

    grows_in_place = True

    def __init__(
        self, shapes: Sequence[tuple[int, int]], capacity: int, kv_format: CacheFormat = "bf16"
    ) -> None:
        super().__init__(capacity)
        self.kv_format: CacheFormat = kv_format
        self._blocks = [block_nbytes(groups, width, kv_format) for groups, width in shapes]
        self._shapes = list(shapes)
        self._step = sum(self._blocks)
        nbytes = max(1, grown_capacity(capacity) // BLOCK_TOKENS * self._step)
        with _refused(nbytes):
            self._memory = np.frombuffer(system.reserve_zeros(nbytes), np.uint8)
        start = self._memory.ctypes.data
        self._starts = [start + sum(self._blocks[:layer]) for layer in range(len(shapes))]

    @property
    def nbytes(self) -> int:
        return self.allocated // BLOCK_TOKENS * self._step

    @property
    def kv_layout(self) -> str:
        shapes = "+".join(
            f"{len(list(alike))}x{groups}x{width}"
            for (groups, width), alike in groupby(self._shapes)
        )
        return f"native {_LAYOUTS.get(self.kv_format, 1)} {self.kv_format} {shapes}"

    @property
    def block_bytes(self) -> int:
        """Bytes of 256 tokens in all layers."""
        return self._step

    def take_blocks(self, first: int, count: int) -> npt.NDArray[np.uint8]:
        """A view, (count, block_bytes)."""
        assert (first + count) * BLOCK_TOKENS <= self.allocated, "blocks that there are"
        memory = self._memory[first * self._step : (first + count) * self._step]
        return memory.reshape(count, self._step)

    def fill_blocks(self, first: int, count: int, read: ReadBlocks) -> None:
        """See ``BlockCache``: in place."""
        read(first, self.take_blocks(first, count))

    def put_rows(self, layer: int, first: int, *both: npt.NDArray[Any]) -> None:
        """Write keys and values of tokens from ``first`` on: (heads, n, numbers) of a GPU's cache
        in the same format, bf16 or int8.
        """
        (groups, width), at = self._shapes[layer], self._starts[layer] - self._starts[0]
        codes, tokens = [part[..., :width] for part in both], first + np.arange(both[0].shape[1])
        rows = [codes[0], codes[1].view(np.uint8)]
        if self.kv_format == "int8":
            scales = [np.ascontiguousarray(part[..., width:]).view(np.uint32) for part in both]
            rows.append(np.stack(scales, -1))
        data = self._memory[: self.nbytes].reshape(-1, 1, self._step)
        planes = _planes(data[..., at : at + self._blocks[layer]], groups, width, self.kv_format)
        for (plane, tiled), new in zip(planes, rows, strict=True):
            place = _place(tokens, tiled)
            plane[place] = np.moveaxis(new, 1, 0).reshape(plane[place].shape)

    def layer_ready(self, layer: int) -> tuple[int, int]:
        """The address of a layer's first block, and the bytes from one block to the next.

        Until ``layer_done``, held tokens can be read there and rows written after them.
        """
        return self._starts[layer], self._step

    def layer_done(self, layer: int, rows: int) -> None:
        """Note that a pass has written ``rows`` new tokens, and is done with the layer."""

    def token_rows(self, layer: int, width: int) -> TokenRows:
        """A layer's rows of ``width``, whose keys are values, until ``layer_done``."""
        start, stride = self.layer_ready(layer)
        first = np.ctypeslib.as_array((ctypes.c_uint16 * width).from_address(start))
        shape = self.allocated // BLOCK_TOKENS, BLOCK_TOKENS, width
        return TokenRows(np.lib.stride_tricks.as_strided(first, shape, (stride, 2 * width, 2)))

    def _grow(self, size: int) -> None:
        nbytes = size // BLOCK_TOKENS * self._step
        with _refused(nbytes):
            system.commit(self._memory.ctypes.data, nbytes)

    def _move(self, first: int, rows: Sequence[int]) -> None:
        steps = self.allocated // BLOCK_TOKENS
        memory = self._memory[: steps * self._step].reshape(steps, self._step)
        at = 0
        for (groups, width), alike in groupby(self._shapes):
            layers = len(list(alike))
            size = block_nbytes(groups, width, self.kv_format)
            # A slice keeps its stride, so that this is a view.
            data = memory[:, at : at + layers * size].reshape(steps, layers, size)
            move_rows(data, groups, width, self.kv_format, first, rows)
            at += layers * size


class KVMaker(Protocol):
    """Makes caches of ``specs`` that are not in RAM throughout: see ``NativeOps.kv_maker``."""

    specs: list[AttentionSpec]

    def cache(
        self, layers: Sequence[AttentionSpec], capacity: int, kv_format: CacheFormat
    ) -> NativeKVCache:
        """An empty cache for one sequence."""

    def cache_nbytes(
        self, layers: Sequence[AttentionSpec], length: int, kv_format: CacheFormat
    ) -> int:
        """Bytes of RAM of a cache that has grown to ``length`` tokens."""
