"""Experts in memory: equal slots that a cache fills by its policy, and loads on their way to them.

One object serves all sparse layers of a lane. A layer's turn is ``demand`` (the router has chosen:
reads begin), then each absent expert is waited for and becomes part of its layer's table. What has
been computed may make room for what is still to come, so that a layer with more experts than slots
passes through. What is proposed ahead of its need lies beside the slots (``staging.py``) until it
is asked for. Everything but the reading is done by the thread that runs the pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.models.checkpoints.store_manifest import StoredUnit
from localrt.models.timing import Mark
from localrt.offload.experts.cache import ExpertCache, Key
from localrt.offload.experts.reader import Check, DemandReader, Load, ReadingTime
from localrt.offload.experts.staging import Staging
from localrt.quant.ops.aligned import aligned_buffer
from localrt.quant.ops.experts import ExpertTable, ExpertWeights, Routing

__all__ = ["Bytes", "Demanded", "ExpertMemory"]

Bytes = npt.NDArray[np.uint8]
Build = Callable[[Key, StoredUnit, Bytes], ExpertWeights]
Verify = Callable[[StoredUnit, Bytes], None]

_LEAST_BESIDE = 4  # slots for each buffer of proposals, and for each expert of a row


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
        self.layers, self.count, self.used = cache.layers, cache.count, cache.used
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
        self._ended: deque[Load] = deque()
        self._staging = Staging(reader, units, self._buffer, self._spare.append, self._ended)
        self._queued: list[int] = []  # of the present layer, for which there was no slot yet
        self._demanded: set[Key] = set()  # of the present layer, absent when it was their turn

    @property
    def nbytes(self) -> int:
        """Bytes that the slots may take: what a budget has to count."""
        return (self.cache.capacity + self._staging.size) * self.slot_nbytes

    @property
    def bytes_read(self) -> int:
        """Bytes that have been read so far."""
        return self._reader.bytes_read

    @property
    def reading(self) -> ReadingTime:
        """How long what was demanded took to read."""
        return self._reader.time()

    @property
    def proposals(self) -> tuple[int, int]:
        """Experts that were read ahead of their need on a guess, and those of them asked for."""
        return self._staging.begun, self._staging.useful

    @property
    def reclaimable(self) -> int:
        """Bytes that ``resize`` could free."""
        return self.nbytes - self._least * self.slot_nbytes

    def table(self, layer: int) -> ExpertTable:
        """A layer's experts that can be computed."""
        return self._tables[layer]

    def resident(self, layer: int) -> npt.NDArray[np.bool_]:
        """(count,): which of a layer's experts have slots, or are on their way to one."""
        return self.cache.resident(layer)

    def hold(self, layer: int, expert: int) -> None:
        """Keep an expert until ``let_go``: somebody reads its bytes. Holds add up."""
        self.cache.hold(layer, [expert])

    def let_go(self, layer: int, expert: int) -> None:
        """Undo one ``hold``."""
        self.cache.let_go(layer, [expert])

    def holds(self, layer: int, expert: int) -> bool:
        """Whether an expert is in a slot, all of it."""
        return (layer, expert) in self._memory and (layer, expert) not in self._loads

    def data(self, layer: int, expert: int) -> Bytes:
        """The bytes of an expert that is in a slot."""
        key = (layer, expert)
        data: Bytes = self._memory[key][: self._units[key].nbytes]
        return data

    def fill(self) -> None:
        """Begin to read ahead of any need where slots are free: a little of every layer."""
        keys = sorted(self._units, key=lambda key: (key[1], key[0]))
        for key in keys[: self.cache.capacity - len(self.cache)]:
            self._begin(key, None, urgent=False)

    def stage(self, size: int) -> bool:
        """Have ``size`` buffers for proposals, which as many slots are given for; 0 gives them up.

        Whether there are so many now. Called between passes.
        """
        if size == self._staging.size:
            return True
        self._settle_arrived()
        if size and self._loads:
            return False  # what is on its way cannot make room
        capacity = self.cache.capacity + self._staging.size - size
        if size and capacity < _LEAST_BESIDE * (size + self.cache.used):
            return False
        self._staging.resize(size)
        for key in self.cache.resize(capacity):
            self._release(key)
        return True

    def propose(self, layer: int, experts: Sequence[int]) -> None:
        """These may be asked for when it is ``layer``'s turn: read them while nobody waits."""
        if any(key not in self._demanded for key in self._loads):
            return  # the slots are being filled
        absent = [e for e in experts if (layer, e) not in self._memory]
        self._staging.propose(layer, absent)

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
        missing = [int(expert) for expert in wanted.experts[order][~there[order]]]
        if self._staging.size:  # what was proposed is there, or sooner than what was not
            ahead = self._staging.chosen(layer, missing)
            missing = [*ahead, *(expert for expert in missing if expert not in ahead)]
        self._queued = list(missing)
        self._demanded = {(layer, expert) for expert in (*arriving, *missing)}
        self._begin_queued(layer, after)
        come = self._settle_staged(layer, missing) if self._staging.size else []
        absent = [expert for expert in (*arriving, *missing) if expert not in come]
        return Demanded((*present, *come), tuple(absent))

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

    def resize(self, nbytes: int) -> int:
        """Have at most ``nbytes`` of slots from now on, but one row's worth; returns bytes freed.

        Called between passes; what was to be read ahead of its need is not.
        """
        before = self.nbytes
        self.stage(0)
        for load in self._reader.call_off(list(self._loads.values())):
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
        self._staging.forget()
        for key in list(self._memory):
            self._tables[key[0]].drop(key[1])
        self._memory.clear()
        self._loads.clear()
        self._spare.clear()

    def _settle_arrived(self) -> None:
        """What was read ahead of its need has come: it can be evicted like any other."""
        while self._ended:
            load = self._ended.popleft()
            key = self._keys[load.unit.name]
            if self._loads.get(key) is not load:
                self._staging.ended(load)
                continue  # it was waited for, or is beside the slots
            if load.error is not None:
                self._forget(key)  # it is asked for again when it is needed
            else:
                self._settle(key)

    def _settle_staged(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Of those that were asked for, what a proposal has brought already."""
        come = []
        for expert in experts:
            load = self._loads.get((layer, expert))
            if load is not None and load.missing == 0:
                self._settle((layer, expert))
                come.append(expert)
        return come

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
        self.cache.hold(key[0], [key[1]])
        staged = self._staging.take(key)
        if staged is not None:
            self._memory[key], self._loads[key] = staged
            self._reader.hurry(self._loads[key])
            return
        memory = self._memory[key] = self._buffer()
        self._loads[key] = self._reader.ask(
            unit, memory[: unit.nbytes], after=after, urgent=urgent, ends=self._ended
        )

    def _buffer(self) -> Any:
        return self._spare.pop() if self._spare else self._alloc(self.slot_nbytes)

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
