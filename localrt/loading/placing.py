"""Loads a model that is larger than its memory budget: the engine streams what does not fit.

It chooses the context that the budget allows, packs the model once, measures the machine once, asks
the planner, and opens the pipeline. The first plan is for a short context, so that weights use
the memory which a long context's cache will need. It knows neither kernels nor schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from localrt.common.errors import StorageError, reason_of
from localrt.common.files import private_folder
from localrt.common.formatting import format_bytes
from localrt.common.option_names import option
from localrt.common.progress import note_to
from localrt.common.settings import Settings
from localrt.engine.native.engine import NativeEngine
from localrt.engine.native.meters import placed_forecast
from localrt.engine.protocol import EngineInfo, Forecaster, Rates, Speeds
from localrt.hub.names import shown_path
from localrt.loading.context import LoadContext
from localrt.loading.first_passes import run_first_passes
from localrt.loading.gpu import open_gpu
from localrt.loading.options import LoadOptions, pick_context
from localrt.models.checkpoints import Checkpoint
from localrt.models.checkpoints.store.checkpoint import StoreCheckpoint
from localrt.models.checkpoints.store.manifest import StoredUnit
from localrt.models.config import DecoderConfig
from localrt.models.decoder import Decoder
from localrt.models.registry import read_config
from localrt.offload.account import (
    FIRST_CONTEXT,
    GROWTH_NBYTES,
    LOADING_NBYTES,
    MARGIN_NBYTES,
    Account,
    Budgets,
    MemoryPart,
    ring_for_all_nbytes,
    unstreamable_gpu_nbytes,
    unstreamable_nbytes,
)
from localrt.offload.kv.cache import KvTier
from localrt.offload.memory import MemoryPressure, current_rss, ram_budget
from localrt.offload.pipeline.opening import open_pipeline
from localrt.offload.pipeline.setup import Setup
from localrt.offload.pipeline.streamed import StreamedWeights
from localrt.offload.placement import Where
from localrt.offload.shapes import ModelShape, shape_from_checkpoint
from localrt.offload.store.pack import cached_store, mend_unit
from localrt.planning.costs import expert_costs
from localrt.planning.forecast import Forecast, PlanRequest
from localrt.planning.machine import typical_machine
from localrt.planning.measure import machine_profile
from localrt.planning.models import check_shapes
from localrt.planning.search import fits, make_forecast
from localrt.planning.simulate import simulate
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.cuda.gpu_cache import damage
from localrt.quant.ops.attention import AttentionSpec
from localrt.quant.ops.kv_formats import parse_kv_format
from localrt.quant.ops.protocol import Ops, implementation


def choose_context(request: PlanRequest, ctx: int | None, notes: list[str]) -> PlanRequest:
    """Return ``request`` with ``ctx`` tokens, or if None with the longest context that fits. Reads
    no weights.

    If an explicit ``ctx`` does not fit in RAM, part of its KV cache is kept on the SSD.

    Raises:
        MemoryBudgetError: it does not fit even then.
    """

    def fitting(tokens: int) -> bool:
        return fits(replace(request, ctx=tokens))

    request = replace(request, ctx=pick_context(ctx, request.shape.context_length, fitting, notes))
    if not fits(request):
        on_ssd = replace(request, kv_on_ssd=True)
        if ctx is not None and request.machine.gpu is None and fits(on_ssd):
            return on_ssd
        make_forecast(request)  # raises, unless ``fits`` was too strict
    return request


def first_plan(request: PlanRequest, rows: int) -> Forecast:
    """Plan for a short context from which the caches can grow to the whole one. With keys and
    values on the SSD, plan for the whole context at once.

    ``rows``: the rows of the passes to place for; more than one if draft tokens are verified.

    Raises:
        MemoryBudgetError: the whole context does not fit.
    """
    if request.kv_on_ssd:
        return make_forecast(request)
    first = min(request.ctx, FIRST_CONTEXT)
    while True:
        plan = make_forecast(replace(request, ctx=first, rows=rows))
        if first >= request.ctx or _can_grow(plan, request.ctx):
            # Later forecasts are for plain passes of one row.
            return replace(plan, request=replace(plan.request, rows=1))
        first = min(request.ctx, 2 * first)


def _can_grow(plan: Forecast, ctx: int) -> bool:
    """Whether the caches of ``ctx`` tokens fit beside unstreamable weights in RAM and VRAM."""
    shape, placement = plan.request.shape, plan.placement
    sizes = shape.kv_nbytes(plan.request.kv_format, ctx)
    kv = {"ram": 0, "vram": 0, "ssd": 0}
    for place, nbytes in zip(placement.kv, sizes, strict=True):
        kv[place] += nbytes
    memory = plan.memory
    streamed = (memory.nbytes(what, "vram") for what in ("weights", "keys and values"))
    stays = memory.total("vram") - sum(streamed) + unstreamable_gpu_nbytes(shape, placement)
    on_gpu = not kv["vram"] or stays + kv["vram"] <= plan.request.budgets.vram
    in_ram = unstreamable_nbytes(shape, placement) + kv["ram"] <= plan.for_weights_and_caches()
    return in_ram and on_gpu


_UNPINNED_SHARE = 0.5  # of the link's rate, when copying from unpinned RAM
_MENDED = "parts of the packed copy were damaged and have been made again from the model"


def load_placed(
    checkpoint: Checkpoint,
    ops: Ops,
    options: LoadOptions,
    context: LoadContext,
    describe: Callable[[DecoderConfig, bool], EngineInfo],
) -> tuple[NativeEngine, int]:
    """Load ``checkpoint`` within a budget for the whole process; return engine and context length.

    If ``ops`` computes on a GPU, GPU and CPU share the work. Without a ``ctx`` the context is the
    model's own, or the longest that fits with all weights streamed. ``describe`` takes the config
    and whether weights are streamed.

    Raises:
        MemoryBudgetError: the budget is too small even so; the message has the least that works.
        StorageError: there is no room on disk for the packed form.
    """
    settings, notes = context.settings, context.notes
    shape = shape_from_checkpoint(checkpoint, context=options.ctx)
    if ops.free_memory() is not None and (line := damage(settings.cache_dir)):
        notes.append(line)
    opened = open_gpu(
        ops,
        threads=options.threads,
        gpu_memory=options.gpu_memory,
        kv_format=options.kv_format,
        formats={unit.format for unit in shape.units if unit.kind != "norm"},
        progress=context.progress,
    )
    ops = opened.host_ops

    # Room for a ring on the GPU, even if nothing is streamed yet.
    kept = ring_for_all_nbytes(shape) if options.shrinkable and opened.gpu is not None else 0

    def budgets(to_come: int = 0) -> Budgets:
        return Budgets(
            ram=ram_budget(options.ram),
            process=current_rss() + GROWTH_NBYTES + MARGIN_NBYTES + to_come,
            vram=max(0, opened.capacity - kept),
            cuda_context=0,  # exists already, and is counted
        )

    request = PlanRequest(
        shape=shape,
        machine=opened.on(typical_machine()),
        budgets=budgets(LOADING_NBYTES),
        ctx=options.ctx or shape.context_length,
        kv_format=parse_kv_format(options.kv_format or "bf16"),
        # The pieces of an MLP cannot leave a GPU.
        splits=not kept and opened.gpu is not None and hasattr(opened.gpu.ops, "norm_split_mlp"),
    )
    request = choose_context(request, options.ctx, notes)
    config = read_config(checkpoint, context=request.ctx)
    store = _packed(checkpoint, shape, options, context)
    shape = replace(shape_from_checkpoint(store, context=request.ctx), name=shape.name)
    # The measuring process runs beside this one, within the same budget.
    room = ram_budget(options.ram) - current_rss()
    formats = {unit.format for unit in shape.units}
    disk, machine = machine_profile(store.path, settings, formats=formats, room=room)
    request = replace(request, shape=shape, machine=opened.on(machine), budgets=budgets())
    plan = first_plan(request, options.pass_rows)
    if options.shrinkable:
        plan = _with_rings(plan)
    notes += plan.notes
    # Experts are loaded later, during the first passes.
    loaded = [
        u for u in shape.units if u.kind != "expert" and not plan.placement.where[u.name].read
    ]
    resident = sum(unit.nbytes for unit in loaded)

    def mend(unit: StoredUnit, data: npt.NDArray[np.uint8]) -> None:
        mend_unit(checkpoint.path, store.path, unit, data)
        if _MENDED not in notes:
            notes.append(_MENDED)

    kv_tier = _kv_tier(plan, config, settings)
    if kv_tier is not None and ops.name == NativeOps.name:
        implementation(ops, NativeOps).kv_maker = kv_tier
    streamed = open_pipeline(
        Setup(
            store=store,
            config=config,
            placement=plan.placement,
            ops=ops,
            clock=opened.clock,
            gpu=opened.gpu,
            expert_costs=expert_costs(plan.request.costs()),
            mode=disk.mode,
            mend=None if store is checkpoint else mend,
            budget=plan.for_weights_and_caches(),
            shortage=MemoryPressure(free_vram=opened.free_memory),
            kv_tier=kv_tier,
            on_bytes=context.byte_counter(resident),
        )
    )
    if opened.gpu is not None and opened.gpu.unpinned:
        notes.append(
            f"the system does not let {format_bytes(opened.gpu.unpinned)} of RAM be pinned: "
            f"copies of it to the GPU take about twice as long; a smaller {option('ram')} may help"
        )
    decoder, placement = Decoder(streamed), plan.placement
    run_first_passes(decoder, context, most=placement.prefill_rows, longest=placement.gpu_rows)
    engine = NativeEngine(
        decoder,
        describe(config, True),
        pass_rows=placement.prefill_rows,
        forecaster=_forecaster(plan, streamed),
        ssd_bytes_s=machine.ssd_bytes_s,
        plan=plan,
        ram=placed_forecast(plan.memory, plan.request.shape, plan.request.budgets.ram),
    )
    return engine, request.ctx


def _with_rings(plan: Forecast) -> Forecast:
    """Return the plan with rings for streaming, even if nothing is streamed yet."""
    placement, ring = plan.placement, ring_for_all_nbytes(plan.request.shape)
    if plan.request.shape.routed or (placement.ram_ring and not placement.uses_gpu):
        return plan
    vram = max(ring, placement.vram_ring) if placement.uses_gpu else placement.vram_ring
    ram = max(ring, placement.ram_ring)
    more = MemoryPart("ram", "ring for reads", ram - placement.ram_ring)
    memory = Account((*plan.memory.parts, more))
    return replace(plan, placement=replace(placement, ram_ring=ram, vram_ring=vram), memory=memory)


def _packed(
    checkpoint: Checkpoint, shape: ModelShape, options: LoadOptions, context: LoadContext
) -> StoreCheckpoint:
    """Return the packed form; pack if needed, after a note on its size and how to avoid it.

    Raises:
        CheckpointError: a tensor is not as the config says, so packing would be useless.
    """
    stores = context.settings.data_dir / "stores"
    if not isinstance(checkpoint, StoreCheckpoint):
        check_shapes(checkpoint)

    def announce() -> None:
        why = f"with more {option('ram')}, or a smaller file of the model, no copy is needed"
        if options.shrinkable:
            why = "the model can then leave its memory to others"
        note_to(context.progress)(
            f"packing the model for streaming: {format_bytes(shape.nbytes)} in "
            f"{shown_path(stores)} (`localrt rm --packed MODEL` deletes the copy; {why})"
        )

    def packed(done: int, total: int, file: str) -> None:
        context.report("pack", done, total, "bytes", file)

    return cached_store(
        checkpoint, stores, announce=announce, progress=packed, cancel=context.cancel
    )


def _kv_tier(plan: Forecast, config: DecoderConfig, settings: Settings) -> KvTier | None:
    """Return the SSD tier for the KV cache; None if the plan keeps no layer's cache there.

    Raises:
        StorageError: the cache folder cannot be made.
    """
    if "ssd" not in plan.placement.kv:
        return None
    folder = settings.cache_dir / "kv"
    try:
        private_folder(folder)
    except OSError as error:
        raise StorageError(f"{folder} cannot be made: {reason_of(error)}") from error
    cached = [
        (spec, place)
        for memory, place in zip(config.memories, plan.placement.kv, strict=True)
        for spec in memory
        if isinstance(spec, AttentionSpec)
    ]
    return KvTier(
        [spec for spec, _ in cached],
        [place for _, place in cached],
        folder,
        capacity=plan.request.ctx,
        kv_format=plan.request.kv_format,
    )


def _forecaster(plan: Forecast, streamed: StreamedWeights) -> Forecaster:
    """Return a function that forecasts speed from current rates and placement of weights."""
    last: list[tuple[object, Speeds]] = []

    def speeds(rates: Rates) -> Speeds:
        now = {stage.name: stage.where for stage in streamed.stages}
        if not last or last[0][0] != (rates, now):
            last[:] = [((rates, now), predict(rates, now))]
        return last[0][1]

    def predict(rates: Rates, now: Mapping[str, Where]) -> Speeds:
        machine = replace(plan.request.machine, ssd_bytes_s=rates.ssd_bytes_s)
        lane = streamed.gpu
        if lane is not None and lane.gpu is not None and lane.gpu.unpinned:
            link = (machine.link_bytes_s or 0.0) * _UNPINNED_SHARE
            machine = replace(machine, link_bytes_s=link)
        costs = replace(plan.request, machine=machine).costs(expert_hits=rates.expert_hits)
        ring = plan.placement.ram_ring + streamed.memory.ring_growth
        placement = replace(plan.placement, where={**plan.placement.where, **now}, ram_ring=ring)
        steady = simulate(costs, placement)
        planned = steady.busy["cpu"] - costs.per_pass()  # work outside stages was not measured
        if rates.cpu_s is not None and planned > 0:
            machine = machine.with_cpu(rates.cpu_s / planned)
            request = replace(plan.request, machine=machine)
            steady = simulate(request.costs(expert_hits=rates.expert_hits), placement)
        return Speeds(1 / steady.seconds, 1 / steady.bound)

    return speeds
