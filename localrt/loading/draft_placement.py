"""Where a draft lies when its target has a card: planned for both before either is loaded.

A draft on a card takes its memory from the target's share, so that both stay within the budgets;
one that fits nowhere is left out, and a note says so. How the ways are compared is the planner's.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from localrt.common.errors import UnsupportedModelError
from localrt.loading.draft_model import DraftPlace
from localrt.loading.options import LoadOptions
from localrt.offload.account import (
    CUDA_CONTEXT_NBYTES,
    FIRST_CONTEXT,
    GROWTH_NBYTES,
    MARGIN_NBYTES,
    draft_nbytes,
    longest_context,
    resident_account,
)

if TYPE_CHECKING:
    from localrt.common.settings import Settings
    from localrt.loading.gpu import OpenGpu
    from localrt.models.checkpoints import Checkpoint
    from localrt.offload.planner.pair import PairPlan
    from localrt.offload.shapes import ModelShape


def place_draft(
    target: Path, draft: Path, name: str, options: LoadOptions, settings: Settings
) -> DraftPlace | None:
    """The best place of the draft at ``draft``; None where there is no card to choose about.

    Raises:
        CheckpointError: a file cannot be read.
        OptionError: no such card.
    """
    from localrt.models.checkpoints import open_checkpoint

    if options.engine == "llamacpp" or options.format is not None or options.device == "cpu":
        return None
    with closing(open_checkpoint(target)) as ours, closing(open_checkpoint(draft)) as theirs:
        try:
            card = _open_card(ours, options)
            if card is None or card.gpu is None:
                return None
            try:
                return _place(ours, theirs, card, name, options, settings)
            finally:
                card.gpu.close()
        except UnsupportedModelError:
            return None  # loading explains it


def _open_card(target: Checkpoint, options: LoadOptions) -> OpenGpu | None:
    """The card of ``options``, if the target can be placed on it."""
    from localrt.loading.gpu import open_gpu
    from localrt.models.registry import read_config
    from localrt.quant.choose import make_ops
    from localrt.quant.cpu.abi import find_library

    ops = make_ops(
        read_config(target).memory,
        device=options.device,
        kv_format=options.kv_format,
        activations=options.activations,
        threads=options.threads,
    )
    if ops.name != "cuda" or not find_library():
        return None
    return open_gpu(
        ops,
        threads=options.threads,
        gpu_memory=options.gpu_memory,
        kv_format=options.kv_format,
    )


def _place(
    target: Checkpoint,
    draft: Checkpoint,
    card: OpenGpu,
    name: str,
    options: LoadOptions,
    settings: Settings,
) -> DraftPlace:
    from localrt.offload.memory import current_rss, ram_budget
    from localrt.offload.planner import Budgets, shape_from_checkpoint
    from localrt.offload.planner.measure import machine_profile
    from localrt.offload.planner.pair import plan_pair
    from localrt.offload.planner.plan import PlanRequest

    ours, theirs = shape_from_checkpoint(target), shape_from_checkpoint(draft)
    formats = {unit.format for shape in (ours, theirs) for unit in shape.units}
    _, machine = machine_profile(target.path, settings, formats=formats)
    ctx = _draft_context(draft, theirs, card, options)
    plan = plan_pair(
        PlanRequest(
            shape=ours,
            machine=card.on(machine),
            budgets=Budgets(
                ram=ram_budget(options.ram),
                process=current_rss() + GROWTH_NBYTES + MARGIN_NBYTES,
                vram=card.capacity,
                cuda_context=0,
            ),
            ctx=min(options.ctx or FIRST_CONTEXT, FIRST_CONTEXT, ours.context_length),
            kv_format=options.kv_format or "bf16",  # type: ignore[arg-type]
        ),
        theirs,
        draft_ctx=ctx,
        draft_vram=_draft_vram(draft, theirs, card, ctx),
    )
    if plan is None:  # not even the target alone: loading says what is missing
        return DraftPlace(alone=options)
    return _decision(plan, card, name, options)


def _decision(plan: PairPlan, card: OpenGpu, name: str, options: LoadOptions) -> DraftPlace:
    """The options of both under the best forecast."""
    best = plan.best
    assert best.plan is not None, "the best placement is one that fits"
    if best.place == "no draft":
        return DraftPlace(alone=options, note=f"draft {name} is not used: {plan.why()}")
    own = replace(
        options, engine="native", kv_format=None, activations=None, gpu_memory=None, pass_rows=1
    )
    target = replace(options, pass_rows=best.plan.request.rows)
    place = DraftPlace(
        alone=options,
        target=target,
        draft=replace(own, device="cpu"),
        line=plan.why(),
        level_share=best.draft_s / best.levels * best.plain_tok_s if best.levels else None,
    )
    if best.place == "draft on CPU":
        return place
    if best.plan.placement.uses_gpu:
        vram = card.capacity - best.vram + CUDA_CONTEXT_NBYTES
        target = replace(target, gpu_memory=vram)
    else:
        target = replace(target, device="cpu", gpu_memory=None)
    return replace(
        place,
        target=target,
        draft=replace(own, gpu_memory=best.vram, ctx=plan.draft_ctx),
        cache_room=sum(plan.draft.kv_nbytes("bf16", plan.draft_ctx)),
    )


def _draft_context(
    draft: Checkpoint, shape: ModelShape, card: OpenGpu, options: LoadOptions
) -> int:
    """As much context as the target was asked to have, or less, so that the draft fits."""
    from localrt.offload.planner.pair import DRAFT_CTX, DRAFT_NODES

    ctx = min((options.ctx or DRAFT_CTX) + DRAFT_NODES, shape.context_length)
    return longest_context(ctx, lambda n: _draft_vram(draft, shape, card, n) <= card.capacity)


def _draft_vram(draft: Checkpoint, shape: ModelShape, card: OpenGpu, ctx: int) -> int:
    """Bytes of the card's memory that the draft takes with a context of ``ctx``."""
    from localrt.models.registry import read_config

    assert card.gpu is not None, "there is a card"
    if card.gpu.ops.name == "native":
        return draft_nbytes(shape, ctx)
    return resident_account(draft, read_config(draft), card.gpu.ops, ctx).total()
