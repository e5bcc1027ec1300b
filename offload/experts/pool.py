"""Slots of experts: in RAM, loaded from the SSD, and in a GPU's memory, filled over the link.

In RAM a layer's turn is ``demand`` (the router has chosen: reads begin), then each absent expert is
waited for and becomes part of its layer's table. What has been computed may make room for what is
still to come, so a layer with more experts than slots passes through. Everything but the reading is
done by the thread that runs the pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from localrt.models.checkpoints.store.manifest import StoredUnit
from localrt.models.weight_store import Check
from localrt.offload.device.gpu import SLABS, Event, Gpu, Slab
from localrt.offload.experts.cache import ExpertCache, Key
from localrt.offload.reading.reader import DemandLoad, DemandReader
from localrt.quant.formats.packed import Bytes
from localrt.quant.ops.experts import ExpertWeights, Routing


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
        self._ended: deque[DemandLoad] = deque()
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

    def _load(self, layer: int, expert: int) -> DemandLoad:
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


class GpuSlots:
    """``cache`` says which of ``units`` are in its slots, which ``memory`` gives.

    ``build`` makes weights of a unit's bytes on the GPU and of the same in RAM.
    """

    def __init__(
        self,
        gpu: Gpu,
        units: Mapping[Key, StoredUnit],
        cache: ExpertCache,
        memory: SlotMemory,
        *,
        build: Callable[[Key, StoredUnit, Any, Any], ExpertWeights],
    ) -> None:
        self.gpu, self.cache = gpu, cache
        self._units = units
        self._memory = memory
        self._build = build
        self._layouts: dict[Key, Hashable] = {}
        self._alike: dict[Hashable, Hashable] = {}

    def bring(self, key: Key, data: Any) -> Event | None:
        """Begin to copy an expert, whose bytes are ``data`` in RAM, to a slot; the copy's event.

        Its table holds it from now on, for kernels that wait for the event. Until then ``data``
        must stay as it is.
        """
        unit, slot = self._units[key], self.cache.admit(*key)
        memory = slot.memory[: unit.nbytes]
        copied = self.gpu.begin_copy(unit.name, data, memory, slot.used)
        layout = self._layout(key)
        if slot.made is None or slot.made[0] is not layout:
            with self.gpu.ops.scope():
                slot.made = layout, self._build(key, unit, memory, data)
        self.cache.fill(*key, slot.made[1])
        return copied

    def used(self, layer: int, experts: Sequence[int]) -> None:
        """Kernels that compute with these have been started."""
        slots = []
        for expert in experts:
            slot = self.cache.slot(layer, expert)
            assert slot is not None, "what a pass uses stays"
            slots.append(slot)
        event = self.gpu.record(*(slot.memory for slot in slots))
        for slot in slots:
            slot.used = event

    def _layout(self, key: Key) -> Hashable:
        """What an expert's weights are made by beside its memory: most experts are alike."""
        found = self._layouts.get(key)
        if found is None:
            tensors = self._units[key].tensors
            own = any(len(tensor.shape) == 1 for tensor in tensors)  # vectors lie elsewhere
            found = key if own else tuple(replace(tensor, name="") for tensor in tensors)
            self._layouts[key] = found = self._alike.setdefault(found, found)
        return found

    @property
    def reclaimable(self) -> int:
        """Bytes that ``evict`` could free."""
        return self._memory.reclaimable

    def evict(self, nbytes: int) -> int:
        """Have ``nbytes`` less of the GPU, but for one allocation; the bytes freed.

        Called between passes, when nothing is on its way to a slot.
        """
        freed = 0
        while freed < nbytes and (gone := self._memory.last()):
            self.cache.withdraw(gone)
            freed += self._memory.free_last()
        return freed

    def close(self) -> None:
        """Free the memory."""
        self.cache.close()
        self._memory.close()


class SlotMemory:
    """Memory of ``gpu`` for ``count`` slots of ``nbytes``, in about ``SLABS`` allocations.

    Raises:
        MemoryBudgetError: the GPU has no room for it.
    """

    def __init__(self, gpu: Gpu, nbytes: int, count: int) -> None:
        self._slabs: list[tuple[Slab, list[Any]]] = []
        together = -(-count // SLABS)
        try:
            for first in range(0, count, together):
                slots = min(together, count - first)
                slab = Slab(gpu, slots * nbytes, slots)
                self._slabs.append((slab, [slab.take(nbytes) for _ in range(slots)]))
        except BaseException:
            self.close()
            raise
        self._unused = [slot for _, slots in self._slabs for slot in slots]

    def take(self) -> Any:
        """The memory of a slot that had none so far."""
        return self._unused.pop(0)

    @property
    def reclaimable(self) -> int:
        """Bytes of all allocations but one."""
        return sum(slab.nbytes for slab, _ in self._slabs[1:])

    def last(self) -> list[Any]:
        """The slots of the last allocation; none where only one is left."""
        return self._slabs[-1][1] if len(self._slabs) > 1 else []

    def free_last(self) -> int:
        """Nobody uses these any more; the bytes freed."""
        slab, slots = self._slabs.pop()
        gone = {id(slot) for slot in slots}
        self._unused = [slot for slot in self._unused if id(slot) not in gone]
        return slab.free()

    def close(self) -> None:
        """Free everything."""
        for slab, _ in self._slabs:
            slab.free()
        self._slabs.clear()
