"""Puts a store's units where a placement wants them, and has them ready for a decoder.

Everything that a pipeline holds is made here and freed by its ``close``: files, threads, rings,
buffers, the GPU's memory. It does not choose the placement.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack

from localrt.models.checkpoints.store.memory import Verifier
from localrt.models.config import EMBEDDING
from localrt.models.decoder import load_norm
from localrt.models.layers.inputs import LAYER_EMBEDDING
from localrt.models.layers.ngrams import NGRAM_TABLE
from localrt.offload.account import card_scratch_nbytes
from localrt.offload.device.gpu import Gpu
from localrt.offload.experts.hybrid import HybridExperts
from localrt.offload.experts.memory import (
    CpuExperts,
    ExpertMemory,
    Mixture,
    open_experts,
    open_gpu_slots,
)
from localrt.offload.pipeline.balance import Balance, Rings, host_ring
from localrt.offload.pipeline.caches import Caches
from localrt.offload.pipeline.lane import Lane
from localrt.offload.pipeline.setup import Opening, Setup, load_resident, make_stages
from localrt.offload.pipeline.stage import Stage
from localrt.offload.pipeline.streamed import Pipeline, StreamedWeights
from localrt.offload.pipeline.tables import NgramTable, RowTable
from localrt.offload.placement import Where
from localrt.offload.reading.files import StoreFiles
from localrt.offload.reading.unit_reader import DiskSource, LinkSource, UnitReader
from localrt.offload.ring import Ring
from localrt.offload.shapes import PassSizes
from localrt.quant.formats.packed import Bytes
from localrt.quant.ops.arrays import aligned_buffer

# Two copies on their way at once: the link does not rest while the next is asked for.
_COPIERS = 2
_COPY_BLOCK = 8 << 20


def open_pipeline(setup: Setup) -> StreamedWeights:
    """Load what is resident, start reading what is streamed.

    Raises:
        CheckpointError: a file is truncated or damaged.
        MemoryBudgetError: the GPU's memory is too small for the placement.
    """
    store, held = setup.store, ExitStack()
    if setup.kv_tier is not None:
        held.callback(setup.kv_tier.close)
    try:
        names = dict.fromkeys(unit.file for unit in store.manifest.units)
        files = setup.files or StoreFiles(store.path, names, direct=setup.mode.direct)
        held.callback(files.close)
        rows = setup.files or StoreFiles(store.path, names)  # never direct: a row is no page
        held.callback(rows.close)
        verify = Verifier(store.path, enabled=setup.verify, mend=setup.mend)
        opening = Opening(setup=setup, held=held, files=files, rows=rows, verify=verify, stages={})
        streamed = StreamedWeights(setup.config, _open(opening))
        # Its threads would otherwise keep the memory of a decoder that nobody closed.
        weakref.finalize(streamed, held.close)
        return streamed
    except BaseException:
        held.close()
        raise


def _open(opening: Opening) -> Pipeline:
    setup, held = opening.setup, opening.held
    placement, config = setup.placement, setup.config
    held.callback(opening.stages.clear)  # last: they refer to what refers to them
    on_gpu = setup.attention_on_gpu()
    cpu = _cpu_lane(opening)
    experts = _open_experts(opening, cpu)
    gpu, link = _gpu_lane(opening, cpu, attends=bool(on_gpu))
    copies = _Copies(gpu, link)
    runners = _expert_runners(opening, gpu, experts)
    held.callback(copies.forget)
    head, segments, joined_head = make_stages(opening, {False: cpu, True: gpu}, on_gpu, runners)
    stages = list(opening.stages.values())
    tables: dict[str, Bytes] = {}
    load_s = load_resident(opening, tables)
    # Streaming begins last: it would share the disk with what is waited for.
    cpu.stream([stage.unit for stage in stages if stage.where.read])
    if gpu is not None:
        gpu.stream([stage.unit for stage in stages if stage.where.copied])
    if experts is not None:
        experts.fill()
    ram_ring, _ = setup.rings()
    slots = placement.ram_ring - ram_ring  # bytes of the ring that are experts' slots
    caches = Caches(config.memories, setup.ops, None if gpu is None else gpu.ops, on_gpu)
    balance = Balance(
        stages,
        [lane for lane in (cpu, gpu) if lane is not None],
        Rings(ram_ring, placement.vram_ring, setup.mode.block),
        setup.budget + slots,
        caches,
        fixed=sum(data.nbytes for data in tables.values()),
        shortage=setup.shortage,
        forget=copies.forget,
        experts=experts,
        gpu_experts=next((r for r in runners.values() if isinstance(r, HybridExperts)), None),
        gpu_scratch=_gpu_scratch(setup),
    )
    beside = {table.tensor for table in config.block.tables(config)}
    rows = _Tables(opening, tables, [stage for stage in head if stage.lane is cpu])
    return Pipeline(
        placement=placement,
        cpu=cpu,
        gpu=gpu,
        layers=stages[: len(stages) - len(head)],
        head=head,
        segments=segments,
        joined_head=joined_head,
        caches=caches,
        embedding=rows.open(EMBEDDING),
        inputs=rows.open(LAYER_EMBEDDING) if LAYER_EMBEDDING in beside else None,
        ngrams=rows.open_ngrams() if NGRAM_TABLE in beside else None,
        balance=balance,
        clock=setup.clock,
        load_s=load_s,
        before_pass=opening.files.check_unchanged,
        abandon=copies.forget,
        kv_tier=setup.kv_tier,
        expert_memory=experts,
        close=held.close,
        experts=runners,
    )


def _gpu_scratch(setup: Setup) -> int:
    """What kernels need of the GPU's memory; nothing where it computes nothing."""
    placement = setup.placement
    if not (placement.card_rows or placement.uses_gpu):
        return 0
    return card_scratch_nbytes(PassSizes.of_config(setup.config), placement.prefill_rows)


