"""Experts in memory: equal slots that a cache fills by its policy, and loads on their way to them.

One object serves all sparse layers of a lane. A layer's turn is ``demand`` (the router has chosen:
reads begin), then each absent expert is waited for and becomes part of its layer's table. What has
been computed may make room for what is still to come, so that a layer with more experts than slots
passes through. Everything but the reading is done by the thread that runs the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.models.checkpoints.store_manifest import StoredUnit
from localrt.offload.experts.cache import ExpertCache, Key
from localrt.offload.experts.reader import Check, DemandReader, Load
from localrt.offload.ring import Mark
from localrt.quant.ops.aligned import aligned_buffer
from localrt.quant.ops.experts import ExpertTable, ExpertWeights, Routing

__all__ = ["Demanded", "ExpertMemory"]

Bytes = npt.NDArray[np.uint8]
Build = Callable[[Key, StoredUnit, Bytes], ExpertWeights]
Verify = Callable[[StoredUnit, Bytes], None]


@dataclass(frozen=True, slots=True)
class Demanded:
    """The experts of one layer in one pass: those to compute at once, and those to wait for.

    ``absent`` are in the order in which they are read.
    """

    present: tuple[int, ...]
    absent: tuple[int, ...]


class ExpertMemory:
    """``units`` by (layer, expert), layers counted among the sparse ones; one ``table`` for each.

    ``cache`` decides, ``reader`` reads, ``build`` makes weights of bytes that have passed
    ``verify``. ``alloc`` gives the memory of a slot.
    """

    def __init__(
        self,
        units: Mapping[Key, StoredUnit],
        tables: Sequence[ExpertTable],
        cache: ExpertCache,
        reader: DemandReader,
        *,
        build: Build,
        verify: Verify = lambda unit, data: None,
        alloc: Callable[[int], Any] = aligned_buffer,
    ) -> None:
        self.cache = cache
        self.slot_nbytes = max(unit.nbytes for unit in units.values())
        self._units = units
        self._keys = {unit.name: key for key, unit in units.items()}
        self._tables = tables
        self._reader = reader
        self._build = build
        self._verify = verify
        self._alloc = alloc
        self._memory: dict[Key, Any] = {}
        self._loads: dict[Key, Load] = {}
        self._spare: list[Any] = []
        self._queued: list[int] = []  # of the present layer, for which there was no slot yet
        self._demanded: set[Key] = set()  # of the present layer, absent when it was their turn

    @property
    def nbytes(self) -> int:
        """Bytes that the slots may take: what a budget has to count."""
        return self.cache.capacity * self.slot_nbytes

    @property
    def bytes_read(self) -> int:
        """Bytes that have been read so far."""
        return self._reader.bytes_read

    @property
    def reclaimable(self) -> int:
        """Bytes that ``resize`` could free."""
        return self.nbytes - self._least * self.slot_nbytes

    def holds(self, layer: int, expert: int) -> bool:
        """Whether an expert is in a slot, all of it."""
        return (layer, expert) in self._memory and (layer, expert) not in self._loads

    def data(self, layer: int, expert: int) -> Bytes:
        """The bytes of an expert that is in a slot."""
        key = (layer, expert)
        data: Bytes = self._memory[key][: self._units[key].nbytes]
        return data

    def fill(self, keys: Sequence[Key]) -> None:
        """Begin to read these ahead of any need, as far as there are free slots."""
        for key in keys[: self.cache.capacity - len(self.cache)]:
            self._begin(key, None, urgent=False)

    def demand(
        self, layer: int, routing: Routing, after: Mark, *, only: Sequence[int] | None = None
    ) -> Demanded:
        """The router has chosen, at ``after``: reading of what is absent begins.

        What is in a slot stays there until ``computed``. ``only`` are those that are wanted here.
        """
        self._settle_arrived()
        wanted = self.cache.touch(layer, routing.experts, routing.scores, only=only)
        there = wanted.resident
        # Reading and computing overlap, each one expert at a time, and all reads take the same: by
        # Johnson's rule those at hand come first, then the absent ones, the most rows first.
        order = np.argsort(-wanted.rows, kind="stable")
        held = [int(expert) for expert in wanted.experts[order][there[order]]]
        arriving = [expert for expert in held if (layer, expert) in self._loads]
        for expert in arriving:
            self._reader.hurry(self._loads[layer, expert])
        present = [expert for expert in held if expert not in arriving] if arriving else held
        self._queued = [int(expert) for expert in wanted.experts[order][~there[order]]]
        absent = (*arriving, *self._queued)
        self._demanded = {(layer, expert) for expert in absent}
        self._begin_queued(layer, after)
        return Demanded(tuple(present), absent)

    def arrive(self, layer: int, expert: int, after: Mark, check: Check | None) -> Mark:
        """Wait for an absent expert, which its table holds then; the mark of its arrival.

        Raises:
            CheckpointError: it cannot be read, or is damaged.
        """
        key = (layer, expert)
        while key not in self._loads:
            self._make_room(check)
            self._begin_queued(layer, after)
        mark = self._reader.wait(self._loads[key], check)
        self._settle(key)
        return mark

    def computed(self, layer: int, experts: Sequence[int], after: Mark) -> None:
        """These are not needed any more in this pass: they may make room for what is queued."""
        if self._queued:
            self.cache.finish(layer, experts)
            self._begin_queued(layer, after)

    def done(self, layer: int) -> None:
        """The layer's turn is over."""
        self._queued.clear()
        self.cache.release(layer)

    def abandon(self, layer: int) -> None:
        """The pass ended in the middle of a layer; what is on its way comes all the same.

        What has failed is asked for again when it is needed.
        """
        self.done(layer)

    def resize(self, nbytes: int) -> int:
        """Have at most ``nbytes`` of slots from now on, but one row's worth; returns bytes freed.

        Called between passes; what was to be read ahead of its need is not.
        """
        before = self.nbytes
        for load in self._reader.call_off():
            self._forget(self._keys[load.unit.name])
        for key in self.cache.resize(max(self._least, nbytes // self.slot_nbytes)):
            self._release(key)
        self._spare.clear()
        return max(0, before - self.nbytes)

    @property
    def _least(self) -> int:
        """Slots that one row's experts take, and what is on its way."""
        return min(max(self.cache.used, len(self._loads)), self.cache.capacity)

    def close(self) -> None:
        """End the reading and free everything."""
        self._reader.close()
        for key in list(self._memory):
            self._tables[key[0]].drop(key[1])
        self._memory.clear()
        self._loads.clear()
        self._spare.clear()

    def _settle_arrived(self) -> None:
        """What was read ahead of its need has come: it can be evicted like any other."""
        for load in self._reader.ended():
            key = self._keys[load.unit.name]
            if self._loads.get(key) is not load:
                continue  # it was waited for
            if load.error is not None:
                self._forget(key)  # it is asked for again when it is needed
            else:
                self._settle(key)

    def _make_room(self, check: Check | None) -> None:
        """Nothing can be evicted: wait for what was read ahead, else let any layer make room."""
        ahead = next((key for key in self._loads if key not in self._demanded), None)
        if ahead is None:
            self.cache.widen()
            return
        self._reader.hurry(self._loads[ahead])
        self._reader.wait(self._loads[ahead], check)
        self._settle(ahead)

    def _begin_queued(self, layer: int, after: Mark) -> None:
        while self._queued and self.cache.room:
            self._begin((layer, self._queued.pop(0)), after, urgent=True)

    def _begin(self, key: Key, after: Mark, *, urgent: bool) -> None:
        """Give ``key`` a slot and begin to read it."""
        victim = self.cache.admit(*key)
        if victim is not None:
            self._release(victim)
        unit = self._units[key]
        memory = self._spare.pop() if self._spare else self._alloc(self.slot_nbytes)
        self._memory[key] = memory
        self.cache.hold(key[0], [key[1]])
        self._loads[key] = self._reader.ask(unit, memory[: unit.nbytes], after=after, urgent=urgent)

    def _settle(self, key: Key) -> None:
        """A load has ended well: its bytes become weights."""
        unit = self._units[key]
        data = self._memory[key][: unit.nbytes]
        try:
            self._verify(unit, data)
            self._tables[key[0]].put(key[1], self._build(key, unit, data))
        except BaseException:
            self._forget(key)
            raise
        del self._loads[key]
        self.cache.let_go(key[0], [key[1]])

    def _forget(self, key: Key) -> None:
        """A load that failed: its slot is free again."""
        del self._loads[key]
        self.cache.let_go(key[0], [key[1]])
        self.cache.drop(*key)
        self._spare.append(self._memory.pop(key))

    def _release(self, key: Key) -> None:
        """An expert that lost its slot."""
        self._tables[key[0]].drop(key[1])
        self._spare.append(self._memory.pop(key))
