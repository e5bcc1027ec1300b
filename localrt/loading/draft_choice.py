"""Which draft a generation uses: from its options to its ``Speculation``.

It loads draft models, and says what is not done for lack of memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cached_property

from localrt.common.errors import LocalrtError, MemoryBudgetError, OptionError
from localrt.common.option_names import option
from localrt.engine.native.engine import NativeEngine
from localrt.engine.options import Options
from localrt.engine.speculation import MakeSource, Speculation
from localrt.loading.draft_family import family_draft
from localrt.loading.draft_model import DraftPlace, ModelDraft
from localrt.loading.parts import LoadedModel
from localrt.speculative.ngram import Archive, NgramSource
from localrt.speculative.source import DEPTH
from localrt.speculative.tuner import TreeSize, Tuner

# Loads the model of that name; its notes are for the user.
LoadDraft = Callable[[str], LoadedModel]
PLUS_NGRAM = "+ngram"
_LOOKUP = "ngram"
_Loaded = tuple[ModelDraft | None, str]  # a draft, or why it is not used


class Drafts:
    """The drafts of one loaded model. Thread-safe; they are loaded once, when first used.

    ``load`` makes a draft model's parts. It raises ``MemoryBudgetError`` where the draft does not
    fit what is left: the answer is the same without it.
    """

    def __init__(self, target: LoadedModel, load: LoadDraft) -> None:
        self._target = target
        self._load = load
        self._lock = threading.Lock()
        self._drafts: dict[str, _Loaded] = {}
        self._tuners: dict[str, Tuner] = {}
        self._made: dict[tuple[str, int | None, int | None, float], Speculation] = {}
        self.archive = Archive()

    def speculation(self, options: Options) -> Speculation | None:
        """How to speculate under ``options``; None: not at all.

        Raises:
            OptionError: an explicit draft that cannot be this model's.
        """
        name, engine = options.draft, self._target.engine
        if name == "off":
            return None
        if not isinstance(engine, NativeEngine):
            if name == "auto":
                return None
            raise OptionError(
                f"{option('draft', name)} needs the native engine; this model runs on "
                f"{engine.info.engine}: leave {option('draft')} out"
            )
        if name == "auto":
            # Elsewhere a row's bits depend on how many are computed together, and so may a token.
            if engine.ops_name != "native":
                return None
            name = self._family or _LOOKUP
        with self._lock:
            key = (name, options.tree_budget, options.tree_depth, options.sampling.temperature)
            known = self._made.get(key)
            if known is None:
                known = self._made[key] = self._make(name, engine, options)
            return known

    def add(
        self,
        name: str,
        parts: LoadedModel | None,
        note: str = "",
        place: DraftPlace | None = None,
    ) -> None:
        """A draft model that was loaded already, or could not be; ``place`` is what was planned.

        Raises:
            OptionError: it has another vocabulary; it is closed.
        """
        draft = None if parts is None else ModelDraft(name, parts, self._target, place)
        with self._lock:
            self._drafts[name] = draft, note

    def close(self) -> None:
        """Free all of them."""
        with self._lock:
            drafts, self._drafts = self._drafts, {}
            self._made.clear()
        for draft, _ in drafts.values():
            if draft is not None:
                draft.close()

    # -- parts -----------------------------------------------------------------------------------

    @cached_property
    def _family(self) -> str | None:
        """What ``auto`` drafts with beside lookups."""
        return family_draft(self._target)

    def _make(self, name: str, engine: NativeEngine, options: Options) -> Speculation:
        guesser = name.removesuffix(PLUS_NGRAM)
        lookups = guesser == _LOOKUP
        draft, note = (None, "") if lookups else self._draft(guesser, options)
        explicit = options.draft != "auto" and options.tree_budget is not None
        makers: dict[str, MakeSource] = {}
        levels = {_LOOKUP: 0.0}
        lookup = draft is None or name != guesser or not explicit
        if lookup:
            makers[_LOOKUP] = lambda _: NgramSource(self.archive)
        if draft is not None:
            makers[draft.kind] = lambda session: draft.source(session, options)
            levels[draft.kind] = draft.level_share
        tuner = self._tuners.setdefault(
            guesser,
            Tuner(levels, streamed=engine.counts() is not None, mixture=engine.is_mixture),
        )
        size = None
        if explicit:
            assert options.tree_budget is not None
            size = TreeSize(options.tree_budget, options.tree_depth or DEPTH)
        archive = self.archive if lookup else None
        return Speculation(makers, tuner, fixed=size, archive=archive, note=note)

    def _draft(self, name: str, options: Options) -> _Loaded:
        known = self._drafts.get(name)
        if known is None:
            known = self._drafts[name] = self._load_model(name, asked=options.draft != "auto")
        return known

    def _load_model(self, name: str, *, asked: bool) -> _Loaded:
        """A draft model; that one is of no use that nobody ``asked`` for is no error."""
        try:
            draft = ModelDraft(name, self._load(name), self._target)
        except MemoryBudgetError as error:
            hint = "" if asked else "; named as the draft when loading, it would be given room"
            return None, f"draft {name} is not used: {error.marked}{hint}"
        except LocalrtError as error:
            if asked:
                raise
            told = isinstance(error, OptionError)  # with the draft's name
            return None, error.marked if told else f"draft {name} is not used: {error.marked}"
        return draft, "" if asked else f"draft {name} was found on this machine"
