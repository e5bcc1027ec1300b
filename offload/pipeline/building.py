"""Puts a store's units where a placement wants them, and makes the decoder that runs them.

Everything that a pipeline holds is made here and freed by the decoder's ``close``: files, threads,
rings, buffers, the card's memory. It does not choose the placement.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from localrt.models.checkpoints.store_checkpoint import StoreCheckpoint
from localrt.models.checkpoints.store_manifest import StoredUnit
from localrt.models.decoder import DecoderConfig
from localrt.models.moe import SparseMlp
from localrt.models.registry import find_architecture
from localrt.models.units import EMBEDDING
from localrt.offload.cards.accelerator import Accelerator
from localrt.offload.cards.clock import Clock, WallClock, later
from localrt.offload.experts.assignment import ExpertCosts
from localrt.offload.experts.card import CardSlots
from localrt.offload.experts.hybrid import HybridStage
from localrt.offload.experts.memory import ExpertMemory
from localrt.offload.experts.opening import (
    expert_units,
    fill_order,
    open_card_slots,
    open_experts,
    sparse_layers,
)
from localrt.offload.experts.pools import ExpertPools
from localrt.offload.experts.stage import SparseStage
from localrt.offload.kv.tier import KvTier
from localrt.offload.pipeline.decoder import PlacedDecoder, Resources
from localrt.offload.pipeline.lane import Lane, Verifier
from localrt.offload.pipeline.residency import Residency
from localrt.offload.pipeline.row_table import RowTable
from localrt.offload.pipeline.stages import Stage, list_stages
from localrt.offload.placement import Placement, Where
from localrt.offload.reading.files import FileReader, ReadMode, StoreFiles
from localrt.offload.reading.loading import read_units
from localrt.offload.reading.sources import DiskSource, LinkSource
from localrt.offload.reading.unit_reader import UnitReader
from localrt.offload.ring import Ring
from localrt.offload.trace import Trace
from localrt.offload.unit_parts import PartBuilder
from localrt.quant.ops.aligned import aligned_buffer
from localrt.quant.ops.protocol import Ops, Vector

__all__ = ["open_pipeline"]

Bytes = npt.NDArray[np.uint8]

# Two copies on their way at once: the link does not rest while the next is asked for.
_COPIERS = 2
_COPY_BLOCK = 8 << 20


def open_pipeline(
    store: StoreCheckpoint,
    ops: Ops,
    config: DecoderConfig,
    placement: Placement,
    *,
    mode: ReadMode,
    budget: int,
    card: Accelerator | None = None,
    clock: Clock | None = None,
    files: FileReader | None = None,
    trace: Trace | None = None,
    verify: bool = True,
    discard: Callable[[], None] | None = None,
    stall_s: float = 60.0,
    kv_tier: KvTier | None = None,
    shortage: Callable[[], tuple[int, int]] = lambda: (0, 0),
    on_bytes: Callable[[int], None] | None = None,
    expert_costs: ExpertCosts | None = None,
) -> PlacedDecoder:
    """Load what is resident, start reading what is streamed.

    ``budget`` bounds the RAM of resident units and KV caches together, in bytes. ``card`` computes
    what the placement puts on a GPU, ``clock`` times it. ``files`` stands in for the store's own.
    ``kv_tier`` makes the caches of ``ops``, some of whose layers are on the SSD. ``shortage`` is
    asked before each pass for bytes of RAM and VRAM to give back. ``on_bytes`` gets the bytes of
    resident units as they are read, and may raise. ``discard`` forgets a ``store`` that is damaged
    and can be made again. ``expert_costs`` are needed where a card computes a mixture.

    Raises:
        CheckpointError: a file is truncated or damaged; StoreDiscardedError after ``discard``.
        MemoryBudgetError: the card's memory is too small for the placement.
    """
    trace = trace or Trace()
    maker = _Maker(store, ops, config, placement, mode, card, clock or WallClock(trace), files)
    if kv_tier is not None:
        maker.held.callback(kv_tier.close)
    try:
        maker.make_lanes(Verifier(store.path, enabled=verify, discard=discard), stall_s, budget)
        load_s = maker.load(on_bytes)
        resources = Resources(
            cpu=maker.cpu,
            card=maker.card_lane,
            embedding=maker.table,
            norms=maker.norms(),
            residency=maker.residency(budget, shortage),
            clock=maker.clock,
            trace=trace,
            load_s=load_s,
            before_pass=maker.files.check_unchanged,
            abandon=maker.abandon,
            ssd_bytes=lambda: maker.ssd_bytes() + (kv_tier.read_bytes if kv_tier else 0),
            close=maker.held.close,
            experts=maker.sparse_stages(expert_costs),
        )
        decoder = PlacedDecoder(config, resources)
        # Its threads would otherwise keep the memory of a decoder that nobody closed.
        weakref.finalize(decoder, maker.held.close)
        return decoder
    except BaseException:
        maker.held.close()
        raise


class _Maker:
    """The parts in the order in which they need one another; ``held`` closes them in reverse."""

    def __init__(
        self,
        store: StoreCheckpoint,
        ops: Ops,
        config: DecoderConfig,
        placement: Placement,
        mode: ReadMode,
        card: Accelerator | None,
        clock: Clock,
        files: FileReader | None,
    ) -> None:
        self._store, self._ops, self._config = store, ops, config
        self._placement, self._mode, self._card = placement, mode, card
        self.clock = clock
        self.held = ExitStack()
        self._units = {unit.name: unit for unit in store.manifest.units}
        self.stages = list_stages(store.manifest.units, placement.where)
        names = dict.fromkeys(unit.file for unit in self._units.values())
        self.files = files or StoreFiles(store.path, names, direct=mode.direct)
        self.held.callback(self.files.close)
        # A row is no whole page: never direct.
        self._rows = files or StoreFiles(store.path, names)
        self.held.callback(self._rows.close)
        self.host: dict[str, Bytes] = {}  # RAM that the card copies from
        self._reader: UnitReader | None = None
        self._link: LinkSource | None = None
        self.card_lane: Lane | None = None
        self._expert_units = expert_units(config, self._units)
        self._experts: ExpertMemory | ExpertPools | None = None
        self._card_slots: CardSlots | None = None

    def make_lanes(self, verify: Verifier, stall_s: float, budget: int) -> None:
        """Rings, threads and lanes, of which weights may take ``budget`` bytes of RAM."""
        placement, mode, card = self._placement, self._mode, self._card
        # Experts are read into slots of their own: where they alone are read, the ring is theirs.
        streams = placement.ram_ring > 0 and (
            not self._config.sparse or any(stage.where.read for stage in self.stages)
        )
        if streams:
            # What is copied over the link must not be paged out on the way.
            memory = None if card is None else card.host_buffer(placement.ram_ring)
            ring = Ring(placement.ram_ring, mode.block, memory)
            source = DiskSource(self.files, self.clock)
            self._reader = UnitReader(
                source, ring, threads=mode.threads, stall_s=stall_s, join=later
            )
            self.held.callback(self._reader.close)
        self._verify, self._stall_s = verify, stall_s
        split = card is not None and card.ops is not self._ops
        builder = self._cpu_builder = self._builder(self._ops, False, split)
        self.cpu = Lane(self._ops, builder, self._reader, verify=verify)
        self.held.callback(self.cpu.close)
        if self._config.sparse:
            others = (stage for stage in self.stages if stage.where in (Where.RAM, Where.LINK))
            room = budget - sum(stage.unit.nbytes for stage in others)
            self._make_experts(0 if streams else placement.ram_ring, room)
        if card is not None:
            self.held.callback(card.close)
            self._card_builder = self._builder(card.ops, True, split)
            copier = None
            # Experts are copied into slots of their own: where they alone are, the ring is theirs.
            copies = placement.vram_ring > 0 and (
                not self._config.sparse or any(stage.where.copied for stage in self.stages)
            )
            if copies:
                memory = card.alloc(placement.vram_ring)
                self.held.callback(card.free, memory)
                self._link = LinkSource(card, self.host, self._reader, verify)
                copier = UnitReader(
                    self._link,
                    Ring(placement.vram_ring, _COPY_BLOCK, memory),
                    # A virtual link takes copies in the order in which they are charged.
                    threads=1 if self.clock.simulated else _COPIERS,
                    stall_s=stall_s + 1,
                    join=later,
                    drained=self._link.resume,
                )
            self.card_lane = Lane(card.ops, self._card_builder, copier, card=card)
            self.held.callback(self.card_lane.close)
            sparse = [s for s in self.stages if s.kind == "mlp" and self._config.mixture(s.layer)]
            if any(stage.where.on_gpu for stage in sparse):
                pool = placement.vram_ring if copier is None else 0
                self._card_slots = open_card_slots(
                    self._config,
                    self._expert_units,
                    placement.where,
                    self._card_builder,
                    card,
                    ring=pool,
                )
                self.held.callback(self._card_slots.close)
            self.held.callback(self.abandon)
            self.held.callback(self.host.clear)

    def load(self, on_bytes: Callable[[int], None] | None) -> float:
        """Everything resident to its place; then copying begins. Returns the seconds of reading."""

        def read(places: Where, alloc: Callable[[int], Bytes], done: _Done) -> float:
            stages = {stage.name: stage for stage in self.stages if stage.where is places}

            def put(unit: StoredUnit, data: Bytes) -> None:
                self._verify(unit, data)
                done(stages[unit.name], data)

            units = [stage.unit for stage in stages.values()]
            return read_units(self.files, units, alloc, put, mode=self._mode, on_bytes=on_bytes)

        seconds = read(Where.RAM, aligned_buffer, self.cpu.put)
        card, lane = self._card, self.card_lane
        if card is not None and lane is not None:
            seconds += read(Where.VRAM, aligned_buffer, self._put_on_card)
            seconds += read(Where.LINK, card.host_buffer, self._put_beside_card)
            for stage in self.stages:
                if stage.where is Where.SSD_LINK:
                    data = aligned_buffer(stage.unit.nbytes)
                    self.files.read_into(stage.unit.file, stage.unit.offset, data)
                    self._card_builder.remember_vectors(stage.unit, data)
        embedding = self._units.get("embedding")
        if embedding is not None and self._placement.where.get("embedding") is Where.RAM:

            def keep(unit: StoredUnit, data: Bytes) -> None:
                self._verify(unit, data)
                self.cpu.keep(unit.name, data)

            seconds += read_units(
                self.files, [embedding], aligned_buffer, keep, mode=self._mode, on_bytes=on_bytes
            )
        # Streaming begins last: it would share the disk with what is waited for.
        if self._reader is not None:
            self._reader.schedule([stage.unit for stage in self.stages if stage.where.read])
        if lane is not None:
            lane.stream([stage for stage in self.stages if stage.where.copied])
        if self._experts is not None:
            self._experts.fill(fill_order(self._expert_units))
        self.table = RowTable(
            self._store, EMBEDDING, self._rows, self.cpu.memory, stall_s=self._stall_s
        )
        self.held.callback(self.table.close)
        return seconds

    def norms(self) -> dict[str, Vector]:
        """The final norm, for each lane."""
        unit = self._units["norm"]
        data = aligned_buffer(unit.nbytes)
        self.files.read_into(unit.file, unit.offset, data)
        norms = {"cpu": self._builder(self._ops, False, False).final_norm(unit, data)}
        if self._card is not None:
            with self._card.ops.scope():
                builder = self._builder(self._card.ops, True, False)
                norms["gpu"] = builder.final_norm(unit, data)
        return norms

    def residency(self, budget: int, shortage: Callable[[], tuple[int, int]]) -> Residency:
        """The places, as they are once everything is loaded."""
        ring = 0 if self._reader is None else self._placement.ram_ring
        rings = ring, self._placement.vram_ring
        if self._experts is not None and self._reader is None:  # the ring's bytes are slots
            budget += self._placement.ram_ring
        return Residency(
            self.stages,
            self.cpu,
            self.card_lane,
            self.host,
            budget,
            rings,
            shortage,
            self.abandon,
            chunk=self._mode.block,
            experts=self._experts,
        )

    def sparse_stages(self, costs: ExpertCosts | None) -> dict[str, SparseStage | HybridStage]:
        """What runs a mixture's layers on each lane."""
        if self._experts is None:
            return {}
        places = sparse_layers(self._config)
        stages: dict[str, SparseStage | HybridStage] = {
            "cpu": SparseStage(self._experts, places, self._ops, self.clock, _router(self.cpu))
        }
        if self._card_slots is not None:
            assert costs is not None, "who computes an expert is decided by what it takes"
            tables = [self._cpu_builder.table(layer) for layer in places]
            stages["gpu"] = HybridStage(
                self._card_slots,
                self._experts,
                places,
                tables,
                self._ops,
                self.clock,
                costs,
                _router(self.card_lane),
            )
        return stages

    def abandon(self) -> None:
        """A pass ended early: nobody waits for what is on its way."""
        if self._link is not None:
            self._link.forget()

    def ssd_bytes(self) -> int:
        """Bytes that passes have read."""
        experts = 0 if self._experts is None else self._experts.bytes_read
        return experts + (0 if self._reader is None else self._reader.bytes_read)

    def _make_experts(self, ring: int, room: int) -> None:
        self._experts = open_experts(
            self._config,
            self._expert_units,
            self._placement.where,
            self._cpu_builder,
            DiskSource(self.files, self.clock),
            ring=ring,
            mode=self._mode,
            verify=self._verify,
            stall_s=self._stall_s,
            room=room,
            # What is copied over the link must not be paged out on the way.
            alloc=aligned_buffer if self._card is None else self._card.host_buffer,
        )
        self.held.callback(self._experts.close)

    def _put_on_card(self, stage: Stage, data: Bytes) -> None:
        card, lane = self._card, self.card_lane
        assert card is not None, "VRAM is a card's"
        assert lane is not None, "and so is the lane"
        memory = card.alloc(stage.unit.nbytes)
        card.wait(card.copy_in(stage.name, data, memory, None, None))
        self._card_builder.remember_vectors(stage.unit, data)
        with card.ops.scope():
            lane.put(stage, memory)

    def _put_beside_card(self, stage: Stage, data: Bytes) -> None:
        self._card_builder.remember_vectors(stage.unit, data)
        self.host[stage.name] = data

    def _builder(self, ops: Ops, on_card: bool, split: bool) -> PartBuilder:
        names = find_architecture(self._store.architecture).names
        layers = [
            stage.layer
            for stage in self.stages
            if stage.kind == "attention" and stage.where.on_gpu is on_card
        ]
        return PartBuilder(self._store, self._config, names, ops, layers if split else None)


def _router(lane: Lane | None) -> Callable[[int], SparseMlp | None]:
    """Finds the router of a sparse layer where it is resident on ``lane``."""

    def find(layer: int) -> SparseMlp | None:
        part = None if lane is None else lane.part(f"layers.{layer}.mlp")
        return part if isinstance(part, SparseMlp) else None

    return find


_Done = Callable[[Stage, Bytes], None]
