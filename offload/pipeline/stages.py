"""The stages of a pass, made of a store's units, and what of them is resident read to its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from localrt.models.checkpoints.store.manifest import StoredUnit
from localrt.models.config import DecoderConfig, memory_places
from localrt.models.decoder import load_attention, load_mlp
from localrt.models.layers.moe import Experts
from localrt.models.units import TABLES
from localrt.offload.cards.accelerator import Accelerator
from localrt.offload.cards.slab import Slab, share_slabs
from localrt.offload.pipeline.head import JoinedHead
from localrt.offload.pipeline.lane import Bytes, Lane
from localrt.offload.pipeline.setup import Setup
from localrt.offload.pipeline.stage import CrossingStage, MixtureStage, Stage
from localrt.offload.pipeline.stretches import Stretches
from localrt.offload.placement import Where
from localrt.offload.reading.loading import read_units
from localrt.quant.ops.arrays import aligned_buffer

__all__ = ["load_resident", "make_stages"]


def make_stages(
    setup: Setup,
    lanes: Mapping[bool, Lane | None],
    on_card: frozenset[int],
    runners: Mapping[str, Experts],
) -> tuple[list[Stage], Stretches, JoinedHead]:
    """A stage for every unit of a pass, in order; returns the head's, and what joins layers and
    the head.
    """
    config, card = setup.config, lanes[True]
    stretches, joined = Stretches(), JoinedHead(config)

    def forget(joining: Stretches | JoinedHead) -> None:
        """What was joined or recorded would read or keep a unit's memory as it was."""
        joining.forget()
        if card is not None and card.recorder is not None:
            card.recorder.forget()

    def layer_moved(lane: Lane) -> Callable[[], None]:
        return (lambda: None) if lane.recorder is None else partial(forget, stretches)

    def lane_of(unit: StoredUnit) -> Lane:
        lane = lanes[setup.where(unit).on_gpu]
        assert lane is not None, "a placement on a card needs one"
        return lane

    def add(stage: Stage) -> None:
        setup.stages[stage.name] = stage

    attention, mlps = setup.layers("attention"), setup.layers("mlp")
    places = _cache_places(config, lanes, on_card)
    for layer in range(config.layers):
        if (unit := attention.get(layer)) is not None:
            source, lane = config.cache_of(layer), lane_of(unit)
            shared = (source in on_card) is (layer in on_card)
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
            assert card is not None, "what crosses goes to one"
            assert not sparse, "of a mixture experts cross"
            add(CrossingStage(unit, setup.where(unit), lane, load, card=card, rows=rows))
        else:
            make = MixtureStage if sparse else Stage
            add(make(unit, setup.where(unit), lane, load, layer_moved(lane)))
    moved = partial(forget, joined)
    head = [joined.stage(unit, setup.where(unit), lane_of(unit), moved) for unit in setup.head()]
    for stage in head:
        add(stage)
    return head, stretches, joined


def _cache_places(
    config: DecoderConfig, lanes: Mapping[bool, Lane | None], on_card: frozenset[int]
) -> dict[int, tuple[int, ...]]:
    """Where a lane's cache has what each layer remembers: one for both lanes, or one for each."""
    split = len({id(lane.ops) for lane in lanes.values() if lane is not None}) > 1
    places: dict[int, tuple[int, ...]] = {}
    for side in (on_card, frozenset(range(config.layers)) - on_card) if split else (None,):
        layers = [n for n in range(config.layers) if side is None or n in side]
        numbers = memory_places(config.memory_of(layer) for layer in layers)
        places |= zip(layers, numbers, strict=True)
    return places


def load_resident(
    setup: Setup, tables: dict[str, Bytes], on_bytes: Callable[[int], None] | None
) -> float:
    """Everything resident to its place, tables that are read by row to ``tables``.

    Returns the seconds of reading.
    """
    card = setup.devices.card

    def read(
        units: Sequence[StoredUnit],
        alloc: Callable[[int], Bytes],
        put: Callable[[StoredUnit, Bytes], None],
    ) -> float:
        def verified(unit: StoredUnit, data: Bytes) -> None:
            setup.verify(unit, data)
            put(unit, data)

        mode = setup.reading.mode
        return read_units(setup.files, units, alloc, verified, mode=mode, on_bytes=on_bytes)

    def read_stages(
        where: Where,
        alloc: Callable[[int], Bytes],
        put: Callable[[Stage, Bytes], None],
        *,
        crossing: bool = False,
    ) -> float:
        stages = {
            stage.name: stage
            for stage in setup.stages.values()
            if stage.where is where and isinstance(stage, CrossingStage) is crossing
        }
        units = [stage.unit for stage in stages.values()]
        return read(units, alloc, lambda unit, data: put(stages[unit.name], data))

    seconds = read_stages(Where.RAM, aligned_buffer, Stage.put)
    if card is not None:
        seconds += read_stages(Where.RAM, card.host_buffer, _put_crossing, crossing=True)
        seconds += read_stages(
            Where.VRAM, aligned_buffer, partial(_put_on_card, card, _slabs(setup, card))
        )
        seconds += read_stages(Where.LINK, card.host_buffer, _put_beside_card)
        for stage in setup.stages.values():
            if stage.place(crossing=True) is Where.SSD_LINK:
                data = aligned_buffer(stage.unit.nbytes)
                setup.files.read_into(stage.unit.file, stage.unit.offset, data)
                if isinstance(stage, CrossingStage):
                    stage.remember_vectors(data)
                else:
                    stage.lane.remember_vectors(stage.unit, data)
    for name in TABLES:
        unit = setup.units.get(name)
        if unit is not None and setup.placement.where.get(name) is Where.RAM:
            seconds += read([unit], aligned_buffer, lambda u, data: tables.update({u.name: data}))
    return seconds


def _slabs(setup: Setup, card: Accelerator) -> dict[str, Slab]:
    """The card's memory for its resident units, by unit."""
    stages = setup.stages.values()
    sizes = {stage.name: stage.unit.nbytes for stage in stages if stage.where is Where.VRAM}
    head = [unit.name for unit in setup.head() if unit.name in sizes]
    layers = {name: size for name, size in sizes.items() if name not in head}
    slabs: dict[str, Slab] = {}
    # The head's slices lie next to one another: they are one matrix.
    for names in (*share_slabs(layers), *([head] if head else [])):
        slab = Slab(card, sum(sizes[name] for name in names), len(names))
        setup.held.callback(slab.free)
        slabs |= dict.fromkeys(names, slab)
    return slabs


def _put_on_card(card: Accelerator, slabs: dict[str, Slab], stage: Stage, data: Bytes) -> None:
    memory = slabs[stage.name].take(stage.unit.nbytes)
    card.wait(card.copy_in(stage.name, data, memory, None, None))
    stage.lane.remember_vectors(stage.unit, data)
    with card.ops.scope():
        stage.put(memory, slabs[stage.name])


def _put_crossing(stage: Stage, data: Bytes) -> None:
    assert isinstance(stage, CrossingStage), "others have their vectors where they are computed"
    stage.remember_vectors(data)
    stage.put(data)


def _put_beside_card(stage: Stage, data: Bytes) -> None:
    stage.lane.remember_vectors(stage.unit, data)
    stage.put(data)
