"""A vocabulary and its merges in packed tables, with a few bytes per entry.

A dictionary of 151,936 pieces takes 25 MB and more in Python or Rust. Here pieces stay packed, and
a hash table of two integer arrays maps a piece to its id: ids sorted by bucket, and the start of
each bucket. A lookup takes about a microsecond; numpy looks up many at once. Knows pieces and ids,
not their meaning.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from heapq import heapify, heappop, heappush
from math import isqrt
from operator import mul
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from localrt.common.errors import TokenizerError
from localrt.models.checkpoints.packed_strings import PackedStrings
from localrt.models.tokenizers.base import Watch, ignore_count

_HASHED = 32  # bytes; longer pieces are mostly runs of one character, which differ in length
_FACTORS = tuple(0x9E3779B97F4A7C15**power % (1 << 64) for power in range(1, 6))  # odd
_WORD = 8  # bytes that are hashed and compared at a time
_MASKS = np.array([(1 << 8 * count) - 1 for count in range(_WORD + 1)], np.uint64)
_ID = np.uint64((1 << 24) - 1)  # the bits of an id; no GGUF array has more strings
_AT_ONCE = 1 << 14
Integers = npt.NDArray[np.int64]


class PieceTable:
    """``Pieces`` by position. Of equal pieces the last one is found, as in a dictionary."""

    def __init__(self, pieces: PackedStrings) -> None:
        self.pieces = pieces
        count = len(pieces)
        self._buckets = 2 * count + 1
        self._data = _padded(np.frombuffer(pieces.data, np.uint8))
        self._longest = 0
        hashes = np.empty(count, np.uint64)
        for start, stop in chunks(count):
            offsets = pieces.offsets[start : stop + 1].astype(np.int64)
            lengths = np.diff(offsets)
            self._longest = max(self._longest, int(lengths.max()))
            hashes[start:stop] = self._hash(self._data, offsets[:-1], lengths)
        begins = bucket_begins(self._bucket_of(hashes), self._buckets)
        # By bucket; of equal pieces, which have equal hashes, the last comes first.
        hashes |= _ID
        hashes -= np.arange(count, dtype=np.uint64)
        hashes.sort()
        ids = (_ID - (hashes & _ID)).astype(np.uint32)
        hashes |= _ID
        self._distinct = not np.any(hashes[1:] == hashes[:-1])  # certainly
        self._ids, self._begins = ids.data, begins.data
        self._members: memoryview | None = None

    @property
    def members(self) -> npt.NDArray[np.bool_]:
        """Whether each id can be found."""
        if self._members is None:
            return np.ones(len(self), np.bool_)
        return np.asarray(self._members).view(np.bool_)

    @cached_property
    def longest(self) -> int:
        """Characters of the longest piece."""
        longest = 0
        for start, stop in chunks(len(self)):
            offsets = self.pieces.offsets[start : stop + 1].astype(np.int64)
            begins = (self._data[offsets[0] : offsets[-1]] & 0xC0) != 0x80  # of characters
            counts = np.append(0, np.cumsum(begins))[offsets - offsets[0]]
            longest = max(longest, int(np.diff(counts).max()))
        return longest

    def only(self, members: npt.NDArray[np.bool_]) -> PieceTable:
        """The same table, limited to ids that are true in ``members``."""
        table = copy.copy(self)
        table._members = members.astype(np.uint8).data
        return table

    def __len__(self) -> int:
        return len(self.pieces)

    def text(self, token: int) -> str:
        return self.pieces[token] if 0 <= token < len(self.pieces) else ""

    def find(self, text: str) -> int | None:
        piece = text.encode("utf-8", "surrogatepass")
        for token in self._bucket(piece):
            if self.pieces.encoded(token) == piece and (
                self._members is None or self._members[token]
            ):
                return token
        return None

    def _bucket(self, piece: bytes) -> memoryview:
        """The ids in the bucket of ``piece``."""
        if len(piece) > self._longest:
            return self._ids[:0]
        words = (piece[at : at + _WORD] for at in range(0, min(len(piece), _HASHED), _WORD))
        numbers = (int.from_bytes(word, "little") for word in words)
        total = sum(map(mul, numbers, _FACTORS), len(piece) * _FACTORS[-1])
        bucket = (total % (1 << 64) >> 32) * self._buckets >> 32
        return self._ids[self._begins[bucket] : self._begins[bucket + 1]]

    def find_many(
        self,
        data: npt.NDArray[np.uint8],
        starts: Integers,
        lengths: Integers,
        likely: Integers | None = None,
    ) -> Integers:
        """Return the ids of the pieces of UTF-8 ``data`` that begin at ``starts``; -1 if unknown.
        Those that are as ``likely`` are not searched.

        Takes some 200 bytes of memory per piece: pass the ranges of ``chunks``.
        """
        offsets, begins, ids = self.pieces.offsets, np.asarray(self._begins), np.asarray(self._ids)
        members = None if self._members is None else np.asarray(self._members)
        found = np.full(len(starts), -1, np.int64)
        data, open_ = _padded(data), np.flatnonzero(lengths <= self._longest)
        if likely is not None and self._distinct and members is None:
            likely = np.minimum(likely, len(self) - 1)
            begin = offsets[likely].astype(np.int64)
            same = np.flatnonzero(offsets[likely + 1] == begin + lengths)
            same = same[_equal(data, starts[same], self._data, begin[same], lengths[same])]
            found[same] = likely[same]
            open_ = np.flatnonzero((found < 0) & (lengths <= self._longest))
        starts, lengths = starts[open_], lengths[open_]
        buckets = self._bucket_of(self._hash(data, starts, lengths))
        at, stop = (begins[buckets + end].astype(np.int64) for end in (0, 1))
        while True:
            left = np.flatnonzero(at < stop)
            if not len(left):
                return found
            open_, starts, lengths, at, stop = (
                each[left] for each in (open_, starts, lengths, at, stop)
            )
            tokens = ids[at].astype(np.int64)
            begin = offsets[tokens].astype(np.int64)
            fits = offsets[tokens + 1] == begin + lengths
            if members is not None:
                fits &= members[tokens] != 0
            same = np.flatnonzero(fits)
            same = same[_equal(data, starts[same], self._data, begin[same], lengths[same])]
            found[open_[same]] = tokens[same]
            at += 1
            at[same] = stop[same]

    def _bucket_of(self, hashes: npt.NDArray[np.uint64]) -> Integers:
        """A larger hash has no smaller bucket."""
        return ((hashes >> 32) * np.uint64(self._buckets) >> 32).astype(np.int64)

    def _hash(
        self, data: npt.NDArray[np.uint8], starts: Integers, lengths: Integers
    ) -> npt.NDArray[np.uint64]:
        """Hashes of pieces, of their first bytes and their length."""
        hashes, longer = lengths.astype(np.uint64) * np.uint64(_FACTORS[-1]), np.arange(len(starts))
        for at, factor in zip(range(0, _HASHED, _WORD), _FACTORS, strict=False):
            longer = longer[lengths[longer] > at]
            words = _words(data, starts[longer] + at, lengths[longer] - at)
            hashes[longer] += words * np.uint64(factor)
        return hashes


def bucket_count(count: int) -> int:
    """A prime number of buckets for ``count`` entries, at least ``count``."""
    number = max(count, 2)
    while any(number % divisor == 0 for divisor in range(2, isqrt(number) + 1)):
        number += 1
    return number


def bucket_begins(buckets: npt.NDArray[np.uint32] | Integers, count: int) -> npt.NDArray[np.uint32]:
    """Where each of ``count`` buckets begins among entries sorted by theirs; and the last's end."""
    begins = np.zeros(count + 1, np.uint32)
    np.cumsum(np.bincount(buckets, minlength=count), out=begins[1:])
    return begins


