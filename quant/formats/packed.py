"""Stored weights: a format, a logical shape, and packed bytes in numpy.

Bytes are laid out in blocks along a row. A codec encodes a format's groups: codes, scales and their
bytes, one group at a time. Groups are rows of an array, (n, block); their scales are (n, k) float32
values that the format can store exactly. Finding the best scales (``quant/methods``), packing whole
tensors (``convert.py``), reading bytes and multiplying are other modules' work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt

Exactness = Literal["exact", "approximate"]
Ranges = tuple[tuple[int, int], ...]
HALF: Ranges = ((0, 2),)
"""The head of a block that begins with a scale in half precision."""
HALVES: Ranges = ((0, 2), (2, 4))
"""The head of a block that begins with a scale and a minimum in half precision."""


@dataclass(frozen=True, slots=True)
class Format:
    """How a weight is packed: every ``block`` weights along a row take ``block_bytes`` bytes.

    A code has ``bits``. ``head`` are the byte ranges of a block's scales, which a tile stores
    first; empty if there is no tiled layout, and for codebook types, which ``codebook.py`` tiles.
    For GGUF's formats, ``ggml_type`` is the number in files, and ``zero`` the code of zero if
    levels are even and there is no codec.
    """

    name: str
    block: int
    block_bytes: int
    bits: int = field(default=4, compare=False, repr=False)
    head: Ranges = field(default=(), compare=False, repr=False)
    zero: int | None = field(default=None, compare=False, repr=False)
    ggml_type: int | None = field(default=None, compare=False, repr=False)

    @property
    def bits_per_weight(self) -> float:
        """Storage per weight in bits, scales included."""
        return 8.0 * self.block_bytes / self.block

    def row_bytes(self, columns: int) -> int:
        """Bytes of one row of ``columns`` weights.

        Raises:
            ValueError: ``columns`` is not a whole number of blocks.
        """
        if columns % self.block:
            raise ValueError(f"{self.name}: {columns} columns are not a multiple of {self.block}")
        return columns // self.block * self.block_bytes


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A weight, or consecutive rows of one, as packed bytes.

    ``shape`` is logical and row-major: ``(rows, columns)`` for a linear layer (out, in), ``(n,)``
    for a vector. ``data`` is ``uint8`` of shape ``(rows, row_bytes)``, a row being one step along
    the first axis; a vector has one row. ``scale`` multiplies every value (NVFP4's second level).
    """

    name: str
    format: Format
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]
    scale: float = 1.0

    @property
    def nbytes(self) -> int:
        """Packed bytes."""
        return self.data.nbytes

    def take_rows(self, index: npt.NDArray[np.intp]) -> PackedTensor:
        """The rows ``index``, in that order; blocks are within rows, so no value changes."""
        return replace(self, shape=(len(index), *self.shape[1:]), data=self.data[index])


Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


class GroupCodec(Protocol):
    """Converts one format's groups between bytes and values. A block of the format is one group."""

    @property
    def format(self) -> Format:
        """The format of its bytes."""

    def decode(self, codes: Bytes, scales: Floats) -> Floats:
        """Values (n, m) of codes (n, m)."""

    def join(self, codes: Bytes, scales: Floats) -> Bytes:
        """Blocks (n, block_bytes) of codes (n, block)."""

    def split(self, blocks: Bytes) -> tuple[Bytes, Floats]:
        """Codes and scales of blocks: the inverse of ``join``."""


class Codec(GroupCodec, Protocol):
    """The arithmetic of a format that localrt packs itself."""

    @property
    def group(self) -> int:
        """Columns that share scales: the format's block, or a part of it."""

    @property
    def shrinks(self) -> tuple[float, ...]:
        """Values of ``shrink`` that a search for better scales tries, in falling order."""

    def tensor_scale(self, largest: float) -> float:
        """The factor of a tensor whose largest magnitude is ``largest``; 1 for most formats."""

    def fit(self, groups: Floats, shrink: float = 1.0) -> Floats:
        """Scales (n, k) that cover ``shrink`` of each group's range; infinite where too large."""

    def encode(self, values: Floats, scales: Floats) -> Bytes:
        """Nearest codes of values (n, m) under scales (n, k); m need not be a whole group."""


class BlockCodec:
    """Base class of most codecs: a block is one group, and the tensor has no factor."""

    __slots__ = ()
    format: Format

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.format.block

    def tensor_scale(self, largest: float) -> float:
        """1: these formats have no factor per tensor."""
        return 1.0


def unpack_blocks_of(codec: GroupCodec) -> Callable[[Bytes, Floats], None]:
    """``codec`` as a function from blocks (n, block_bytes) to values written to (n, block)."""

    def unpack_blocks(blocks: Bytes, out: Floats) -> None:
        out[:] = codec.decode(*codec.split(blocks))

    return unpack_blocks


def join_nibbles(codes: Bytes) -> Bytes:
    """Codes' low four bits (..., m) as bytes (..., m / 2): code j is byte j's low nibble, code
    j + m / 2 its high one.
    """
    half = codes.shape[-1] // 2
    low: Bytes = codes[..., :half] & np.uint8(15)
    return low | (codes[..., half:] << np.uint8(4))


def split_nibbles(packed: Bytes) -> Bytes:
    """The inverse of ``join_nibbles``."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def half_bytes(values: Floats) -> Bytes:
    """Half-precision columns (n, k) as bytes (n, 2k), little-endian."""
    return np.ascontiguousarray(values, dtype="<f2").view(np.uint8)


def half_values(packed: Bytes) -> Floats:
    """The inverse of ``half_bytes``."""
    return np.ascontiguousarray(packed).view("<f2").astype(np.float32)


def to_half(values: Floats) -> Floats:
    """``values`` rounded to half precision."""
    with np.errstate(over="ignore"):
        return values.astype(np.float16).astype(np.float32)


def over(values: Floats, scales: Floats) -> Floats:
    """``values / scales``, and zero where the scale is zero."""
    return np.divide(values, scales, out=np.zeros_like(values), where=scales != 0)


def nearest(levels: Floats) -> Callable[[Floats], Bytes]:
    """A function from values to the index of the nearest of rising ``levels``; ties go down."""
    middles = (levels[1:] + levels[:-1]) / 2

    def nearest_level(values: Floats) -> Bytes:
        if len(middles) > 15:
            return np.searchsorted(middles, values).astype(np.uint8)
        # For few levels, counting is ten times as fast as searching.
        index = np.zeros(values.shape, np.uint8)
        for middle in middles:
            index += values > middle
        return index

    return nearest_level


class LevelCodec(BlockCodec):
    """Sixteen uneven levels times a scale (n, 1) in half precision: the scale, then nibbles."""

    __slots__ = ()
    levels: ClassVar[Floats]  # rising
    nearest_level: ClassVar[staticmethod[[Floats], Bytes]]

    def encode(self, values: Floats, scales: Floats) -> Bytes:
        return self.nearest_level(over(values, scales))

    def decode(self, codes: Bytes, scales: Floats) -> Floats:
        return self.levels[codes] * scales

    def join(self, codes: Bytes, scales: Floats) -> Bytes:
        return np.concatenate([half_bytes(scales), join_nibbles(codes)], axis=1)

    def split(self, blocks: Bytes) -> tuple[Bytes, Floats]:
        return split_nibbles(blocks[:, 2:]), half_values(blocks[:, :2])
