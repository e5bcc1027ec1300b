"""The stages of a pass, made of a store's units, and what of them is resident read to its place."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from localrt.models.checkpoints.store.manifest import StoredUnit
from localrt.models.config import DecoderConfig, memory_places
from localrt.models.decoder import load_attention, load_mlp
from localrt.models.layers.moe import Experts
from localrt.models.units import TABLES
from localrt.offload.device.gpu import Gpu, Slab, share_slabs
from localrt.offload.pipeline.lane import Bytes, Lane
from localrt.offload.pipeline.segments import JoinedHead, Segments
from localrt.offload.pipeline.setup import Opening
from localrt.offload.pipeline.stage import CrossingStage, Stage
from localrt.offload.placement import Where
from localrt.offload.reading.files import ReadMode, StoreFiles
from localrt.quant.ops.arrays import aligned_buffer


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
