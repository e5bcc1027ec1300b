"""Experts in RAM: the slots of a cache, and loads from the SSD on their way to them.

A layer's turn is ``demand`` (the router has chosen: reads begin), then each absent expert is waited
for and becomes part of its layer's table. What has been computed may make room for what is still to
come, so that a layer with more experts than slots passes through. Everything but the reading is
done by the thread that runs the pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from localrt.models.checkpoints.store.manifest import StoredUnit
from localrt.models.residency import Check
from localrt.offload.experts.cache import ExpertCache, Key
from localrt.offload.reading.demand_reader import DemandReader, Load
from localrt.quant.ops.experts import ExpertWeights, Routing

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Demanded:
    """The experts of one layer in one pass: those to compute at once, and those to wait for.

    ``absent`` are in the order in which they are read.
    """

    present: tuple[int, ...]
    absent: tuple[int, ...]


class ExpertPool:
    """The experts of ``units``, by (layer, expert), layers counted among the sparse ones.

    ``cache`` decides which have slots, ``reader`` reads, ``build`` makes weights of bytes that have
    passed ``verify``.
    """

    def __init__(
        self,
        units: Mapping[Key, StoredUnit],
        cache: ExpertCache,
        reader: DemandReader,
        *,
        build: Callable[[Key, Bytes], ExpertWeights],
        verify: Callable[[StoredUnit, Bytes], None],
    ) -> None:
        self.cache = cache
        self.slot_nbytes = max(unit.nbytes for unit in units.values())
        self._units = units
        self._keys = {unit.name: key for key, unit in units.items()}
        self._reader = reader
        self._build = build
        self._verify = verify
        self._ended: deque[Load] = deque()
        self._queued: list[int] = []  # of the present layer, for which there was no slot yet
        self._demanded: set[Key] = set()  # of the present layer, absent when it was their turn

    @property
    def nbytes(self) -> int:
        """Bytes that the slots may take: what a budget has to count."""
        return self.cache.capacity * self.slot_nbytes

    @property
    def reclaimable(self) -> int:
        """Bytes that ``resize`` could free."""
        return self.nbytes - self._least * self.slot_nbytes

    def holds(self, layer: int, expert: int) -> bool:
        """Whether an expert is in a slot, all of it."""
        slot = self.cache.slot(layer, expert)
        return slot is not None and slot.load is None

    def data(self, layer: int, expert: int) -> Bytes:
        """The bytes of an expert that has a slot."""
        slot = self.cache.slot(layer, expert)
        assert slot is not None, "it has one"
        data: Bytes = slot.memory[: self._units[layer, expert].nbytes]
        return data

    def fill(self) -> None:
        """Begin to read ahead of any need where slots are free: a little of every layer."""
        keys = sorted(self._units, key=lambda key: (key[1], key[0]))
        for key in keys[: self.cache.capacity - len(self.cache)]:
            self._begin(key, urgent=False)

    # -- a layer's turn --------------------------------------------------------------------------

    def demand(
        self, layer: int, routing: Routing, *, only: Sequence[int] | None = None
    ) -> Demanded:
        """The router has chosen: reading of what is absent begins.

        What is in a slot stays there until ``computed``. ``only`` are those that are wanted here.
        """
        self._settle_arrived()
        wanted = self.cache.touch(layer, routing.experts, routing.scores, only=only)
        there = wanted.resident
        # Reading and computing overlap, each one expert at a time, and all reads take the same: by
        # Johnson's rule those at hand come first, then the absent ones, the most rows first.
        order = np.argsort(-wanted.rows, kind="stable")
        held = wanted.experts[order][there[order]].tolist()
        arriving = [expert for expert in held if not self.holds(layer, expert)]
        for expert in arriving:
            self._reader.hurry(self._load(layer, expert))
        missing = wanted.experts[order][~there[order]].tolist()
        absent = (*arriving, *missing)
        self._queued = missing
        self._demanded = {(layer, expert) for expert in absent}
        self._begin_queued(layer)
        return Demanded(tuple(e for e in held if e not in arriving), absent)

    def arrive(self, layer: int, expert: int, check: Check | None) -> None:
        """Wait for an absent expert, which its table holds then.

        Raises:
            CheckpointError: it cannot be read, or is damaged.
        """
        while (layer, expert) not in self.cache:
            self._make_room(check)
            self._begin_queued(layer)
        self._reader.wait(self._load(layer, expert), check)
        self._settle(layer, expert)

    def computed(self, layer: int, experts: Sequence[int]) -> None:
        """These are not needed any more in this pass: they may make room for what is queued."""
        if self._queued:
            self.cache.finish(layer, experts)
            self._begin_queued(layer)

    def done(self, layer: int) -> None:
        """The layer's turn is over, to its end or not; what is on its way comes all the same."""
        self._queued = []
        self.cache.release(layer)

    # -- memory ----------------------------------------------------------------------------------

    def resize(self, nbytes: int) -> int:
        """Have at most ``nbytes`` of slots from now on, but one row's worth; returns bytes freed.

        Called between passes; what was to be read ahead of its need is not.
        """
        before = self.nbytes
        loads = [self._load(*key) for key in self.cache.loading()]
        for load in self._reader.cancel(loads):
            self._forget(*self._keys[load.unit.name])
        self.cache.resize(max(self._least, nbytes // self.slot_nbytes))
        return max(0, before - self.nbytes)

    @property
    def _least(self) -> int:
        """Slots that one row's experts take, and what is on its way."""
        return min(max(self.cache.used, len(self.cache.loading())), self.cache.capacity)

    def _make_room(self, check: Check | None) -> None:
        """Nothing can be evicted: wait for what was read ahead, else let any layer make room."""
        ahead = next((key for key in self.cache.loading() if key not in self._demanded), None)
        if ahead is None:
            self.cache.widen()
            return
        load = self._load(*ahead)
        self._reader.hurry(load)
        self._reader.wait(load, check)
        self._settle(*ahead)

    # -- loads -----------------------------------------------------------------------------------

    def _load(self, layer: int, expert: int) -> Load:
        slot = self.cache.slot(layer, expert)
        assert slot is not None, "it has a slot"
        assert slot.load is not None, "it is on its way"
        return slot.load

    def _begin_queued(self, layer: int) -> None:
        while self._queued and self.cache.room:
            self._begin((layer, self._queued.pop(0)), urgent=True)

    def _begin(self, key: Key, *, urgent: bool) -> None:
        """Give ``key`` a slot and begin to read it."""
        unit, slot = self._units[key], self.cache.admit(*key)
        self.cache.hold(key[0], [key[1]])
        slot.load = self._reader.ask(
            unit, slot.memory[: unit.nbytes], urgent=urgent, ends=self._ended
        )

    def _settle_arrived(self) -> None:
        """What was read ahead of its need has come: it can be evicted like any other."""
        while self._ended:
            load = self._ended.popleft()
            layer, expert = self._keys[load.unit.name]
            slot = self.cache.slot(layer, expert)
            if slot is None or slot.load is not load:
                continue  # it was waited for
            if load.error is not None:
                self._forget(layer, expert)  # it is asked for again when it is needed
            else:
                self._settle(layer, expert)

    def _settle(self, layer: int, expert: int) -> None:
        """A load has ended well: its bytes become weights."""
        data = self.data(layer, expert)
        try:
            self._verify(self._units[layer, expert], data)
            weights = self._build((layer, expert), data)
        except BaseException:
            self._forget(layer, expert)
            raise
        self.cache.fill(layer, expert, weights)
        self.cache.let_go(layer, [expert])

    def _forget(self, layer: int, expert: int) -> None:
        """A load that failed or was cancelled: its slot is free again."""
        self.cache.let_go(layer, [expert])
        self.cache.drop(layer, expert)
