"""KV caches: their contract, shared counting, saving of blocks, and common prefixes.

``KVCache`` is the contract. ``GrowingCache`` counts tokens held, room allocated, growth in steps,
and trims; implementations choose the arrays of keys and values. A cache that grows in place takes
no more than its length rounded up to a step. One that copies grows by a half at a time and at most
to its capacity, tensor by tensor: at the peak it holds one tensor of one layer twice.

``BlockCache`` is a cache that can be saved to a file, or moved to another memory: its bytes are
taken out and put back in blocks of 256 tokens, which hold all layers of their tokens; a partial
last block is taken whole. Bytes only go back into a cache of the same layout.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Protocol,
    TypeAlias,
    runtime_checkable,
)

import numpy as np
import numpy.typing as npt

from localrt.quant.formats.convert import bf16_bits, bf16_values
from localrt.quant.formats.packed import Bytes, Floats
from localrt.quant.ops.adapters import Mix
from localrt.quant.ops.kv_formats import BLOCK_TOKENS

if TYPE_CHECKING:
    from localrt.quant.ops.states import SavedState

Tokens: TypeAlias = npt.NDArray[np.int64]
"""For a sequence compared again and again: a list would be converted each time."""


def common_prefix(a: Sequence[int] | Tokens, b: Sequence[int] | Tokens) -> int:
    """Number of leading tokens that ``a`` and ``b`` share."""
    size = min(len(a), len(b))
    differ = np.flatnonzero(np.asarray(a[:size]) != np.asarray(b[:size]))
    return int(differ[0]) if len(differ) else size


ReadBlocks: TypeAlias = "Callable[[int, Bytes], int]"
"""Fills room for n blocks, (n, block_bytes), with those from a number on; how many there were."""

FillBlocks: TypeAlias = "Callable[[int, int, ReadBlocks], None]"
"""``BlockCache.fill_blocks``."""

_PIECE = 16 << 20  # bytes of blocks read at once


class KVCache(Protocol):
    """Keys and values of one sequence over all layers: contiguous, growing in steps, trimmable.

    ``mix`` is the adapter set that all its tokens are computed with.
    """

    mix: Mix

    @property
    def length(self) -> int:
        """Tokens held."""

    @property
    def capacity(self) -> int:
        """The most tokens it may ever hold."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated now."""

    def reserve(self, length: int) -> None:
        """Make room for ``length`` tokens in all; keeps what is held."""

    def advance(self, count: int) -> None:
        """Count ``count`` rows that a finished pass has written as held."""

    def trim(self, length: int) -> int:
        """Forget every token from ``length`` on; returns how many are still held.

        Fewer than ``length`` where a state of recurrent layers cannot go back to it.
        """

    def select(self, first: int, rows: Sequence[int]) -> None:
        """Keep token ``first + rows[i]`` as token ``first + i``, and no other from ``first`` on.

        ``rows`` ascend from 0: the accepted path of a tree whose rows begin at ``first``.
        """


