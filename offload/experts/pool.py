"""Experts in RAM: equal slots that a cache fills by its policy, and loads on their way to them.

A layer's turn is ``demand`` (the router has chosen: reads begin), then each absent expert is waited
for and becomes part of its layer's table. What has been computed may make room for what is still to
come, so that a layer with more experts than slots passes through. Everything but the reading is
done by the thread that runs the pass.

Experts that are proposed ahead of their need are read while nobody waits, into buffers that as many
slots were given for. A proposal evicts nothing: when its layer has chosen, what was right takes a
slot by the cache's rules like any expert that is asked for, only sooner there; what was wrong is
called off or overwritten.
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
from localrt.offload.experts.reader import Check, DemandReader, Load
from localrt.quant.ops.aligned import aligned_buffer
from localrt.quant.ops.experts import ExpertTable, ExpertWeights, Routing

__all__ = ["Bytes", "Demanded", "ExpertPool"]

Bytes = npt.NDArray[np.uint8]

_LEAST_BESIDE = 4  # slots for each buffer of proposals, and for each expert of a row


@dataclass(frozen=True, slots=True)
class Demanded:
    """The experts of one layer in one pass: those to compute at once, and those to wait for.

    ``absent`` are in the order in which they are read.
    """

    present: tuple[int, ...]
    absent: tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Slot:
    """Where an expert is: ``memory``, which ``load`` fills; None: it is there, and in its table."""

    memory: Any
    load: Load | None


class ExpertPool:
    """The experts of ``units``, by (layer, expert), layers counted among the sparse ones.

    ``tables`` are the layers', ``cache`` decides, ``reader`` reads, ``build`` makes weights of
    bytes that have passed ``verify``. ``alloc`` gives the memory of a slot.

    ``begun`` counts the proposals of which anything was read, ``useful`` those that were asked for.
    """

    def __init__(
        self,
        units: Mapping[Key, StoredUnit],
        tables: Sequence[ExpertTable],
        cache: ExpertCache,
        reader: DemandReader,
        *,
        build: Callable[[Key, Bytes], ExpertWeights],
        verify: Callable[[StoredUnit, Bytes], None] = lambda unit, data: None,
        alloc: Callable[[int], Any] = aligned_buffer,
    ) -> None:
        self.cache = cache
        self.slot_nbytes = max(unit.nbytes for unit in units.values())
        self.begun = self.useful = 0
        self._units = units
        self._keys = {unit.name: key for key, unit in units.items()}
        self._tables = tables
        self._reader = reader
        self._build = build
        self._verify = verify
        self._alloc = alloc
        self._slots: dict[Key, _Slot] = {}
        # Of these, what has a load: asked for, or filled ahead; and proposed, unknown to the cache.
        self._arriving: dict[Key, _Slot] = {}
        self._proposed: dict[Key, _Slot] = {}
        self._aside = 0  # buffers for proposals
        self._spare: list[Any] = []
        self._leaving: dict[Load, Any] = {}  # proposals called off while they were being read
        self._ended: deque[Load] = deque()
        self._queued: list[int] = []  # of the present layer, for which there was no slot yet
        self._demanded: set[Key] = set()  # of the present layer, absent when it was their turn

    @property
    def nbytes(self) -> int:
        """Bytes that the slots may take: what a budget has to count."""
        return (self.cache.capacity + self._aside) * self.slot_nbytes

    @property
    def reclaimable(self) -> int:
        """Bytes that ``resize`` could free."""
        return self.nbytes - self._least * self.slot_nbytes

    def holds(self, layer: int, expert: int) -> bool:
        """Whether an expert is in a slot, all of it."""
        slot = self._slots.get((layer, expert))
        return slot is not None and slot.load is None

    def data(self, layer: int, expert: int) -> Bytes:
        """The bytes of an expert that is in a slot."""
        key = (layer, expert)
        data: Bytes = self._slots[key].memory[: self._units[key].nbytes]
        return data

    def fill(self) -> None:
        """Begin to read ahead of any need where slots are free: a little of every layer."""
        keys = sorted(self._units, key=lambda key: (key[1], key[0]))
        for key in keys[: self.cache.capacity - len(self.cache)]:
            self._begin(key, None, urgent=False)

    # -- a layer's turn --------------------------------------------------------------------------

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
        arriving = [expert for expert in held if (layer, expert) in self._arriving]
        for expert in arriving:
            self._reader.hurry(self._load(layer, expert))
        present = [expert for expert in held if expert not in arriving] if arriving else held
        missing = [int(expert) for expert in wanted.experts[order][~there[order]]]
        if self._aside:  # what was proposed is there, or sooner than what was not
            ahead = self._chosen(layer, missing)
            missing = [*ahead, *(expert for expert in missing if expert not in ahead)]
        self._queued = list(missing)
        self._demanded = {(layer, expert) for expert in (*arriving, *missing)}
        self._begin_queued(layer, after)
        come = self._settle_proposed(layer, missing) if self._aside else []
        absent = [expert for expert in (*arriving, *missing) if expert not in come]
        return Demanded((*present, *come), tuple(absent))

    def arrive(self, layer: int, expert: int, after: Mark, check: Check | None) -> Mark:
        """Wait for an absent expert, which its table holds then; the mark of its arrival.

        Raises:
            CheckpointError: it cannot be read, or is damaged.
        """
        key = (layer, expert)
        while key not in self._arriving:
            self._make_room(check)
            self._begin_queued(layer, after)
        mark = self._reader.wait(self._load(layer, expert), check)
        self._settle(key)
        return mark

    def computed(self, layer: int, experts: Sequence[int], after: Mark) -> None:
        """These are not needed any more in this pass: they may make room for what is queued."""
        if self._queued:
            self.cache.finish(layer, experts)
            self._begin_queued(layer, after)

    def done(self, layer: int) -> None:
        """The layer's turn is over, to its end or not; what is on its way comes all the same."""
        self._queued.clear()
        self.cache.release(layer)

    # -- proposals -------------------------------------------------------------------------------

    def stage(self, size: int) -> bool:
        """Have ``size`` buffers for proposals, which as many slots are given for; 0 gives them up.

        Whether there are so many now. Called between passes.
        """
        if size == self._aside:
            return True
        self._settle_arrived()
        if size and self._arriving:
            return False  # what is on its way cannot make room
        capacity = self.cache.capacity + self._aside - size
        if size and capacity < _LEAST_BESIDE * (size + self.cache.used):
            return False
        for key in list(self._proposed):
            self._call_off(key)
        self._aside = size
        for key in self.cache.resize(capacity):
            self._release(key)
        return True

    def propose(self, layer: int, experts: Sequence[int]) -> None:
        """These may be asked for when it is ``layer``'s turn: read them while nobody waits."""
        if any(key not in self._demanded for key in self._arriving):
            return  # the slots are being filled
        for key in [key for key in self._proposed if key[0] != layer]:  # of a pass given up
            self._call_off(key)
        wanted = [key for expert in experts if (key := (layer, expert)) not in self._slots]
        for key in wanted[: max(0, self._aside - len(self._proposed) - len(self._leaving))]:
            memory, unit = self._buffer(), self._units[key]
            load = self._reader.ask(unit, memory[: unit.nbytes], urgent=False, ends=self._ended)
            self._slots[key] = self._proposed[key] = _Slot(memory, load)

    def _chosen(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Those of ``experts`` that were proposed for ``layer``. Its other proposals end."""
        for key in [key for key in self._proposed if key[0] == layer]:
            load = self._proposed[key].load
            if key[1] not in experts or (load is not None and load.error is not None):
                self._call_off(key)
        return [expert for expert in experts if (layer, expert) in self._proposed]

    def _settle_proposed(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Of those that were asked for, what a proposal has brought already."""
        come = []
        for expert in experts:
            slot = self._arriving.get((layer, expert))
            if slot is not None and slot.load is not None and slot.load.missing == 0:
                self._settle((layer, expert))
                come.append(expert)
        return come

    def _call_off(self, key: Key) -> None:
        """A proposal that nobody wants."""
        slot = self._proposed.pop(key)
        del self._slots[key]
        load = slot.load
        assert load is not None, "a proposal is settled when it is asked for"
        self.begun += _is_begun(load)
        if load.done or self._reader.cancel(load):
            self._spare.append(slot.memory)
        else:
            self._leaving[load] = slot.memory

    # -- memory ----------------------------------------------------------------------------------

    def resize(self, nbytes: int) -> int:
        """Have at most ``nbytes`` of slots from now on, but one row's worth; returns bytes freed.

        Called between passes; what was to be read ahead of its need is not.
        """
        before = self.nbytes
        self.stage(0)
        for load in self._reader.call_off([self._load(*key) for key in self._arriving]):
            self._forget(self._keys[load.unit.name])
        for key in self.cache.resize(max(self._least, nbytes // self.slot_nbytes)):
            self._release(key)
        self._spare.clear()
        return max(0, before - self.nbytes)

    def close(self) -> None:
        """Free everything; the reader has been closed."""
        for key, slot in self._slots.items():
            if slot.load is None:
                self._tables[key[0]].drop(key[1])
        for kept in (self._slots, self._arriving, self._proposed, self._leaving, self._spare):
            kept.clear()

    @property
    def _least(self) -> int:
        """Slots that one row's experts take, and what is on its way."""
        return min(max(self.cache.used, len(self._arriving)), self.cache.capacity)

    # -- loads -----------------------------------------------------------------------------------

    def _load(self, layer: int, expert: int) -> Load:
        load = self._arriving[layer, expert].load
        assert load is not None, "it is on its way"
        return load

    def _settle_arrived(self) -> None:
        """What was read ahead of its need has come: it can be evicted like any other."""
        while self._ended:
            load = self._ended.popleft()
            key = self._keys[load.unit.name]
            slot = self._arriving.get(key)
            if slot is None or slot.load is not load:  # it was waited for, or is only proposed
                memory = self._leaving.pop(load, None)
                if memory is not None:
                    self._spare.append(memory)
            elif load.error is not None:
                self._forget(key)  # it is asked for again when it is needed
            else:
                self._settle(key)

    def _make_room(self, check: Check | None) -> None:
        """Nothing can be evicted: wait for what was read ahead, else let any layer make room."""
        ahead = next((key for key in self._arriving if key not in self._demanded), None)
        if ahead is None:
            self.cache.widen()
            return
        load = self._load(*ahead)
        self._reader.hurry(load)
        self._reader.wait(load, check)
        self._settle(ahead)

    def _begin_queued(self, layer: int, after: Mark) -> None:
        while self._queued and self.cache.room:
            self._begin((layer, self._queued.pop(0)), after, urgent=True)

    def _begin(self, key: Key, after: Mark, *, urgent: bool) -> None:
        """Give ``key`` a slot and begin to read it."""
        victim = self.cache.admit(*key)
        if victim is not None:
            self._release(victim)
        self.cache.hold(key[0], [key[1]])
        slot = self._proposed.pop(key, None)
        if slot is not None and slot.load is not None:
            read = _is_begun(slot.load)
            self.begun, self.useful = self.begun + read, self.useful + read
            self._reader.hurry(slot.load)
        else:
            memory, unit = self._buffer(), self._units[key]
            load = self._reader.ask(
                unit, memory[: unit.nbytes], after=after, urgent=urgent, ends=self._ended
            )
            slot = self._slots[key] = _Slot(memory, load)
        self._arriving[key] = slot

    def _buffer(self) -> Any:
        return self._spare.pop() if self._spare else self._alloc(self.slot_nbytes)

    def _settle(self, key: Key) -> None:
        """A load has ended well: its bytes become weights."""
        layer, expert = key
        unit, slot = self._units[key], self._arriving[key]
        data = slot.memory[: unit.nbytes]
        try:
            self._verify(unit, data)
            self._tables[layer].put(expert, self._build(key, data))
        except BaseException:
            self._forget(key)
            raise
        del self._arriving[key]
        slot.load = None
        self.cache.let_go(layer, [expert])

    def _forget(self, key: Key) -> None:
        """A load that failed: its slot is free again."""
        del self._arriving[key]
        self.cache.let_go(key[0], [key[1]])
        self.cache.drop(*key)
        self._spare.append(self._slots.pop(key).memory)

    def _release(self, key: Key) -> None:
        """An expert that lost its slot."""
        self._tables[key[0]].drop(key[1])
        self._spare.append(self._slots.pop(key).memory)


def _is_begun(load: Load) -> bool:
    return load.in_flight > 0 or load.missing < load.unit.nbytes
