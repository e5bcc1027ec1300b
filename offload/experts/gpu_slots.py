"""Experts in a GPU's memory: equal slots in a few allocations, filled over the link.

It knows bytes and events, not who computes what.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from localrt.models.checkpoints.store.manifest import StoredUnit
from localrt.offload.device.gpu import SLABS, Event, Gpu, Slab
from localrt.offload.experts.cache import ExpertCache, Key
from localrt.quant.ops.experts import ExpertWeights


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
        """Bytes that ``give_back`` could free."""
        return self._memory.reclaimable

    def give_back(self, nbytes: int) -> int:
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
