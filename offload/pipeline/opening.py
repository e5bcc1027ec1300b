"""Puts a store's units where a placement wants them, and has them ready for a decoder.

Everything that a pipeline holds is made here and freed by its ``close``: files, threads,
rings, buffers, the card's memory. It does not choose the placement.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack

from localrt.models.checkpoints.store.checkpoint import StoreCheckpoint
from localrt.models.checkpoints.store.memory import Verifier
from localrt.models.config import EMBEDDING, LAYER_EMBEDDING, NGRAM_TABLE, DecoderConfig
from localrt.models.decoder import load_norm
from localrt.offload.account import card_scratch_nbytes
from localrt.offload.experts.hybrid import HybridStage
from localrt.offload.experts.memory import (
    ExpertMemory,
    Mixture,
    open_card_slots,
    open_experts,
)
from localrt.offload.experts.stage import SparseStage
from localrt.offload.kv.tier import KvTier
from localrt.offload.pipeline.balance import Balance, Rings, host_ring
from localrt.offload.pipeline.caches import Caches
from localrt.offload.pipeline.lane import Bytes, Lane
from localrt.offload.pipeline.ngram_table import NgramTable
from localrt.offload.pipeline.row_table import RowTable
from localrt.offload.pipeline.setup import Devices, Setup
from localrt.offload.pipeline.stages import load_resident, make_stages
from localrt.offload.pipeline.streamed import Pipeline, Streamed
from localrt.offload.placement import Placement, Where
from localrt.offload.reading.files import StoreFiles
from localrt.offload.reading.loading import Reading
from localrt.offload.reading.sources import DiskSource, LinkSource
from localrt.offload.reading.unit_reader import UnitReader
from localrt.offload.ring import Ring
from localrt.offload.shapes import PassSizes
from localrt.quant.ops.arrays import aligned_buffer

__all__ = ["open_pipeline"]

# Two copies on their way at once: the link does not rest while the next is asked for.
_COPIERS = 2
_COPY_BLOCK = 8 << 20


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
        CheckpointError: a file is truncated or damaged.
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
        setup = Setup(
            held=held,
            store=store,
            config=config,
            placement=placement,
            devices=devices,
            reading=reading,
            units={unit.name: unit for unit in store.manifest.units},
            files=files,
            rows=rows,
            verify=Verifier(store.path, enabled=reading.verify, mend=reading.mend),
            stages={},
        )
        streamed = Streamed(config, _open(setup, budget, shortage, kv_tier, on_bytes))
        # Its threads would otherwise keep the memory of a decoder that nobody closed.
        weakref.finalize(streamed, held.close)
        return streamed
    except BaseException:
        held.close()
        raise


def _open(
    setup: Setup,
    budget: int,
    shortage: Callable[[], tuple[int, int]],
    kv_tier: KvTier | None,
    on_bytes: Callable[[int], None] | None,
) -> Pipeline:
    held, devices, placement = setup.held, setup.devices, setup.placement
    held.callback(setup.stages.clear)  # last: they refer to what refers to them
    on_card = frozenset(
        layer for layer, unit in setup.layers("attention").items() if setup.where(unit).on_gpu
    )
    cpu = _cpu_lane(setup)
    experts = _open_experts(setup, cpu, budget)
    card, link = _card_lane(setup, cpu, attends=bool(on_card))

    def forget() -> None:
        """End what copies wait for; nothing is copied until the card's reader begins again."""
        if card is not None and card.reader is not None and link is not None:
            card.reader.stop()  # else what it drops already could end now, and resume the link
            link.forget()

    runners = _expert_runners(setup, cpu, card, experts)
    held.callback(forget)
    head, stretches, joined_head = make_stages(setup, {False: cpu, True: card}, on_card, runners)
    stages = list(setup.stages.values())
    tables: dict[str, Bytes] = {}
    load_s = load_resident(setup, tables, on_bytes)
    # Streaming begins last: it would share the disk with what is waited for.
    cpu.stream([stage.unit for stage in stages if stage.where.read])
    if card is not None:
        card.stream([stage.unit for stage in stages if stage.where.copied])
    if experts is not None:
        experts.fill()

    def resident(name: str) -> Bytes | None:
        """The bytes of a unit that is read by row, and is in RAM."""
        if name in tables:
            return tables[name]
        ours = (stage for stage in head if stage.name == name and stage.lane is cpu)
        return next((stage.memory for stage in ours), None)

    def open_table(name: str) -> RowTable:
        stall_s = setup.reading.stall_s
        table = RowTable(setup.store, name, setup.rows, resident, stall_s=stall_s)
        held.callback(table.close)
        return table

    def open_ngrams() -> NgramTable:
        stall_s = setup.reading.stall_s
        table = NgramTable(setup.store, NGRAM_TABLE, setup.files, resident, stall_s=stall_s)
        held.callback(table.close)
        return table

    inputs = setup.config.layer_inputs
    ngrams = None if setup.config.ngrams is None else open_ngrams()
    ram_ring, _ = setup.rings()
    slots = placement.ram_ring - ram_ring  # bytes of the ring that are experts' slots
    card_ops = None if card is None else card.ops
    caches = Caches(setup.config.memories, devices.ops, card_ops, on_card)
    balance = Balance(
        stages,
        [lane for lane in (cpu, card) if lane is not None],
        Rings(ram_ring, placement.vram_ring, setup.reading.mode.block),
        budget + slots,
        caches,
        fixed=sum(data.nbytes for data in tables.values()),
        shortage=shortage,
        forget=forget,
        experts=experts,
        card_experts=next((r for r in runners.values() if isinstance(r, HybridStage)), None),
        card_scratch=_card_scratch(setup),
    )

    def ssd_bytes() -> int:
        read = 0 if cpu.reader is None else cpu.reader.bytes_read
        read += 0 if experts is None else experts.bytes_read
        read += 0 if ngrams is None else ngrams.bytes_read
        return read + (0 if kv_tier is None else kv_tier.read_bytes)

    return Pipeline(
        placement=placement,
        cpu=cpu,
        card=card,
        layers=stages[: len(stages) - len(head)],
        head=head,
        stretches=stretches,
        joined_head=joined_head,
        caches=caches,
        embedding=open_table(EMBEDDING),
        inputs=None if inputs is None else open_table(LAYER_EMBEDDING),
        ngrams=ngrams,
        balance=balance,
        clock=devices.clock,
        load_s=load_s,
        before_pass=setup.files.check_unchanged,
        abandon=forget,
        ssd_bytes=ssd_bytes,
        close=held.close,
        experts=runners,
    )


