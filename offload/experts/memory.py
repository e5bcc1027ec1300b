"""The memory of a mixture's experts, in RAM and on a GPU, and sparse layers on the CPU alone.

The memory of all experts placed in RAM, and of the ring for the others, is divided into slots; the
expert cache, not the placement, decides which experts the slots hold. Slots are equal, but GGUF
mixes (Q4_K_M, Q3_K_M) give some layers' down matrices more bits: there, layers with experts of one
size share a pool of slots. A sparse layer on the CPU computes resident experts while others are
read; results are added in a fixed order, so the sum does not depend on which were resident.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from localrt.models.checkpoints.store.manifest import StoredUnit
from localrt.models.config import DecoderConfig
from localrt.models.layers.moe import Routed, load_expert
from localrt.models.layers.parts import PassState
from localrt.models.weights import WeightLoader
from localrt.offload.device.gpu import SLABS, Clock, Gpu
from localrt.offload.experts.cache import ExpertCache, Key, slots_within
from localrt.offload.experts.pool import ExpertPool, GpuSlots
from localrt.offload.placement import Where
from localrt.offload.reading.files import ReadMode
from localrt.offload.reading.reader import DemandReader, UnitSource
from localrt.quant.formats.packed import Bytes
from localrt.quant.ops.arrays import Array, Memory, MemoryT
from localrt.quant.ops.experts import ExpertTable, ExpertWeights
from localrt.quant.ops.protocol import Check, Ops

_MIN_SLOTS = 4  # slots a pool needs per expert used per row
_SIZE_RATIO = 1.02  # largest ratio of sizes in one pool
_MIN_WASTE = 0.03  # share of memory that equal slots waste: below it, one pool is enough


class WeightMaker(Protocol):
    """Builds a processor's weights from units' bytes."""

    ops: Ops

    def weights(self, unit: StoredUnit, data: Memory) -> WeightLoader:
        """A unit's tensors in ``data``."""

    def remember_vectors(self, unit: StoredUnit, data: Bytes) -> None:
        """Copy a unit's norms and biases from its bytes in RAM."""


