"""Loading a draft model beside its target, within what the target's budget leaves.

A draft is resident or it is not used: streaming it would cost what it is to save.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from localrt.drafts.choice import PLUS_NGRAM, Drafts
from localrt.drafts.head import is_draft_head, with_room_for_head
from localrt.drafts.placement import DraftPlace, place_draft
from localrt.errors import MemoryBudgetError
from localrt.loading.options import LoadOptions
from localrt.loading.parts import LoadedModel, load_parts

if TYPE_CHECKING:
    from localrt.progress import ProgressCallback
    from localrt.settings import Settings

_HELD_TOKENS = 4096  # of a conversation whose context was not asked for

__all__ = ["Beside", "draft_loader", "is_draft_model", "load_beside", "load_draft"]


def is_draft_model(draft: str) -> bool:
    """Whether a ``draft`` option names a model: neither a way of guessing nor a draft head."""
    if draft in ("auto", "off", "ngram"):  # checked to be a string that is not empty
        return False
    return not is_draft_head(draft.removesuffix(PLUS_NGRAM))


def draft_loader(
    options: LoadOptions,
    settings: Settings,
    *,
    offline: bool | None = None,
) -> Callable[[str], LoadedModel]:
    """A function from a draft's name to its parts, for later."""

    def load(name: str) -> LoadedModel:
        return load_draft(name, options, settings, offline=offline)

    return load


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
    own = replace(options, engine="native", kv_format=None, pass_rows=1)
    if options.device.startswith("virtual:"):  # the card is the target's
        own = replace(own, device="cpu", gpu_memory=None)
    own = replace(own, ctx=_fitting_context(resolved.path, own))
    return load_parts(resolved.path, own, settings=settings, progress=progress, cancel=cancel)


def _fitting_context(path: Path, options: LoadOptions) -> int | None:
    """The draft's context, once it is known to fit.

    Raises:
        MemoryBudgetError: weights, cache and scratch exceed what is left.
    """
    from localrt.formatting import format_bytes
    from localrt.loading.native import memory_left
    from localrt.models.checkpoints import open_checkpoint
    from localrt.models.registry import read_config
    from localrt.offload.account import resident_account
    from localrt.quant.ops.choose import make_ops

    with closing(open_checkpoint(path)) as checkpoint:
        config = read_config(checkpoint)
        ctx = min(options.ctx or config.context_length, config.context_length)
        ops = make_ops(
            config.attention,
            device="cpu" if options.device.startswith("virtual:") else options.device,
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


class Beside:
    """A draft that is loaded beside its target, so that the target's plan leaves it its room.

    ``place`` is what was planned for both, ``load`` loads the draft.
    """

    def __init__(
        self, name: str, place: DraftPlace, load: Callable[[LoadOptions], LoadedModel]
    ) -> None:
        self._name = name
        self._place = place
        self._load = load
        self._note = place.note
        self._parts: LoadedModel | None = None  # the draft's
        self._target: LoadedModel | None = None

    def target(self, load: Callable[[LoadOptions], LoadedModel]) -> LoadedModel:
        """Load the target, and the draft before or after it."""
        if not self._place.after:
            self._load_draft()
        parts = self._load_target(load)
        if self._place.after:
            try:
                self._load_draft()
            except BaseException:
                parts.engine.close()
                raise
        self._target = parts
        note = self._note or self._place.line
        return replace(parts, notes=(*parts.notes, note)) if note else parts

    def hand_over(self, drafts: Drafts) -> None:
        """Give the draft to those of the target, which is closed if that fails.

        Raises:
            OptionError: it has another vocabulary.
        """
        parts, self._parts = self._parts, None
        target, self._target = self._target, None
        if parts is None and not self._note:
            return
        try:
            drafts.add(self._name, parts, self._note, self._place)
        except BaseException:
            if target is not None:
                target.engine.close()
            raise

    def close(self) -> None:
        """Free what was not handed over."""
        parts, self._parts = self._parts, None
        if parts is not None:
            parts.engine.close()

    def _load_target(self, load: Callable[[LoadOptions], LoadedModel]) -> LoadedModel:
        """Load the target; where it does not fit beside the draft, without the draft."""
        place = self._place
        if self._note or place.draft is None:
            return load(place.alone)
        options = place.target or _beside_draft(self._parts, place.alone)
        try:
            return load(options)
        except MemoryBudgetError as error:
            self.close()
            self._note = f"draft {self._name} is not used: beside it, {error}"
        gc.collect()
        return load(place.alone)

    def _load_draft(self) -> None:
        options = self._place.draft
        if options is None or self._note:
            return
        try:
            self._parts = self._load(options)
        except MemoryBudgetError as error:
            self._note = f"draft {self._name} is not used: {error}"


def _beside_draft(parts: LoadedModel | None, options: LoadOptions) -> LoadOptions:
    """The target's options with room in its RAM budget for what the draft will still grow by."""
    from localrt.engine.native.engine import NativeEngine
    from localrt.offload.account import draft_growth_nbytes
    from localrt.offload.memory.process import ram_budget

    if parts is None:
        return options
    engine = parts.engine
    if not isinstance(engine, NativeEngine) or engine.free_memory() is not None:
        return options
    cache = engine.kv_nbytes(min(options.ctx or _HELD_TOKENS, parts.ctx))
    return replace(options, ram=max(ram_budget(options.ram) - draft_growth_nbytes(cache), 1))


@contextmanager
def load_beside(
    draft: str,
    options: LoadOptions,
    settings: Settings,
    *,
    target: Path,
    offline: bool | None = None,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
) -> Iterator[Beside]:
    """The draft of a ``draft`` option, if that names a model, for the model at ``target``.

    Where there is a card, both are planned for before either is loaded.
    """
    from localrt.hub import resolve

    def load(own: LoadOptions) -> LoadedModel:
        return load_draft(name, own, settings, offline=offline, progress=progress, cancel=cancel)

    name = draft.removesuffix(PLUS_NGRAM)
    if is_draft_head(name):
        options = with_room_for_head(name, options, settings)
    place = DraftPlace(alone=options)
    if is_draft_model(draft):
        path = resolve(
            name, settings=settings, offline=offline, progress=progress, cancel=cancel
        ).path
        planned = place_draft(target, path, name, options, settings)
        place = planned or DraftPlace(alone=options, draft=options)
    beside = Beside(name, place, load)
    try:
        yield beside
    finally:
        beside.close()