def _card_scratch(setup: Setup) -> int:
    """What kernels need of the card; nothing where it computes nothing."""
    placement = setup.placement
    if not (placement.card_rows or placement.uses_gpu):
        return 0
    return card_scratch_nbytes(PassSizes.of_config(setup.config), placement.prefill_rows)


# -- lanes -----------------------------------------------------------------------------------------


def _cpu_lane(setup: Setup) -> Lane:
    nbytes, _ = setup.rings()
    reading, devices = setup.reading, setup.devices
    reader = None
    if nbytes:
        reader = UnitReader(
            DiskSource(setup.files, devices.clock),
            host_ring(nbytes, reading.mode.block, devices.card),
            threads=reading.mode.threads,
            stall_s=reading.stall_s,
        )
    lane = Lane(setup.store, devices.ops, devices.clock, reader=reader, verify=setup.verify)
    return _with_norm(setup, lane)


def _card_lane(setup: Setup, cpu: Lane, *, attends: bool) -> tuple[Lane | None, LinkSource | None]:
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

        def in_ram(name: str) -> Bytes | None:
            stage = setup.stages.get(name)
            if stage is None or stage.where not in (Where.LINK, Where.RAM):
                return None
            return stage.memory

        link = LinkSource(card, in_ram, cpu.reader, setup.verify)
        copier = UnitReader(
            link,
            Ring(nbytes, _COPY_BLOCK, memory),
            # A virtual link takes copies in the order in which they are charged.
            threads=1 if clock.simulated else _COPIERS,
            stall_s=setup.reading.stall_s + 1,
            drained=link.resume,
        )
    lane = Lane(setup.store, card.ops, clock, reader=copier, card=card, attends=attends)
    return _with_norm(setup, lane), link


def _with_norm(setup: Setup, lane: Lane) -> Lane:
    """The lane with the final norm's weights; it is closed, and its units freed, in its turn."""

    def close() -> None:
        if lane.reader is not None:
            lane.reader.close()
        for stage in setup.stages.values():
            if stage.lane is lane:
                stage.free()

    setup.held.callback(close)
    if not setup.config.final_norm:
        return lane
    unit = setup.unit("norm")
    data = aligned_buffer(unit.nbytes)
    setup.files.read_into(unit.file, unit.offset, data)
    with lane.ops.scope():
        lane.norm = load_norm(setup.config, lane.weights(unit, data))
    return lane


# -- experts ---------------------------------------------------------------------------------------


def _mixture(setup: Setup) -> Mixture:
    return Mixture(setup.config, setup.units, setup.placement.where)


def _open_experts(setup: Setup, cpu: Lane, budget: int) -> ExpertMemory | None:
    """Slots in RAM; None of a dense model."""
    if not setup.config.sparse:
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
        free=(lambda memory: None) if card is None else card.free_host,
    )
    setup.held.callback(experts.close)
    return experts


def _expert_runners(
    setup: Setup, cpu: Lane, card: Lane | None, experts: ExpertMemory | None
) -> dict[str, SparseStage | HybridStage]:
    """What runs a mixture's layers on each lane."""
    if experts is None:
        return {}
    devices, layers = setup.devices, list(setup.config.sparse_layers)
    runners: dict[str, SparseStage | HybridStage] = {
        "cpu": SparseStage(experts, devices.ops, devices.clock)
    }
    mlps = [setup.where(setup.layers("mlp")[layer]) for layer in layers]
    if card is not None and any(where.on_gpu for where in mlps):
        ring = setup.placement.vram_ring - setup.rings()[1]
        slots = open_card_slots(_mixture(setup), card, ring=ring)
        setup.held.callback(slots.close)
        costs = devices.expert_costs
        assert costs is not None, "who computes an expert is decided by what it takes"
        runners["gpu"] = hybrid = HybridStage(
            slots,
            experts,
            devices.ops,
            devices.clock,
            costs,
            card_rows=setup.placement.card_rows,
        )
        setup.held.callback(hybrid.settle)
    return runners
