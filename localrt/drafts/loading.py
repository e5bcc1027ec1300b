"""Loads a draft model beside its target, within the target's budgets.

With a GPU, both are placed by one plan before either is loaded: a draft on the GPU takes its memory
from the target's share. A draft that cannot be resident is not used, and a note says why: streaming
it would cost the time that it should save.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from localrt.common.errors import MemoryBudgetError, UnsupportedModelError
from localrt.common.settings import DEFAULT_CONTEXT
from localrt.drafts.discovery import MTP
from localrt.drafts.head import HeadDraft
from localrt.drafts.model import DraftPlace, ModelDraft
from localrt.drafts.selection import PLUS_NGRAM, Draft, Drafts
from localrt.loading.context import LoadContext
from localrt.loading.load import LoadedModel, load_model
from localrt.loading.native import check_left
from localrt.loading.options import LoadOptions
from localrt.offload.account import (
    FIRST_CONTEXT,
    GROWTH_NBYTES,
    MARGIN_NBYTES,
    draft_nbytes,
    longest_context,
    resident_account,
)

if TYPE_CHECKING:
    from localrt.common.settings import Settings
    from localrt.drafts.placement import PairPlan
    from localrt.loading.gpu import OpenGpu
    from localrt.models.checkpoints import Checkpoint
    from localrt.offload.shapes import ModelShape


def place_draft(
    target: Path, draft: Path, name: str, options: LoadOptions, settings: Settings
) -> DraftPlace | None:
    """Choose where the draft at ``draft`` is placed; None without a GPU that could hold it.

    Raises:
        CheckpointError: a file cannot be read.
        OptionError: the GPU does not exist.
    """
    from localrt.models.checkpoints import open_checkpoint

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
    from localrt.drafts.placement import plan_pair
    from localrt.offload.memory import current_rss, ram_budget
    from localrt.offload.planner import Budgets, shape_from_checkpoint
    from localrt.offload.planner.measure import machine_profile
    from localrt.offload.planner.plan import PlanRequest

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
    if plan is None:  # even the target alone does not fit: loading reports it
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
    from localrt.drafts.placement import DRAFT_CTX, DRAFT_NODES

    ctx = min((options.ctx or DRAFT_CTX) + DRAFT_NODES, shape.context_length)
    return longest_context(ctx, lambda n: _draft_vram(draft, shape, opened, n) <= opened.capacity)


def _draft_vram(draft: Checkpoint, shape: ModelShape, opened: OpenGpu, ctx: int) -> int:
    """Return the bytes of GPU memory that the draft takes with a context of ``ctx``."""
    from localrt.models.registry import read_config

    assert opened.gpu is not None, "there is a GPU"
    if opened.gpu.ops.name == "native":
        return draft_nbytes(shape, ctx)
    return resident_account(draft, read_config(draft), opened.gpu.ops, ctx).total()


def is_draft_model(draft: str) -> bool:
    """Whether ``draft``, a non-empty option, names a model."""
    return draft not in ("auto", "off", "ngram")


def draft_for(
    name: str,
    target: LoadedModel,
    options: LoadOptions,
    context: LoadContext,
) -> Draft:
    """Load the draft ``name``, a model or a head, for a model that is loaded already.

    Raises:
        MemoryBudgetError: it does not fit in the rest of the budget.
        LocalrtError: it cannot be found or loaded, or does not fit the model.
    """
    from localrt.drafts.heads.files import is_head

    if name == MTP:
        return HeadDraft(target)
    path = context.resolve(name).path
    if is_head(path):
        return HeadDraft(target, path)
    return ModelDraft(name, load_draft(name, options, context), target)


def load_draft(name: str, options: LoadOptions, context: LoadContext) -> LoadedModel:
    """Load the draft model ``name`` with the target's ``options``.

    Raises:
        MemoryBudgetError: it does not fit in the rest of the budget.
        LocalrtError: it cannot be found or loaded.
    """
    path = context.resolve(name).path
    own = replace(options, engine="native", kv_format=None, activations=None, pass_rows=1)
    own = replace(own, ctx=_fitting_context(path, own))
    return load_model(path, own, context)


def _fitting_context(path: Path, options: LoadOptions) -> int | None:
    """Return the draft's context, after checking that the draft fits.

    Raises:
        MemoryBudgetError: weights, cache and scratch do not fit in the rest of the budget.
    """
    from localrt.models.checkpoints import open_checkpoint
    from localrt.models.registry import read_config
    from localrt.offload.account import resident_account
    from localrt.quant.choose import make_ops

    with closing(open_checkpoint(path)) as checkpoint:
        config = read_config(checkpoint)
        ctx = min(options.ctx or config.context_length, config.context_length)
        ops = make_ops(
            config.memory,
            device=options.device,
            compute_format=options.format,
            threads=options.threads,
        )
        least = min(ctx, 2048)
        need = resident_account(checkpoint, config, ops, least).total()
        check_left(need, ops, options)
    return ctx


def load_with_draft(
    target: Path,
    draft: str,
    options: LoadOptions,
    context: LoadContext,
    load: Callable[[LoadOptions], LoadedModel],
) -> tuple[LoadedModel, Drafts]:
    """Load the model at ``target`` through ``load``, and return it with its drafts.

    A draft model named by ``draft`` is loaded first, so that the target's plan leaves room for it.
    With a GPU, both are planned before either is loaded.
    """
    from localrt.drafts.heads.files import is_head

    quietly = replace(context, progress=None, cancel=None)

    def later(name: str, model: LoadedModel) -> Draft:
        return draft_for(name, model, options, quietly)

    name = draft.removesuffix(PLUS_NGRAM)
    path: Path | None = None
    if is_draft_model(draft) and name != MTP:
        path = context.resolve(name).path
        path = None if is_head(path) else path
    if path is None:
        model = load(options)
        drafts = Drafts(model, later)
        if is_draft_model(draft) or draft == "auto":
            try:
                drafts.load(name)
            except BaseException:
                model.engine.close()
                raise
        return model, drafts
    place = place_draft(target, path, name, options, context.settings)
    place = place or DraftPlace(alone=options, draft=options)
    with ExitStack() as opened:  # closed on failure

        def load_own() -> tuple[LoadedModel | None, str]:
            """Load the draft; return None and the reason if it is not used."""
            if place.draft is None:
                return None, place.note
            try:
                own = load_draft(name, place.draft, context)
            except MemoryBudgetError as error:
                return None, f"draft {name} is not used: {error.marked}"
            opened.callback(own.engine.close)
            return own, ""

        own, note = load_own()
        parts: LoadedModel | None = None
        if own is not None:
            try:
                parts = load(place.target or _beside_draft(own, options))
            except MemoryBudgetError as error:
                note = f"draft {name} is not used: beside it, {error.marked}"
                own.engine.close()
                own = None
        if parts is None:
            gc.collect()
            parts = load(place.alone)
        opened.callback(parts.engine.close)
        if note or place.line:
            parts = replace(parts, notes=(*parts.notes, note or place.line))
        drafts = Drafts(parts, later)
        if own is not None:
            drafts.add(name, ModelDraft(name, own, parts, place), note)
        elif note:
            drafts.add(name, None, note)
        opened.pop_all()
    return parts, drafts


def _beside_draft(parts: LoadedModel | None, options: LoadOptions) -> LoadOptions:
    """Return the target's options with room for the draft: its caches' growth, and its weights if
    there is a budget of GPU memory, which the two share.
    """
    from localrt.engine.native.engine import NativeEngine
    from localrt.offload.account import draft_growth_nbytes
    from localrt.offload.memory import ram_budget

    if parts is None:
        return options
    engine = parts.engine
    if not isinstance(engine, NativeEngine):
        return options
    cache = engine.kv_nbytes(min(options.ctx or DEFAULT_CONTEXT, parts.ctx))
    growth, free = draft_growth_nbytes(cache), engine.free_memory()
    if free is None:
        return replace(options, ram=max(ram_budget(options.ram) - growth, 1))
    left = free - growth
    if options.gpu_memory is not None:
        left = min(left, options.gpu_memory - engine.info.weight_bytes - growth)
    return replace(options, gpu_memory=max(left, 1))
