"""Eviction: chooses which units stay in memory as caches grow or memory runs short.

What leaves a GPU goes to RAM if it fits. Evicted units return when there is room, without an extra
read or copy, since they pass through a ring anyway; on a GPU one slab at a time, or at once if its
budget grows. All changes happen between passes. This module moves units; it does not compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from localrt.common.errors import MemoryBudgetError
from localrt.common.formatting import format_bytes
from localrt.common.option_names import option
from localrt.models.weight_store import GpuUse, WeightMemory
from localrt.offload.account import growing_ring_nbytes
from localrt.offload.device.gpu import Gpu, Slab
from localrt.offload.experts.hybrid import HybridExperts
from localrt.offload.experts.memory import ExpertMemory
from localrt.offload.pipeline.caches import Caches
from localrt.offload.pipeline.lane import Lane, host_ring
from localrt.offload.pipeline.setup import Setup
from localrt.offload.pipeline.stage import Stage
from localrt.offload.placement import Where
from localrt.offload.ring import Ring
from localrt.quant.formats.packed import Bytes


def choose_units(stages: Sequence[Stage], nbytes: int, candidates: Sequence[Stage]) -> list[Stage]:
    """Choose ``candidates`` with at least ``nbytes`` in all, in order; none if too few.

    The choice exceeds ``nbytes`` only slightly and is spread over the pass. ``stages`` is the whole
    pass, including stages that are already streamed.
    """
    place = {stage.name: index for index, stage in enumerate(stages)}
    left = list(candidates)
    if sum(stage.unit.nbytes for stage in left) < nbytes:
        return []
    streamed = [index for index, stage in enumerate(stages) if stage.where.read]
    chosen: list[Stage] = []
    while nbytes > 0:
        # The smallest stage that suffices, else the largest; among equals, the farthest from
        # streamed ones.
        enough = [stage for stage in left if stage.unit.nbytes >= nbytes]
        size = (min if enough else max)(stage.unit.nbytes for stage in enough or left)
        equals = [stage for stage in left if stage.unit.nbytes == size]
        unit = max(equals, key=lambda stage: _distance(place[stage.name], streamed, len(stages)))
        left.remove(unit)
        streamed.append(place[unit.name])
        chosen.append(unit)
        nbytes -= size
    return sorted(chosen, key=lambda stage: place[stage.name])


def choose_slabs(slabs: Sequence[Sequence[Stage]], nbytes: int) -> list[Sequence[Stage]]:
    """Choose slabs with ``nbytes`` in all or slightly more; all slabs if they have less."""
    left, chosen = list(slabs), list[Sequence[Stage]]()
    while left and nbytes > 0:
        sizes = [sum(stage.unit.nbytes for stage in slab) for slab in left]
        enough = [size for size in sizes if size >= nbytes]
        size = min(enough) if enough else max(sizes)
        chosen.append(left.pop(sizes.index(size)))
        nbytes -= size
    return chosen


def _distance(index: int, others: Sequence[int], count: int) -> int:
    """Distance in stages to the nearest of ``others``, cyclically."""
    return min((min(abs(index - o), count - abs(index - o)) for o in others), default=count)


_OTHERS = "other programs need the memory"
_OWN = "something else in this program needs the GPU's memory"
_RELIEF_SHARE = 16  # a full GPU evicts 1/16 of its weights
_STREAMED = {Where.RAM: Where.SSD, Where.LINK: Where.SSD_LINK, Where.VRAM: Where.SSD_LINK}


class Balance(WeightMemory):
    """Keeps weights and ``caches`` within the budget of ``setup``. ``stages`` are in pass order.

    Units that are larger than a ring cannot pass through it. The RAM ring is enlarged if only
    larger units are left to evict. ``fixed`` is the size of weights in RAM that are never evicted.
    ``experts`` are the expert slots in RAM, ``gpu_experts`` those on the GPU. ``gpu_scratch``
    returns the bytes of GPU memory that kernels need besides weights and caches.
    """

    def __init__(
        self,
        setup: Setup,
        stages: Sequence[Stage],
        cpu: Lane,
        gpu: Lane | None,
        caches: Caches,
        *,
        fixed: int,
        experts: ExpertMemory | None,
        gpu_experts: HybridExperts | None,
        gpu_scratch: Callable[[], int],
    ) -> None:
        self.streams = True
        self._stages = stages
        self._cpu, self._gpu_lane = cpu, gpu
        self._ram_ring, self._vram_ring = setup.rings()
        self._chunk = setup.mode.block
        # The bytes of the ring that is used for expert slots are theirs.
        self._budget = setup.budget + setup.placement.ram_ring - self._ram_ring
        self._caches = caches
        self._fixed = fixed
        self._shortage = setup.shortage
        self._experts = experts
        self._gpu = setup.gpu
        self._max_gpu_capacity = 0 if self._gpu is None else self._gpu.capacity
        self._gpu_limit = self._max_gpu_capacity  # at load: a larger budget has no effect
        self._gpu_experts = gpu_experts
        self._gpu_scratch = gpu_scratch
        self._max_expert_nbytes = 0 if experts is None else experts.nbytes
        self.ring_growth = 0
        """Bytes by which the RAM ring exceeds the plan."""
        self._crossing = False  # whether the GPU computes units that can cross the link
        self._lent = 0  # bytes of the budget that other programs use
        self._evicted_ram: list[Stage] = []  # units evicted from RAM, latest last
        self._ram_at_load = self.ram_nbytes
        self._budget_note = ""  # note about the last change of the budget
        self._ram_reason = ""  # reason for the last eviction from RAM
        self._evicted_slabs: list[list[Stage]] = []  # units by former slab, latest last
        self._restoring: list[Stage] = []  # units being copied to a slab in this pass
        self._gpu_reason = ""
        self._gpu_caches = 0  # keys and values on the GPU, in the last pass
        self._gpu_reserved = 0  # bytes taken by ``take_gpu``

    @property
    def note(self) -> str:
        """A sentence about which weights have moved since loading, and why; empty if none has."""
        ram, vram = self._ram_at_load - self.ram_nbytes, self._gpu_evicted_nbytes
        clauses: list[str] = []
        if ram > 0 and self._ram_reason:
            clauses.append(f"{format_bytes(ram)} more of the weights are read for every token")
        if ram < 0 and self._budget_note:
            clauses.append(f"{format_bytes(-ram)} less of the weights are read for every token")
        if vram:
            clauses.append(f"{format_bytes(vram)} more are copied to the GPU")
        why = (self._ram_reason if ram > 0 else self._budget_note) or self._gpu_reason
        return f"{' and '.join(clauses)}: {why}" if clauses else ""

    @property
    def ram_nbytes(self) -> int:
        """Weights in RAM, without the ring."""
        experts = 0 if self._experts is None else self._experts.nbytes
        return self._fixed + sum(stage.ram_nbytes for stage in self._stages) + experts

    @property
    def spare(self) -> int:
        return max(0, self._room(self._caches.nbytes))

    @property
    def reclaimable(self) -> int:
        experts = 0 if self._experts is None else self._experts.reclaimable
        if self._ram_ring == 0:
            return experts
        return experts + sum(s.ram_nbytes for s in self._stages if not s.fixed)

    @property
    def lends(self) -> bool:
        return self._lent > 0

    # -- the budget ------------------------------------------------------------------------------

    def set_budget(self, nbytes: int, note: str) -> None:
        """See ``WeightMemory``; called between passes.

        With a larger budget, streamed units become resident as they pass, as far as there is room.
        """
        before = self._budget_note
        self._budget_note = note
        try:
            self._try_budget(nbytes)
        except MemoryBudgetError:
            self._budget_note = before
            raise
        read = [stage for stage in self._stages if stage.where is Where.SSD]
        self._evicted_ram = [
            *(stage for stage in read if stage not in self._evicted_ram),
            *self._evicted_ram,
        ]
        self._choose_ram_restores(self._caches.nbytes)

    def take(self, nbytes: int) -> None:
        budget = self._budget - nbytes
        if budget < 0:
            raise MemoryBudgetError(
                f"{format_bytes(nbytes)} are wanted, and of the budget the model has "
                f"{format_bytes(self._budget)}"
            )
        missing = self.ram_nbytes + self.ring_growth + self._caches.nbytes > budget
        self._try_budget(budget)
        if missing:
            self._ram_reason = "something else in this program needs memory"

    def take_gpu(self, nbytes: int) -> None:
        gpu = self._gpu
        if gpu is not None and nbytes > 0:
            self._fit_gpu(gpu, gpu.capacity - nbytes, _OWN)
        self._gpu_reserved += nbytes
        if gpu is not None:
            self._return_to_gpu(gpu)

    def set_gpu_budget(self, nbytes: int, note: str) -> None:
        gpu, nbytes = self._gpu, min(nbytes, self._gpu_limit)
        if gpu is not None:
            self._fit_gpu(gpu, nbytes, note)
            gpu.capacity = self._max_gpu_capacity = nbytes
            self._return_to_gpu(gpu)

    def _fit_gpu(self, gpu: Gpu, nbytes: int, why: str) -> None:
        """Evict what exceeds ``nbytes`` of the GPU's memory."""
        self.drop_restore()
        missing, most = gpu.used + self._gpu_needed() - nbytes, self._leavable
        if missing > most:
            raise MemoryBudgetError(
                f"{gpu.name}: {format_bytes(missing)} more are wanted, and weights that can be "
                f"streamed leave {format_bytes(most)}"
            )
        if missing > 0:
            self._gpu_reason = why
            self.evict_gpu(missing)

    def _try_budget(self, nbytes: int) -> None:
        before = self._budget, self._ram_reason
        self._budget = nbytes
        try:
            self.make_room(0)
        except MemoryBudgetError:
            self._budget, self._ram_reason = before
            raise

    # -- before and after a pass -----------------------------------------------------------------

    def follow(self, *, crossing: bool) -> None:
        """Prepare a pass in which the GPU (if ``crossing``) or the CPU computes crossing units."""
        if crossing is self._crossing:
            return
        self._crossing = crossing
        if any(stage.place(crossing=True) is not stage.where for stage in self._stages):
            self.schedule()  # units already copied ahead are for the other kind of pass

    def make_room(self, growth: int, gpu_growth: int = 0) -> None:
        """Evict enough for a pass that adds ``growth`` bytes of RAM and ``gpu_growth`` of VRAM.

        Raises:
            MemoryBudgetError: evicting everything that can be streamed is not enough.
        """
        self.drop_restore()
        caches = self._caches.nbytes + growth
        ram, vram = self._shortage()
        if ram > 0:
            self._lent += self.evict(ram)
            self._ram_reason = _OTHERS
        elif ram < 0:  # at least twice the needed memory is free
            self._lent = max(0, self._lent + ram)
        self._make_room_on_gpu(gpu_growth, vram)
        missing = max(0, self.ram_nbytes + self.ring_growth + caches - self._budget)
        if missing > 0:
            self._ram_reason = self._budget_note or "keys and values have grown"
        if missing > 0 and self.evict(missing) < missing and not self._enlarge_ring(missing):
            raise MemoryBudgetError(
                f"the context has grown to {format_bytes(caches)} of keys and values and "
                f"{format_bytes(self._budget)} is left for them and for what cannot be streamed: "
                f"use a shorter {option('ctx')}, {option('kv_format', 'int8')}, or more "
                f"{option('ram')}"
            )
        self._choose_ram_restores(caches)
        self._choose_slab_restore()
        self._grow_experts(caches)
        self._grow_gpu_experts()

    def settle(self) -> None:
        """After a pass, make the units resident that were copied out of a ring."""
        if any(stage.copy is None for stage in self._restoring):  # such as a head without logits
            self.drop_restore()
        copied = [stage for stage in self._stages if stage.copy is not None]
        for stage in self._stages:
            stage.keep = False
        if copied:
            self._stop_copies()  # copies read units' locations
        for stage in copied:
            memory, slab = stage.copy, stage.restore_slab
            stage.copy = stage.restore_slab = None
            stage.where = Where.RAM if slab is None else Where.VRAM
            assert memory is not None, "it was copied"
            stage.put(memory, slab)
            if slab is None:
                self._evicted_ram.remove(stage)
        if self._restoring:
            self._restoring = []
            self._evicted_slabs.pop()
        if copied:
            self.schedule()

    def drop_restore(self) -> None:
        """Free the slab of an unfinished restore: its pass has failed."""
        slab = self._restoring[0].restore_slab if self._restoring else None
        for stage in self._restoring:
            stage.keep, stage.copy, stage.restore_slab = False, None, None
        self._restoring = []
        if slab is not None:
            slab.free()

    # -- eviction --------------------------------------------------------------------------------

    def evict(self, nbytes: int) -> int:
        """Free at least ``nbytes`` of RAM if possible; returns the bytes freed.

        Copies of what is on the GPU go first, then expert slots: they cost the least and are
        easiest to restore.
        """
        freed = 0
        for stage in self._stages:
            if freed < nbytes and stage.ram_copy is not None:
                freed += stage.drop_copy()
        self._ram_at_load -= freed
        if self._gpu_experts is not None:
            self._gpu_experts.settle()  # running copies lock the experts that they read
        if self._experts is not None and freed < nbytes:
            freed += self._experts.resize(self._experts.nbytes - (nbytes - freed))
        if freed >= nbytes:
            return freed
        return freed + self._stream(choose_units(self._stages, nbytes - freed, self._evictable()))

    def evict_gpu(self, nbytes: int) -> int:
        """The same for the GPU's memory: units are copied in each pass, from RAM if they fit it."""
        freed = 0 if self._gpu_experts is None else self._gpu_experts.evict(nbytes)
        return freed + self._evict_slabs(nbytes - freed) if freed < nbytes else freed

    def _evict_slabs(self, nbytes: int) -> int:
        chosen = choose_slabs(self._slabs(), nbytes)
        self._evicted_slabs += map(list, chosen)
        stages = [stage for slab in chosen for stage in slab]
        room = self._room(self._caches.nbytes)
        for stage in stages:
            if stage.ram_copy is None and stage.unit.nbytes <= room:
                room -= stage.copy_to_ram()
                self._ram_at_load += stage.ram_nbytes
        return self._stream(stages)

    @property
    def gpu_use(self) -> GpuUse | None:
        if self._gpu is None:
            return None
        used, missing = self._gpu.used + self._gpu_needed(), self._gpu_evicted_nbytes
        if self._gpu_experts is not None:
            missing += self._gpu_experts.slots.missing
        return GpuUse(used, self._gpu_limit, self._leavable, missing)

    @property
    def _gpu_evicted_nbytes(self) -> int:
        return sum(stage.unit.nbytes for slab in self._evicted_slabs for stage in slab)

    def _gpu_needed(self, growth: int = 0) -> int:
        """Bytes of GPU memory for all but weights, if a pass adds ``growth`` bytes."""
        return self._caches.gpu_nbytes + growth + self._gpu_scratch() + self._gpu_reserved

    @property
    def _leavable(self) -> int:
        """Bytes of expert slots that can be freed, and of slabs whose units can be streamed."""
        experts = 0 if self._gpu_experts is None else self._gpu_experts.reclaimable
        return experts + sum(stage.unit.nbytes for slab in self._slabs() for stage in slab)

    def relieve(self) -> bool:
        """Free GPU memory after a pass ran out of it; False if nothing can be freed."""
        gpu = self._gpu
        if gpu is None:
            return False
        freed = self.evict_gpu(max(gpu.used // _RELIEF_SHARE, 1))
        if freed:
            gpu.capacity = gpu.used + gpu.reserved
            self._gpu_reason = _OTHERS
        return freed > 0

    def _make_room_on_gpu(self, growth: int, shortage: int) -> None:
        """Make room on the GPU: ``growth`` bytes for a pass, ``shortage`` for other programs."""
        gpu = self._gpu
        if gpu is None:
            return
        needed = self._gpu_needed(growth)
        if shortage > 0:
            freed = self.evict_gpu(shortage)
            gpu.capacity = min(gpu.capacity, gpu.used + needed)
            self._gpu_reason = _OTHERS if freed else self._gpu_reason
        elif shortage < 0:
            gpu.capacity = min(self._max_gpu_capacity, gpu.capacity - shortage)
        missing = gpu.used + needed - gpu.capacity
        if missing > 0:
            if self._caches.gpu_nbytes + growth > self._gpu_caches:
                self._gpu_reason = "keys and values on the GPU have grown"
            elif self._gpu_reserved:
                self._gpu_reason = _OWN
            elif not self._budget_note:
                self._gpu_reason = _OTHERS
            if self.evict_gpu(missing) < missing:  # others' wishes come after a pass's needs
                gpu.capacity = min(self._max_gpu_capacity, gpu.used + needed)
            if gpu.used + needed > gpu.capacity:
                raise MemoryBudgetError(
                    f"{gpu.name}: keys, values and what kernels need take {format_bytes(needed)}, "
                    f"weights that cannot be streamed {format_bytes(gpu.used)}, and "
                    f"{format_bytes(gpu.capacity)} may be used: use a shorter {option('ctx')}, or "
                    f"more {option('gpu_memory')}"
                )
        self._gpu_caches = self._caches.gpu_nbytes + growth
        gpu.set_reserved(needed)

    def _slabs(self) -> list[list[Stage]]:
        """The units of each slab on the GPU whose units can all be streamed."""
        limit = min(self._ram_ring, self._vram_ring)
        slabs: dict[int, list[Stage]] = {}
        for stage in self._stages:
            if stage.slab is not None and not stage.fixed:
                slabs.setdefault(id(stage.slab), []).append(stage)
        return [slab for slab in slabs.values() if all(s.unit.nbytes <= limit for s in slab)]

    def _evictable(self) -> list[Stage]:
        resident = [s for s in self._stages if not s.fixed and s.ram_copy is None]
        return [s for s in resident if 0 < s.ram_nbytes <= self._ram_ring]

    def _enlarge_ring(self, missing: int) -> bool:
        """Free ``missing`` bytes by streaming larger units through an enlarged ring."""
        size = growing_ring_nbytes(
            max((s.ram_nbytes for s in self._stages if not s.fixed), default=0)
        )
        more = size - self._ram_ring
        if more <= 0 or self._ram_ring == 0:
            return False
        before, self._ram_ring = self._ram_ring, size
        chosen = choose_units(self._stages, missing + more, self._evictable())
        if not chosen:
            self._ram_ring = before
            return False
        self.ring_growth += more
        self._stream(chosen, host_ring(size, self._chunk, self._gpu))
        return True

    def _stream(self, chosen: Sequence[Stage], ring: Ring[Bytes] | None = None) -> int:
        """Stream the ``chosen`` units from now on; returns the bytes freed."""
        if chosen:
            self._stop_copies()  # copies may be reading this memory
        freed = 0
        for stage in chosen:
            if stage.where is Where.RAM:
                self._evicted_ram.append(stage)
            freed += stage.move(
                Where.LINK if stage.ram_copy is not None else _STREAMED[stage.where]
            )
        if chosen:
            self.schedule(ring)
        return freed

    def schedule(self, ring: Ring[Bytes] | None = None) -> None:
        """Begin to stream the units that are not resident, through ``ring`` in RAM if given."""
        self._stop_copies()
        if ring is not None:
            for stage in self._stages:
                if stage.lane is self._cpu:
                    stage.clear_ring_parts()
        self._cpu.stream([stage.unit for stage in self._stages if stage.where.read], ring)
        if self._gpu_lane is not None:
            crossing = self._crossing
            self._gpu_lane.stream(
                [s.unit for s in self._stages if s.place(crossing=crossing).copied]
            )
            for stage in self._stages if not crossing else ():
                stage.bind_ring()

    def _stop_copies(self) -> None:
        if self._gpu_lane is not None:
            self._gpu_lane.stop_copies()

    # -- restoring -------------------------------------------------------------------------------

    def _room(self, caches: int) -> int:
        taken = self._lent + self.ring_growth + self.ram_nbytes + caches
        return self._budget - taken

    def _grow_experts(self, caches: int) -> None:
        """Restore evicted expert slots, as far as there is room."""
        experts = self._experts
        if experts is None or experts.nbytes >= self._max_expert_nbytes:
            return
        room = self._room(caches)
        if room >= experts.step_nbytes:
            experts.resize(min(self._max_expert_nbytes, experts.nbytes + room))

    def _choose_slab_restore(self) -> None:
        """Have the next pass restore the slab evicted last, if it fits along with the caches of the
        next tokens; otherwise it would soon be evicted again.
        """
        gpu = self._gpu
        if gpu is None or not self._evicted_slabs:
            return
        if (slab := self._new_slab(gpu)) is not None:
            self._restoring = self._evicted_slabs[-1]
            for stage in self._restoring:
                stage.keep, stage.restore_slab = True, slab

    def _new_slab(self, gpu: Gpu) -> Slab | None:
        """Memory for the slab evicted last; None if there is no room."""
        stages = self._evicted_slabs[-1]
        nbytes = sum(stage.unit.nbytes for stage in stages)
        if gpu.capacity - gpu.used - gpu.reserved < nbytes + self._caches.gpu_step:
            return None
        try:
            return Slab(gpu, nbytes, len(stages))
        except MemoryBudgetError:  # another program has taken the memory
            return None

    def _grow_gpu_experts(self) -> None:
        """Take expert slots again, as far as there is room, once all slabs are back."""
        gpu, step = self._gpu, self._caches.gpu_step
        if gpu is not None and self._gpu_experts is not None and not self._evicted_slabs:
            self._gpu_experts.grow(gpu.capacity - gpu.used - gpu.reserved - step)

    def _return_to_gpu(self, gpu: Gpu) -> None:
        """Bring evicted slabs in RAM and experts back to the GPU, as far as there is room."""
        self.drop_restore()
        gpu.set_reserved(self._gpu_needed())
        evicted, count = self._evicted_slabs, len(self._evicted_slabs)
        while evicted and all(stage.where is Where.LINK for stage in evicted[-1]):
            if (slab := self._new_slab(gpu)) is None:
                break
            if len(evicted) == count:
                self._stop_copies()
            for stage in evicted.pop():
                stage.copy_back(gpu, slab)
        if len(evicted) < count:
            self.schedule()
        self._grow_gpu_experts()

    def _choose_ram_restores(self, caches: int) -> None:
        """Have the next pass restore evicted units to RAM, latest first, as far as they fit."""
        for stage in self._stages:
            stage.keep, stage.copy = False, None
        if not self._evicted_ram:
            return
        room = self._room(caches)
        for stage in reversed(self._evicted_ram):
            if stage.unit.nbytes <= room:
                stage.keep = True
                room -= stage.unit.nbytes
