"""From a model that is larger than its memory budget to a decoder that streams what does not fit.

It packs the model once, measures the machine once, asks the planner, and opens the pipeline. It
knows neither kernels nor schedules.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from localrt.cards import OpenCard, open_card
from localrt.engine.base import Forecast
from localrt.engine.types import Progress, ProgressCallback
from localrt.offload.pressure import MemoryPressure
from localrt.offload.process_memory import current_rss, ram_budget
from localrt.offload.trace import Trace
from localrt.settings import Settings

if TYPE_CHECKING:
    from localrt.models.checkpoints import Checkpoint
    from localrt.offload.decoder import PlacedDecoder
    from localrt.offload.planner import Budgets, MachineProfile, ModelShape, Plan
    from localrt.quant.ops.protocol import Ops

__all__ = ["PlacedModel", "open_placed"]

# What the process still grows by beside the accounted parts: sampling, text, threads' stacks.
_GROWTH_BYTES = 10 << 20
# What loading itself leaves behind: a refusal before it has to leave room for that.
_LOADING_BYTES = 2 << 20
# Tokens that the first placement has room for; the caches take it from the weights as they grow.
_FIRST_CONTEXT = 512
_SMALLEST_CONTEXT = 512
# Less than this is too little to tell a disk's speed by.
_LOAD_SAMPLE = 64 << 20


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A streaming decoder, the plan that it follows, and its context length."""

    decoder: PlacedDecoder
    plan: Plan
    forecast: Forecast
    ctx: int


def open_placed(
    checkpoint: Checkpoint,
    ops: Ops,
    *,
    device: str,
    threads: int | None,
    gpu_memory: int | None,
    ram: int | None,
    ctx: int | None,
    kv_format: str,
    settings: Settings,
    notes: list[str],
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
    count_bytes: Callable[[int], Callable[[int], None]],
) -> PlacedModel:
    """Open ``checkpoint`` within ``ram`` bytes for the whole process (None: what there is).

    ``device`` is a card for the part of the work that it is better at: the one that ``ops``
    computes on, of whose memory ``gpu_memory`` bytes may be used, or ``virtual:CARD``.
    Without ``ctx`` the context is the model's own, or what fits with all weights streamed.
    ``count_bytes`` makes a counter for a number of bytes to load.

    Raises:
        MemoryBudgetError: the budget is too small even so; says the least that would do.
        StorageError: there is no room on disk for the packed form.
    """
    from localrt.measuring import machine_profile
    from localrt.models.registry import read_config
    from localrt.offload.pipeline import open_pipeline
    from localrt.offload.planner import Budgets, shape_from_checkpoint
    from localrt.offload.store.cached import cached_store

    def packed(done: int, total: int, file: str) -> None:
        if progress is not None:
            progress(Progress("pack", done, total, "bytes", file))

    trace = Trace()
    card = open_card(device, ops, trace, threads=threads, gpu_memory=gpu_memory)
    ops = card.host_ops

    def budgets(to_come: int = 0) -> Budgets:
        return Budgets(
            ram=ram_budget(ram),
            process=current_rss() + _GROWTH_BYTES + to_come,
            vram=card.capacity,
            cuda_context=0,  # it is there already, and counted
        )

    ctx = _context(checkpoint, budgets(_LOADING_BYTES), card, ctx, kv_format, notes)
    config = read_config(checkpoint, context=ctx)
    store = cached_store(checkpoint, settings.data_dir / "stores", progress=packed, cancel=cancel)
    shape = shape_from_checkpoint(store)
    disk, machine = machine_profile(
        store.path, settings, formats={unit.format for unit in shape.units}
    )
    machine = card.on(machine)
    limits = budgets()
    plan = _first_plan(shape, machine, limits, ctx, kv_format)
    notes += plan.notes
    resident = sum(u.nbytes for u in shape.units if not plan.placement.where[u.name].read)
    decoder = open_pipeline(
        store,
        ops,
        config,
        plan.placement,
        mode=disk.mode,
        budget=_for_weights_and_caches(plan),
        card=card.accelerator,
        clock=card.clock,
        trace=trace,
        shortage=MemoryPressure(free_vram=card.free_memory),
        on_bytes=count_bytes(resident),
    )
    rate = resident / decoder.load_s if resident > _LOAD_SAMPLE else machine.ssd_bytes_s
    return PlacedModel(decoder, plan, _forecast(plan, rate, decoder.simulated), ctx)


