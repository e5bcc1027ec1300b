"""What a pipeline is opened from, and the stages that are made of it.

``Setup`` is the one bag: a store, a placement, devices, and how to read. Each unit of the store
becomes a stage of the pass; what is resident is read to its place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Literal

from localrt.common.errors import CheckpointError
from localrt.models.checkpoints.store.checkpoint import StoreCheckpoint
from localrt.models.checkpoints.store.manifest import StoredUnit
from localrt.models.checkpoints.store.memory import Mend, Verifier
from localrt.models.config import EMBEDDING, HEAD, DecoderConfig, memory_places
from localrt.models.decoder import load_attention, load_mlp
from localrt.models.layers.moe import Experts
from localrt.models.units import TABLES
from localrt.offload.device.gpu import Clock, Gpu, Slab, share_slabs
from localrt.offload.experts.scheduler import ExpertCosts
from localrt.offload.kv.tier import KvTier
from localrt.offload.pipeline.lane import Lane
from localrt.offload.pipeline.stage import CrossingStage, JoinedHead, Segments, Stage
from localrt.offload.placement import Placement, Where
from localrt.offload.reading.files import ReadMode, StoreFiles
from localrt.quant.formats.packed import Bytes
from localrt.quant.ops.arrays import aligned_buffer
from localrt.quant.ops.protocol import Ops


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A model and what is to become of it.

    ``ops`` computes on the CPU, ``gpu`` what the ``placement`` puts on one; ``clock`` times both.
    ``expert_costs`` are needed where a GPU computes a mixture. ``budget`` bounds the RAM of
    resident units and KV caches together, in bytes; ``shortage`` is asked before each pass for
    bytes of RAM and of the GPU's memory to give back. ``kv_tier`` makes the caches of ``ops``, some
    of whose layers are on the SSD. ``mode`` says how to read the store, ``files`` stands in for the
    store's own, ``stall_s`` is how long a disk may be silent. With ``verify`` each unit is compared
    with its SHA-256, once; see ``Verifier`` for ``mend``. ``on_bytes`` gets the bytes of resident
    units as they are read, and may raise.
    """

    store: StoreCheckpoint
    config: DecoderConfig
    placement: Placement
    ops: Ops
    mode: ReadMode
    budget: int
    clock: Clock = field(default_factory=Clock)
    gpu: Gpu | None = None
    expert_costs: ExpertCosts | None = None
    shortage: Callable[[], tuple[int, int]] = lambda: (0, 0)
    kv_tier: KvTier | None = None
    files: StoreFiles | None = None
    verify: bool = True
    mend: Mend | None = None
    stall_s: float = 60.0
    on_bytes: Callable[[int], None] | None = None

    @cached_property
    def units(self) -> Mapping[str, StoredUnit]:
        """The store's units by name."""
        return {unit.name: unit for unit in self.store.manifest.units}

    def unit(self, name: str) -> StoredUnit:
        """A unit that every such model has."""
        if name not in self.units:
            raise CheckpointError(f"{self.store.path}: unit {name} is missing: pack it again")
        return self.units[name]

    def where(self, unit: StoredUnit) -> Where:
        """Units that the placement does not name are resident in RAM."""
        return self.placement.where.get(unit.name, Where.RAM)

    def layers(self, kind: Literal["attention", "mlp"]) -> dict[int, StoredUnit]:
        """The layers' units of a kind, in order; of those layers that have one."""
        memory, has_mlp = self.config.memory_of, self.config.has_mlp
        return {
            layer: self.unit(f"layers.{layer}.{kind}")
            for layer in range(self.config.layers)
            if (memory(layer) if kind == "attention" else has_mlp(layer))
        }

    def head(self) -> list[StoredUnit]:
        """The head's slices, in order."""
        matrix = EMBEDDING if self.config.tied_head else HEAD
        found = [u for u in self.units.values() if u.tensors and u.tensors[0].name == matrix]
        return sorted(found, key=lambda unit: unit.tensors[0].row)

    def dense(self) -> list[StoredUnit]:
        """The units of all stages: what is not an expert."""
        attention, mlp = self.layers("attention"), self.layers("mlp")
        return [*attention.values(), *mlp.values(), *self.head()]

    def attention_on_gpu(self) -> frozenset[int]:
        """The layers whose keys and values are on the GPU."""
        units = self.layers("attention").items()
        return frozenset(layer for layer, unit in units if self.where(unit).on_gpu)

    def rings(self) -> tuple[int, int]:
        """Bytes of the rings of RAM and GPU, 0 where nothing passes through.

        Experts have slots of their own: where they alone are streamed, these have the ring's bytes.
        """
        dense, sparse = [self.where(unit) for unit in self.dense()], self.config.sparse
        ram, vram = self.placement.ram_ring, self.placement.vram_ring
        return (
            0 if sparse and not any(where.read for where in dense) else ram,
            0 if sparse and not any(where.copied for where in dense) else vram,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What the steps of opening share. ``held`` frees, in reverse, what they make.

    ``stages`` are filled once there are lanes, by name and in the order of a pass. ``rows`` reads
    single rows of the embedding.
    """

    setup: Setup
    held: ExitStack
    files: StoreFiles
    rows: StoreFiles
    verify: Verifier
    stages: dict[str, Stage]


def make_stages(
    opening: Opening,
    lanes: Mapping[bool, Lane | None],
    on_gpu: frozenset[int],
    runners: Mapping[str, Experts],
) -> tuple[list[Stage], Segments, JoinedHead]:
    """A stage for every unit of a pass, in order; returns the head's, and what joins layers and
    the head.
    """
    setup, config, gpu = opening.setup, opening.setup.config, lanes[True]
    segments, joined = Segments(), JoinedHead(config)

    def forget(joining: Segments | JoinedHead) -> None:
        """What was joined or recorded would read or keep a unit's memory as it was."""
        joining.forget()
        if gpu is not None and gpu.recorder is not None:
            gpu.recorder.forget()

    def layer_moved(lane: Lane) -> Callable[[], None]:
        return (lambda: None) if lane.recorder is None else partial(forget, segments)

    def lane_of(unit: StoredUnit) -> Lane:
        lane = lanes[setup.where(unit).on_gpu]
        assert lane is not None, "a placement on a GPU needs one"
        return lane

    def add(stage: Stage) -> None:
        opening.stages[stage.name] = stage

    attention, mlps = setup.layers("attention"), setup.layers("mlp")
    places = _cache_places(config, lanes, on_gpu)
    for layer in range(config.layers):
        if (unit := attention.get(layer)) is not None:
            source, lane = config.cache_of(layer), lane_of(unit)
            shared = (source in on_gpu) is (layer in on_gpu)
            assert shared, "layers with one cache attend on one processor"
            load = partial(load_attention, config, layer, at=places[source])
            add(Stage(unit, setup.where(unit), lane, load, layer_moved(lane)))
        if (unit := mlps.get(layer)) is None:
            continue
        sparse, lane = config.mixture(layer) is not None, lane_of(unit)
        experts = runners[lane.resource] if sparse else None
        load = partial(load_mlp, config, layer, experts=experts)
        if unit.name in setup.placement.crossing:
            rows = setup.placement.card_rows
            assert gpu is not None, "what crosses goes to one"
            assert not sparse, "of a mixture experts cross"
            add(CrossingStage(unit, setup.where(unit), lane, load, gpu=gpu, rows=rows))
        else:
            moved = layer_moved(lane)
            add(Stage(unit, setup.where(unit), lane, load, moved, sparse=sparse))
    moved = partial(forget, joined)
    head = [joined.stage(unit, setup.where(unit), lane_of(unit), moved) for unit in setup.head()]
    for stage in head:
        add(stage)
    return head, segments, joined


def _cache_places(
    config: DecoderConfig, lanes: Mapping[bool, Lane | None], on_gpu: frozenset[int]
) -> dict[int, tuple[int, ...]]:
    """Where a lane's cache has what each layer remembers: one for both lanes, or one for each."""
    split = len({id(lane.ops) for lane in lanes.values() if lane is not None}) > 1
    places: dict[int, tuple[int, ...]] = {}
    for side in (on_gpu, frozenset(range(config.layers)) - on_gpu) if split else (None,):
        layers = [n for n in range(config.layers) if side is None or n in side]
        numbers = memory_places(config.memory_of(layer) for layer in layers)
        places |= zip(layers, numbers, strict=True)
    return places


def load_resident(opening: Opening, tables: dict[str, Bytes]) -> float:
    """Everything resident to its place, tables that are read by row to ``tables``.

    Returns the seconds of reading.
    """
    setup, stages_by_name = opening.setup, opening.stages
    gpu = setup.gpu

    def read(
        units: Sequence[StoredUnit],
        alloc: Callable[[int], Bytes],
        put: Callable[[StoredUnit, Bytes], None],
    ) -> float:
        def verified(unit: StoredUnit, data: Bytes) -> None:
            opening.verify(unit, data)
            put(unit, data)

        return read_units(
            opening.files, units, alloc, verified, mode=setup.mode, on_bytes=setup.on_bytes
        )

    def read_stages(
        where: Where,
        alloc: Callable[[int], Bytes],
        put: Callable[[Stage, Bytes], None],
        *,
        crossing: bool = False,
    ) -> float:
        stages = {
            stage.name: stage
            for stage in stages_by_name.values()
            if stage.where is where and isinstance(stage, CrossingStage) is crossing
        }
        units = [stage.unit for stage in stages.values()]
        return read(units, alloc, lambda unit, data: put(stages[unit.name], data))

    seconds = read_stages(Where.RAM, aligned_buffer, Stage.put)
    if gpu is not None:
        seconds += read_stages(Where.RAM, gpu.host_buffer, _put_crossing, crossing=True)
        seconds += read_stages(
            Where.VRAM, aligned_buffer, partial(_put_on_gpu, gpu, _slabs(opening, gpu))
        )
        seconds += read_stages(Where.LINK, gpu.host_buffer, _put_beside_gpu)
        for stage in stages_by_name.values():
            if stage.place(crossing=True) is Where.SSD_LINK:
                data = aligned_buffer(stage.unit.nbytes)
                opening.files.read_into(stage.unit.file, stage.unit.offset, data)
                if isinstance(stage, CrossingStage):
                    stage.remember_vectors(data)
                else:
                    stage.lane.remember_vectors(stage.unit, data)
    for name in TABLES:
        unit = setup.units.get(name)
        if unit is not None and setup.placement.where.get(name) is Where.RAM:
            seconds += read([unit], aligned_buffer, lambda u, data: tables.update({u.name: data}))
    return seconds


def _slabs(opening: Opening, gpu: Gpu) -> dict[str, Slab]:
    """The GPU's memory for its resident units, by unit."""
    setup, stages = opening.setup, opening.stages.values()
    sizes = {stage.name: stage.unit.nbytes for stage in stages if stage.where is Where.VRAM}
    head = [unit.name for unit in setup.head() if unit.name in sizes]
    layers = {name: size for name, size in sizes.items() if name not in head}
    slabs: dict[str, Slab] = {}
    # The head's slices lie next to one another: they are one matrix.
    for names in (*share_slabs(layers), *([head] if head else [])):
        slab = Slab(gpu, sum(sizes[name] for name in names), len(names))
        opening.held.callback(slab.free)
        slabs |= dict.fromkeys(names, slab)
    return slabs


def _put_on_gpu(gpu: Gpu, slabs: dict[str, Slab], stage: Stage, data: Bytes) -> None:
    memory = slabs[stage.name].take(stage.unit.nbytes)
    gpu.copy_in(stage.name, data, memory, None)
    stage.lane.remember_vectors(stage.unit, data)
    with gpu.ops.scope():
        stage.put(memory, slabs[stage.name])


def _put_crossing(stage: Stage, data: Bytes) -> None:
    assert isinstance(stage, CrossingStage), "others have their vectors where they are computed"
    stage.remember_vectors(data)
    stage.put(data)


def _put_beside_gpu(stage: Stage, data: Bytes) -> None:
    stage.lane.remember_vectors(stage.unit, data)
    stage.put(data)


def read_units(
    files: StoreFiles,
    units: Sequence[StoredUnit],
    alloc: Callable[[int], Bytes],
    done: Callable[[StoredUnit, Bytes], None],
    *,
    mode: ReadMode,
    on_bytes: Callable[[int], None] | None = None,
) -> float:
    """Read ``units`` in order, each into memory of its own, and call ``done`` for each.

    ``on_bytes`` gets the bytes as they come, and may raise to stop. Returns the seconds that
    reading took, without ``done``.

    Raises:
        CheckpointError: a file is truncated or fails.
    """
    seconds = 0.0

    def read(unit: StoredUnit, data: Bytes, start: int) -> int:
        part = data[start : start + mode.block]
        files.read_into(unit.file, unit.offset + start, part)
        return part.nbytes

    with ThreadPoolExecutor(mode.threads, thread_name_prefix="localrt-load") as pool:
        for unit in units:
            data = alloc(unit.nbytes)
            began = time.perf_counter()
            starts = range(0, unit.nbytes, mode.block)
            for count in pool.map(lambda start, u=unit, d=data: read(u, d, start), starts):
                if on_bytes is not None:
                    on_bytes(count)
            seconds += time.perf_counter() - began
            done(unit, data)
    return seconds
