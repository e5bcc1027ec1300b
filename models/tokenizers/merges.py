"""The merges of byte-pair encoding, by the ids of the two pieces that they join.

The rule is that of the ``tokenizers`` package: of all neighbours that a merge joins, the pair whose
merge comes first in the list is joined, the leftmost of equals, until none is left. Held as integer
arrays: 19 bytes for each merge. Does not know how text becomes the first ids.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np

from localrt.errors import TokenizerError
from localrt.models.checkpoints.packed_strings import PackedStrings
from localrt.models.tokenizers.pieces import PieceTable, bucket_count, bucket_order, chunks

__all__ = ["MergeTable", "split_merges"]

_NONE = 1 << 32  # a rank behind all others
_SHORT = 64  # ids; up to here a scan of the whole word beats a queue
_HALF = 24  # bits of an id in a pair's key; no GGUF array has more strings


class MergeTable:
    """Joins neighbouring ids.

    ``sides`` has the left and the right piece of each merge in turn; ``words`` knows all of them,
    and all that they join to.

    Raises:
        TokenizerError: a piece is not in ``words``.
    """

    def __init__(self, words: PieceTable, sides: PackedStrings) -> None:
        count = len(sides) // 2
        keys, joined = np.empty(count, np.uint64), np.empty(count, np.uint32)
        data = np.frombuffer(sides.data, np.uint8)
        for start, stop in chunks(count):
            offsets = sides.offsets[2 * start : 2 * stop + 1].astype(np.int64)
            left, middle, right = offsets[:-1:2], offsets[1::2], offsets[2::2]
            lefts = words.find_many(data, left, middle - left)
            rights = words.find_many(data, middle, right - middle)
            both = words.find_many(data, left, right - left)
            if len(missing := np.flatnonzero((lefts < 0) | (rights < 0) | (both < 0))):
                at = 2 * (start + int(missing[0]))
                raise TokenizerError(
                    "the model's BPE vocabulary cannot be used: the merge of "
                    f"{sides[at]!r} and {sides[at + 1]!r} needs a piece that it lacks"
                )
            keys[start:stop] = lefts << _HALF | rights
            joined[start:stop] = both
        self._buckets = bucket_count(count)
        # Ranks fall within a bucket, so that the last of equal merges is met first: it counts
        buckets = (keys % np.uint64(self._buckets)).astype(np.uint32)
        order, begins = bucket_order(buckets[::-1], self._buckets)
        ranks = np.subtract(count - 1, order, out=order)
        self._keys = keys[ranks].data
        self._ranks = ranks.astype(np.uint32).data
        self._joined = joined.data
        self._begins = begins.data

    def merge(self, ids: list[int]) -> list[int]:
        """``ids`` of one word with all merges applied."""
        return self._scan(ids) if len(ids) <= _SHORT else self._queue(ids)

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

    def _queue(self, ids: list[int]) -> list[int]:
        """The same in almost linear time: candidates in a heap, stale ones told by their rank."""
        ids = list(ids)
        count = len(ids)
        before, after = list(range(-1, count - 1)), list(range(1, count + 1))
        ranks = [*map(self._rank, ids, ids[1:]), _NONE]  # of each id with the next one
        queue = [(rank, at) for at, rank in enumerate(ranks) if rank != _NONE]
        heapify(queue)
        while queue:
            best, at = heappop(queue)
            if ranks[at] != best:
                continue  # one of the two has been joined since
            gone = after[at]
            ids[at], ids[gone], ranks[gone] = self._joined[best], -1, _NONE
            after[at] = after[gone]
            if after[at] < count:
                before[after[at]] = at
            for left in (before[at], at):
                if left >= 0:
                    right = after[left]
                    rank = self._rank(ids[left], ids[right]) if right < count else _NONE
                    ranks[left] = rank
                    if rank != _NONE:
                        heappush(queue, (rank, left))
        return [token for token in ids if token >= 0]


def split_merges(merges: PackedStrings) -> PackedStrings:
    """Both sides of each merge, which is spelled ``"left right"``, in turn.

    Raises:
        TokenizerError: a merge lacks a side.
    """
    data = np.frombuffer(merges.data, np.uint8)
    sides = np.zeros(2 * len(merges) + 1, merges.offsets.dtype)
    parts = []
    for start, stop in chunks(len(merges)):
        offsets = merges.offsets[start : stop + 1].astype(np.int64)
        text = data[offsets[0] : offsets[-1]]
        offsets -= (base := offsets[0])
        spaces = np.append(np.flatnonzero(text == ord(" ")), len(text))
        space = spaces[np.searchsorted(spaces, offsets[:-1])]  # the first one behind each start
        if len(broken := np.flatnonzero((space == offsets[:-1]) | (space >= offsets[1:] - 1))):
            merge = merges[start + int(broken[0])]
            raise TokenizerError(f"the model's BPE merge {merge!r} does not name two pieces")
        before = np.arange(start, stop)  # the spaces that are left out before
        sides[2 * start + 1 : 2 * stop : 2] = base + space - before
        sides[2 * start + 2 : 2 * stop + 1 : 2] = base + offsets[1:] - before - 1
        parts.append(np.delete(text, space).tobytes())
    return PackedStrings(b"".join(parts), sides)
