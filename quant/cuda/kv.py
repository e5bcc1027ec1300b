"""Paged KV cache on a GPU: a sequence's blocks of 256 tokens; a block has all layers.

A cache grows by whole blocks, and tokens never move. The blocks' addresses are an input of each
pass, so a recorded pass serves all caches of a model. A block has each layer's keys, (heads, 256,
key), then its values, one layer after another. ``SpanTable`` has what kernels read of the sequences
of a pass, so that one launch serves all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ctypes import Structure, sizeof
from dataclasses import dataclass
from itertools import accumulate, chain, groupby

import numpy as np
import numpy.typing as npt

from localrt.quant.cuda.device import Device
from localrt.quant.cuda.launch import arguments, declarations, launch, pointers
from localrt.quant.cuda.products import MOST_ROWS
from localrt.quant.cuda.programs import Program
from localrt.quant.cuda.tensor import UINT8, Dtype, Tensor, upload, zeros
from localrt.quant.formats.packed import Bytes
from localrt.quant.ops.hybrid_cache import kv_of
from localrt.quant.ops.kv import GrowingCache, ReadBlocks, grown_capacity, read_pieces
from localrt.quant.ops.kv_formats import BLOCK_TOKENS
from localrt.quant.ops.protocol import Span

_LEAST_BLOCKS = 16  # recorded passes have room for 4,096 tokens or more
_THREADS = 256

_MoveTokens = arguments("move_tokens.cu", "MoveTokens")


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """A layer's place in each block: byte offsets of its keys and values, for ``heads`` heads. A
    key has ``key`` elements of the cache's type, a value ``value``.
    """

    keys_at: int
    values_at: int
    heads: int
    key: int
    value: int


class BlockedCache(GrowingCache):
    """See ``KVCache``. ``shapes`` gives (kv heads, key size, value size) per layer, in elements of
    ``dtype``. ``addresses`` are those of the blocks, on ``device``.
    """

    grows_in_place = True

    def __init__(
        self, shapes: Sequence[tuple[int, int, int]], capacity: int, dtype: Dtype, device: Device
    ) -> None:
        super().__init__(capacity)
        self._dtype, self._device = dtype, device
        self._shapes = list(shapes)
        # Heads and bytes of a row: a layer's keys, its values, the next layer's keys.
        parts = [(heads, n * dtype.itemsize) for heads, *sizes in shapes for n in sizes]
        starts = list(accumulate((BLOCK_TOKENS * heads * n for heads, n in parts), initial=0))
        self.layers = [
            LayerPlace(starts[2 * n], starts[2 * n + 1], *shape) for n, shape in enumerate(shapes)
        ]
        self._step = starts[-1]
        self._alike: list[tuple[int, int, int]] = []  # runs of equal parts: first row, heads, bytes
        for size, same in groupby(zip(starts, parts, strict=False), lambda part: part[1][1]):
            found = list(same)
            if (count := sum(heads for _, (heads, _) in found)) and size:
                self._alike.append((found[0][0], count, size))
        self._blocks: list[Tensor] = []
        self.addresses: npt.NDArray[np.int64] = np.zeros(0, np.int64)

    @property
    def nbytes(self) -> int:
        return len(self._blocks) * self._step

    @property
    def kv_layout(self) -> str:
        shapes = "+".join(
            f"{len(list(same))}x{heads}x{key}x{value}"
            for (heads, key, value), same in groupby(self._shapes)
        )
        return f"blocks 1 {self._dtype} {shapes}"

    @property
    def block_bytes(self) -> int:
        """Bytes of 256 tokens in all layers."""
        return self._step

    @property
    def room(self) -> int:
        """The number of blocks for which a pass is recorded: rounded up, so that it rarely changes
        as the cache grows.
        """
        doubled = 1 << (len(self._blocks) - 1).bit_length()
        return min(max(doubled, _LEAST_BLOCKS), grown_capacity(self._capacity) // BLOCK_TOKENS)

    def parts(self, layer: int, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """A layer's keys and values in blocks from ``first`` on, (heads, 256, size), in place."""
        place = self.layers[layer]
        for block in self._blocks[first:]:
            found = (
                block[at : at + place.heads * BLOCK_TOKENS * size * self._dtype.itemsize]
                .typed(self._dtype)
                .view(place.heads, BLOCK_TOKENS, size)
                for at, size in ((place.keys_at, place.key), (place.values_at, place.value))
            )
            keys, values = found
            yield keys, values

    def take_blocks(self, first: int, count: int) -> Bytes:
        """A copy in RAM, (count, block_bytes)."""
        taken = np.empty((count, self._step), np.uint8)
        for room, block in zip(taken, self._blocks[first : first + count], strict=True):
            block.device.copy_out(room, block.address)
        self._device.synchronize()
        return taken

    def fill_blocks(self, first: int, count: int, read: ReadBlocks) -> None:
        for start, blocks in read_pieces(first, count, self._step, read):
            for number, data in enumerate(blocks, start):
                self._blocks[number].put(data)

    def _grow(self, size: int) -> None:
        while len(self._blocks) < size // BLOCK_TOKENS:
            # Zeros, since the unused end of the last block is saved too.
            block = zeros(
                self._step, dtype=UINT8, device=self._device, pool=self._device.persistent
            )
            self._blocks.append(block)
            self.addresses = np.append(self.addresses, block.address)

    def _move(self, first: int, rows: Sequence[int]) -> None:
        """Move tokens one after another: indices ascend, so none is overwritten before it has
        moved.
        """
        if not self._alike:
            return
        moves = list[int]()
        for target, source in enumerate((first + row for row in rows), first):
            if source != target:
                old, new = divmod(source, BLOCK_TOKENS), divmod(target, BLOCK_TOKENS)
                moves += [self.addresses[old[0]], old[1], self.addresses[new[0]], new[1]]
        numbers = upload(np.array([*chain(*self._alike), *moves], np.int64), self._device)
        parts, there = pointers(numbers, numbers[3 * len(self._alike) :])
        args = _MoveTokens(parts, there, len(moves) // 4)
        words = max(heads * size // 4 for _, heads, size in self._alike)
        grid = (-(-words // _THREADS), len(self._alike), 1)
        launch(self._device, Program.of("move_tokens"), grid, _THREADS, args)


@declarations("kv.cuh").struct("Span")
class _Record(Structure):
    """A sequence of a pass."""


_RECORD = sizeof(_Record)


@dataclass(frozen=True, slots=True)
class SpanTable:
    """The sequences of a pass on the device, for kernels.

    ``numbers``, int64, begin with ``count`` records. ``longest`` bounds each cache's tokens with
    its new rows. ``columns`` are those of trees; 0 if none may have one.
    """

    numbers: Tensor
    count: int
    longest: int
    columns: int
    parts: tuple[SpanPart, ...]


@dataclass(frozen=True, slots=True)
class SpanPart:
    """Consecutive sequences whose attention one launch computes: their ``count`` ``records``, and
    their rows. ``long``: each has more than ``MOST_ROWS``, and no tree.
    """

    records: Tensor
    count: int
    first: int
    rows: int
    long: bool


class SpanNumbers:
    """A ``SpanTable`` in RAM, for ``count`` sequences or fewer with ``rows`` rows in all, ``room``
    blocks each, and trees of ``columns`` columns. ``ahead``: whether rows may see later ones.

    ``numbers`` is one array, (n,) int64, which may be copied to any address.
    """

    def __init__(
        self, count: int, rows: int, room: int, columns: int = 0, *, ahead: bool = False
    ) -> None:
        self.count, self.rows, self._columns = count, rows, -(-columns // 4) * 4
        words = count * _RECORD // 8, count * room, rows * self._columns // 4
        self.numbers = np.zeros(sum(words) + ahead * -(-rows // 2), np.int64)
        records, blocks, trees, later = np.split(self.numbers, np.cumsum(words))
        self._records = (_Record * count).from_buffer(records.data)
        self._blocks = blocks.reshape(count, room)
        self._trees = trees.view(np.int16).reshape(-1, max(1, self._columns))
        self._ahead = later.view(np.int32)

    def fill(self, spans: Sequence[Span]) -> None:
        """Describe the sequences of a pass, whose caches have room for it. Rows that are left
        repeat the last one.
        """
        first = 0
        for at, span in enumerate(spans):
            more, own = (span.mask, span.ahead, span.windows_only), kv_of(span, BlockedCache)
            self.put(at, own.addresses, own.length, first, span.rows, *more)
            first += span.rows
        last = self._records[len(spans) - 1]
        for place in range(len(spans), self.count):
            record = self._records[place]
            record.first, record.rows, record.fresh = first, self.rows - first, 1
            first = self.rows
            # As if the last row were the only new one.
            apart, skipped = _RECORD * (place - len(spans) + 1), last.rows - 1
            record.blocks, record.held = last.blocks - apart, last.held + skipped
            record.columns = last.columns
            record.tree = last.tree and last.tree - apart + 2 * skipped * last.columns

    def put(
        self,
        at: int,
        addresses: npt.NDArray[np.int64],
        held: int,
        first: int,
        rows: int,
        mask: npt.NDArray[np.bool_] | None = None,
        ahead: npt.NDArray[np.int32] | None = None,
        windows_only: bool = False,
    ) -> None:
        """Describe a sequence, which has ``held`` tokens in the blocks at ``addresses``, and its
        ``rows`` from ``first`` on. See ``Span`` for the others.
        """
        record, here = self._records[at], self.numbers.ctypes.data + _RECORD * at
        self._blocks[at, : len(addresses)] = addresses
        record.blocks = self._blocks[at:].ctypes.data - here
        record.held, record.first, record.rows, record.fresh = held, first, rows, rows
        record.tree, record.columns = 0, -1 if windows_only else 0
        own = slice(first, first + rows)
        if mask is not None:
            _fill_tree(self._trees[own], mask)
            record.tree, record.columns = self._trees[own].ctypes.data - here, self._columns
        elif ahead is not None:
            self._ahead[own] = ahead
            record.tree = self._ahead[own].ctypes.data - here

    def table(self, numbers: Tensor, longest: int) -> SpanTable:
        """The table, once it is filled, with a copy of its ``numbers`` on the device."""
        parts, at = list[SpanPart](), 0

        def is_long(record: _Record) -> bool:
            return bool(record.rows > MOST_ROWS and record.columns <= 0)

        for long, same in groupby(self._records, is_long):
            records = list(same)
            rows, own = sum(record.rows for record in records), numbers[_RECORD // 8 * at :]
            parts.append(SpanPart(own, len(records), records[0].first, rows, long))
            at += len(records)
        return SpanTable(numbers, self.count, longest, self._columns, tuple(parts))


def widest_mask(spans: Sequence[Span]) -> int:
    """The columns of the widest mask; 0 if there is none."""
    return max(0 if span.mask is None else span.mask.shape[1] for span in spans)


def most_tiles(rows: int, unit: int, count: int) -> int:
    """The most blocks of a launch that computes ``unit`` of ``rows`` query rows in each, where they
    are those of ``count`` sequences.
    """
    return rows // unit + count - (count == 1 and rows % unit == 0)


def one_span(
    addresses: npt.NDArray[np.int64],
    rows: int,
    device: Device,
    *,
    held: int = 0,
    mask: npt.NDArray[np.bool_] | None = None,
    ahead: npt.NDArray[np.int32] | None = None,
    longest: int | None = None,
) -> SpanTable:
    """The table of ``rows`` new rows of one sequence; see ``SpanNumbers.put``. ``longest`` is
    ``held`` + ``rows`` or more.
    """
    columns = 0 if mask is None else mask.shape[1]
    numbers = SpanNumbers(1, rows, len(addresses), columns, ahead=ahead is not None)
    numbers.put(0, addresses, held, 0, rows, mask, ahead)
    return numbers.table(upload(numbers.numbers, device), longest or held + rows)


def _fill_tree(tree: npt.NDArray[np.int16], mask: npt.NDArray[np.bool_]) -> None:
    """Write ``mask`` (rows, columns) over the last tokens as the kernels read it: the indices of
    the tokens that each row sees, in order, then -1.
    """
    seen = np.ones(tree.shape, np.bool_)
    seen[:, tree.shape[1] - mask.shape[1] :] = mask
    tree[:] = -1
    for path, row in zip(tree, seen, strict=True):
        found = np.flatnonzero(row)
        path[: len(found)] = found