def _first_plan(
    shape: ModelShape, machine: MachineProfile, limits: Budgets, ctx: int, kv_format: str
) -> Plan:
    """For a short context, with a ring that leaves its room to the whole one's caches later.

    Raises:
        MemoryBudgetError: the whole context does not fit.
    """
    from localrt.offload.planner import make_plan

    first = min(ctx, _FIRST_CONTEXT)
    while True:
        plan = make_plan(shape, machine, limits, ctx=first, kv_format=kv_format)  # type: ignore[arg-type]
        if first >= ctx or _can_grow(plan, ctx):
            return plan
        first = min(ctx, 2 * first)


def _can_grow(plan: Plan, ctx: int) -> bool:
    """Whether the caches of ``ctx`` tokens fit beside what cannot be streamed.

    The ring grows with them, until every unit passes through.
    """
    from localrt.offload.placement import Where
    from localrt.offload.residency import RING_SLACK

    shape, placement = plan.request.shape, plan.placement
    in_ram = [u for u in shape.units if placement.where[u.name] in (Where.RAM, Where.LINK)]
    table = ("embedding", "norm")
    stays = sum(u.nbytes for u in in_ram if u.kind in table or not placement.ram_ring)
    largest = max((u.nbytes for u in in_ram if u.kind not in table), default=0)
    if largest > placement.ram_ring > 0:
        stays += largest + RING_SLACK - placement.ram_ring
    caches = zip(placement.kv, shape.kv_nbytes(plan.request.kv_format, ctx), strict=True)
    kv = sum(nbytes for place, nbytes in caches if place == "ram")
    return stays + kv <= _for_weights_and_caches(plan)


def _for_weights_and_caches(plan: Plan) -> int:
    """What the other parts of the plan leave of the RAM."""
    fixed = sum(
        part.nbytes
        for part in plan.memory
        if part.tier == "ram" and part.what not in ("weights", "keys and values")
    )
    return plan.request.budgets.ram - fixed


def _forecast(plan: Plan, ssd_bytes_s: float, simulated: bool) -> Forecast:
    """The plan's prediction for the disk as it is today."""
    from localrt.offload.planner.simulate import simulate

    request = replace(plan.request, machine=replace(plan.request.machine, ssd_bytes_s=ssd_bytes_s))
    steady = simulate(request.costs(), plan.placement)
    return Forecast(1 / steady.seconds, 1 / steady.bound, simulated)


def _context(
    checkpoint: Checkpoint,
    budgets: Budgets,
    card: OpenCard,
    ctx: int | None,
    kv_format: str,
    notes: list[str],
) -> int:
    """The context as asked, or the longest that fits; refused before anything is packed.

    Raises:
        MemoryBudgetError: the one asked for, or the shortest, does not fit.
    """
    from localrt.errors import MemoryBudgetError
    from localrt.offload.planner import make_plan, shape_from_checkpoint
    from localrt.offload.planner.machine import typical_machine

    shape = shape_from_checkpoint(checkpoint)
    if ctx is not None and ctx > shape.context_length:
        notes.append(
            f"the context of {ctx} tokens is longer than the {shape.context_length} that the model "
            "was trained for: answers may degrade"
        )
    wanted = ctx or shape.context_length
    while True:
        try:
            make_plan(
                shape,
                card.on(typical_machine()),
                budgets,
                ctx=wanted,
                kv_format=kv_format,  # type: ignore[arg-type]
                solver="greedy",
            )
        except MemoryBudgetError:
            if ctx is not None or wanted <= _SMALLEST_CONTEXT:
                raise
            wanted = max(_SMALLEST_CONTEXT, wanted // 2)
            continue
        if ctx is None and wanted < shape.context_length:
            notes.append(
                f"the context is {wanted} tokens, not the model's {shape.context_length}, to fit "
                "in memory"
            )
        return wanted
