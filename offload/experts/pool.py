"""Slots of experts: in RAM, filled from the SSD, and in GPU memory, filled over the link.

In RAM a layer begins with ``demand``: the router has chosen, and reads begin. Then each absent
expert is awaited and enters its layer's table. Computed experts may be evicted for later ones, so a
layer may choose more experts than there are slots. Everything but reading happens on the thread
that runs the pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from localrt.models.checkpoints.store.manifest import StoredUnit
from localrt.offload.device.gpu import Event, Gpu
from localrt.offload.experts.cache import ExpertCache, ExpertSlot, Key
from localrt.offload.reading.reader import DemandLoad, DemandReader
from localrt.quant.formats.packed import Bytes
from localrt.quant.ops.arrays import DeviceMemory, Memory
from localrt.quant.ops.experts import ExpertWeights, Routing
from localrt.quant.ops.protocol import Check


@dataclass(frozen=True, slots=True)
class Demanded:
    """The experts of one layer in one pass: those ready to compute, and those to wait for.

    ``absent`` are in reading order.
    """

    present: tuple[int, ...]
    absent: tuple[int, ...]


class ExpertPool:
    """The experts of ``units``, by (layer, expert), layers counted among the sparse ones.

    ``cache`` decides which have slots, ``reader`` reads, ``build`` builds weights from bytes.
    """

    def __init__(
        self,
        units: Mapping[Key, StoredUnit],
        cache: ExpertCache[Bytes],
        reader: DemandReader,
        *,
        build: Callable[[Key, Bytes], ExpertWeights],
    ) -> None:
        self.cache = cache
        self.slot_nbytes = cache.slot_nbytes
        self._units = units
        self._keys = {unit.name: key for key, unit in units.items()}
        self._reader = reader
        self._build = build
        self._max_slots = cache.capacity
        self._ended: deque[DemandLoad] = deque()
        self._queued: list[int] = []  # the current layer's experts without slots yet
        self._absent: set[Key] = set()  # the current layer's absent experts
        self._complete = False

    @property
    def nbytes(self) -> int:
        """Bytes that the slots may take, to be counted in the budget."""
        return self.cache.capacity * self.slot_nbytes

    @property
    def reclaimable(self) -> int:
        """Bytes that ``resize`` could free."""
        return self.nbytes - self._min_slots * self.slot_nbytes

    def holds(self, layer: int, expert: int) -> bool:
        """Whether an expert is in a slot and fully loaded."""
        slot = self.cache.slot(layer, expert)
        return slot is not None and slot.load is None

    @property
    def complete(self) -> bool:
        """Whether all experts are in slots and loaded."""
        if not self._complete and len(self.cache) == len(self._units):
            self._settle_arrived()
            self._complete = len(self.cache) == len(self._units) and not self.cache.loading()
        return self._complete

    def data(self, layer: int, expert: int) -> Bytes:
        """The bytes of an expert that has a slot."""
        slot = self.cache.slot(layer, expert)
        assert slot is not None, "it has one"
        return slot.memory[: self._units[layer, expert].nbytes]

    def fill(self) -> None:
        """Begin to read experts ahead into free slots: a few of every layer."""
        keys = sorted(self._units, key=lambda key: (key[1], key[0]))
        for key in keys[: self.cache.capacity - len(self.cache)]:
            self._begin(key, urgent=False)

    # -- one layer of one pass -------------------------------------------------------------------

    def demand(
        self, layer: int, routing: Routing, *, only: Sequence[int] | None = None
    ) -> Demanded:
        """Begin to read the absent experts that the router has chosen.

        Resident experts keep their slots until ``computed``. Experts not in ``only`` are ignored.
        """
        if only is not None and self.complete:
            return Demanded(tuple(only), ())
        self._settle_arrived()
        wanted = self.cache.touch(layer, routing.experts, routing.scores, only=only)
        resident = wanted.resident
        # Reading and computing overlap, each one expert at a time, and all reads take equally long:
        # by Johnson's rule, resident experts come first, then absent ones by decreasing rows.
        order = np.argsort(-wanted.rows, kind="stable")
        slotted = wanted.experts[order][resident[order]].tolist()
        arriving = [expert for expert in slotted if not self.holds(layer, expert)]
        for expert in arriving:
            self._reader.hurry(self._load(layer, expert))
        missing = wanted.experts[order][~resident[order]].tolist()
        absent = (*arriving, *missing)
        self._queued = missing
        self._absent = {(layer, expert) for expert in absent}
        self._begin_queued(layer)
        return Demanded(tuple(e for e in slotted if e not in arriving), absent)

    def learn(self, layer: int, routing: Routing, only: Sequence[int]) -> None:
        """Learn that a pass has used experts ``only``, all of them resident."""
        self._settle_arrived()
        self.cache.touch(layer, routing.experts, routing.scores, only=only)
        self.cache.release(layer)

    def arrive(self, layer: int, expert: int, check: Check | None) -> None:
        """Wait for an absent expert and put it into its layer's table.

        Raises:
            CheckpointError: it cannot be read, or is damaged.
        """
        while (layer, expert) not in self.cache:
            self._make_room(check)
            self._begin_queued(layer)
        self._reader.wait(self._load(layer, expert), check)
        self._settle(layer, expert)

    def computed(self, layer: int, experts: Sequence[int]) -> None:
        """Mark experts as computed in this pass: they may make room for queued ones."""
        if self._queued:
            self.cache.finish(layer, experts)
            self._begin_queued(layer)

    def done(self, layer: int) -> None:
        """End the layer, also after an error; running reads continue."""
        self._queued = []
        self.cache.release(layer)

    # -- memory ----------------------------------------------------------------------------------

    def resize(self, nbytes: int) -> int:
        """Limit slots to ``nbytes``, but keep enough for one row; returns the bytes freed.

        Called between passes; reads ahead that have not begun are cancelled. Slots are freed in
        slabs.
        """
        before, self._complete = self.nbytes, False
        loads = [self._load(*key) for key in self.cache.loading()]
        for load in self._reader.cancel(loads):
            self._discard(*self._keys[load.unit.name])
        least, slots = self._min_slots, min(nbytes // self.slot_nbytes, self._max_slots)
        if slots < self._max_slots:
            slots -= max(0, slots - self.cache.capacity) % self.cache.slab_slots
        self.cache.resize(max(least, slots), least)
        return max(0, before - self.nbytes)

    @property
    def _min_slots(self) -> int:
        """The fewest slots: enough slabs for one row's experts, or one for each running load."""
        cache = self.cache
        allocations = max(-(-cache.used // cache.slab_slots), len(cache.loading()))
        return min(allocations * cache.slab_slots, cache.capacity)

    def _make_room(self, check: Check | None) -> None:
        """If no slot can be evicted, wait for a read ahead; without one, evict from any layer."""
        ahead = next((key for key in self.cache.loading() if key not in self._absent), None)
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
        self.cache.lock(key[0], [key[1]])
        slot.load = self._reader.ask(
            unit, slot.memory[: unit.nbytes], urgent=urgent, ends=self._ended
        )

    def _settle_arrived(self) -> None:
        """Finish the reads ahead that have ended, so that their experts can be evicted."""
        while self._ended:
            load = self._ended.popleft()
            layer, expert = self._keys[load.unit.name]
            slot = self.cache.slot(layer, expert)
            if slot is None or slot.load is not load:
                continue  # ``arrive`` has finished it
            if load.error is not None:
                self._discard(layer, expert)  # it is read again when needed
            else:
                self._settle(layer, expert)

    def _settle(self, layer: int, expert: int) -> None:
        """Build weights from a completed load's bytes."""
        data = self.data(layer, expert)
        try:
            weights = self._build((layer, expert), data)
        except BaseException:
            self._discard(layer, expert)
            raise
        self.cache.fill(layer, expert, weights)
        self.cache.unlock(layer, [expert])

    def _discard(self, layer: int, expert: int) -> None:
        """Free the slot of a load that failed or was cancelled."""
        self.cache.unlock(layer, [expert])
        self.cache.drop(layer, expert)


@dataclass(frozen=True, slots=True)
class Arrival:
    """An expert being copied to a ``slot`` on a GPU; arrived once ``copied`` has happened."""

    key: Key
    slot: ExpertSlot[DeviceMemory]
    copied: Event | None
    weights: ExpertWeights


class GpuSlots:
    """Slots on a GPU, assigned by ``cache``, for experts of ``units``.

    ``build`` builds weights from a unit's bytes on the GPU and their copy in RAM. A slot takes
    ``slot_nbytes`` in all.
    """

    def __init__(
        self,
        gpu: Gpu,
        units: Mapping[Key, StoredUnit],
        cache: ExpertCache[DeviceMemory],
        *,
        slot_nbytes: int,
        build: Callable[[Key, StoredUnit, Memory, Bytes], ExpertWeights],
    ) -> None:
        self.gpu, self.cache, self.slot_nbytes = gpu, cache, slot_nbytes
        self._at_load = cache.capacity
        self._units = units
        self._build = build
        self._last_use: dict[int, Event | None] = {}  # last use by eager kernels, by layer
        self._layouts: dict[Key, Hashable] = {}
        self._shared_layouts: dict[Hashable, Hashable] = {}

    def bring(self, key: Key, data: Bytes) -> Arrival:
        """Begin to copy an expert's bytes, ``data`` in RAM, to a slot.

        ``data`` must not change until the copy has ended. ``enter`` puts the expert into its table.
        """
        unit, slot = self._units[key], self.cache.admit(*key)
        memory = slot.memory[: unit.nbytes]
        copied = self.gpu.begin_copy(unit.name, data, memory, self._unused(slot))
        slot.layer = key[0]
        layout = self._layout(key)
        if layout is None:
            self.gpu.wait(copied)
        if layout is None or slot.made is None or slot.made[0] is not layout:
            with self.gpu.ops.scope():
                slot.made = layout, self._build(key, unit, memory, data)
        if layout is None:
            self._last_use[slot.layer] = self.gpu.record()
        return Arrival(key, slot, copied, slot.made[1])

    def enter(self, arrival: Arrival) -> None:
        """Put an expert into its layer's table once it has arrived or kernels wait for it."""
        if self.cache.slot(*arrival.key) is arrival.slot:
            self.cache.fill(*arrival.key, arrival.weights)

    def used(self, layer: int) -> None:
        """Record that kernels using a layer's experts have been started."""
        self._last_use[layer] = self.gpu.record()

    def _unused(self, slot: ExpertSlot[DeviceMemory]) -> Event | None:
        """The event after which no kernel reads the slot."""
        return None if slot.layer is None else self._last_use.get(slot.layer)

    def _layout(self, key: Key) -> Hashable:
        """A key for the layout of an expert's weights in its memory, shared by most experts; None
        if the weights are unpacked to other memory.
        """
        layout = self._layouts.get(key)
        if layout is None:
            tensors, in_place = self._units[key].tensors, self.gpu.ops.in_place
            if not all(in_place(t.format, t.shape[1]) for t in tensors if len(t.shape) > 1):
                return None
            # Vectors have their own memory.
            has_vectors = any(len(tensor.shape) == 1 for tensor in tensors)
            layout = key if has_vectors else tuple(replace(tensor, name="") for tensor in tensors)
            self._layouts[key] = layout = self._shared_layouts.setdefault(layout, layout)
        return layout

    @property
    def reclaimable(self) -> int:
        """Bytes that ``evict`` could free: all allocations but one."""
        return max(0, self.cache.capacity - self.cache.slab_slots) * self.slot_nbytes

    def evict(self, nbytes: int) -> int:
        """Free ``nbytes`` of the GPU's slots, except the last allocation; returns freed bytes.

        Called between passes, when nothing is being copied to a slot.
        """
        cache, before = self.cache, self.cache.capacity
        cache.resize(before - -(-nbytes // self.slot_nbytes), least=1)
        return (before - cache.capacity) * self.slot_nbytes

    @property
    def missing(self) -> int:
        """Bytes that ``evict`` has freed, and that ``grow`` could take again."""
        return (self._at_load - self.cache.capacity) * self.slot_nbytes

    def grow(self, nbytes: int) -> int:
        """Take freed slots again, in whole allocations of ``nbytes`` at most; returns how many."""
        cache, before, room = self.cache, self.cache.capacity, nbytes // self.slot_nbytes
        missing = self._at_load - before
        more = missing if missing <= room else room - room % cache.slab_slots
        if more > 0:
            cache.grow(before + more)
        return cache.capacity - before

    def close(self) -> None:
        """Free the memory."""
        self.cache.close()
