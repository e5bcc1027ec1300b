"""Chooses which units stay in memory: evicts some as caches grow or memory runs short.

Evicted units are kept again when there is room, without an extra read or copy: they pass through a
ring anyway. Of a GPU a slab comes back at a time. All changes happen between passes. This module
moves units; it does not compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from localrt.common.errors import MemoryBudgetError
from localrt.common.formatting import format_bytes
from localrt.common.option_names import option
from localrt.models.weight_store import WeightMemory
from localrt.offload.account import growing_ring_nbytes
from localrt.offload.device.gpu import Gpu, Slab
from localrt.offload.experts.hybrid import HybridExperts
from localrt.offload.experts.memory import ExpertMemory
from localrt.offload.pipeline.caches import Caches
from localrt.offload.pipeline.lane import Lane
from localrt.offload.pipeline.stage import Stage
from localrt.offload.placement import Where
from localrt.offload.ring import Ring
from localrt.quant.formats.packed import Bytes

_OTHERS = "other programs need the memory"
_RELIEF_SHARE = 16  # a full GPU evicts one in so many bytes of its weights
_STREAMED = {Where.RAM: Where.SSD, Where.LINK: Where.SSD_LINK, Where.VRAM: Where.SSD_LINK}


def host_ring(nbytes: int, chunk: int, gpu: Gpu | None) -> Ring[Bytes]:
    """Make the CPU's ring in RAM; with a GPU it is pinned, since copies over the link read it."""
    if gpu is None:
        return Ring(nbytes, chunk)
    return Ring(nbytes, chunk, gpu.host_buffer(nbytes), free=gpu.free_host)


