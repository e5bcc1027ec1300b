"""Puts a store's units where a placement wants them, and has them ready for a decoder.

Everything that a pipeline holds is made here and freed by its ``close``: files, threads,
rings, buffers, the card's memory. It does not choose the placement.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from localrt.errors import CheckpointError
from localrt.models.checkpoints.store_checkpoint import StoreCheckpoint
from localrt.models.checkpoints.store_manifest import StoredUnit
from localrt.models.config import EMBEDDING, HEAD, DecoderConfig
from localrt.models.decoder import PartLoader
from localrt.models.moe import SparseMlp
from localrt.models.parts import Residual
from localrt.models.registry import part_loader
from localrt.models.timing import Clock
from localrt.offload.cards.accelerator import Accelerator
from localrt.offload.cards.clock import WallClock, later
from localrt.offload.experts.assignment import ExpertCosts
from localrt.offload.experts.hybrid import HybridStage
from localrt.offload.experts.memory import ExpertMemory
from localrt.offload.experts.opening import Mixture, open_card_slots, open_experts
from localrt.offload.experts.pools import ExpertPools
from localrt.offload.experts.stage import SparseStage
from localrt.offload.kv.tier import KvTier
from localrt.offload.pipeline.balance import Balance, Rings
from localrt.offload.pipeline.head import SlicedHead
from localrt.offload.pipeline.lane import Bytes, Lane
from localrt.offload.pipeline.row_table import RowTable
from localrt.offload.pipeline.stage import MixtureStage, Stage
from localrt.offload.pipeline.streamed import Pipeline, Streamed
from localrt.offload.placement import Placement, Where
from localrt.offload.reading.files import FileReader, StoreFiles
from localrt.offload.reading.loading import Reading, read_units
from localrt.offload.reading.sources import DiskSource, LinkSource
from localrt.offload.reading.unit_memory import Verifier
from localrt.offload.reading.unit_reader import UnitReader
from localrt.offload.ring import Ring
from localrt.offload.trace import Trace
from localrt.quant.ops.aligned import aligned_buffer
from localrt.quant.ops.protocol import Ops

__all__ = ["Devices", "open_pipeline"]

# Two copies on their way at once: the link does not rest while the next is asked for.
_COPIERS = 2
_COPY_BLOCK = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """What computes: ``ops`` is the CPU's, ``card`` does what the placement puts on a GPU.

    ``clock`` times both for ``trace``. ``expert_costs`` are needed where a card computes a mixture.
    """

    ops: Ops
    trace: Trace
    clock: Clock
    card: Accelerator | None = None
    expert_costs: ExpertCosts | None = None

    @classmethod
    def cpu(cls, ops: Ops) -> Devices:
        """The CPU alone, by the wall's clock."""
        trace = Trace()
        return cls(ops=ops, trace=trace, clock=WallClock(trace))