def bucket_order(
    buckets: npt.NDArray[np.uint32], count: int
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Entries sorted by their bucket, and ``bucket_begins``.

    Within a bucket entries are in descending order, so that the last of equal entries is met first.
    """
    order = buckets.astype(np.uint64) << 32 | ~np.arange(len(buckets), dtype=np.uint32)
    order.sort()  # faster than a stable argsort
    return ~order.astype(np.uint32), bucket_begins(buckets, count)


def chunks(count: int) -> Iterator[tuple[int, int]]:
    """``range(count)`` in chunks that bound numpy's temporary arrays."""
    return ((start, min(start + _AT_ONCE, count)) for start in range(0, count, _AT_ONCE))


def _padded(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """``data`` for ``_words``, which reads behind its end."""
    return np.append(data, np.zeros(_WORD, np.uint8))


def _words(
    data: npt.NDArray[np.uint8], starts: Integers, lengths: Integers
) -> npt.NDArray[np.uint64]:
    """The first bytes of segments of padded ``data``, up to eight of each, as numbers."""
    words = np.ndarray(len(data) - _WORD + 1, "<u8", data, strides=(1,))
    result: npt.NDArray[np.uint64] = words[starts] & _MASKS[np.minimum(lengths, _WORD)]
    return result


def _equal(
    ours: npt.NDArray[np.uint8],
    starts: Integers,
    theirs: npt.NDArray[np.uint8],
    begins: Integers,
    lengths: Integers,
) -> npt.NDArray[np.bool_]:
    """Whether each segment of ``ours`` equals the segment of ``theirs``, both padded."""
    equal: npt.NDArray[np.bool_] = _words(ours, starts, lengths) == _words(theirs, begins, lengths)
    longer = np.flatnonzero(equal & (lengths > _WORD))
    starts, begins, lengths = starts[longer], begins[longer], lengths[longer]
    ends = np.cumsum(lengths)
    within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)
    differ = (
        ours[np.repeat(starts, lengths) + within] != theirs[np.repeat(begins, lengths) + within]
    )
    equal[longer[np.searchsorted(ends, np.flatnonzero(differ), "right")]] = False
    return equal


# -- byte-pair encoding: neighbours are joined, the best pair first; ties: the leftmost

_BLOCK = 2048  # symbols; joining takes some 400 bytes of memory for each
_OPEN = 4  # symbols at a block's end, which the symbols after it may change
_NONE = 1 << 32  # a rank after all others
_SHORT = 64  # ids; up to here scanning the word is faster than a queue
_HALF = 24  # bits of an id in a pair's key; GGUF arrays have fewer strings


Symbol = TypeVar("Symbol", int, str)
Join = Callable[[Symbol, Symbol], tuple[float, Symbol] | None]


def join_neighbours(
    symbols: Sequence[Symbol], join: Join[Symbol], watch: Watch = ignore_count
) -> list[Symbol]:
    """Join all neighbours of ``symbols`` that can be joined, in almost linear time.

    ``join`` returns the rank of two neighbours (lowest first) and their joined symbol. ``watch``
    gets the number of symbols so far.

    A boundary between two results that survives joining just their symbols is one in the whole text
    too: until a pair across it ranks best, each side is joined as if alone. So blocks are joined
    separately, and again together if their boundary does not hold.
    """
    found: list[Symbol] = []
    blocks: list[tuple[int, int, int, int]] = []  # start, size, found count, last start
    begin, size, last = 0, _BLOCK, 0
    while begin < len(symbols):
        parts = _joined(symbols[begin : begin + size], join)
        stop = begin + (parts[1][0] if len(parts) > 1 else size)  # the first symbol's end
        across = _joined(symbols[last:stop], join) if found else ()
        if found and all(last + start != begin for start, _ in across):
            begin, before, count, last = blocks.pop()
            size += 2 * before  # the block grows until its boundary holds
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
    """Join one block; returns each joined symbol's start, and the symbol."""
    joined = list(symbols)
    count = len(joined)
    before, after = list(range(-1, count - 1)), list(range(1, count + 1))

    def offer(at: int) -> tuple[float, int, Symbol] | None:
        """The queue's entry for a symbol and the next one; None if they cannot be joined."""
        found = join(joined[at], joined[after[at]]) if after[at] < count else None
        return None if found is None else (found[0], at, found[1])

    offers = [offer(at) for at in range(count)]
    queue = [found for found in offers if found is not None]
    heapify(queue)
    while queue:
        best = heappop(queue)
        _, at, symbol = best
        if offers[at] is not best:
            continue  # one of its symbols has been joined since
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
    """Joins neighbouring ids by ``merges``, each spelled ``"left right"``.

    Raises:
        TokenizerError: a merge lacks a side, or ``words`` lacks a side or the joined piece.
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
            space = spaces[np.searchsorted(spaces, begins)]  # the first space of each merge
            if len(broken := np.flatnonzero((space == begins) | (space >= ends - 1))):
                merge = merges[start + int(broken[0])]
                raise TokenizerError(f"the model's BPE merge {merge!r} does not name two pieces")
            lefts = words.find_many(text, begins, space - begins)
            rights = words.find_many(text, space + 1, ends - space - 1)
            spaces_before = np.arange(stop - start)
            whole = np.delete(text, space)
            # Most vocabularies list merged pieces in the order of their merges.
            likely = joined[start - 1] + np.arange(1, stop - start + 1) if start else None
            both = words.find_many(whole, begins - spaces_before, ends - begins - 1, likely)
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
        """Apply all merges to ``ids``, those of one word."""
        return self._scan(ids) if len(ids) <= _SHORT else join_neighbours(ids, self.join, watch)

    def join(self, left: int, right: int) -> tuple[int, int] | None:
        """The rank of two neighbours and their joined id; None if there is no merge."""
        rank = self._rank(left, right)
        return None if rank == _NONE else (rank, self._joined[rank])

    def _rank(self, left: int, right: int) -> int:
        """The position of two ids' merge in the list, or ``_NONE``."""
        key = left << _HALF | right
        bucket = key % self._buckets
        for at in range(self._begins[bucket], self._begins[bucket + 1]):
            if self._keys[at] == key:
                return self._ranks[at]
        return _NONE

    def _scan(self, ids: list[int]) -> list[int]:
        """Merge by repeated scans, in time quadratic in the word's length."""
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
