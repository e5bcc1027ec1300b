"""Places a draft model and its target on a GPU and the CPU, with one plan before either is
loaded.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

from localrt.common.errors import UnsupportedModelError
from localrt.common.settings import Settings
from localrt.drafts.model_draft import DraftPlace
from localrt.drafts.placement import DRAFT_CTX, DRAFT_NODES, PairPlan, plan_pair
from localrt.loading.gpu import OpenGpu, open_gpu
from localrt.loading.options import LoadOptions
from localrt.models.checkpoints import Checkpoint, open_checkpoint
from localrt.models.registry import read_config
from localrt.offload.account import (
    FIRST_CONTEXT,
    GROWTH_NBYTES,
    MARGIN_NBYTES,
    Budgets,
    draft_nbytes,
    longest_context,
    resident_account,
)
from localrt.offload.memory import current_rss, ram_budget
from localrt.offload.shapes import ModelShape, shape_from_checkpoint
from localrt.planning.forecast import PlanRequest
from localrt.planning.measure import machine_profile
from localrt.quant.choose import make_ops
from localrt.quant.cpu.abi import find_library


def place_draft(
    target: Path, draft: Path, name: str, options: LoadOptions, settings: Settings
) -> DraftPlace | None:
    """Choose where the draft at ``draft`` is placed; None without a GPU that could hold it.

    Raises:
        CheckpointError: a file cannot be read.
        OptionError: the GPU does not exist.
    """
    if options.engine == "llamacpp" or options.format is not None or options.device == "cpu":
        return None
    with closing(open_checkpoint(target)) as ours, closing(open_checkpoint(draft)) as theirs:
        try:
            opened = _open_gpu(ours, options)
            if opened is None or opened.gpu is None:
                return None
            try:
                return _place(ours, theirs, opened, name, options, settings)
            finally:
                opened.gpu.close()
        except UnsupportedModelError:
            return None  # loading reports the reason


def _open_gpu(target: Checkpoint, options: LoadOptions) -> OpenGpu | None:
    """Open the GPU of ``options``; None if the target cannot be placed on it."""
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
        ops, threads=options.threads, gpu_memory=options.gpu_memory, kv_format=options.kv_format
    )


def _place(
    target: Checkpoint,
    draft: Checkpoint,
    opened: OpenGpu,
    name: str,
    options: LoadOptions,
    settings: Settings,
) -> DraftPlace:

    ours, theirs = shape_from_checkpoint(target), shape_from_checkpoint(draft)
    formats = {unit.format for shape in (ours, theirs) for unit in shape.units}
    _, machine = machine_profile(target.path, settings, formats=formats)
    ctx = _draft_context(draft, theirs, opened, options)
    plan = plan_pair(
        PlanRequest(
            shape=ours,
            machine=opened.on(machine),
            budgets=Budgets(
                ram=ram_budget(options.ram),
                process=current_rss() + GROWTH_NBYTES + MARGIN_NBYTES,
                vram=opened.capacity,
                cuda_context=0,
            ),
            ctx=min(options.ctx or FIRST_CONTEXT, FIRST_CONTEXT, ours.context_length),
            kv_format=options.kv_format or "bf16",  # type: ignore[arg-type]
        ),
        theirs,
        draft_ctx=ctx,
        draft_vram=_draft_vram(draft, theirs, opened, ctx),
    )
    if plan is None:  # not even the target fits, which loading will report
        return DraftPlace(alone=options)
    return _decision(plan, opened, name, options)


def _decision(plan: PairPlan, opened: OpenGpu, name: str, options: LoadOptions) -> DraftPlace:
    """Return the load options of both models for the fastest placement."""
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
        vram = opened.capacity - best.vram + opened.beside
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
    draft: Checkpoint, shape: ModelShape, opened: OpenGpu, options: LoadOptions
) -> int:
    """Return the draft's context: the target's requested one, or the longest that fits the GPU."""
    ctx = min((options.ctx or DRAFT_CTX) + DRAFT_NODES, shape.context_length)
    return longest_context(ctx, lambda n: _draft_vram(draft, shape, opened, n) <= opened.capacity)


def _draft_vram(draft: Checkpoint, shape: ModelShape, opened: OpenGpu, ctx: int) -> int:
    """Return the bytes of GPU memory that the draft takes with a context of ``ctx``."""
    assert opened.gpu is not None, "there is a GPU"
    if opened.gpu.ops.name == "native":
        return draft_nbytes(shape, ctx)
    return resident_account(draft, read_config(draft), opened.gpu.ops, ctx).total()
