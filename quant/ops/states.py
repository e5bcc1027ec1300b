"""States of recurrent layers: a sequence's memory there, and how to return to earlier tokens.

``StateCache`` is a complete ``KVCache``: tokens are appended, trimmed, selected from a tree. A
``StateSet`` is the state of all layers: each layer's state after ``position`` tokens, and the rows
since (plus earlier ones that its convolution reads). The rows of a short pass wait there until the
next pass adds them to the state, so trimming them costs nothing, and a tree's rows leave no trace.
A long pass makes a new set of all but its last four rows; the old set remains until ``advance``, so
a cancelled pass leaves no trace.

A *kept* set no longer changes: the next pass makes another. So a sequence can return to a kept set,
and to each of the few tokens before it, without computing; for any other place, tokens since the
nearest kept set are computed again, and ``trim`` returns how many are still held. Sets are kept at
the end of every pass of a prompt and every 256 tokens of an answer, at least 32 tokens apart, as
many as fit 256 MB, at least one; the set that saves the least recomputation is dropped first. This
module knows no devices: arrays come from an implementation, and are only read and written in
contiguous slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from math import log
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from localrt.quant.ops.arrays import put_from_host, to_host
from localrt.quant.ops.recurrent import RecurrentSpec

SHORT_ROWS = 4
"""A pass of so many rows leaves states as they are; so many of a longer one's last rows wait."""

_KEPT_NBYTES = 256 << 20
_MOST_KEPT = 32
_KEEP_EVERY = 256  # tokens of an answer between kept sets
_KEEP_LEAST = 32  # tokens between any two: fewer are computed again nearly as quickly

Alloc = Callable[[int], Any]
"""A zeroed float32 array of so many numbers."""


@dataclass(frozen=True, slots=True, eq=False)
class SavedState:
    """A saved set: ``data`` has the states after ``position`` tokens, the rows from there to
    ``length``, and earlier rows that these read. It serves every length in between.
    """

    position: int
    length: int
    data: npt.NDArray[np.uint8]


class _Saved(Protocol):
    """A saved state, or its description."""

    @property
    def position(self) -> int: ...

    @property
    def length(self) -> int: ...


def reachable(states: Sequence[_Saved], length: int) -> int:
    """How many of the first ``length`` tokens ``states`` can restore; all if there are no states,
    since none are needed then.
    """
    fitting = (min(length, state.length) for state in states if state.position <= length)
    return max(fitting, default=0) if states else length


