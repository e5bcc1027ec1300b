"""Byte-pair encoding: neighbours are joined, the best pair first, until none can be.

The rule is that of the ``tokenizers`` package and of SentencePiece: of equally good pairs the
leftmost is joined. ``MergeTable`` ranks pairs of ids by a list of merges, in integer arrays of 19
bytes for each merge. Long words are joined a block at a time. Does not know how text becomes the
first symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from typing import TypeVar

import numpy as np

from localrt.common.errors import TokenizerError
from localrt.models.checkpoints.packed_strings import PackedStrings
from localrt.models.tokenizers.base import Watch, ignore_count
from localrt.models.tokenizers.vocabulary import (
    PieceTable,
    bucket_count,
    bucket_order,
    chunks,
)

_BLOCK = 2048  # symbols; joining puts some 400 bytes aside for each
_OPEN = 4  # of what a block became: its end, which the symbols behind it may change
_NONE = 1 << 32  # a rank behind all others
_SHORT = 64  # ids; up to here a scan of the whole word beats a queue
_HALF = 24  # bits of an id in a pair's key; no GGUF array has more strings


Symbol = TypeVar("Symbol", int, str)
Join = Callable[[Symbol, Symbol], tuple[float, Symbol] | None]


def join_neighbours(
    symbols: Sequence[Symbol], join: Join[Symbol], watch: Watch = ignore_count
) -> list[Symbol]:
    """``symbols`` with all neighbours joined that can be, in almost linear time.

    ``join`` gives the rank of two neighbours, the lowest first, and what they become. ``watch``
    hears how many there are so far.

    A boundary between two joined symbols that is one when their own symbols alone are joined is
    one in the whole, too: until a pair across some boundary is the best, each side is joined as it
    would be alone. So blocks are joined alone, and again as one where their boundary does not hold.
    """
    found: list[Symbol] = []
    blocks: list[tuple[int, int, int, int]] = []  # begin, size, found before, the last one's begin
    begin, size, last = 0, _BLOCK, 0
    while begin < len(symbols):
        parts = _joined(symbols[begin : begin + size], join)
        stop = begin + (parts[1][0] if len(parts) > 1 else size)  # of the first
        across = _joined(symbols[last:stop], join) if found else ()
        if found and all(last + start != begin for start, _ in across):
            begin, before, count, last = blocks.pop()
            size += 2 * before  # so that it grows until the boundary holds
            del found[count:]
            continue
        blocks.append((begin, size, len(found), last))
        ends = begin + size >= len(symbols)
        kept = len(parts) if ends else max(1, len(parts) - _OPEN)
        found += [symbol for _, symbol in parts[:kept]]
        last = begin + parts[kept - 1][0]
        begin += parts[kept][0] if kept < len(parts) else size
        size = _BLOCK
        watch(len(found))
    return found


def _joined(symbols: Sequence[Symbol], join: Join[Symbol]) -> list[tuple[int, Symbol]]:
    """The rule for one block: where each joined symbol begins, and the symbol."""
    joined = list(symbols)
    count = len(joined)
    before, after = list(range(-1, count - 1)), list(range(1, count + 1))

    def offer(at: int) -> tuple[float, int, Symbol] | None:
        """What a symbol and the next one become."""
        found = join(joined[at], joined[after[at]]) if after[at] < count else None
        return None if found is None else (found[0], at, found[1])

    offers = [offer(at) for at in range(count)]
    queue = [found for found in offers if found is not None]
    heapify(queue)
    while queue:
        best = heappop(queue)
        _, at, symbol = best
        if offers[at] is not best:
            continue  # one of the two has been joined since
        joined[at], offers[after[at]] = symbol, None
        after[at] = after[after[at]]
        if after[at] < count:
            before[after[at]] = at
        for left in (before[at], at):
            if left >= 0:
                offers[left] = new = offer(left)
                if new is not None:
                    heappush(queue, new)
    at, result = 0, list[tuple[int, Symbol]]()
    while at < count:
        result.append((at, joined[at]))
        at = after[at]
    return result


class MergeTable:
    """Joins neighbouring ids, as ``merges`` says: each is spelled ``"left right"``.

    Raises:
        TokenizerError: a merge lacks a side, or ``words`` lacks a side or what it joins to.
    """

    def __init__(self, words: PieceTable, merges: PackedStrings) -> None:
        count = len(merges)
        keys, joined = np.empty(count, np.uint64), np.empty(count, np.uint32)
        data = np.frombuffer(merges.data, np.uint8)
        for start, stop in chunks(count):
            offsets = merges.offsets[start : stop + 1].astype(np.int64)
            text = data[offsets[0] : offsets[-1]]
            begins, ends = offsets[:-1] - offsets[0], offsets[1:] - offsets[0]
            spaces = np.append(np.flatnonzero(text == ord(" ")), len(text))
            space = spaces[np.searchsorted(spaces, begins)]  # the first one of each merge
            if len(broken := np.flatnonzero((space == begins) | (space >= ends - 1))):
                merge = merges[start + int(broken[0])]
                raise TokenizerError(f"the model's BPE merge {merge!r} does not name two pieces")
            lefts = words.find_many(text, begins, space - begins)
            rights = words.find_many(text, space + 1, ends - space - 1)
            spaces_before = np.arange(stop - start)
            whole = np.delete(text, space)
            both = words.find_many(whole, begins - spaces_before, ends - begins - 1)
            if len(missing := np.flatnonzero((lefts < 0) | (rights < 0) | (both < 0))):
                left, right = merges[start + int(missing[0])].split(" ", 1)
                raise TokenizerError(
                    "the model's BPE vocabulary cannot be used: the merge of "
                    f"{left!r} and {right!r} needs a piece that it lacks"
                )
            keys[start:stop] = lefts << _HALF | rights
            joined[start:stop] = both
        self._buckets = bucket_count(count)
        buckets = (keys % np.uint64(self._buckets)).astype(np.uint32)
        ranks, places = bucket_order(buckets, self._buckets)
        self._keys = keys[ranks].data
        self._ranks, self._begins, self._joined = ranks.data, places.data, joined.data

    def merge(self, ids: list[int], watch: Watch = ignore_count) -> list[int]:
        """``ids`` of one word with all merges applied."""
        return self._scan(ids) if len(ids) <= _SHORT else join_neighbours(ids, self.join, watch)

    def join(self, left: int, right: int) -> tuple[int, int] | None:
        """The rank of two neighbours, and what they become; None where they stay apart."""
        rank = self._rank(left, right)
        return None if rank == _NONE else (rank, self._joined[rank])

    def _rank(self, left: int, right: int) -> int:
        """The place in the list of the merge of two ids, or ``_NONE``."""
        key = left << _HALF | right
        bucket = key % self._buckets
        for at in range(self._begins[bucket], self._begins[bucket + 1]):
            if self._keys[at] == key:
                return self._ranks[at]
        return _NONE

    def _scan(self, ids: list[int]) -> list[int]:
        """The rule as it stands, in a time that grows with the square of the word's length."""
        ids = list(ids)
        ranks = list(map(self._rank, ids, ids[1:]))
        while ranks and (best := min(ranks)) != _NONE:
            at = ranks.index(best)
            ids[at : at + 2] = [self._joined[best]]
            del ranks[at]
            if at > 0:
                ranks[at - 1] = self._rank(ids[at - 1], ids[at])
            if at < len(ranks):
                ranks[at] = self._rank(ids[at], ids[at + 1])
        return ids
