"""The native KV cache in RAM, in blocks of 256 tokens whose insides ``quant/cpu/csrc/kv.h``
describes.

Formats are bf16; int8, one float32 scale for each token and head; int4, chunks of 32 neighbours of
a head with a scale in bf16: values in 4 bits, keys in 6, with scales 5.5 on average. Quantized keys
and values are kept times a Hadamard matrix, behind the rotary embedding and over the largest power
of two that divides the head's size, at most 128. Keys leave out their projection's bias, which
attention adds exactly. docs/quality.md has what other choices lose.

Memory is mapped for the whole capacity at once and becomes resident as tokens are written: growth
copies nothing, and what is resident is never more than ``nbytes``.

Moving rows of the native KV cache: what verification keeps of a tree, side by side.

It knows the insides of a block (``quant/cpu/csrc/kv.h``) and nothing of caches: keys lie in tiles
of 16 tokens, values token by token, scales in planes of 256 tokens.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from localrt.common.errors import MemoryBudgetError, OptionError
from localrt.quant.ops.attention import AttentionSpec, LatentSpec
from localrt.quant.ops.kv import GrowingCache, ReadBlocks, grown_capacity

_BLOCK, _TILE, _MOVED_AT_ONCE = 256, 16, 32
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
    chunks = -(-width // _MOVED_AT_ONCE)
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


KVFormat = Literal["bf16", "int8", "int4", "latent-bf16", "latent-int8"]
KV_FORMATS: tuple[KVFormat, ...] = ("bf16", "int8", "int4")  # in the order of abi.h
LATENT_FORMATS: dict[KVFormat, KVFormat] = {"bf16": "latent-bf16", "int8": "latent-int8"}
"""Of latent attention, by what they keep a number as: a token's row is key and value at once."""
BLOCK = 256  # tokens
_LAYOUTS: dict[KVFormat, int] = {"int8": 2, "int4": 2}
"""Of a block's insides, 1 where none is named; another number for another meaning of bytes."""
_CHUNK = 32
_KEY_BYTES, _VALUE_BYTES = 24 + 2, 16 + 2  # of a chunk: codes and their scale


def parse_kv_format(name: str | None) -> KVFormat:
    """The format of that name; bf16 for none.

    Raises:
        OptionError: there is no such format.
    """
    for known in KV_FORMATS:
        if name in (known, None):
            return known
    raise OptionError(f"kv_format must be one of {', '.join(KV_FORMATS)}, is {name!r}")


def cache_format(layers: Sequence[AttentionSpec], kv_format: KVFormat) -> KVFormat:
    """The format of the layers' cache where ``kv_format`` is asked for, or has been given before.

    Raises:
        OptionError: latents are not kept in so few bits.
    """
    if not any(isinstance(spec, LatentSpec) for spec in layers):
        return kv_format
    if kv_format in LATENT_FORMATS.values():
        return kv_format
    if kv_format not in LATENT_FORMATS:
        raise OptionError(
            f"kv_format {kv_format} is not for latent attention, whose cache is small as it is: "
            f"use {' or '.join(LATENT_FORMATS)}"
        )
    return LATENT_FORMATS[kv_format]


def block_nbytes(groups: int, width: int, kv_format: KVFormat) -> int:
    """Bytes of one layer's keys and values of 256 tokens: ``groups`` heads of ``width``."""
    if kv_format == "bf16":
        head = 4 * width
    elif kv_format == "int8":
        head = 2 * (width + 4)
    elif kv_format == "latent-bf16":
        head = 2 * width
    elif kv_format == "latent-int8":
        head = width + 4
    else:
        head = -(-width // _CHUNK) * (_KEY_BYTES + _VALUE_BYTES)
    return BLOCK * groups * head


def token_nbytes(shapes: Sequence[tuple[int, int]], kv_format: KVFormat) -> int:
    """Bytes that one token takes in all layers. ``shapes`` gives (kv heads, head size) of each."""
    return sum(block_nbytes(groups, width, kv_format) for groups, width in shapes) // BLOCK


def map_zeros(nbytes: int) -> npt.NDArray[np.uint8]:
    """Zeros that begin on a page and are not resident before they are written.

    Raises:
        MemoryBudgetError: the system refuses so much.
    """
    try:
        if hasattr(mmap, "MAP_PRIVATE"):
            memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            memory = mmap.mmap(-1, max(nbytes, 1))
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryBudgetError(
            f"there is no memory for a KV cache of {nbytes} bytes: use a smaller context"
        ) from error
    return np.frombuffer(memory, np.uint8)


def map_floats(count: int) -> npt.NDArray[np.float32]:
    """The same, of so many float32 numbers."""
    return map_zeros(4 * max(1, count)).view(np.float32)[:count]


class NativeKVCache(GrowingCache):
    """See the ``KVCache`` protocol. ``shapes`` gives (kv heads, head size) per layer.

    A step of 256 tokens holds one block of each layer, so that growth goes on at the end.
    """

    grows_in_place = True

    def __init__(
        self, shapes: Sequence[tuple[int, int]], capacity: int, kv_format: KVFormat = "bf16"
    ) -> None:
        super().__init__(capacity)
        self.kv_format: KVFormat = kv_format
        self._blocks = [block_nbytes(groups, width, kv_format) for groups, width in shapes]
        self._shapes = list(shapes)
        self._step = sum(self._blocks)
        self._memory = map_zeros(grown_capacity(capacity) // BLOCK * self._step)
        start = self._memory.ctypes.data
        self._starts = [start + sum(self._blocks[:layer]) for layer in range(len(shapes))]

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.allocated // BLOCK * self._step

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
        assert (first + count) * BLOCK <= self.allocated, "blocks that there are"
        memory = self._memory[first * self._step : (first + count) * self._step]
        return memory.reshape(count, self._step)

    def fill_blocks(self, first: int, count: int, read: ReadBlocks) -> None:
        """See ``BlockCache``: in place."""
        read(first, self.take_blocks(first, count))

    def layer_ready(self, layer: int) -> tuple[int, int]:
        """Where a layer's first block lies, and the bytes from one block to the next.

        Every token held can be read there, and rows written behind them, until ``layer_done``.
        """
        return self._starts[layer], self._step

    def layer_done(self, layer: int, rows: int) -> None:
        """A pass has written ``rows`` tokens behind those held, and is done with the layer."""

    def _grow(self, size: int) -> None:
        """The memory is mapped already."""

    def _move(self, first: int, rows: Sequence[int]) -> None:
        steps = self.allocated // BLOCK
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
    """Makes caches that are not in RAM throughout: see ``NativeOps.kv_maker``."""

    def cache(
        self, layers: Sequence[AttentionSpec], capacity: int, kv_format: KVFormat
    ) -> NativeKVCache:
        """An empty cache for one sequence."""

    def cache_nbytes(
        self, layers: Sequence[AttentionSpec], length: int, kv_format: KVFormat
    ) -> int:
        """Bytes of RAM of a cache that has grown to ``length`` tokens."""
