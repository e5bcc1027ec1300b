"""Loading a draft model beside its target, within what the target's budget leaves.

A draft is resident or it is not used: streaming it would cost what it is to save.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from localrt.common.errors import MemoryBudgetError
from localrt.loading.draft_choice import PLUS_NGRAM, Drafts
from localrt.loading.draft_model import DraftPlace
from localrt.loading.draft_placement import place_draft
from localrt.loading.options import LoadOptions
from localrt.loading.parts import LoadedModel, load_parts

if TYPE_CHECKING:
    from localrt.common.progress import ProgressCallback
    from localrt.common.settings import Settings

_HELD_TOKENS = 4096  # of a conversation whose context was not asked for


def is_draft_model(draft: str) -> bool:
    """Whether a ``draft`` option, a string that is not empty, names a model."""
    return draft not in ("auto", "off", "ngram")


def load_draft(
    name: str,
    options: LoadOptions,
    settings: Settings,
    *,
    offline: bool | None = None,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
) -> LoadedModel:
    """The draft model ``name`` under the target's ``options``.

    Raises:
        MemoryBudgetError: it is larger than what is left of the budget.
        LocalrtError: it cannot be found or loaded.
    """
    from localrt.hub import resolve

    resolved = resolve(name, settings=settings, offline=offline, progress=progress, cancel=cancel)
    own = replace(options, engine="native", kv_format=None, activations=None, pass_rows=1)
    own = replace(own, ctx=_fitting_context(resolved.path, own))
    return load_parts(resolved.path, own, settings=settings, progress=progress, cancel=cancel)


def _fitting_context(path: Path, options: LoadOptions) -> int | None:
    """The draft's context, once it is known to fit.

    Raises:
        MemoryBudgetError: weights, cache and scratch exceed what is left.
    """
    from localrt.common.formatting import format_bytes
    from localrt.loading.native import memory_left
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
        left, tier = memory_left(ops, options)
    if need > left:
        raise MemoryBudgetError(
            f"it needs {format_bytes(need)} and {format_bytes(max(left, 0))} of {tier} are left"
        )
    return ctx


def load_with_draft(
    target: Path,
    draft: str,
    options: LoadOptions,
    settings: Settings,
    load: Callable[[LoadOptions], LoadedModel],
    *,
    offline: bool | None = None,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
) -> tuple[LoadedModel, Drafts]:
    """The model at ``target``, which ``load`` loads, and its drafts.

    A model that the ``draft`` option names is loaded too, so that the target's plan leaves it its
    room. Where there is a card, both are planned for before either is loaded.
    """
    from localrt.hub import resolve

    def later(name: str) -> LoadedModel:
        return load_draft(name, options, settings, offline=offline)

    name = draft.removesuffix(PLUS_NGRAM)
    if not is_draft_model(draft):
        model = load(options)
        return model, Drafts(model, later)
    path = resolve(name, settings=settings, offline=offline, progress=progress, cancel=cancel).path
    place = place_draft(target, path, name, options, settings)
    place = place or DraftPlace(alone=options, draft=options)
    with ExitStack() as opened:  # closed where something fails

        def load_own() -> tuple[LoadedModel | None, str]:
            """The draft, or why it is not used."""
            if place.draft is None:
                return None, place.note
            try:
                own = load_draft(
                    name, place.draft, settings, offline=offline, progress=progress, cancel=cancel
                )
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
        if own is not None or note:
            drafts.add(name, own, note, place)
        opened.pop_all()
    return parts, drafts


def _beside_draft(parts: LoadedModel | None, options: LoadOptions) -> LoadOptions:
    """The target's options with room for the draft: for what it will still grow by, and of a budget
    of the GPU's memory, which is both's, for what it has taken.
    """
    from localrt.engine.native.engine import NativeEngine
    from localrt.offload.account import draft_growth_nbytes
    from localrt.offload.memory import ram_budget

    if parts is None:
        return options
    engine = parts.engine
    if not isinstance(engine, NativeEngine):
        return options
    cache = engine.kv_nbytes(min(options.ctx or _HELD_TOKENS, parts.ctx))
    growth, free = draft_growth_nbytes(cache), engine.free_memory()
    if free is None:
        return replace(options, ram=max(ram_budget(options.ram) - growth, 1))
    left = free - growth
    if options.gpu_memory is not None:
        left = min(left, options.gpu_memory - engine.info.weight_bytes - growth)
    return replace(options, gpu_memory=max(left, 1))
