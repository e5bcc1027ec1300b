"""Slots of experts: in RAM, loaded from the SSD, and in a GPU's memory, filled over the link.

In RAM a layer's turn begins with ``demand`` (the router has chosen: reads begin); then each absent
expert is waited for and enters its layer's table. Computed experts may make room for later ones, so
a layer may have more experts than slots. The thread that runs the pass does everything but the
reading.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from localrt.models.checkpoints.store.manifest import StoredUnit
from localrt.offload.device.gpu import Event, Gpu
from localrt.offload.experts.cache import ExpertCache, Key, Slot
from localrt.offload.reading.reader import DemandLoad, DemandReader
from localrt.quant.formats.packed import Bytes
from localrt.quant.ops.arrays import DeviceMemory, Memory
from localrt.quant.ops.experts import ExpertWeights, Routing
from localrt.quant.ops.protocol import Check


@dataclass(frozen=True, slots=True)
class Demanded:
    """The experts of one layer in one pass: those to compute at once and those to wait for.

    ``absent`` are in the order in which they are read.
    """

    present: tuple[int, ...]
    absent: tuple[int, ...]


class ExpertPool:
    """The experts of ``units``, by (layer, expert), layers counted among the sparse ones.

    ``cache`` decides which have slots, ``reader`` reads, ``build`` makes weights of bytes.
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
        self._most = cache.capacity
        self._ended: deque[DemandLoad] = deque()
        self._queued: list[int] = []  # the present layer's experts that have no slot yet
        self._demanded: set[Key] = set()  # the present layer's experts that were absent
        self._whole = False

    @property
    def nbytes(self) -> int:
        """Bytes that the slots may take, which a budget must count."""
        return self.cache.capacity * self.slot_nbytes

    @property
    def reclaimable(self) -> int:
        """Bytes that ``resize`` could free."""
        return self.nbytes - self._least * self.slot_nbytes

    def holds(self, layer: int, expert: int) -> bool:
        """Whether an expert is in a slot and fully loaded."""
        slot = self.cache.slot(layer, expert)
        return slot is not None and slot.load is None

    @property
    def whole(self) -> bool:
        """Whether all experts are in slots and loaded."""
        if not self._whole and len(self.cache) == len(self._units):
            self._settle_arrived()
            self._whole = len(self.cache) == len(self._units) and not self.cache.loading()
        return self._whole

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

    # -- a layer's turn --------------------------------------------------------------------------

    def demand(
        self, layer: int, routing: Routing, *, only: Sequence[int] | None = None
    ) -> Demanded:
        """Begin to read the absent experts that the router has chosen.

        Resident experts keep their slots until ``computed``. Experts not in ``only`` are ignored.
        """
        if only is not None and self.whole:
            return Demanded(tuple(only), ())
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
        """End the layer's turn, even if it failed; running reads continue."""
        self._queued = []
        self.cache.release(layer)

    # -- memory ----------------------------------------------------------------------------------

    def resize(self, nbytes: int) -> int:
        """Limit slots to ``nbytes``, but keep at least one row's; returns the bytes freed.

        Called between passes; reads ahead that have not begun are cancelled. Slots come and go as
        they are allocated, together.
        """
        before, self._whole = self.nbytes, False
        loads = [self._load(*key) for key in self.cache.loading()]
        for load in self._reader.cancel(loads):
            self._forget(*self._keys[load.unit.name])
        least, slots = self._least, min(nbytes // self.slot_nbytes, self._most)
        if slots < self._most:
            slots -= max(0, slots - self.cache.capacity) % self.cache.together
        self.cache.resize(max(least, slots), least)
        return max(0, before - self.nbytes)

    @property
    def _least(self) -> int:
        """The fewest slots: enough for one row's experts, and for those being loaded, which may be
        in as many allocations.
        """
        cache = self.cache
        allocations = max(-(-cache.used // cache.together), len(cache.loading()))
        return min(allocations * cache.together, cache.capacity)

    def _make_room(self, check: Check | None) -> None:
        """Without evictable slots, wait for a read ahead, or else let any layer make room."""
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
        """Settle reads ahead that have ended: their experts can then be evicted."""
        while self._ended:
            load = self._ended.popleft()
            layer, expert = self._keys[load.unit.name]
            slot = self.cache.slot(layer, expert)
            if slot is None or slot.load is not load:
                continue  # ``arrive`` has settled it
            if load.error is not None:
                self._forget(layer, expert)  # it is read again when needed
            else:
                self._settle(layer, expert)

    def _settle(self, layer: int, expert: int) -> None:
        """Make weights of a completed load's bytes."""
        data = self.data(layer, expert)
        try:
            weights = self._build((layer, expert), data)
        except BaseException:
            self._forget(layer, expert)
            raise
        self.cache.fill(layer, expert, weights)
        self.cache.let_go(layer, [expert])

    def _forget(self, layer: int, expert: int) -> None:
        """Free the slot of a load that failed or was cancelled."""
        self.cache.let_go(layer, [expert])
        self.cache.drop(layer, expert)


@dataclass(frozen=True, slots=True)
class Arrival:
    """An expert on its way to a ``slot`` on a GPU, where it is when ``copied`` has happened."""

    key: Key
    slot: Slot[DeviceMemory]
    copied: Event | None
    weights: ExpertWeights


class GpuSlots:
    """Slots on a GPU, whose memory ``cache`` has; it says which of ``units`` they hold.

    ``build`` makes weights from a unit's bytes on the GPU and their copy in RAM. A slot takes
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
        self._units = units
        self._build = build
        self._last: dict[int, Event | None] = {}  # use by eager kernels, by layer
        self._replayed: set[int] = set()  # layers used since by recorded ones
        self._layouts: dict[Key, Hashable] = {}
        self._alike: dict[Hashable, Hashable] = {}

    def bring(self, key: Key, data: Bytes) -> Arrival:
        """Begin to copy an expert's bytes, ``data`` in RAM, to a slot.

        ``data`` must stay as it is until the copy has ended. Its table holds it from ``enter`` on.
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
            self._last[slot.layer] = self.gpu.record()
        return Arrival(key, slot, copied, slot.made[1])

    def enter(self, arrival: Arrival) -> None:
        """Have kernels find an expert that has arrived, or that they wait for."""
        if self.cache.slot(*arrival.key) is arrival.slot:
            self.cache.fill(*arrival.key, arrival.weights)

    def used(self, layer: int) -> None:
        """Record that kernels have been started that use a layer's experts."""
        self._last[layer] = self.gpu.record()
        self._replayed.discard(layer)

    def replayed(self, layer: int) -> None:
        """A recording has been started that uses any of a layer's experts: the event is recorded
        once it is asked for.
        """
        self._replayed.add(layer)

    def _unused(self, slot: Slot[DeviceMemory]) -> Event | None:
        """The event after which nobody reads a slot's content."""
        if slot.layer is None:
            return None
        if slot.layer in self._replayed:
            return self.gpu.record()
        return self._last.get(slot.layer)

    def _layout(self, key: Key) -> Hashable:
        """A key for how an expert's weights lie in its memory: most experts share one. None if they
        do not, but are made of the bytes there.
        """
        found = self._layouts.get(key)
        if found is None:
            tensors, in_place = self._units[key].tensors, self.gpu.ops.in_place
            if not all(in_place(t.format, t.shape[1]) for t in tensors if len(t.shape) > 1):
                return None
            own = any(len(tensor.shape) == 1 for tensor in tensors)  # vectors have their own memory
            found = key if own else tuple(replace(tensor, name="") for tensor in tensors)
            self._layouts[key] = found = self._alike.setdefault(found, found)
        return found

    @property
    def reclaimable(self) -> int:
        """Bytes that ``evict`` could free: all allocations but one."""
        return max(0, self.cache.capacity - self.cache.together) * self.slot_nbytes

    def evict(self, nbytes: int) -> int:
        """Free ``nbytes`` of the GPU, except its last allocation; returns the bytes freed.

        Called between passes, when nothing is on its way to a slot.
        """
        cache, before = self.cache, self.cache.capacity
        cache.resize(before - -(-nbytes // self.slot_nbytes), least=1)
        return (before - cache.capacity) * self.slot_nbytes

    def close(self) -> None:
        """Free the memory."""
        self.cache.close()