class StateLayout:
    """The layout of a set for layers of ``specs``: states one after another, then rows."""

    def __init__(self, specs: Sequence[RecurrentSpec]) -> None:
        self.specs = tuple(specs)
        self.back = max((spec.back for spec in specs), default=0)
        self.states = list(accumulate((spec.state_size for spec in specs), initial=0))
        self.rows = list(accumulate((spec.row_size for spec in specs), initial=0))

    def ring(self, waiting: int) -> int:
        """Rows of a ring for ``waiting`` rows and the earlier rows that convolutions read."""
        return self.back + max(waiting, 2 * SHORT_ROWS)

    def nbytes(self, waiting: int = 0) -> int:
        """Bytes of a set."""
        return 4 * (self.states[-1] + self.ring(waiting) * self.rows[-1])

    @property
    def name(self) -> str:
        """A name for the layout of a set's numbers."""
        alike = groupby((spec.state_size, spec.row_size, spec.back + 1) for spec in self.specs)
        parts = (f"{len(list(same))}x{'.'.join(map(str, sizes))}" for sizes, same in alike)
        return f"states 1 {'+'.join(parts)}"

    def saved_nbytes(self, position: int, length: int) -> int:
        """Bytes of a saved set."""
        return 4 * (self.states[-1] + (length - self.first(position)) * self.rows[-1])

    def first(self, position: int) -> int:
        """The first token whose row is needed besides a state."""
        return max(0, position - self.back)

    @property
    def kept(self) -> int:
        """The most sets kept for a sequence."""
        return min(_MOST_KEPT, max(1, _KEPT_NBYTES // max(1, self.nbytes())))

    def sets(self, length: int) -> int:
        """The most sets of a sequence of ``length`` tokens: two, plus those kept so far."""
        return 2 + min(self.kept, -(-length // _KEEP_EVERY))

    def sequence_nbytes(self, length: int) -> int:
        """The most bytes of a sequence of ``length`` tokens."""
        return sum(self.layer_nbytes(length))

    def layer_nbytes(self, length: int) -> Iterator[int]:
        """The same for each layer."""
        if self.specs:
            sets, ring = self.sets(length), self.ring(0)
            for spec in self.specs:
                yield 4 * sets * (spec.state_size + ring * spec.row_size)


class StateSet:
    """Each layer's state after ``positions[layer]`` tokens, and a ring of the rows since.

    Token n's row is row ``n % ring`` of a layer's ring, (ring, row size). ``length`` is the number
    of tokens with rows, once the set is kept.
    """

    def __init__(self, layout: StateLayout, alloc: Alloc, waiting: int = 0) -> None:
        self.layout = layout
        self.ring = layout.ring(waiting)
        self.states = alloc(layout.states[-1])
        self.rows = alloc(self.ring * layout.rows[-1])
        self.positions: npt.NDArray[np.int64] = np.zeros(len(layout.specs), np.int64)
        self.length = 0
        self.kept = False

    @property
    def nbytes(self) -> int:
        return int(self.states.nbytes + self.rows.nbytes)

    @property
    def position(self) -> int:
        """Tokens that cannot be trimmed."""
        return int(self.positions.max(initial=0))

    def state(self, layer: int) -> Any:
        """A layer's state, a view."""
        first, last = self.layout.states[layer : layer + 2]
        return self.states[first:last]

    def ring_of(self, layer: int) -> Any:
        """A layer's rows, (ring, row size), a view."""
        first, last = self.layout.rows[layer : layer + 2]
        return self.rows[self.ring * first : self.ring * last].reshape(self.ring, last - first)

    def save(self, length: int) -> SavedState | None:
        """The state to return to ``length`` tokens; None if layers' positions differ."""
        position = self.position
        if (self.positions != position).any():
            return None
        tokens = np.arange(self.layout.first(position), length)
        rings = map(self.ring_of, range(len(self.positions)))
        held = runs(tokens % self.ring)
        parts = [self.states, *(ring[run] for ring in rings for (run,) in held)]
        data = np.concatenate([to_host(part).reshape(-1) for part in parts])
        return SavedState(position, length, data.view(np.uint8))

    def load(self, saved: SavedState, alloc: Alloc) -> None:
        """The inverse of ``save``; takes over the memory of ``saved``."""
        if self.ring < self.layout.ring(saved.length - saved.position):
            self.widen(alloc, saved.length - saved.position, 0)
        numbers = saved.data.view(np.float32)
        tokens = np.arange(self.layout.first(saved.position), saved.length)
        states = numbers[: self.layout.states[-1]]
        if isinstance(self.states, np.ndarray):
            self.states = states  # no one else uses this memory, and fresh memory is slow
        else:
            put_from_host(self.states, states)
        at, held = self.layout.states[-1], runs(tokens % self.ring)
        for layer, (first, last) in enumerate(pairwise(self.layout.rows)):
            count = len(tokens) * (last - first)
            rows = numbers[at : at + count].reshape(len(tokens), -1)
            ring = self.ring_of(layer)
            done = 0
            for (run,) in held:
                stop = done + run.stop - run.start
                put_from_host(ring[run], rows[done:stop])
                done = stop
            at += count
        self.positions[:], self.length = saved.position, saved.length

    def widen(self, alloc: Alloc, waiting: int, length: int) -> None:
        """Make room for ``waiting`` rows; the rows of the last of ``length`` tokens stay."""
        old = [self.ring_of(layer) for layer in range(len(self.positions))]
        tokens = np.arange(max(0, length - self.ring), length)
        before, self.ring = self.ring, self.layout.ring(waiting)
        self.rows = alloc(self.ring * self.layout.rows[-1])
        moves = runs(tokens % before, tokens % self.ring)
        for layer, rows in enumerate(old):
            ring = self.ring_of(layer)
            for source, target in moves:
                ring[target] = rows[source]


def runs(*indices: npt.NDArray[np.int64]) -> list[tuple[slice, ...]]:
    """Rows (n,) of as many arrays as slices, each of rows that are consecutive in all; if there are
    no rows, one empty slice.
    """
    if not len(indices[0]):
        return [tuple(slice(0, 0) for _ in indices)]
    steps = np.array([np.diff(index) for index in indices])
    ends = [0, *(np.flatnonzero((steps != 1).any(0)) + 1).tolist(), len(indices[0])]
    return [
        tuple(slice(int(index[a]), int(index[a]) + b - a) for index in indices)
        for a, b in pairwise(ends)
    ]


@dataclass(frozen=True, slots=True)
class StatePass:
    """What a pass does to a sequence's states.

    ``target`` will have the states after ``fold`` tokens, and the rows from there on; it is
    ``source`` itself if that may change. ``parents`` are of a tree's rows (see ``tree_parents``);
    ``extra`` of these rows are held already.
    """

    source: StateSet
    target: StateSet
    fold: int
    parents: npt.NDArray[np.int32] | None
    extra: int


class StateCache:
    """See ``KVCache``."""

    def __init__(self, specs: Sequence[RecurrentSpec], capacity: int, alloc: Alloc) -> None:
        self.layout = StateLayout(specs)
        self._capacity = capacity
        self._alloc = alloc
        self._length = 0
        self._now = StateSet(self.layout, alloc)
        self._kept: list[StateSet] = []  # by their lengths
        self._spare: StateSet | None = None
        self._pass: StatePass | None = None
        self._reads = self._grows = False  # the running pass: tokens in order, a tree's rows

    @property
    def length(self) -> int:
        return self._length

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def nbytes(self) -> int:
        target = None if self._pass is None else self._pass.target
        sets = {id(each): each for each in (self._now, self._spare, target, *self._kept) if each}
        return sum(each.nbytes for each in sets.values())

    @property
    def waiting(self) -> int:
        """The number of last held tokens that are not yet in a layer's state."""
        return self._length - int(self._now.positions.min(initial=self._length))

    def reserve(self, length: int) -> None:
        """Nothing grows with the tokens."""
        if length > self._capacity:
            raise ValueError(f"{length} tokens exceed the cache's capacity of {self._capacity}")

    def tokens_behind(self, layer: int, count: int) -> npt.NDArray[np.int64]:
        """The last ``count`` tokens held, or all if fewer, as an ``ngram`` layer stores them."""
        now = self._now
        tokens = np.arange(max(0, self._length - count), self._length)
        ring = now.ring_of(layer)
        rows = [to_host(ring[run]) for (run,) in runs(tokens % now.ring)]
        return np.concatenate(rows)[:, -1].astype(np.int64)

    # -- a pass ----------------------------------------------------------------------------------

    def begin(self, rows: int, mask: npt.NDArray[np.bool_] | None) -> StatePass:
        """Begin a pass of ``rows`` after the held tokens; ``advance`` makes it count.

        ``mask`` is a ``Span``'s: tokens of its tree are not added to a state.
        """
        self._give_up()
        tree, extra = mask is not None, 0 if mask is None else mask.shape[1] - rows
        self._keep(self._length - extra)
        now, end = self._now, self._length + rows
        self._reads, self._grows = not tree and rows > 1, tree
        long = not tree and rows > SHORT_ROWS
        fold = end - SHORT_ROWS if long else self._length - extra
        if now.kept or long:
            target = self._spare or StateSet(self.layout, self._alloc)
            self._spare = None
            if target.ring < self.layout.ring(end - fold):
                target.widen(self._alloc, end - fold, 0)
        else:
            target, waiting = now, self.waiting + rows
            if now.ring < self.layout.ring(waiting):
                now.widen(self._alloc, waiting, self._length)
        parents = None if mask is None else tree_parents(mask)
        self._pass = StatePass(now, target, fold, parents, extra)
        return self._pass

    def layer_done(self, layer: int) -> None:
        """Note that a layer's part of the target is done."""
        assert self._pass is not None, "a pass has begun"
        self._pass.target.positions[layer] = self._pass.fold

    def advance(self, count: int) -> None:
        done = self._pass
        assert done is not None, "rows must be computed before they count"
        self._pass = None
        self._length += count
        if done.target is not self._now:
            old, self._now = self._now, done.target
            if not old.kept:
                self._spare = old
        if not self._reads:
            self._spare = None  # as long as tokens come one by one
        if not self._grows:  # otherwise ``select`` says which of its rows stay
            self._keep(self._length, always=self._reads)

    def _keep(self, length: int, *, always: bool = False) -> None:
        """Keep a set for returning to the first ``length`` tokens, if worth it."""
        now, last = self._now, self._kept[-1].length if self._kept else 0
        if length - last < (_KEEP_LEAST if always else _KEEP_EVERY):
            return
        now.length = length
        if not now.kept:
            now.kept = True
            self._kept.append(now)
        while len(self._kept) > self.layout.kept:
            self._drop(self._least())

    # -- saving and restoring --------------------------------------------------------------------

    def saved(self) -> list[SavedState]:
        """The held state and all kept sets, to be read before the next pass."""
        sets = {id(each): (each, each.length) for each in self._kept}
        if self._length:
            sets[id(self._now)] = self._now, self._length
        found = (each.save(length) for each, length in sets.values())
        return sorted((one for one in found if one is not None), key=lambda one: one.length)

    def restore(self, states: Sequence[SavedState], length: int) -> int:
        """Restore as many of the first ``length`` tokens as ``states`` can; returns how many.

        Raises:
            ValueError: the states have another layout.
        """
        self.trim(0)
        for state in states:
            if state.position > length:
                continue
            if state.data.nbytes != self.layout.saved_nbytes(state.position, state.length):
                raise ValueError("a saved state has other sizes than this model's")
            if self._now.kept:
                self._now = StateSet(self.layout, self._alloc)
            self._now.load(state, self._alloc)
            self._length = self._now.length = min(length, state.length)
            self._now.kept = True
            self._kept.append(self._now)
            while len(self._kept) > self.layout.kept:
                self._drop(self._least())
        return self._length

    # -- going back ------------------------------------------------------------------------------

    def trim(self, length: int) -> int:
        """Forget tokens from ``length`` on; returns how many stay, fewer without a kept state."""
        if not 0 <= length <= self._length:
            raise ValueError(f"cannot trim a cache of {self._length} tokens to {length}")
        self._give_up()
        if length == self._length:
            return length
        for each in [each for each in self._kept if each.position > length]:
            self._drop(each)
        if self._now.position > length:
            last = max(self._kept, key=lambda each: min(each.length, length), default=None)
            if last is None:
                last, length = StateSet(self.layout, self._alloc), 0
            if not self._now.kept:
                self._spare = self._spare or self._now
            self._now, length = last, min(last.length, length)
        for each in self._kept:
            each.length = min(each.length, length)
        self._length = length
        return length

    def select(self, first: int, rows: Sequence[int]) -> None:
        """Keep token ``first + rows[i]`` as token ``first + i``, and no other from ``first`` on.

        The next pass says which of them are still part of a tree.
        """
        if any(b <= a for a, b in pairwise(rows)) or (rows and rows[0] < 0):
            raise ValueError(f"rows must ascend from 0: {list(rows)}")
        now = self._now
        assert not now.kept or now.length <= first, "a tree's rows are not kept"
        if not now.position <= first <= self._length:
            raise ValueError(f"cannot select from token {first} of {self._length}")
        if rows and rows[-1] >= len(rows):
            moves = [(first + row, first + i) for i, row in enumerate(rows) if row != i]
            for layer in range(len(now.positions)):
                ring = now.ring_of(layer)
                for token, to in moves:  # in order: no row is in the place of a later one
                    source, target = token % now.ring, to % now.ring
                    ring[target : target + 1] = ring[source : source + 1]
        self._length = first + len(rows)

    # -- parts -----------------------------------------------------------------------------------

    def _give_up(self) -> None:
        """Discard the target of a pass that did not end."""
        done, self._pass = self._pass, None
        if done is not None and done.target is not self._now:
            self._spare = done.target

    def _drop(self, gone: StateSet) -> None:
        gone.kept = False
        self._kept.remove(gone)

    def _least(self) -> StateSet:
        """The kept set whose loss would cost the fewest extra tokens on returns.

        Returns near the end are likelier. Regenerating an answer and rewriting a turn return to the
        last two sets, which stay.
        """
        places = [0, *(each.length for each in self._kept)]
        behind = [places[-1] - place + _KEEP_EVERY for place in places]

        def worth(index: int) -> float:
            more = places[index + 1] - places[index]
            return more * log(behind[index + 1] / behind[index + 2])

        return self._kept[min(range(max(1, len(self._kept) - 2)), key=worth)]


def tree_parents(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """The parent of each of a tree's rows: held rows first, then new ones.

    ``mask`` is a ``Span``'s, (rows, held + rows). -1 is the token before the tree, -2 a row without
    new children.
    """
    parents = np.full(mask.shape[1], -2, np.int32)
    for row in mask:
        path = np.flatnonzero(row)
        parents[path] = [-1, *path[:-1]]
    return parents
