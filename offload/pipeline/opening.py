"""Opens a pipeline: loads a store's units to the devices that a placement names.

Each unit of the store becomes a stage of the pass; resident units are read now. Files, threads,
rings, buffers and GPU memory are all created here and freed by the pipeline's ``close``. This
module does not choose the placement.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import cast

from localrt.common.forks import finalize
from localrt.models.checkpoints.store.checkpoint import Verifier
from localrt.models.checkpoints.store.manifest import StoredUnit
from localrt.models.config import Part, memory_places
from localrt.models.decoder import load_attention, load_mlp, load_norm
from localrt.models.layers.ngrams import NGRAM_TABLE
from localrt.models.tensor_source import EMBEDDING
from localrt.models.units import TABLES
from localrt.offload.account import gpu_scratch_nbytes
from localrt.offload.device.gpu import Gpu, Slab, share_slabs
from localrt.offload.experts.hybrid import HybridExperts
from localrt.offload.experts.memory import (
    CpuExperts,
    ExpertMemory,
    Mixture,
    open_experts,
    open_gpu_slots,
)
from localrt.offload.pipeline.balance import Balance
from localrt.offload.pipeline.caches import Caches
from localrt.offload.pipeline.lane import Lane, host_ring
from localrt.offload.pipeline.setup import Setup
from localrt.offload.pipeline.split import HostPiece, PieceStage, SplitStage, split_unit
from localrt.offload.pipeline.stage import (
    CrossingStage,
    JoinedParts,
    Stage,
    Stages,
    head_stage,
    join_head,
    join_segments,
)
from localrt.offload.pipeline.streamed import StreamedWeights
from localrt.offload.pipeline.tables import CACHE_BYTES, RowTable
from localrt.offload.placement import Where
from localrt.offload.reading.files import DiskSource, StoreFiles
from localrt.offload.reading.queued import QueuedCopies
from localrt.offload.reading.reader import UnitReader
from localrt.offload.ring import COPY_BLOCK, Ring
from localrt.offload.shapes import PassSizes
from localrt.quant.formats.packed import Bytes
from localrt.quant.ops.arrays import aligned_buffer

_VERIFIED = 2  # units hashed while others are read; a core hashes about a gigabyte per second
_PINNED_AT_ONCE = 256 << 20  # bytes of expert slots per allocation, since driver calls are slow


def open_pipeline(setup: Setup) -> StreamedWeights:
    """Load resident units and start reading streamed ones.

    Raises:
        CheckpointError: a file is truncated or damaged.
        MemoryBudgetError: the GPU's memory is too small for the placement.
    """
    resources = ExitStack()
    if setup.kv_tier is not None:
        resources.callback(setup.kv_tier.close)
    try:
        weights = _Opening(setup, resources).open()
        # Otherwise the threads would keep a decoder alive that nobody closes.
        finalize(weights, resources.close)
        return weights
    except BaseException:
        resources.close()
        raise


class _Opening:
    """A pipeline being opened. ``resources`` frees everything created, in reverse order.

    ``stages`` are by name in the order of a pass; ``tables`` holds tables that are read by row, if
    in RAM.
    """

    def __init__(self, setup: Setup, resources: ExitStack) -> None:
        self.setup, self.resources = setup, resources
        # Everything below needs these, so they are freed last.
        store = setup.store
        names = dict.fromkeys(unit.file for unit in store.manifest.units)
        self.files = setup.files or StoreFiles(store.path, names, direct=setup.mode.direct)
        resources.callback(self.files.close)
        self.verify = Verifier(store.path, enabled=setup.verify, mend=setup.mend)
        self.stages = Stages()
        resources.callback(self.stages.clear)  # which breaks reference cycles
        self.segments = JoinedParts(join_segments)
        self.tables: dict[str, Bytes] = {}
        self.on_gpu = setup.attention_on_gpu()
        # Each of these uses those before it, and is freed before them.
        self.cpu = self._cpu_lane()
        self.experts = self._experts()
        self.gpu = self._gpu_lane()
        self.runners = self._runners()

    def open(self) -> StreamedWeights:
        """Build the whole pipeline."""
        setup, config, cpu, gpu = self.setup, self.setup.config, self.cpu, self.gpu
        if gpu is not None:
            self.resources.callback(gpu.stop_copies)
        joined_head = JoinedParts(partial(join_head, config))
        self._make_layers()
        head = self._make_head(joined_head)
        stages = list(self.stages.values())
        self._load()
        if self.experts is not None:
            self.experts.fill()
        caches = Caches(config.memories, cpu.ops, None if gpu is None else gpu.ops, self.on_gpu)
        balance = Balance(
            setup,
            stages,
            cpu,
            gpu,
            caches,
            fixed=sum(data.nbytes for data in self.tables.values()),
            experts=self.experts,
            gpu_experts=next(
                (r for r in self.runners.values() if isinstance(r, HybridExperts)), None
            ),
            gpu_scratch=self._gpu_scratch(),
        )
        balance.schedule()  # last, since it would slow the resident units' reads
        on_cpu = {stage.name: stage for stage in head if stage.lane is cpu}
        return StreamedWeights(
            setup,
            cpu=cpu,
            gpu=gpu,
            layers=[s for s in stages[: len(stages) - len(head)] if not isinstance(s, PieceStage)],
            head=head,
            segments=self.segments,
            joined_head=joined_head,
            caches=caches,
            embedding=self._table(EMBEDDING, on_cpu),
            tables=[
                (table, self._table(table.tensor, on_cpu)) for table in config.block.tables(config)
            ],
            memory=balance,
            before_pass=self.files.check_unchanged,
            expert_memory=self.experts,
            sparse=self.runners,
            close=self.resources.close,
        )

    # -- lanes -----------------------------------------------------------------------------------

    def _cpu_lane(self) -> Lane:
        setup = self.setup
        nbytes, _ = setup.rings()
        reader = None
        if nbytes:
            reader = UnitReader(
                DiskSource(self.files, setup.clock),
                host_ring(nbytes, setup.mode.block, setup.gpu),
                threads=setup.mode.threads,
                stall_s=setup.stall_s,
                verify=self.verify,
            )
        lane = Lane(setup.store, setup.ops, setup.clock, reader=reader)
        return self._with_norm(lane)

    def _gpu_lane(self) -> Lane | None:
        setup, gpu, reader = self.setup, self.setup.gpu, self.cpu.reader
        if gpu is None:
            return None
        self.resources.callback(gpu.close)
        _, nbytes = setup.rings()
        copier = None
        if nbytes:
            memory = gpu.alloc(nbytes)
            self.resources.callback(gpu.free, memory)
            assert reader is None or isinstance(reader, UnitReader), "it reads from the SSD"
            copier = QueuedCopies(gpu, Ring(nbytes, COPY_BLOCK, memory), self.stages.in_ram, reader)
        attends = bool(self.on_gpu)
        lane = Lane(setup.store, gpu.ops, setup.clock, reader=copier, gpu=gpu, attends=attends)
        return self._with_norm(lane)

    def _with_norm(self, lane: Lane) -> Lane:
        """The lane with the final norm's weights; closing it frees its units."""
        setup, stages = self.setup, self.stages

        def close() -> None:
            if lane.reader is not None:
                lane.reader.close()
            for stage in stages.values():
                if stage.lane is lane:
                    stage.free()
            if lane.recorder is not None:
                lane.recorder.forget()

        self.resources.callback(close)
        if setup.config.block.final_norm:
            unit = setup.unit("norm")
            with lane.ops.scope():
                lane.norm = load_norm(setup.config, lane.weights(unit, self._read(unit)))
        return lane

    def _read(self, unit: StoredUnit) -> Bytes:
        data = aligned_buffer(unit.nbytes)
        self.files.read_into(unit.file, unit.offset, data)
        return data

    # -- experts ---------------------------------------------------------------------------------

    def _experts(self) -> ExpertMemory | None:
        """The experts' slots in RAM; None for a dense model."""
        setup, gpu = self.setup, self.setup.gpu
        if not setup.config.sparse:
            return None
        in_ram = (u.nbytes for u in setup.dense() if setup.where(u) in (Where.RAM, Where.LINK))
        experts = open_experts(
            Mixture(setup.config, setup.units, setup.placement.where),
            self.cpu,
            DiskSource(self.files, setup.clock),
            setup.mode,
            self.verify,
            stall_s=setup.stall_s,
            ring=setup.placement.ram_ring - setup.rings()[0],
            room=setup.budget - sum(in_ram),
            # Sources of copies over the link must not be paged out.
            alloc=aligned_buffer if gpu is None else gpu.host_buffer,
            free=(lambda memory: None) if gpu is None else gpu.free_host,
            slab_nbytes=0 if gpu is None else _PINNED_AT_ONCE,
        )
        self.resources.callback(experts.close)
        return experts

    def _runners(self) -> dict[str, CpuExperts | HybridExperts]:
        """Make the runner of a mixture's layers for each lane."""
        gpu, experts = self.gpu, self.experts
        if experts is None:
            return {}
        setup, placement = self.setup, self.setup.placement
        runners: dict[str, CpuExperts | HybridExperts] = {
            "cpu": CpuExperts(experts, setup.ops, setup.clock)
        }
        mlps = [setup.where(setup.layers("mlp")[layer]) for layer in setup.config.sparse_layers]
        if gpu is not None and setup.gpu is not None and any(where.on_gpu for where in mlps):
            slots = open_gpu_slots(
                Mixture(setup.config, setup.units, placement.where),
                gpu,
                setup.gpu,
                ring=placement.vram_ring - setup.rings()[1],
            )
            self.resources.callback(slots.close)
            assert setup.expert_costs is not None, "a mixture on a GPU needs costs"
            runners["gpu"] = hybrid = HybridExperts(
                slots,
                experts,
                setup.ops,
                setup.clock,
                setup.expert_costs,
                gpu_rows=placement.gpu_rows,
                recorder=gpu.recorder,
            )
            self.resources.callback(hybrid.settle)
        return runners

    # -- stages ----------------------------------------------------------------------------------

    def _make_layers(self) -> None:
        """A stage for every unit of the layers, in order."""
        setup, config, placement = self.setup, self.setup.config, self.setup.placement
        attention, mlps = setup.layers("attention"), setup.layers("mlp")
        places = self._cache_places()
        for layer in range(config.layers):
            if (unit := attention.get(layer)) is not None:
                source, lane = config.cache_of(layer), self._lane(unit)
                shared = (source in self.on_gpu) is (layer in self.on_gpu)
                assert shared, "layers with one cache attend on one processor"
                load = partial(load_attention, config, layer, at=places[source])
                self._add_stage(unit, lane, load)
            if (unit := mlps.get(layer)) is None:
                continue
            if unit.name in placement.split:
                self._make_split(layer, unit)
                continue
            sparse, lane = config.mixture(layer) is not None, self._lane(unit)
            experts = self.runners[lane.resource] if sparse else None
            load = partial(load_mlp, config, layer, experts=experts)
            if unit.name in placement.crossing:
                assert self.gpu is not None, "what crosses goes to one"
                assert not sparse, "of a mixture experts cross"
                self.stages[unit.name] = CrossingStage(
                    unit, setup.where(unit), lane, load, gpu=self.gpu, rows=placement.gpu_rows
                )
            else:
                self._add_stage(unit, lane, load, experts)

    def _add_stage(
        self,
        unit: StoredUnit,
        lane: Lane,
        load: Callable[..., Part],
        experts: CpuExperts | HybridExperts | None = None,
    ) -> None:
        where = self.setup.where(unit)
        self.stages[unit.name] = Stage(unit, where, lane, load, self.segments, experts=experts)

    def _make_split(self, layer: int, unit: StoredUnit) -> None:
        """Stages for the pieces of an MLP; one of them computes the whole MLP."""
        config, placement, gpu = self.setup.config, self.setup.placement, self.gpu
        assert gpu is not None, "it has a piece"
        pieces = split_unit(config, layer, unit, placement.split[unit.name])
        host = HostPiece(pieces[-1], self.cpu, gpu, config, layer, self.setup.clock)
        rows = placement.gpu_rows if host.name in placement.crossing else 0
        stage = SplitStage(pieces, gpu, host, rows, self.segments)
        self.stages |= {each.name: each for each in stage.stages}

    def _make_head(self, joined: JoinedParts) -> list[Stage]:
        """A stage for every slice of the head."""
        config, where = self.setup.config, self.setup.where
        head = [
            head_stage(config, unit, where(unit), self._lane(unit), joined)
            for unit in self.setup.head()
        ]
        self.stages |= {stage.name: stage for stage in head}
        return head

    def _lane(self, unit: StoredUnit) -> Lane:
        if not self.setup.where(unit).on_gpu:
            return self.cpu
        assert self.gpu is not None, "a placement on a GPU needs one"
        return self.gpu

    def _cache_places(self) -> dict[int, tuple[int, ...]]:
        """Each layer's indices in the cache of its lane."""
        config, places = self.setup.config, dict[int, tuple[int, ...]]()
        for layers in (self.on_gpu, frozenset(range(config.layers)) - self.on_gpu):
            ordered = sorted(layers)
            numbers = memory_places(config.memory_of(layer) for layer in ordered)
            places |= zip(ordered, numbers, strict=True)
        return places

    # -- weights ---------------------------------------------------------------------------------

    def _load(self) -> None:
        """Read every resident unit to its place."""
        setup = self.setup
        slabs = {} if setup.gpu is None else self._slabs(setup.gpu)

        def put(stage: Stage, data: Bytes) -> None:
            stage.remember_vectors(data)
            if (slab := slabs.get(stage.name)) is None:
                stage.put(data)
                return
            assert setup.gpu is not None, "its memory is in slabs"
            memory = slab.take(stage.unit.nbytes)
            setup.gpu.copy_in(stage.name, data, memory, None)
            with setup.gpu.ops.scope():
                stage.put(memory, slab)

        def buffer(stage: Stage) -> Bytes:
            staged = stage.where is Where.VRAM
            return aligned_buffer(stage.unit.nbytes) if staged else stage.host_buffer()

        def put_pieces(stage: SplitStage, whole: Bytes) -> None:
            for each in stage.stages:
                data = buffer(each)
                each.piece.take(whole, data)
                put(each, data)

        unverified = deque[tuple[Future[None], Stage, Bytes]]()

        def put_next() -> None:
            verified, stage, data = unverified.popleft()
            verified.result()
            put_pieces(stage, data) if isinstance(stage, SplitStage) else put(stage, data)

        with (
            ThreadPoolExecutor(setup.mode.threads, thread_name_prefix="localrt-load") as pool,
            ThreadPoolExecutor(_VERIFIED, thread_name_prefix="localrt-verify") as verifiers,
        ):
            for stage in self.stages.values():
                if isinstance(stage, PieceStage):
                    continue  # loaded with its ``SplitStage``
                if not stage.where.read:
                    unit, data = stage.unit, None
                    if isinstance(stage, SplitStage):
                        unit = setup.unit(stage.mlp_name)
                        data = aligned_buffer(unit.nbytes)
                    data = buffer(stage) if data is None else data
                    self._fill(unit, data, pool)
                    unverified.append((verifiers.submit(self.verify, unit, data), stage, data))
                    if len(unverified) > _VERIFIED:
                        put_next()
                elif stage.place(crossing=True) is Where.SSD_LINK:
                    stage.remember_vectors(self._read(stage.unit))
            for name in TABLES:
                if setup.placement.where.get(name) is Where.RAM and name in setup.units:
                    unit = setup.units[name]
                    self.tables[name] = aligned_buffer(unit.nbytes)
                    self._fill(unit, self.tables[name], pool)
                    self.verify(unit, self.tables[name])
            while unverified:
                put_next()

    def _fill(self, unit: StoredUnit, data: Bytes, pool: ThreadPoolExecutor) -> None:
        """Read a unit into ``data``."""
        files, block = self.files, self.setup.mode.block

        def read(start: int) -> int:
            part = data[start : start + block]
            files.read_into(unit.file, unit.offset + start, part)
            return part.nbytes

        for count in pool.map(read, range(0, unit.nbytes, block)):
            if self.setup.on_bytes is not None:
                self.setup.on_bytes(count)

    def _slabs(self, gpu: Gpu) -> dict[str, Slab]:
        """Allocate GPU memory for resident units; returns each unit's slab."""
        stages = self.stages.values()
        sizes = {stage.name: stage.unit.nbytes for stage in stages if stage.where is Where.VRAM}
        head = [unit.name for unit in self.setup.head() if unit.name in sizes]
        split = {name: size for name, size in sizes.items() if self.stages[name].fixed}
        layers = {n: size for n, size in sizes.items() if n not in head and n not in split}
        slabs: dict[str, Slab] = {}
        # The head's slices are adjacent: they are one matrix.
        for names in (*share_slabs(layers), *share_slabs(split), *([head] if head else [])):
            slab = Slab(gpu, sum(sizes[name] for name in names), len(names))
            self.resources.callback(slab.free)
            slabs |= dict.fromkeys(names, slab)
        return slabs

    def _gpu_scratch(self) -> Callable[[], int]:
        """Return a function that returns the bytes of GPU memory that kernels need."""
        placement, gpu = self.setup.placement, self.gpu
        if not (placement.gpu_rows or placement.uses_gpu):
            return lambda: 0
        recorder = None if gpu is None else gpu.recorder
        sizes, rows = PassSizes.of_config(self.setup.config), placement.prefill_rows
        return lambda: gpu_scratch_nbytes(sizes, rows, 0 if recorder is None else recorder.nbytes)

    def _table(self, name: str, head: Mapping[str, Stage]) -> RowTable:
        """A table that is read by row; ``head`` holds the slices that the CPU computes."""
        setup, loaded = self.setup, self.tables

        def resident(unit: str) -> Bytes | None:
            if unit in loaded:
                return loaded[unit]
            return cast(Bytes, head[unit].memory) if unit in head else None

        # N-grams rarely repeat soon.
        cache = 0 if name == NGRAM_TABLE else CACHE_BYTES
        table = RowTable(
            setup.store,
            name,
            self.files,
            resident,
            self.verify.repair,
            cache_bytes=cache,
            stall_s=setup.stall_s,
        )
        self.resources.callback(table.close)
        return table
