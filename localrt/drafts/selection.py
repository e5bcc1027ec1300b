"""The drafts of one loaded model, and the choice among them for a generation.

Each is loaded when first used; a note tells if there is too little memory for it. Draft models are
in ``model_draft.py``, heads in ``head_draft.py``.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from localrt.common.errors import LocalrtError, MemoryBudgetError, OptionError
from localrt.common.option_names import option
from localrt.common.settings import Settings
from localrt.drafts.discovery import family_draft, own_head
from localrt.engine.native.engine import NativeEngine
from localrt.engine.options import Options
from localrt.engine.speculation import MakeSource, Speculation
from localrt.loading.load import LoadedModel
from localrt.speculative.ngram import Archive, NgramSource
from localrt.speculative.source import DEPTH, DraftSource, TreeSize
from localrt.speculative.tuner import Tuner

if TYPE_CHECKING:
    from localrt.engine.protocol import EngineSession


class Draft(Protocol):
    """A draft model or head of a loaded model.

    ``level_share`` is the assumed cost of a draft level, or of all levels if computed ``at_once``,
    as a share of a plain step.
    """

    kind: str
    level_share: float
    at_once: bool

    def source(self, session: EngineSession, options: Options) -> DraftSource:
        """Return the draft source for a session."""

    def close(self) -> None:
        """Free its weights."""


# Loads the draft with this name for a loaded model.
LoadDraft = Callable[[str, LoadedModel], Draft]
PLUS_NGRAM = "+ngram"
_LOOKUP = "ngram"
_Loaded = tuple[Draft | None, str]  # the draft, or None; a note for the user


class Drafts:
    """The drafts of one loaded model. Thread-safe; each is loaded once, when first used.

    ``load`` loads a draft model. If it raises ``MemoryBudgetError``, the draft is not used, which
    does not change answers.
    """

    def __init__(self, target: LoadedModel, load: LoadDraft) -> None:
        self._target = target
        self._load = load
        self._lock = threading.Lock()
        self._drafts: dict[str, _Loaded] = {}
        self._tuners: dict[str, Tuner] = {}
        self._speculations: dict[tuple[str, int | None, int | None, float], Speculation] = {}
        self.archive = Archive()

    def speculation(self, options: Options) -> Speculation | None:
        """Return how to speculate under ``options``; None means no speculation.

        Raises:
            OptionError: an explicitly named draft cannot draft for this model.
        """
        name = options.draft
        if name == "off":
            return None
        if name == "auto":
            if not self._takes_auto():
                return None
            name = self._head or self._family or _LOOKUP
        engine = self._native(name)
        with self._lock:
            key = (name, options.tree_budget, options.tree_depth, options.sampling.temperature)
            if key not in self._speculations:
                self._speculations[key] = self._make(name, engine, options)
            return self._speculations[key]

    def add(self, name: str, draft: Draft | None, note: str = "") -> None:
        """Add a loaded draft, or a ``note`` that explains why there is none."""
        with self._lock:
            self._drafts[name] = draft, note

    def load(self, name: str) -> None:
        """Load the draft ``name``; for ``"auto"``, the head that auto uses, if any.

        Raises:
            LocalrtError: it cannot be found or loaded, or does not fit the model.
        """
        if name == "auto":
            head = self._head if self._takes_auto() else None
            if head is not None:
                with self._lock:
                    self._drafts[head] = self._load_draft(head, explicit=False)
            return
        self._native(name)
        with self._lock:
            self._drafts[name] = self._load_draft(name, explicit=True)

    def close(self) -> None:
        """Free all drafts."""
        with self._lock:
            drafts, self._drafts = self._drafts, {}
            self._speculations.clear()
        for draft, _ in drafts.values():
            if draft is not None:
                draft.close()

    # -- parts -----------------------------------------------------------------------------------

    def _native(self, name: str) -> NativeEngine:
        engine = self._target.engine
        if not isinstance(engine, NativeEngine):
            raise OptionError(
                f"{option('draft', name)} needs the native engine; this model runs on "
                f"{engine.info.engine}: leave {option('draft')} out"
            )
        return engine

    def _takes_auto(self) -> bool:
        """Whether ``auto`` speculates at all: else a row's bits, and so its token, may depend on
        the other rows of its pass.
        """
        engine = self._target.engine
        return isinstance(engine, NativeEngine) and engine.exact_rows > 1

    @cached_property
    def _head(self) -> str | None:
        """The head that ``auto`` uses in addition to n-gram lookup, but where a GPU has a part of
        the weights: it would take memory from them.
        """
        info = self._target.engine.info
        if info.streamed and info.device != "cpu":
            return None
        own = own_head(self._target.path, Settings.from_environment(), streamed=info.streamed)
        return None if own is None else own.name

    @cached_property
    def _family(self) -> str | None:
        """The draft model that ``auto`` uses if there is no head."""
        return family_draft(self._target)

    def _make(self, name: str, engine: NativeEngine, options: Options) -> Speculation:
        drafter = name.removesuffix(PLUS_NGRAM)
        lookups = drafter == _LOOKUP
        draft, note = (None, "") if lookups else self._draft(drafter, options)
        explicit = options.draft != "auto" and options.tree_budget is not None
        makers: dict[str, MakeSource] = {}
        levels = {_LOOKUP: 0.0}
        lookup = draft is None or name != drafter or not explicit
        if lookup:
            makers[_LOOKUP] = lambda _: NgramSource(self.archive)
        if draft is not None:
            makers[draft.kind] = lambda session: draft.source(session, options)
            levels[draft.kind] = draft.level_share
        exact = engine.exact_rows
        most = exact if exact > 1 else sys.maxsize  # no size is exact
        tuner = Tuner(levels, mixture=engine.is_mixture, most_rows=most)
        tuner = self._tuners.setdefault(drafter, tuner)
        if draft is not None:
            tuner.sources[draft.kind].cost.at_once = draft.at_once
        size = None
        if explicit:
            assert options.tree_budget is not None
            size = TreeSize(options.tree_budget, options.tree_depth or DEPTH)
        archive = self.archive if lookup else None
        return Speculation(makers, tuner, fixed=size, archive=archive, note=note, shared=("head",))

    def _draft(self, name: str, options: Options) -> _Loaded:
        if name not in self._drafts:
            self._drafts[name] = self._load_draft(name, explicit=options.draft != "auto")
        return self._drafts[name]

    def _load_draft(self, name: str, *, explicit: bool) -> _Loaded:
        """Load a draft. Unless the user named it (``explicit``), a failure only causes a note."""
        try:
            draft = self._load(name, self._target)
        except MemoryBudgetError as error:
            hint = "" if explicit else "; named as the draft when loading, it would be given room"
            return None, f"draft {name} is not used: {error.marked}{hint}"
        except LocalrtError as error:
            if explicit:
                raise
            named = isinstance(error, OptionError)  # its message already names the draft
            return None, error.marked if named else f"draft {name} is not used: {error.marked}"
        if explicit or draft.kind == "head":
            return draft, ""
        return draft, f"draft {name} was found on this machine"