class _Copies:
    """Copies to the GPU ahead of a pass, and what they wait for."""

    def __init__(self, gpu: Lane | None, link: LinkSource | None) -> None:
        self._gpu, self._link = gpu, link

    def forget(self) -> None:
        """End what copies wait for; nothing is copied until the GPU's reader begins again."""
        if self._gpu is not None and self._gpu.reader is not None and self._link is not None:
            self._gpu.reader.stop()  # else what it drops already could end now, and resume the link
            self._link.forget()


class _Tables:
    """Opens what is read by row; ``loaded`` and the ``head``'s slices on the CPU are in RAM."""

    def __init__(self, opening: Opening, loaded: dict[str, Bytes], head: list[Stage]) -> None:
        self._opening, self._loaded, self._head = opening, loaded, head

    def open(self, name: str) -> RowTable:
        """Rows of an embedding."""
        opening, setup = self._opening, self._opening.setup
        table = RowTable(setup.store, name, opening.rows, self._resident, stall_s=setup.stall_s)
        opening.held.callback(table.close)
        return table

    def open_ngrams(self) -> NgramTable:
        """Rows of hashed n-grams."""
        opening, setup = self._opening, self._opening.setup
        table = NgramTable(
            setup.store, NGRAM_TABLE, opening.files, self._resident, stall_s=setup.stall_s
        )
        opening.held.callback(table.close)
        return table

    def _resident(self, name: str) -> Bytes | None:
        """The bytes of a unit, where they are in RAM."""
        if name in self._loaded:
            return self._loaded[name]
        return next((stage.memory for stage in self._head if stage.name == name), None)


# -- lanes -----------------------------------------------------------------------------------------


def _cpu_lane(opening: Opening) -> Lane:
    setup = opening.setup
    nbytes, _ = setup.rings()
    reader = None
    if nbytes:
        reader = UnitReader(
            DiskSource(opening.files, setup.clock),
            host_ring(nbytes, setup.mode.block, setup.gpu),
            threads=setup.mode.threads,
            stall_s=setup.stall_s,
        )
    lane = Lane(setup.store, setup.ops, setup.clock, reader=reader, verify=opening.verify)
    return _with_norm(opening, lane)