@runtime_checkable
class BlockCache(KVCache, Protocol):
    """A cache whose blocks can be saved and restored."""

    @property
    def kv_layout(self) -> str:
        """Names the layout of the bytes: format, heads, widths. Empty: blocks cannot be saved."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""

    def take_blocks(self, first: int, count: int) -> Bytes:
        """Blocks ``first`` to ``first + count``, (count, block_bytes): to be read before the next
        pass. They must lie within what is allocated.
        """

    def fill_blocks(self, first: int, count: int, read: ReadBlocks) -> None:
        """Have ``read`` fill reserved memory with blocks ``first`` to ``first + count``, or fewer;
        ``restore`` makes their tokens count.
        """

    def saved_states(self) -> Sequence[SavedState]:
        """The states of recurrent layers; none without such layers."""

    def restore(self, length: int, states: Sequence[SavedState]) -> int:
        """Hold the first ``length`` tokens, whose blocks have been filled, in an empty cache.

        Returns how many are held: fewer if recurrent layers have no state for that length.
        """


def read_pieces(
    first: int, count: int, block_bytes: int, read: ReadBlocks
) -> Iterator[tuple[int, Bytes]]:
    """Read blocks a few at a time, if not possible in place; yields (number, blocks)."""
    step = max(1, _PIECE // max(1, block_bytes))
    for start in range(first, first + count, step):
        room = np.empty((min(step, first + count - start), block_bytes), np.uint8)
        there = read(start, room)
        if there:
            yield start, room[:there]
        if there < len(room):
            return


def held_blocks(blocks: Bytes, first: int = 0) -> ReadBlocks:
    """A ``ReadBlocks`` of blocks in memory, which are numbered from ``first``."""

    def read(start: int, room: Bytes) -> int:
        room[:] = blocks[start - first : start - first + len(room)]
        return len(room)

    return read


def grown_capacity(length: int) -> int:
    """Tokens allocated to hold ``length``: whole steps, so that growth is rare and waste small."""
    return -(-length // BLOCK_TOKENS) * BLOCK_TOKENS


@dataclass(frozen=True, slots=True, eq=False)
class TokenRows:
    """A layer's ``rows`` (blocks, 256, numbers), one a token; in bf16 as uint16."""

    rows: npt.NDArray[Any]

    def put(self, tokens: npt.NDArray[np.int64], columns: slice, values: Floats) -> None:
        """Set columns of some tokens' rows, (n, columns)."""
        at = tokens // BLOCK_TOKENS, tokens % BLOCK_TOKENS, columns
        self.rows[at] = bf16_bits(values) if self.rows.dtype == np.uint16 else values

    def get(self, tokens: npt.NDArray[np.int64], columns: slice) -> Floats:
        """Columns of some tokens' rows, (n, columns)."""
        found = self.rows[tokens // BLOCK_TOKENS, tokens % BLOCK_TOKENS, columns]
        return bf16_values(found) if found.dtype == np.uint16 else found


class GrowingCache(ABC):
    """The counting half of the ``KVCache`` protocol."""

    grows_in_place: ClassVar[bool] = False

    def __init__(self, capacity: int) -> None:
        self.mix: Mix = ()
        self._capacity = capacity
        self._length = 0
        self.allocated = 0

    @property
    def length(self) -> int:
        return self._length

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes allocated."""

    @abstractmethod
    def _grow(self, size: int) -> None:
        """Allocate room for ``size`` tokens, zeroed, and keep those held."""

    def reserve(self, length: int) -> None:
        """Grow to at least ``length`` tokens, in whole steps, up to the capacity.

        Grows by a half if growth copies.
        """
        if length > self._capacity:
            raise ValueError(f"{length} tokens exceed the cache's capacity of {self._capacity}")
        if length <= self.allocated:
            return
        wanted = length
        if not self.grows_in_place:
            wanted = max(wanted, self.allocated + self.allocated // 2)
        size = min(grown_capacity(wanted), grown_capacity(self._capacity))
        self._grow(size)
        self.allocated = size

    def advance(self, count: int) -> None:
        assert self._length + count <= self.allocated, "rows must be written before they count"
        self._length += count

    def saved_states(self) -> Sequence[SavedState]:
        """None: keys and values are all in blocks."""
        return ()

    def restore(self, length: int, states: Sequence[SavedState]) -> int:
        """Count the tokens of filled blocks as held."""
        assert not self._length, "an empty cache"
        self.advance(length)
        return length

    def trim(self, length: int) -> int:
        """Forget tokens from ``length`` on; their memory is kept."""
        if not 0 <= length <= self._length:
            raise ValueError(f"cannot trim a cache of {self._length} tokens to {length}")
        self._length = length
        return length

    def select(self, first: int, rows: Sequence[int]) -> None:
        """Keep token ``first + rows[i]`` as token ``first + i``, and forget all others behind.

        ``rows`` ascend. A tree's accepted path is then stored as if computed alone.
        """
        if any(b <= a for a, b in pairwise(rows)) or (rows and rows[0] < 0):
            raise ValueError(f"rows must ascend from 0: {list(rows)}")
        if not 0 <= first + (rows[-1] + 1 if rows else 0) <= self._length:
            raise ValueError(f"cannot select row {first}+{rows[-1:]} of {self._length} tokens")
        if rows and rows[-1] >= len(rows):
            self._move(first, rows)
        self.trim(first + len(rows))

    @abstractmethod
    def _move(self, first: int, rows: Sequence[int]) -> None:
        """Copy the keys and values of token ``first + rows[i]`` to token ``first + i``."""
