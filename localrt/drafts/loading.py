"""Loads a draft model along with its target, within the target's budgets.

With a GPU, both are placed by one plan before either is loaded: a draft on the GPU takes its memory
from the target's share. A draft that cannot be resident is not used, as a note explains: streaming
it would cost more time than it saves.
"""

from __future__ import annotations

import gc
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

from localrt.common.errors import MemoryBudgetError
from localrt.common.settings import DEFAULT_CONTEXT
from localrt.drafts.discovery import MTP
from localrt.drafts.head_draft import HeadDraft
from localrt.drafts.model_draft import DraftPlace, ModelDraft
from localrt.drafts.selection import PLUS_NGRAM, Draft, Drafts
from localrt.engine.native.engine import NativeEngine
from localrt.hub.other_programs import Extras
from localrt.loading.context import LoadContext
from localrt.loading.load import LoadedModel, load_model
from localrt.loading.native import check_left
from localrt.loading.options import LoadOptions
from localrt.models.checkpoints import open_checkpoint
from localrt.models.checkpoints.opening import is_head
from localrt.models.registry import read_config
from localrt.offload.account import draft_growth_nbytes, resident_account
from localrt.offload.memory import ram_budget
from localrt.quant.choose import make_ops


def is_draft_model(draft: str) -> bool:
    """Whether ``draft``, a non-empty option, names a model."""
    return draft not in ("auto", "off", "ngram")


def draft_for(name: str, target: LoadedModel, options: LoadOptions, context: LoadContext) -> Draft:
    """Load the draft ``name``, a model or a head, for a model that is already loaded.

    Raises:
        MemoryBudgetError: it does not fit in the rest of the budget.
        LocalrtError: it cannot be found or loaded, or does not fit the model.
    """
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
    target: Path, options: LoadOptions, context: LoadContext, extras: Extras
) -> tuple[LoadedModel, Drafts]:
    """Load the model at ``target``, and return it with its drafts.

    A draft model named by ``options.draft`` is loaded first, so that the target's plan leaves room
    for it. With a GPU, both are planned before either is loaded.
    """
    draft, quietly = options.draft, replace(context, progress=None, cancel=None)

    def load(own: LoadOptions) -> LoadedModel:
        return load_model(target, own, context, extras)

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
    from localrt.drafts.placement import place_draft  # slow: imports the planner

    place = place_draft(target, path, name, options, context.settings)
    place = place or DraftPlace(alone=options, draft=options)
    with ExitStack() as opened:  # closes the draft on failure
        own: LoadedModel | None = None
        beside: LoadedModel | None = None
        note = place.note
        if place.draft is not None:
            try:
                own = load_draft(name, place.draft, context)
                opened.callback(own.engine.close)
            except MemoryBudgetError as error:
                note = f"draft {name} is not used: {error.marked}"
        if own is not None:
            try:
                beside = load(place.target or _beside_draft(own, options))
            except MemoryBudgetError as error:
                note = f"draft {name} is not used: beside it, {error.marked}"
                own.engine.close()
                own = None
        if beside is None:
            gc.collect()
        model = beside or load(place.alone)
        opened.callback(model.engine.close)
        if note or place.line:
            model = replace(model, notes=(*model.notes, note or place.line))
        drafts = Drafts(model, later)
        if own is not None or note:
            loaded = None if own is None else ModelDraft(name, own, model, place)
            drafts.add(name, loaded, note)
        opened.pop_all()
    return model, drafts


def _beside_draft(draft: LoadedModel, options: LoadOptions) -> LoadOptions:
    """Return the target's options, leaving room for the growth of the draft's caches, and for its
    weights if there is a GPU memory budget, which both share.
    """
    engine = draft.engine
    if not isinstance(engine, NativeEngine):
        return options
    cache = engine.kv_nbytes(min(options.ctx or DEFAULT_CONTEXT, draft.ctx))
    growth, free = draft_growth_nbytes(cache), engine.free_memory()
    if free is None:
        return replace(options, ram=max(ram_budget(options.ram) - growth, 1))
    left = free - growth
    if options.gpu_memory is not None:
        left = min(left, options.gpu_memory - engine.info.weight_bytes - growth)
    return replace(options, gpu_memory=max(left, 1))
