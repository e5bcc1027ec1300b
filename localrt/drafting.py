"""What a model drafts with: from the options of a generation to its ``Speculation``.

It loads draft models, explains why two vocabularies differ, and says what is not done for lack of
memory. What a guess is worth is the tuner's to find out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localrt.engine.speculation import Speculation
from localrt.errors import MemoryBudgetError, OptionError
from localrt.speculative.draft_model import DraftModelSource
from localrt.speculative.merged import MergedSource
from localrt.speculative.ngram import NgramSource
from localrt.speculative.policy import DEPTH, MOST_NODES, Plan
from localrt.speculative.said import Archive, SaidSource
from localrt.speculative.source import DraftSource
from localrt.speculative.tuner import Tuner

if TYPE_CHECKING:
    from localrt.engine.base import EngineSession
    from localrt.engine.native import NativeEngine
    from localrt.engine.options import Options
    from localrt.loading import LoadedModel
    from localrt.models.tokenizers import Tokenizer

__all__ = ["PLUS_NGRAM", "Drafts", "LoadDraft", "family_draft", "vocabulary_problem"]

# Loads the model of that name; its notes are for the user.
LoadDraft = Callable[[str], "LoadedModel"]

PLUS_NGRAM = "+ngram"
_LOOKUP = "ngram"
_MODEL = "model"


@dataclass(frozen=True, slots=True)
class _Draft:
    """A draft model that is loaded, or why it is not used."""

    parts: LoadedModel | None
    note: str = ""


class Drafts:
    """The drafts of one loaded model. Thread-safe; draft models are loaded once, when first used.

    ``load`` makes a draft model's parts. It raises ``MemoryBudgetError`` where the draft does not
    fit what is left: the answer is the same without it.
    """

    def __init__(self, target: LoadedModel, load: LoadDraft) -> None:
        self._target = target
        self._load = load
        self._lock = threading.Lock()
        self._drafts: dict[str, _Draft] = {}
        self._tuners: dict[str, Tuner] = {}
        self._made: dict[tuple[str, int | None, int | None, float], Speculation] = {}
        self._archive = Archive(target.engine.info.vocab_size)

    def speculation(self, options: Options) -> Speculation | None:
        """How to speculate under ``options``; None: not at all.

        Raises:
            OptionError: an explicit draft that cannot be this model's.
        """
        name = options.draft
        engine = self._engine()
        if name == "off":
            return None
        if engine is None:
            if name == "auto":
                return None
            raise OptionError(
                f"draft {name!r} needs the native engine; this model runs on "
                f"{self._target.engine.info.engine}: leave draft out"
            )
        if name == "auto":
            # Elsewhere a row's bits depend on how many are computed together, and so may a token.
            if engine.ops_name != "native":
                return None
            name = family_draft(self._target) or _LOOKUP
        with self._lock:
            key = (name, options.tree_budget, options.tree_depth, options.sampling.temperature)
            known = self._made.get(key)
            if known is None:
                known = self._made[key] = self._make(name, engine, options)
            return known

    def add(self, name: str, parts: LoadedModel | None, note: str = "") -> None:
        """A draft model that was loaded already, or could not be."""
        if parts is not None:
            try:
                self._check(name, parts)
            except OptionError:
                parts.engine.close()
                raise
        with self._lock:
            self._drafts[name] = _Draft(parts, note)

    def close(self) -> None:
        """Free the draft models."""
        with self._lock:
            drafts, self._drafts = self._drafts, {}
            self._made.clear()
        for draft in drafts.values():
            if draft.parts is not None:
                draft.parts.engine.close()

    # -- parts -----------------------------------------------------------------------------------

    def _engine(self) -> NativeEngine | None:
        from localrt.engine.native import NativeEngine

        engine = self._target.engine
        return engine if isinstance(engine, NativeEngine) else None

    def _make(self, name: str, engine: NativeEngine, options: Options) -> Speculation:
        model = name.removesuffix(PLUS_NGRAM)
        draft = _Draft(None) if model == _LOOKUP else self._draft(model)
        explicit = options.draft != "auto" and options.tree_budget is not None
        lookup = draft.parts is None or name != model or not explicit

        def make(session: EngineSession) -> Mapping[str, DraftSource]:
            sources: dict[str, DraftSource] = {}
            if lookup:
                sources[_LOOKUP] = MergedSource([NgramSource(), SaidSource(self._archive)])
            if draft.parts is not None:
                sources[_MODEL] = self._model_source(draft.parts, session, options)
            if len(sources) > 1 and explicit:
                return {name: MergedSource(list(sources.values()))}
            return sources

        names = [n for n in (_LOOKUP, _MODEL) if n != _MODEL or draft.parts is not None]
        tuner = self._tuners.setdefault(
            model,
            Tuner(
                {n: 0.0 if n == _LOOKUP else self._level(draft) for n in names},
                streamed=engine.counts() is not None,
            ),
        )
        fixed = None
        if explicit:
            assert options.tree_budget is not None
            source = _LOOKUP
            if draft.parts is not None:
                source = name if lookup else _MODEL
            fixed = Plan(source, options.tree_budget, options.tree_depth or DEPTH)
        return Speculation(
            make,
            tuner,
            fixed=fixed,
            archive=self._archive if lookup else None,
            note=draft.note,
        )

    def _level(self, draft: _Draft) -> float:
        """The share of a target's step that a level of the draft may cost: by their weights."""
        assert draft.parts is not None, "there is a draft"
        ours, theirs = (p.engine.info.weight_bytes for p in (self._target, draft.parts))
        return min(1.0, 1.5 * theirs / max(ours, 1))

    def _draft(self, name: str) -> _Draft:
        known = self._drafts.get(name)
        if known is not None:
            return known
        try:
            parts = self._load(name)
        except MemoryBudgetError as error:
            draft = _Draft(None, f"draft {name} is not used: {error}")
        else:
            try:
                self._check(name, parts)
            except OptionError:
                parts.engine.close()
                raise
            draft = _Draft(parts)
        self._drafts[name] = draft
        return draft

    def _check(self, name: str, parts: LoadedModel) -> None:
        from localrt.engine.native import NativeEngine

        if not isinstance(parts.engine, NativeEngine):
            raise OptionError(f"draft {name} needs the native engine, which does not know it")
        problem = vocabulary_problem(self._target.tokenizer, parts.tokenizer)
        if not problem and self._target.tokenizer is None:
            ours, theirs = (p.engine.info.vocab_size for p in (self._target, parts))
            if ours != theirs:
                problem = f"it has {theirs} tokens and the model {ours}"
        if problem:
            raise OptionError(f"draft {name} has another vocabulary: {problem}")

    def _model_source(
        self, parts: LoadedModel, session: EngineSession, options: Options
    ) -> DraftSource:
        from localrt.engine.native import NativeEngine

        engine = parts.engine
        assert isinstance(engine, NativeEngine), "it was checked"
        most = options.tree_budget or MOST_NODES
        return DraftModelSource(
            _EngineDecoder(engine),
            capacity=min(session.capacity + most, parts.ctx),
            vocab_size=min(engine.info.vocab_size, self._target.engine.info.vocab_size),
            temperature=options.sampling.temperature,
            held_rows=engine.ops_name in ("torch", "native"),
        )