def open_pipeline(
    store: StoreCheckpoint,
    config: DecoderConfig,
    placement: Placement,
    devices: Devices,
    reading: Reading,
    *,
    budget: int,
    shortage: Callable[[], tuple[int, int]] = lambda: (0, 0),
    kv_tier: KvTier | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> Streamed:
    """Load what is resident, start reading what is streamed.

    ``budget`` bounds the RAM of resident units and KV caches together, in bytes. ``shortage`` is
    asked before each pass for bytes of RAM and VRAM to give back. ``kv_tier`` makes the caches of
    the CPU's ``Ops``, some of whose layers are on the SSD. ``on_bytes`` gets the bytes of resident
    units as they are read, and may raise.

    Raises:
        CheckpointError: a file is truncated or damaged; StoreDiscardedError after ``discard``.
        MemoryBudgetError: the card's memory is too small for the placement.
    """
    held = ExitStack()
    if kv_tier is not None:
        held.callback(kv_tier.close)
    try:
        names = dict.fromkeys(unit.file for unit in store.manifest.units)
        files = reading.files or StoreFiles(store.path, names, direct=reading.mode.direct)
        held.callback(files.close)
        rows = reading.files or StoreFiles(store.path, names)  # never direct: a row is no page
        held.callback(rows.close)
        setup = _Setup(
            held=held,
            store=store,
            loader=part_loader(store, config),
            placement=placement,
            devices=devices,
            reading=reading,
            units={unit.name: unit for unit in store.manifest.units},
            files=files,
            rows=rows,
            verify=Verifier(store.path, enabled=reading.verify, discard=reading.discard),
            stages=[],
        )
        streamed = Streamed(config, _open(setup, budget, shortage, kv_tier, on_bytes))
        # Its threads would otherwise keep the memory of a decoder that nobody closed.
        weakref.finalize(streamed, held.close)
        return streamed
    except BaseException:
        held.close()
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setup:
    """What all steps of opening share. ``held`` frees, in reverse, what they make.

    ``stages`` are filled once there are lanes; ``rows`` reads single rows of the embedding.
    """

    held: ExitStack
    store: StoreCheckpoint
    loader: PartLoader
    placement: Placement
    devices: Devices
    reading: Reading
    units: Mapping[str, StoredUnit]
    files: FileReader
    rows: FileReader
    verify: Verifier
    stages: list[Stage]

    def unit(self, name: str) -> StoredUnit:
        """A unit that every such model has."""
        if name not in self.units:
            raise CheckpointError(f"{self.store.path}: unit {name} is missing: pack it again")
        return self.units[name]

    def where(self, unit: StoredUnit) -> Where:
        """Units that the placement does not name are resident in RAM."""
        return self.placement.where.get(unit.name, Where.RAM)

    def layers(self, kind: str) -> list[StoredUnit]:
        """The layers' ``"attention"`` or ``"mlp"`` units, in order."""
        return [self.unit(f"layers.{layer}.{kind}") for layer in range(self.loader.config.layers)]

    def head(self) -> list[StoredUnit]:
        """The head's slices, in order."""
        matrix = EMBEDDING if self.loader.config.tied_head else HEAD
        found = [u for u in self.units.values() if u.tensors and u.tensors[0].name == matrix]
        return sorted(found, key=lambda unit: unit.tensors[0].row)

    def dense(self) -> list[StoredUnit]:
        """The units of all stages: what is not an expert."""
        return [*self.layers("attention"), *self.layers("mlp"), *self.head()]

    def rings(self) -> tuple[int, int]:
        """Bytes of the rings of RAM and card, 0 where nothing passes through.

        Experts have slots of their own: where they alone are streamed, these have the ring's bytes.
        """
        dense, sparse = [self.where(unit) for unit in self.dense()], self.loader.config.sparse
        ram, vram = self.placement.ram_ring, self.placement.vram_ring
        return (
            0 if sparse and not any(where.read for where in dense) else ram,
            0 if sparse and not any(where.copied for where in dense) else vram,
        )


def _open(
    setup: _Setup,
    budget: int,
    shortage: Callable[[], tuple[int, int]],
    kv_tier: KvTier | None,
    on_bytes: Callable[[int], None] | None,
) -> Pipeline:
    held, devices, placement = setup.held, setup.devices, setup.placement
    on_card = frozenset(
        layer for layer, unit in enumerate(setup.layers("attention")) if setup.where(unit).on_gpu
    )
    cpu = _cpu_lane(setup)
    experts = _open_experts(setup, cpu, budget)
    card, link = _card_lane(setup, cpu, attends=bool(on_card))
    forget = (lambda: None) if link is None else link.forget
    runners = _expert_runners(setup, cpu, card, experts)
    held.callback(forget)
    head = _make_stages(setup, {False: cpu, True: card}, on_card, runners)
    embedding: dict[str, Bytes] = {}
    load_s = _load(setup, embedding, on_bytes)
    # Streaming begins last: it would share the disk with what is waited for.
    cpu.stream([stage.unit for stage in setup.stages if stage.where.read])
    if card is not None:
        card.stream([stage.unit for stage in setup.stages if stage.where.copied])
    if experts is not None:
        experts.fill()

    def resident(name: str) -> Bytes | None:
        """The bytes of a unit of the embedding that is in RAM."""
        if name in embedding:
            return embedding[name]
        ours = (s for s in head.stages if s.name == name and s.lane is cpu)
        return next((stage.memory for stage in ours), None)

    table = RowTable(setup.store, EMBEDDING, setup.rows, resident, stall_s=setup.reading.stall_s)
    held.callback(table.close)
    ram_ring, _ = setup.rings()
    slots = placement.ram_ring - ram_ring  # bytes of the ring that are experts' slots
    balance = Balance(
        setup.stages,
        [lane for lane in (cpu, card) if lane is not None],
        Rings(ram_ring, placement.vram_ring, setup.reading.mode.block),
        budget + slots,
        fixed=sum(data.nbytes for data in embedding.values()),
        shortage=shortage,
        forget=forget,
        experts=experts,
    )

    def ssd_bytes() -> int:
        read = 0 if cpu.reader is None else cpu.reader.bytes_read
        read += 0 if experts is None else experts.bytes_read
        return read + (0 if kv_tier is None else kv_tier.read_bytes)

    return Pipeline(
        cpu=cpu,
        card=card,
        layers=setup.stages[: 2 * setup.loader.config.layers],
        head=head,
        attention_on_card=on_card,
        embedding=table,
        balance=balance,
        clock=devices.clock,
        trace=devices.trace,
        load_s=load_s,
        before_pass=setup.files.check_unchanged,
        abandon=forget,
        ssd_bytes=ssd_bytes,
        close=held.close,
        experts=runners,
    )


# -- lanes -----------------------------------------------------------------------------------------


def _cpu_lane(setup: _Setup) -> Lane:
    nbytes, _ = setup.rings()
    reading, devices = setup.reading, setup.devices
    reader = None
    if nbytes:
        # What is copied over the link must not be paged out on the way.
        memory = None if devices.card is None else devices.card.host_buffer(nbytes)
        reader = UnitReader(
            DiskSource(setup.files, devices.clock),
            Ring(nbytes, reading.mode.block, memory),
            threads=reading.mode.threads,
            stall_s=reading.stall_s,
            join=later,
        )
    lane = Lane(setup.store, devices.ops, devices.clock, reader=reader, verify=setup.verify)
    return _with_norm(setup, lane)


def _card_lane(setup: _Setup, cpu: Lane, *, attends: bool) -> tuple[Lane | None, LinkSource | None]:
    """The card's lane, and what it copies from; None where there is no card."""
    card, clock, held = setup.devices.card, setup.devices.clock, setup.held
    if card is None:
        return None, None
    held.callback(card.close)
    _, nbytes = setup.rings()
    link = copier = None
    if nbytes:
        memory = card.alloc(nbytes)
        held.callback(card.free, memory)
        by_name: dict[str, Stage] = {}

        def in_ram(name: str) -> Bytes | None:
            if not by_name:
                by_name.update((stage.name, stage) for stage in setup.stages)
            stage = by_name[name]
            return stage.memory if stage.where is Where.LINK else None

        link = LinkSource(card, in_ram, cpu.reader, setup.verify)
        copier = UnitReader(
            link,
            Ring(nbytes, _COPY_BLOCK, memory),
            # A virtual link takes copies in the order in which they are charged.
            threads=1 if clock.simulated else _COPIERS,
            stall_s=setup.reading.stall_s + 1,
            join=later,
            drained=link.resume,
        )
    lane = Lane(setup.store, card.ops, clock, reader=copier, card=card, attends=attends)
    return _with_norm(setup, lane), link


def _with_norm(setup: _Setup, lane: Lane) -> Lane:
    """The lane with the final norm's weights; it is closed, and its units freed, in its turn."""

    def close() -> None:
        if lane.reader is not None:
            lane.reader.close()
        for stage in setup.stages:
            if stage.lane is lane:
                stage.free()

    setup.held.callback(close)
    unit = setup.unit("norm")
    data = aligned_buffer(unit.nbytes)
    setup.files.read_into(unit.file, unit.offset, data)
    with lane.ops.scope():
        lane.norm = setup.loader.norm(lane.weights(unit, data))
    return lane


# -- experts ---------------------------------------------------------------------------------------


def _mixture(setup: _Setup) -> Mixture:
    return Mixture(setup.loader, setup.units, setup.placement.where)


def _open_experts(setup: _Setup, cpu: Lane, budget: int) -> ExpertMemory | ExpertPools | None:
    """Slots in RAM; None of a dense model."""
    if not setup.loader.config.sparse:
        return None
    card = setup.devices.card
    in_ram = (u.nbytes for u in setup.dense() if setup.where(u) in (Where.RAM, Where.LINK))
    experts = open_experts(
        _mixture(setup),
        cpu,
        DiskSource(setup.files, setup.devices.clock),
        setup.reading,
        setup.verify,
        ring=setup.placement.ram_ring - setup.rings()[0],
        room=budget - sum(in_ram),
        # What is copied over the link must not be paged out on the way.
        alloc=aligned_buffer if card is None else card.host_buffer,
    )
    setup.held.callback(experts.close)
    return experts


def _expert_runners(
    setup: _Setup, cpu: Lane, card: Lane | None, experts: ExpertMemory | ExpertPools | None
) -> dict[str, SparseStage | HybridStage]:
    """What runs a mixture's layers on each lane."""
    if experts is None:
        return {}
    devices, layers = setup.devices, list(setup.loader.config.sparse_layers)

    def router(lane: Lane) -> Callable[[int], SparseMlp | None]:
        """Finds the router of a sparse layer where it is resident on ``lane``."""

        def find(place: int) -> SparseMlp | None:
            stage = setup.stages[2 * layers[place] + 1]
            part = stage.part if stage.lane is lane else None
            return part.layer if isinstance(part, Residual) else None  # type: ignore[return-value]

        return find

    runners: dict[str, SparseStage | HybridStage] = {
        "cpu": SparseStage(experts, devices.ops, devices.clock, router(cpu))
    }
    mlps = [setup.where(setup.layers("mlp")[layer]) for layer in layers]
    if card is not None and any(where.on_gpu for where in mlps):
        ring = setup.placement.vram_ring - setup.rings()[1]
        slots = open_card_slots(_mixture(setup), card, ring=ring)
        setup.held.callback(slots.close)
        costs = devices.expert_costs
        assert costs is not None, "who computes an expert is decided by what it takes"
        runners["gpu"] = HybridStage(
            slots, experts, devices.ops, devices.clock, costs, router(card)
        )
    return runners


# -- stages ----------------------------------------------------------------------------------------


def _make_stages(
    setup: _Setup,
    lanes: Mapping[bool, Lane | None],
    on_card: frozenset[int],
    runners: Mapping[str, SparseStage | HybridStage],
) -> SlicedHead:
    """Every unit of a pass, in order; returns the head's."""
    loader, config = setup.loader, setup.loader.config

    def lane_of(unit: StoredUnit) -> Lane:
        lane = lanes[setup.where(unit).on_gpu]
        assert lane is not None, "a placement on a card needs one"
        return lane

    split = len({id(lane.ops) for lane in lanes.values() if lane is not None}) > 1
    caches: dict[bool, int] = {False: 0, True: 0}  # layers of each lane's cache so far
    for layer, (attention, mlp) in enumerate(
        zip(setup.layers("attention"), setup.layers("mlp"), strict=True)
    ):
        side = layer in on_card
        at, caches[side] = (caches[side] if split else layer), caches[side] + 1
        load = partial(loader.attention, layer, at=at)
        setup.stages.append(Stage(attention, setup.where(attention), lane_of(attention), load))
        sparse, lane = config.mixture(layer) is not None, lane_of(mlp)
        load = partial(loader.mlp, layer, experts=runners[lane.resource] if sparse else None)
        kind = MixtureStage if sparse else Stage
        setup.stages.append(kind(mlp, setup.where(mlp), lane, load))
    head = SlicedHead(config)
    for unit in setup.head():
        head.add(unit, setup.where(unit), lane_of(unit))
    setup.stages.extend(head.stages)
    return head


def _load(
    setup: _Setup, embedding: dict[str, Bytes], on_bytes: Callable[[int], None] | None
) -> float:
    """Everything resident to its place. Returns the seconds of reading."""
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
        where: Where, alloc: Callable[[int], Bytes], put: Callable[[Stage, Bytes], None]
    ) -> float:
        stages = {stage.name: stage for stage in setup.stages if stage.where is where}
        units = [stage.unit for stage in stages.values()]
        return read(units, alloc, lambda unit, data: put(stages[unit.name], data))

    seconds = read_stages(Where.RAM, aligned_buffer, Stage.put)
    if card is not None:
        seconds += read_stages(Where.VRAM, aligned_buffer, partial(_put_on_card, card))
        seconds += read_stages(Where.LINK, card.host_buffer, _put_beside_card)
        for stage in setup.stages:
            if stage.where is Where.SSD_LINK:
                data = aligned_buffer(stage.unit.nbytes)
                setup.files.read_into(stage.unit.file, stage.unit.offset, data)
                stage.lane.remember_vectors(stage.unit, data)
    unit = setup.units.get("embedding")
    if unit is not None and setup.placement.where.get("embedding") is Where.RAM:
        seconds += read([unit], aligned_buffer, lambda u, data: embedding.update({u.name: data}))
    return seconds


def _put_on_card(card: Accelerator, stage: Stage, data: Bytes) -> None:
    memory = card.alloc(stage.unit.nbytes)
    card.wait(card.copy_in(stage.name, data, memory, None, None))
    stage.lane.remember_vectors(stage.unit, data)
    with card.ops.scope():
        stage.put(memory)


def _put_beside_card(stage: Stage, data: Bytes) -> None:
    stage.lane.remember_vectors(stage.unit, data)
    stage.put(data)
