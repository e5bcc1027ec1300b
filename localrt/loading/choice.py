"""Which context a memory budget allows, and the placement that a conversation begins with.

A short conversation leaves the room of a long one's cache to weights. It knows bytes and plans,
neither files nor threads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from localrt.loading.options import pick_context
from localrt.offload.account import FIRST_CONTEXT, unstreamable_card_nbytes, unstreamable_nbytes
from localrt.offload.planner import (
    Budgets,
    MachineProfile,
    ModelShape,
    Plan,
    PlanRequest,
    make_plan,
)
from localrt.offload.planner.search import fits
from localrt.offload.shapes import KvFormat


@dataclass(frozen=True, slots=True)
class ContextChoice:
    """A context in tokens, and whether some of its cache must live on the SSD."""

    ctx: int
    kv_on_ssd: bool = False


def choose_context(
    shape: ModelShape,
    machine: MachineProfile,
    budgets: Budgets,
    ctx: int | None,
    kv_format: KvFormat,
    notes: list[str],
) -> ContextChoice:
    """The context as asked, or the longest whose cache fits in RAM; refused before reading.

    One that is asked for and does not fit in RAM keeps layers of its cache on the SSD.

    Raises:
        MemoryBudgetError: it does not fit, not even so.
    """
    trained = shape.context_length
    request = PlanRequest(
        shape=shape, machine=machine, budgets=budgets, ctx=ctx or trained, kv_format=kv_format
    )
    wanted = pick_context(ctx, trained, lambda tokens: fits(replace(request, ctx=tokens)), notes)
    request = replace(request, ctx=wanted)
    if fits(request):
        return ContextChoice(wanted)
    if ctx is not None and machine.gpu is None and fits(replace(request, kv_on_ssd=True)):
        return ContextChoice(wanted, kv_on_ssd=True)
    make_plan(request)
    return ContextChoice(wanted)  # for rules that disagree: the plan was possible


def first_plan(
    shape: ModelShape,
    machine: MachineProfile,
    limits: Budgets,
    choice: ContextChoice,
    kv_format: KvFormat,
    *,
    rows: int = 1,
) -> Plan:
    """For a short context, such that the whole one's caches will fit; or for all of it at once
    where some of its keys and values live on the SSD.

    ``rows`` are those of the passes to place for: more than one where guesses are verified.

    Raises:
        MemoryBudgetError: the whole context does not fit.
    """
    ctx = choice.ctx
    request = PlanRequest(
        shape=shape,
        machine=machine,
        budgets=limits,
        ctx=ctx,
        kv_format=kv_format,
        kv_on_ssd=choice.kv_on_ssd,
    )
    if choice.kv_on_ssd:
        return make_plan(request)
    first = min(ctx, FIRST_CONTEXT)
    while True:
        plan = make_plan(replace(request, ctx=first, rows=rows))
        if first >= ctx or _can_grow(plan, ctx):
            # What is forecast from now on are plain passes.
            return replace(plan, request=replace(plan.request, rows=1))
        first = min(ctx, 2 * first)


def _can_grow(plan: Plan, ctx: int) -> bool:
    """Whether the caches of ``ctx`` tokens fit beside what cannot be streamed, on both sides."""
    shape, placement = plan.request.shape, plan.placement
    sizes = shape.kv_nbytes(plan.request.kv_format, ctx)
    kv = {"ram": 0, "vram": 0, "ssd": 0}
    for place, nbytes in zip(placement.kv, sizes, strict=True):
        kv[place] += nbytes
    memory = plan.memory
    streamed = (memory.nbytes(what, "vram") for what in ("weights", "keys and values"))
    stays = memory.total("vram") - sum(streamed) + unstreamable_card_nbytes(shape, placement)
    on_card = not kv["vram"] or stays + kv["vram"] <= plan.request.budgets.vram
    in_ram = unstreamable_nbytes(shape, placement) + kv["ram"] <= plan.for_weights_and_caches()
    return in_ram and on_card