class Mixture:
    """The experts of a model in a store, and their placement.

    ``units`` are by (sparse layer's number, expert).
    """

    def __init__(
        self, config: DecoderConfig, units: Mapping[str, StoredUnit], where: Mapping[str, Where]
    ) -> None:
        self.layers = list(config.sparse_layers)
        self.specs = [spec for spec in config.mixtures if spec is not None]
        self.count = max(spec.router.count for spec in self.specs)
        self.used = max(spec.router.used for spec in self.specs)
        self.units: dict[Key, StoredUnit] = {
            (place, number): units[f"layers.{layer}.expert.{number}"]
            for place, (layer, spec) in enumerate(zip(self.layers, self.specs, strict=True))
            for number in range(spec.router.count)
        }
        self.nbytes = sum(unit.nbytes for unit in self.units.values())
        self._config = config
        self._where = where

    def placed(self, *places: Where) -> int:
        """Bytes of the experts placed at ``places``."""
        units = self.units.values()
        return sum(unit.nbytes for unit in units if self._where.get(unit.name) in places)

    def tables(self, ops: Ops) -> list[ExpertTable]:
        """An empty table for each sparse layer."""
        return [ops.expert_table(spec.router.count) for spec in self.specs]

    def build(self, lane: WeightMaker, key: Key, data: Memory) -> ExpertWeights:
        """Build an expert's weights for ``lane`` from the unit's bytes in its memory."""
        place, number = key
        weights = lane.weights(self.units[key], data)
        return load_expert(self._config, self.layers[place], number, weights)

    def slots(self, units: Mapping[Key, StoredUnit], resident_nbytes: int, ring: int) -> int:
        """How many slots ``resident_nbytes + ring`` bytes give."""
        if resident_nbytes >= sum(unit.nbytes for unit in units.values()):
            return len(units)  # even if slots of the largest size would not fit
        largest = max(unit.nbytes for unit in units.values())
        return min(slots_within(resident_nbytes + ring, largest), len(units))

    def cache(
        self,
        slots: int,
        slot_nbytes: int,
        tables: Sequence[ExpertTable],
        alloc: Callable[[int], MemoryT],
        free: Callable[[MemoryT], object],
        *,
        slab_nbytes: int,
    ) -> ExpertCache[MemoryT]:
        """Make a cache of ``slots``, in about ``SLABS`` allocations, each of at most
        ``slab_nbytes`` bytes or one slot.
        """
        return ExpertCache(
            *(len(self.layers), self.count, self.used, slots),
            slot_nbytes=slot_nbytes,
            slab_slots=max(1, min(-(-slots // SLABS), slab_nbytes // slot_nbytes)),
            tables=tables,
            alloc=alloc,
            free=free,
        )


class ExpertMemory:
    """Slots in RAM for all sparse layers, in ``pools`` by the layers' numbers.

    ``resize`` adds at least ``step_nbytes``.
    """

    def __init__(self, pools: Mapping[int, ExpertPool], reader: DemandReader) -> None:
        self.pools = list(dict.fromkeys(pools.values()))
        self.slot_nbytes = max(pool.slot_nbytes for pool in self.pools)
        self.step_nbytes = max(p.cache.slab_slots * p.slot_nbytes for p in self.pools)
        self._pool_of = pools
        self._reader = reader
        self._full_sizes = [pool.nbytes for pool in self.pools]

    def pool(self, layer: int) -> ExpertPool:
        """The pool of a sparse layer, by its number among sparse layers."""
        return self._pool_of[layer]

    @property
    def nbytes(self) -> int:
        """The most bytes that the slots may take, to be counted in the budget."""
        return sum(pool.nbytes for pool in self.pools)

    @property
    def reclaimable(self) -> int:
        """Bytes that ``resize`` could free."""
        return sum(pool.reclaimable for pool in self.pools)

    @property
    def complete(self) -> bool:
        """Whether all experts are in RAM."""
        return all(pool.complete for pool in self.pools)

    @property
    def bytes_read(self) -> int:
        """Bytes that have been read so far."""
        return self._reader.bytes_read

    def fill(self) -> None:
        """Begin to read experts ahead into free slots."""
        for pool in self.pools:
            pool.fill()

    def resize(self, nbytes: int) -> int:
        """Limit slots to ``nbytes``, shared by the pools; returns the bytes freed."""
        total, pairs = sum(self._full_sizes), zip(self.pools, self._full_sizes, strict=True)
        return sum(pool.resize(nbytes * size // total) for pool, size in pairs)

    def close(self) -> None:
        """Stop reading and free everything."""
        self._reader.close()
        for pool in self.pools:
            pool.cache.close()


def open_experts(
    mixture: Mixture,
    lane: WeightMaker,
    source: UnitSource,
    mode: ReadMode,
    verify: Callable[[StoredUnit, Bytes], None],
    *,
    stall_s: float,
    ring: int,
    alloc: Callable[[int], Bytes],
    free: Callable[[Bytes], object] = lambda memory: None,
    slab_nbytes: int = 0,
    room: int = 0,
) -> ExpertMemory:
    """Make slots for as many experts as are placed in RAM, and for ``ring`` bytes more, in
    allocations of up to ``slab_nbytes`` bytes.

    Experts placed in VRAM get slots in the rest of ``room``, the RAM for slots: if evicted from the
    GPU, they need not be read again.

    Raises:
        MemoryBudgetError: there is no room for even one expert.
    """
    units = mixture.units
    resident_nbytes = mixture.placed(Where.RAM, Where.LINK)
    resident_nbytes += min(mixture.placed(Where.VRAM), max(0, room - resident_nbytes))
    tables = mixture.tables(lane.ops)
    reader = DemandReader(
        source, threads=mode.threads, block=mode.block, stall_s=stall_s, verify=verify
    )
    pools: dict[int, ExpertPool] = {}
    try:
        for members, nbytes in _shares(mixture, resident_nbytes, ring):
            pool_units = {key: unit for key, unit in units.items() if key[0] in members}
            size = max(unit.nbytes for unit in pool_units.values())
            slots = mixture.slots(pool_units, nbytes, ring if len(pool_units) == len(units) else 0)
            pool = ExpertPool(
                pool_units,
                mixture.cache(slots, size, tables, alloc, free, slab_nbytes=slab_nbytes),
                reader,
                build=lambda key, data: mixture.build(lane, key, data),
            )
            pools |= dict.fromkeys(members, pool)
        return ExpertMemory(pools, reader)
    except BaseException:
        reader.close()
        raise


def _shares(mixture: Mixture, resident_nbytes: int, ring: int) -> list[tuple[Sequence[int], int]]:
    """Each pool's layers and bytes for its experts; a single pool's exclude ``ring``.

    A single pool makes better use of few slots than several would.
    """
    classes = size_classes(mixture.units)
    single: list[tuple[Sequence[int], int]] = [(range(len(mixture.layers)), resident_nbytes)]
    if len(classes) == 1:
        return single
    shares: list[tuple[Sequence[int], int]] = []
    for members in classes:
        sizes = [unit.nbytes for (place, _), unit in mixture.units.items() if place in members]
        share = (resident_nbytes + ring) * sum(sizes) // mixture.nbytes
        if share // max(sizes) < _MIN_SLOTS * mixture.used:
            return single
        # If everything fits, each pool holds all its experts.
        shares.append((members, sum(sizes) if resident_nbytes >= mixture.nbytes else share))
    return shares


def size_classes(units: Mapping[Key, StoredUnit]) -> list[list[int]]:
    """Group layers with experts of about equal size.

    There is only one list if equal slots for all would waste hardly any memory.
    """
    sizes: dict[int, int] = {}
    for (layer, _), unit in units.items():
        sizes[layer] = max(unit.nbytes, sizes.get(layer, 0))
    layers = sorted(sizes, key=lambda layer: (sizes[layer], layer))
    waste = 1 - sum(sizes.values()) / (len(sizes) * sizes[layers[-1]])
    if waste < _MIN_WASTE:
        return [sorted(layers)]
    classes = [[layers[0]]]
    for layer in layers[1:]:
        if sizes[layer] <= _SIZE_RATIO * sizes[classes[-1][0]]:
            classes[-1].append(layer)
        else:
            classes.append([layer])
    return [sorted(members) for members in classes]


def open_gpu_slots(mixture: Mixture, lane: WeightMaker, gpu: Gpu, *, ring: int) -> GpuSlots:
    """Make slots for as many experts as are placed in VRAM, plus ``ring`` bytes; at least one.
    Formats without a GPU kernel also need room for the unpacked expert.

    Raises:
        MemoryBudgetError: the GPU has no room for them.
    """
    units = mixture.units
    size = max(unit.nbytes for unit in units.values())
    unpacked = max(unpacked_nbytes(unit, lane.ops) for unit in units.values())
    ring = ring * size // (size + unpacked)
    slots = mixture.slots(units, max(mixture.placed(Where.VRAM), size), ring)

    def build(key: Key, unit: StoredUnit, data: Memory, in_ram: Bytes) -> ExpertWeights:
        if any(len(tensor.shape) == 1 for tensor in unit.tensors):
            lane.remember_vectors(unit, in_ram)
        return mixture.build(lane, key, data)

    tables = mixture.tables(lane.ops)
    cache = mixture.cache(
        slots,
        size,
        tables,
        alloc=lambda nbytes: gpu.alloc(nbytes, nbytes // size * unpacked),
        free=lambda memory: gpu.free(memory, memory.nbytes // size * unpacked),
        slab_nbytes=slots * size,
    )
    try:
        cache.reserve()
    except BaseException:
        cache.close()
        raise
    return GpuSlots(gpu, units, cache, slot_nbytes=size + unpacked, build=build)


def unpacked_nbytes(unit: StoredUnit, ops: Ops) -> int:
    """Bytes that ``ops`` need for a unit's matrices in addition to the unit's own."""
    matrices = [(t.shape[0], t.shape[1], t.format) for t in unit.tensors if len(t.shape) > 1]
    return sum(
        0 if ops.in_place(format_, columns) else ops.weight_nbytes((rows, columns), format_)
        for rows, columns, format_ in matrices
    )


class CpuExperts:
    """Runs sparse layers on the CPU. See ``Experts``.

    The CPU's time is counted by the caller's task on ``clock``, which is paused while an expert is
    read. ``uses`` counts the chosen experts of all layers, ``hits`` those of them that were in
    memory.
    """

    capturable = False

    def __init__(self, memory: ExpertMemory, ops: Ops, clock: Clock) -> None:
        self.hits = self.uses = 0
        self.memory = memory
        self.ops = ops
        self.clock = clock

    def begin(self, routed: Routed, state: PassState) -> _CpuPass:
        """Begin a layer: start to read absent experts."""
        try:
            return _CpuPass(self, routed, state.check)
        except BaseException:
            self.memory.pool(routed.place).done(routed.place)
            raise


class _CpuPass:
    """See ``ExpertPass``."""

    def __init__(self, experts: CpuExperts, routed: Routed, check: Check | None) -> None:
        self._experts, self._routed, self._check = experts, routed, check
        self._pool = experts.memory.pool(routed.place)
        self._wanted = wanted = self._pool.demand(routed.place, routed.routing)
        experts.hits += len(wanted.present)
        experts.uses += len(wanted.present) + len(wanted.absent)

    def slots(self) -> Array:
        """Compute resident experts, then others as they arrive."""
        pool, routed, wanted = self._pool, self._routed, self._wanted
        slots = self._experts.ops.expert_slots(routed.rows, routed.routing)
        if wanted.present:
            self._compute(slots, wanted.present)
        for expert in wanted.absent:
            with self._experts.clock.pause("cpu", f"layers.{routed.layer}.mlp"):
                pool.arrive(routed.place, expert, self._check)
            self._compute(slots, [expert])
        return slots

    def end(self) -> None:
        """End the layer; running reads continue, failed ones are repeated on demand."""
        self._pool.done(self._routed.place)

    def _compute(self, slots: Array, experts: Sequence[int]) -> None:
        routed = self._routed
        table = self._pool.cache.tables[routed.place]
        self._experts.ops.run_experts(
            routed.rows, routed.routing, table, routed.spec, slots, experts
        )
        self._pool.computed(routed.place, experts)