def _gpu_lane(
    opening: Opening, cpu: Lane, *, attends: bool
) -> tuple[Lane | None, LinkSource | None]:
    """The GPU's lane, and what it copies from; None where there is no GPU."""
    setup, held, stages = opening.setup, opening.held, opening.stages
    gpu = setup.gpu
    if gpu is None:
        return None, None
    held.callback(gpu.close)
    _, nbytes = setup.rings()
    link = copier = None
    if nbytes:
        memory = gpu.alloc(nbytes)
        held.callback(gpu.free, memory)

        def in_ram(name: str) -> Bytes | None:
            stage = stages.get(name)
            if stage is None or stage.where not in (Where.LINK, Where.RAM):
                return None
            return stage.memory

        link = LinkSource(gpu, in_ram, cpu.reader, opening.verify)
        copier = UnitReader(
            link,
            Ring(nbytes, _COPY_BLOCK, memory),
            threads=_COPIERS,
            stall_s=setup.stall_s + 1,
            drained=link.resume,
        )
    lane = Lane(setup.store, gpu.ops, setup.clock, reader=copier, gpu=gpu, attends=attends)
    return _with_norm(opening, lane), link


def _with_norm(opening: Opening, lane: Lane) -> Lane:
    """The lane with the final norm's weights; it is closed, and its units freed, in its turn."""
    setup = opening.setup

    def close() -> None:
        if lane.reader is not None:
            lane.reader.close()
        for stage in opening.stages.values():
            if stage.lane is lane:
                stage.free()

    opening.held.callback(close)
    if not setup.config.block.final_norm:
        return lane
    unit = setup.unit("norm")
    data = aligned_buffer(unit.nbytes)
    opening.files.read_into(unit.file, unit.offset, data)
    with lane.ops.scope():
        lane.norm = load_norm(setup.config, lane.weights(unit, data))
    return lane


# -- experts ---------------------------------------------------------------------------------------


def _mixture(setup: Setup) -> Mixture:
    return Mixture(setup.config, setup.units, setup.placement.where)


def _open_experts(opening: Opening, cpu: Lane) -> ExpertMemory | None:
    """Slots in RAM; None of a dense model."""
    setup = opening.setup
    if not setup.config.sparse:
        return None
    gpu: Gpu | None = setup.gpu
    in_ram = (u.nbytes for u in setup.dense() if setup.where(u) in (Where.RAM, Where.LINK))
    experts = open_experts(
        _mixture(setup),
        cpu,
        DiskSource(opening.files, setup.clock),
        setup.mode,
        opening.verify,
        stall_s=setup.stall_s,
        ring=setup.placement.ram_ring - setup.rings()[0],
        room=setup.budget - sum(in_ram),
        # What is copied over the link must not be paged out on the way.
        alloc=aligned_buffer if gpu is None else gpu.host_buffer,
        free=(lambda memory: None) if gpu is None else gpu.free_host,
    )
    opening.held.callback(experts.close)
    return experts


def _expert_runners(
    opening: Opening, gpu: Lane | None, experts: ExpertMemory | None
) -> dict[str, CpuExperts | HybridExperts]:
    """What runs a mixture's layers on each lane."""
    if experts is None:
        return {}
    setup = opening.setup
    runners: dict[str, CpuExperts | HybridExperts] = {
        "cpu": CpuExperts(experts, setup.ops, setup.clock)
    }
    mlps = [setup.where(setup.layers("mlp")[layer]) for layer in setup.config.sparse_layers]
    if gpu is not None and gpu.gpu is not None and any(where.on_gpu for where in mlps):
        ring = setup.placement.vram_ring - setup.rings()[1]
        slots = open_gpu_slots(_mixture(setup), gpu, gpu.gpu, ring=ring)
        opening.held.callback(slots.close)
        assert setup.expert_costs is not None, "who computes an expert is decided by what it takes"
        runners["gpu"] = hybrid = HybridExperts(
            slots,
            experts,
            setup.ops,
            setup.clock,
            setup.expert_costs,
            card_rows=setup.placement.card_rows,
        )
        opening.held.callback(hybrid.settle)
    return runners