class _EngineDecoder:
    """A draft model's engine as the decoder that drafting needs."""

    def __init__(self, engine: NativeEngine) -> None:
        self.cache = engine.cache
        self.forward = engine.run


def family_draft(target: LoadedModel) -> str | None:
    """A small model of the target's family among those on this machine, to draft with.

    None so far: which local models are of a family is not recorded.
    """
    del target
    return None


def vocabulary_problem(target: Tokenizer | None, draft: Tokenizer | None) -> str:
    """Where two vocabularies differ, token by token; empty where they are the same."""
    if target is None or draft is None:
        if target is draft:
            return ""
        return "one of the two models has no tokenizer to compare"
    differ = []
    for token in range(min(target.vocab_size, draft.vocab_size)):
        ours, theirs = target.token_text(token), draft.token_text(token)
        if ours != theirs:
            differ.append((token, theirs, ours))
    if differ:
        token, theirs, ours = differ[0]
        more = f" (and {len(differ) - 1} more differ)" if len(differ) > 1 else ""
        return f"token {token} is {theirs!r}, in the model {ours!r}{more}"
    if target.vocab_size != draft.vocab_size:
        longer, who = (
            (target, "the model") if target.vocab_size > draft.vocab_size else (draft, "it")
        )
        first = min(target.vocab_size, draft.vocab_size)
        return (
            f"it has {draft.vocab_size} tokens and the model {target.vocab_size}: only {who} has "
            f"token {first}, {longer.token_text(first)!r}"
        )
    return ""