class Balance(WeightMemory):
    """Keeps weights and caches within ``budget`` bytes of RAM. ``stages`` are a pass's, in order.

    ``caches`` share the budget. ``ram_ring`` and ``vram_ring`` are bytes of the rings, 0 for none:
    larger units cannot pass through. The CPU's, with chunks of ``chunk`` bytes, is enlarged if only
    larger units are left to evict. ``fixed`` are bytes of weights in RAM that stay. ``shortage``
    says how many bytes of RAM and of the GPU's memory others need now (below zero: how many are
    spare again). ``experts`` are a mixture's slots, ``gpu_experts`` those on the GPU.
    ``gpu_scratch`` says how many bytes of the GPU kernels need now beside weights and caches.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        cpu: Lane,
        gpu: Lane | None,
        caches: Caches,
        *,
        budget: int,
        ram_ring: int,
        vram_ring: int,
        chunk: int,
        fixed: int,
        shortage: Callable[[], tuple[int, int]],
        experts: ExpertMemory | None,
        gpu_experts: HybridExperts | None,
        gpu_scratch: Callable[[], int],
    ) -> None:
        self.streams = True
        self._stages = stages
        self._cpu, self._gpu_lane = cpu, gpu
        self._ram_ring, self._vram_ring, self._chunk = ram_ring, vram_ring, chunk
        self._budget = budget
        self._caches = caches
        self._fixed = fixed
        self._shortage = shortage
        self._experts = experts
        self._gpu = None if gpu is None else gpu.gpu
        self._gpu_most = 0 if self._gpu is None else self._gpu.capacity
        self._gpu_experts = gpu_experts
        self._gpu_scratch = gpu_scratch
        self._most_experts = 0 if experts is None else experts.nbytes
        self.ring_growth = 0
        """Bytes of the CPU's ring beyond the plan."""
        self._crossing = False  # whether the GPU computes units that can cross the link
        self._withheld = 0  # bytes of the budget that others have needed
        self._given: list[Stage] = []  # evicted stages, latest last
        self._at_load = self.ram_nbytes
        self._changed = ""  # says that the budget changed, and to what
        self._why = ""  # why units were evicted
        self._gpu_given = 0
        self._evicted: list[list[Stage]] = []  # by their former slabs, latest last
        self._returning: list[Stage] = []  # to a slab, in the pass at hand
        self._gpu_why = ""
        self._gpu_caches = 0  # keys and values on the GPU, in the last pass
        self._gpu_taken = 0  # bytes of the GPU that something else has now

    @property
    def note(self) -> str:
        """A sentence on which weights have moved since loading, and why; empty if none has."""
        ram, vram = self._at_load - self.ram_nbytes, self._gpu_given
        parts: list[str] = []
        if ram > 0 and self._why:
            parts.append(f"{format_bytes(ram)} more of the weights are read for every token")
        if ram < 0 and self._changed:
            parts.append(f"{format_bytes(-ram)} less of the weights are read for every token")
        if vram:
            parts.append(f"{format_bytes(vram)} more are copied to the GPU")
        why = (self._why if ram > 0 else self._changed) or self._gpu_why
        return f"{' and '.join(parts)}: {why}" if parts else ""

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
        return experts + sum(s.ram_nbytes for s in self._stages if not s.stays)

    # -- the budget ------------------------------------------------------------------------------

    def set_budget(self, nbytes: int, words: str) -> None:
        """See ``WeightMemory``; called between passes.

        With a larger budget, streamed units are kept as they pass, as far as there is room.
        """
        before = self._changed
        self._changed = words
        try:
            self._try_budget(nbytes)
        except MemoryBudgetError:
            self._changed = before
            raise
        read = [stage for stage in self._stages if stage.where is Where.SSD]
        self._given = [*(stage for stage in read if stage not in self._given), *self._given]
        self._choose_kept(self._caches.nbytes)

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
            self._why = "something else in this program needs memory"

    def take_gpu(self, nbytes: int) -> None:
        gpu = self._gpu
        if gpu is None or nbytes <= 0:  # units return to what is given back as they pass
            self._gpu_taken += nbytes
            return
        self.drop_returning()
        missing = nbytes - (gpu.capacity - gpu.used - gpu.held)
        if missing > self._in_slabs:  # experts stay, as nothing brings them all back
            raise MemoryBudgetError(
                f"{gpu.name}: {format_bytes(nbytes)} are wanted, and weights that can be streamed "
                f"leave {format_bytes(max(0, nbytes - missing + self._in_slabs))}"
            )
        if missing > 0:
            self._evict_slabs(missing)
            self._gpu_why = "something else in this program needs the GPU's memory"
        self._gpu_taken += nbytes
        gpu.hold(gpu.held + nbytes)

    def _try_budget(self, nbytes: int) -> None:
        before = self._budget, self._why
        self._budget = nbytes
        try:
            self.make_room(0)
        except MemoryBudgetError:
            self._budget, self._why = before
            raise

    # -- before and after a pass -----------------------------------------------------------------

    def follow(self, *, crossing: bool) -> None:
        """Prepare a pass in which the GPU (if ``crossing``) or the CPU computes crossing units."""
        if crossing is self._crossing:
            return
        self._crossing = crossing
        if any(stage.place(crossing=True) is not stage.where for stage in self._stages):
            self.schedule()  # units copied ahead are for the other kind of pass

    def make_room(self, growth: int, gpu_growth: int = 0) -> None:
        """Evict what is missing for a pass that adds ``growth`` bytes of RAM and ``gpu_growth``
        bytes of a GPU's memory.

        Raises:
            MemoryBudgetError: evicting everything that can be streamed is not enough.
        """
        self.drop_returning()
        caches = self._caches.nbytes + growth
        ram, vram = self._shortage()
        if ram > 0:
            self._withheld += self.evict(ram)
            self._why = _OTHERS
        elif ram < 0:  # free: at least twice what we would take
            self._withheld = max(0, self._withheld + ram)
        self._make_room_on_gpu(gpu_growth, vram)
        missing = max(0, self.ram_nbytes + self.ring_growth + caches - self._budget)
        if missing > 0:
            self._why = self._changed or "keys and values have grown"
        if missing > 0 and self.evict(missing) < missing and not self._widen(missing):
            raise MemoryBudgetError(
                f"the context has grown to {format_bytes(caches)} of keys and values and "
                f"{format_bytes(self._budget)} is left for them and for what cannot be streamed: "
                f"use a shorter {option('ctx')}, {option('kv_format', 'int8')}, or more "
                f"{option('ram')}"
            )
        self._choose_kept(caches)
        self._choose_returning()
        self._grow_experts(caches)

    def settle(self) -> None:
        """After a pass, make the units resident that were copied as they passed."""
        if any(stage.copy is None for stage in self._returning):  # such as a head without logits
            self.drop_returning()
        copied = [stage for stage in self._stages if stage.copy is not None]
        for stage in self._stages:
            stage.keep = False
        if copied:
            self._stop_copies()  # copies look up where a unit is
        for stage in copied:
            memory, slab = stage.copy, stage.returning
            stage.copy = stage.returning = None
            stage.where = Where.RAM if slab is None else Where.VRAM
            assert memory is not None, "it was copied"
            stage.put(memory, slab)
            if slab is None:
                self._given.remove(stage)
            else:
                self._gpu_given -= stage.unit.nbytes
        if self._returning:
            self._returning = []
            self._evicted.pop()
        if copied:
            self.schedule()

    def drop_returning(self) -> None:
        """Free the slab that units were to return to: their pass has not ended well."""
        slab = self._returning[0].returning if self._returning else None
        for stage in self._returning:
            stage.keep, stage.copy, stage.returning = False, None, None
        self._returning = []
        if slab is not None:
            slab.free()

    @property
    def gpu(self) -> tuple[int, int] | None:
        return None if self._gpu is None else (self._gpu.used, self._gpu.capacity)

    # -- giving back -----------------------------------------------------------------------------

    def evict(self, nbytes: int) -> int:
        """Free at least ``nbytes`` of RAM if possible; returns the bytes freed.

        Slots of experts go first: they cost the least and are easiest to restore.
        """
        if self._gpu_experts is not None:
            self._gpu_experts.settle()  # copies hold what they read
        freed = 0 if self._experts is None else self._experts.resize(self._experts.nbytes - nbytes)
        if freed >= nbytes:
            return freed
        return freed + self._move(choose_units(self._stages, nbytes - freed, self._able()))

    def evict_gpu(self, nbytes: int) -> int:
        """The same for the GPU's memory: evicted units are read and copied in each pass."""
        freed = 0 if self._gpu_experts is None else self._gpu_experts.evict(nbytes)
        return freed + self._evict_slabs(nbytes - freed) if freed < nbytes else freed

    def _evict_slabs(self, nbytes: int) -> int:
        chosen = choose_slabs(self._slabs(), nbytes)
        self._evicted += map(list, chosen)
        streamed = self._move([stage for slab in chosen for stage in slab])
        self._gpu_given += streamed
        return streamed

    def shrink_gpu(self, nbytes: int, words: str) -> int:
        experts = 0 if self._gpu_experts is None else self._gpu_experts.reclaimable
        if self._in_slabs + experts < nbytes:
            return 0
        freed = self.evict_gpu(nbytes)
        self._evicted.clear()  # what was asked for stays away
        if freed and self._gpu is not None:
            self._gpu.capacity -= freed
            self._gpu_most = self._gpu.capacity
            self._changed = self._why = words
        return freed

    @property
    def _in_slabs(self) -> int:
        """Bytes of the GPU's units that can be streamed."""
        return sum(stage.unit.nbytes for slab in self._slabs() for stage in slab)

    def relieve(self) -> bool:
        """Use less of the GPU's memory after a pass found none; False if nothing can be freed."""
        gpu = self._gpu
        if gpu is None:
            return False
        freed = self.evict_gpu(max(gpu.used // _RELIEF_SHARE, 1))
        if freed:
            gpu.capacity = gpu.used + gpu.held
            self._gpu_why = _OTHERS
        return freed > 0

    def _make_room_on_gpu(self, growth: int, shortage: int) -> None:
        """Make room on the GPU for ``growth`` bytes of a pass and ``shortage`` bytes of others."""
        gpu = self._gpu
        if gpu is None:
            return
        held = self._caches.gpu_nbytes + growth + self._gpu_scratch() + self._gpu_taken
        if shortage > 0:
            freed = self.evict_gpu(shortage)
            gpu.capacity = min(gpu.capacity, gpu.used + held)
            self._gpu_why = _OTHERS if freed else self._gpu_why
        elif shortage < 0:
            gpu.capacity = min(self._gpu_most, gpu.capacity - shortage)
        missing = gpu.used + held - gpu.capacity
        if missing > 0:
            if self._caches.gpu_nbytes + growth > self._gpu_caches:
                self._gpu_why = "keys and values on the GPU have grown"
            elif self._gpu_taken:
                self._gpu_why = "something else in this program needs the GPU's memory"
            elif not self._changed:
                self._gpu_why = _OTHERS
            if self.evict_gpu(missing) < missing:
                raise MemoryBudgetError(
                    f"{gpu.name}: keys, values and what kernels need take {format_bytes(held)}, "
                    f"weights that cannot be streamed {format_bytes(gpu.used)}, and "
                    f"{format_bytes(gpu.capacity)} may be used: use a shorter {option('ctx')}, or "
                    f"more {option('gpu_memory')}"
                )
        self._gpu_caches = self._caches.gpu_nbytes + growth
        gpu.hold(held)

    def _slabs(self) -> list[list[Stage]]:
        """The units of each slab on the GPU whose units can all be streamed."""
        limit = min(self._ram_ring, self._vram_ring)
        slabs: dict[int, list[Stage]] = {}
        for stage in self._stages:
            if stage.slab is not None and not stage.stays:
                slabs.setdefault(id(stage.slab), []).append(stage)
        return [slab for slab in slabs.values() if all(s.unit.nbytes <= limit for s in slab)]

    def _able(self) -> list[Stage]:
        return [s for s in self._stages if 0 < s.ram_nbytes <= self._ram_ring and not s.stays]

    def _widen(self, missing: int) -> bool:
        """Free ``missing`` bytes with an enlarged ring, through which larger units pass too."""
        size = growing_ring_nbytes(
            max((s.ram_nbytes for s in self._stages if not s.stays), default=0)
        )
        more = size - self._ram_ring
        if more <= 0 or self._ram_ring == 0:
            return False
        before, self._ram_ring = self._ram_ring, size
        chosen = choose_units(self._stages, missing + more, self._able())
        if not chosen:
            self._ram_ring = before
            return False
        self.ring_growth += more
        self._move(chosen, host_ring(size, self._chunk, self._gpu))
        return True

    def _move(self, chosen: Sequence[Stage], ring: Ring[Bytes] | None = None) -> int:
        """Stream the ``chosen`` from now on; returns the bytes freed."""
        if chosen:
            self._stop_copies()  # copies may be reading what is freed
        freed = 0
        for stage in chosen:
            if stage.where is Where.RAM:
                self._given.append(stage)
            freed += stage.move(_STREAMED[stage.where])
        if chosen:
            self.schedule(ring)
        return freed

    def schedule(self, ring: Ring[Bytes] | None = None) -> None:
        """Begin to stream what is not resident, through ``ring`` in RAM if given."""
        self._stop_copies()
        if ring is not None:
            for stage in self._stages:
                if stage.lane is self._cpu:
                    stage.forget_places()
        self._cpu.stream([stage.unit for stage in self._stages if stage.where.read], ring)
        if self._gpu_lane is not None:
            crossing = self._crossing
            self._gpu_lane.stream(
                [s.unit for s in self._stages if s.place(crossing=crossing).copied]
            )
            for stage in self._stages if not crossing else ():
                stage.follow_ring()

    def _stop_copies(self) -> None:
        if self._gpu_lane is not None:
            self._gpu_lane.stop_copies()

    # -- keeping again ---------------------------------------------------------------------------

    def _room(self, caches: int) -> int:
        taken = self._withheld + self.ring_growth + self.ram_nbytes + caches
        return self._budget - taken

    def _grow_experts(self, caches: int) -> None:
        """Restore experts' slots that were evicted, as far as there is room."""
        experts = self._experts
        if experts is None or experts.nbytes >= self._most_experts:
            return
        room = self._room(caches)
        if room >= experts.step_nbytes:
            experts.resize(min(self._most_experts, experts.nbytes + room))

    def _choose_returning(self) -> None:
        """Have the units of the slab that was freed last stay on the GPU as they pass, if there is
        room for it and for the next tokens: else it would leave again soon.
        """
        gpu = self._gpu
        if gpu is None or not self._evicted:
            return
        stages = self._evicted[-1]
        nbytes = sum(stage.unit.nbytes for stage in stages)
        if gpu.capacity - gpu.used - gpu.held < nbytes + self._caches.gpu_step:
            return
        try:
            slab = Slab(gpu, nbytes, len(stages))
        except MemoryBudgetError:  # others were quicker
            return
        self._returning = stages
        for stage in stages:
            stage.keep, stage.returning = True, slab

    def _choose_kept(self, caches: int) -> None:
        """Mark evicted units to keep, latest first, as far as there is room."""
        for stage in self._stages:
            stage.keep, stage.copy = False, None
        if not self._given:
            return
        room = self._room(caches)
        for stage in reversed(self._given):
            if stage.unit.nbytes <= room:
                stage.keep = True
                room -= stage.unit.nbytes


def choose_units(stages: Sequence[Stage], nbytes: int, able: Sequence[Stage]) -> list[Stage]:
    """Choose units of ``able`` with at least ``nbytes`` in all, in order; none if all are too few.

    The choice exceeds ``nbytes`` by little and is spread over the pass. ``stages`` is the whole
    pass, including what it streams already.
    """
    place = {stage.name: index for index, stage in enumerate(stages)}
    left = list(able)
    if sum(stage.unit.nbytes for stage in left) < nbytes:
        return []
    streamed = [index for index, stage in enumerate(stages) if stage.where.read]
    chosen: list[Stage] = []
    while nbytes > 0:
        # The smallest unit that suffices, else the largest; of equals the farthest from the others.
        enough = [stage for stage in left if stage.unit.nbytes >= nbytes]
        size = (min if enough else max)(stage.unit.nbytes for stage in enough or left)
        equals = [stage for stage in left if stage.unit.nbytes == size]
        pick = max(equals, key=lambda stage: _distance(place[stage.name], streamed, len(stages)))
        left.remove(pick)
        streamed.append(place[pick.name])
        chosen.append(pick)
        nbytes -= size
    return sorted(chosen, key=lambda stage: place[stage.name])


def choose_slabs(slabs: Sequence[Sequence[Stage]], nbytes: int) -> list[Sequence[Stage]]:
    """Choose slabs with at least ``nbytes`` in all, and little more; all if they are too few."""
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
