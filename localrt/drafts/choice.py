"""What a model drafts with: from the options of a generation to its ``Speculation``.

It loads draft models, explains why two vocabularies differ, and says what is not done for lack of
memory. What a guess is worth is the tuner's to find out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from localrt.drafts.head import OWN_HEAD, DraftHead, find_head, is_draft_head
from localrt.drafts.placement import source_of
from localrt.engine.speculation import MakeSource, Speculation
from localrt.errors import LocalrtError, MemoryBudgetError, OptionError
from localrt.settings import Settings
from localrt.speculative.archive import Archive, SaidSource
from localrt.speculative.draft_model import DraftDecoder, DraftModelSource
from localrt.speculative.merged import MergedSource
from localrt.speculative.ngram import NgramSource
from localrt.speculative.policy import DEPTH, MOST_NODES, Plan
from localrt.speculative.source import DraftSource
from localrt.speculative.tuner import Tuner

if TYPE_CHECKING:
    from localrt.drafts.placement import DraftPlace
    from localrt.engine.native.engine import NativeEngine
    from localrt.engine.options import Options
    from localrt.engine.protocol import EngineSession
    from localrt.loading.parts import LoadedModel
    from localrt.models.tokenizers import Tokenizer

__all__ = ["PLUS_NGRAM", "Drafts", "LoadDraft", "family_draft", "vocabulary_problem"]

# Loads the model of that name; its notes are for the user.
LoadDraft = Callable[[str], "LoadedModel"]

PLUS_NGRAM = "+ngram"
_LOOKUP = "ngram"
_MODEL = "model"
_ROUND_NODES = 128
_ROUND_LOGITS = 16 << 20
_HEAD = "dgf"


@dataclass(frozen=True, slots=True)
class _Draft:
    """A draft model that is loaded, or why it is not used."""

    parts: LoadedModel | None
    note: str = ""
    place: DraftPlace | None = None


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
        self._heads: dict[str, DraftHead] = {}
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
        """A draft model that was loaded already, or could not be; ``place`` is what was planned."""
        if parts is not None:
            try:
                self._check(name, parts)
            except OptionError:
                parts.engine.close()
                raise
        with self._lock:
            self._drafts[name] = _Draft(parts, note, place)

    def close(self) -> None:
        """Free the draft models."""
        with self._lock:
            drafts, self._drafts = self._drafts, {}
            heads, self._heads = self._heads, {}
            self._made.clear()
        for head in heads.values():
            head.close()
        for draft in drafts.values():
            if draft.parts is not None:
                draft.parts.engine.close()

    # -- parts -----------------------------------------------------------------------------------

    @cached_property
    def _family(self) -> str | None:
        """What ``auto`` drafts with beside lookups."""
        return family_draft(self._target)

    def _engine(self) -> NativeEngine | None:
        from localrt.engine.native.engine import NativeEngine

        engine = self._target.engine
        return engine if isinstance(engine, NativeEngine) else None

    def _make(self, name: str, engine: NativeEngine, options: Options) -> Speculation:
        model = name.removesuffix(PLUS_NGRAM)
        head = self._head(model, engine) if is_draft_head(model) else None
        draft = _Draft(None) if model == _LOOKUP or head else self._draft(model, options)
        guesser = _HEAD if head else _MODEL if draft.parts is not None else ""
        explicit = options.draft != "auto" and options.tree_budget is not None
        lookup = not guesser or name != model or not explicit

        makers: dict[str, MakeSource] = {}
        if lookup:
            makers[_LOOKUP] = lambda _: MergedSource([NgramSource(), SaidSource(self._archive)])
        if head is not None:
            makers[_HEAD] = lambda session: head.source(session, options)
        elif draft.parts is not None:
            makers[_MODEL] = lambda session: self._model_source(draft, session, options)
        if len(makers) > 1 and explicit:
            parts = list(makers.values())
            makers = {name: lambda session: MergedSource([make(session) for make in parts])}

        levels = {_LOOKUP: 0.0}
        if guesser:
            levels[guesser] = head.level_share if head else self._level(draft)
        tuner = self._tuners.setdefault(
            model,
            Tuner(
                levels,
                streamed=engine.counts() is not None,
                mixture=engine.mixture,
            ),
        )
        fixed = None
        if explicit:
            assert options.tree_budget is not None
            source = _LOOKUP
            if guesser:
                source = name if lookup else guesser
            fixed = Plan(source, options.tree_budget, options.tree_depth or DEPTH)
        return Speculation(
            makers,
            tuner,
            fixed=fixed,
            archive=self._archive if lookup else None,
            note=draft.note,
        )

    def _head(self, name: str, engine: NativeEngine) -> DraftHead:
        known = self._heads.get(name)
        if known is None:
            folder: Path | None = Path(name)
            if name == OWN_HEAD:
                folder = find_head(self._target, Settings.from_environment())
            if folder is None:
                raise OptionError(
                    "there is no draft head for this model: localrt draft train makes one"
                )
            known = self._heads[name] = DraftHead(folder, self._target, engine)
        return known

    def _level(self, draft: _Draft) -> float:
        """The share of a target's step that a level may cost: as planned, or by the weights."""
        assert draft.parts is not None, "there is a draft"
        if draft.place is not None and draft.place.level_share is not None:
            return min(1.0, draft.place.level_share)
        ours, theirs = (p.engine.info.weight_bytes for p in (self._target, draft.parts))
        return min(1.0, 1.5 * theirs / max(ours, 1))

    def _draft(self, name: str, options: Options) -> _Draft:
        known = self._drafts.get(name)
        if known is not None:
            return known
        found = options.draft == "auto"  # nobody asked for it: that it is of no use is no error
        try:
            parts = self._load(name)
        except MemoryBudgetError as error:
            hint = "; named as the draft when loading, it would be given room" if found else ""
            draft = _Draft(None, f"draft {name} is not used: {error}{hint}")
        except LocalrtError as error:
            if not found:
                raise
            draft = _Draft(None, f"draft {name} is not used: {error}")
        else:
            try:
                self._check(name, parts)
            except OptionError as error:
                parts.engine.close()
                if not found:
                    raise
                draft = _Draft(None, str(error))
            else:
                draft = _Draft(parts, f"draft {name} was found on this machine" if found else "")
        self._drafts[name] = draft
        return draft

    def _check(self, name: str, parts: LoadedModel) -> None:
        from localrt.engine.native.engine import NativeEngine

        if not isinstance(parts.engine, NativeEngine):
            raise OptionError(f"draft {name} needs the native engine, which does not know it")
        problem = vocabulary_problem(self._target.tokenizer, parts.tokenizer)
        if not problem and self._target.tokenizer is None:
            ours, theirs = (p.engine.info.vocab_size for p in (self._target, parts))
            if ours != theirs:
                problem = f"it has {theirs} tokens and the model {ours}"
        if problem:
            raise OptionError(f"draft {name} has another vocabulary: {problem}")

    def _round_nodes(self) -> int:
        """Nodes of a draft's pass: where memory is tight, logits of 16 MB at most."""
        info = self._target.engine.info
        return max(8, _ROUND_LOGITS // (4 * info.vocab_size)) if info.streamed else _ROUND_NODES

    def _model_source(self, draft: _Draft, session: EngineSession, options: Options) -> DraftSource:
        from localrt.engine.native.engine import NativeEngine

        parts, target = draft.parts, self._engine()
        assert parts is not None, "there is a draft"
        assert target is not None, "it was checked"
        engine = parts.engine
        assert isinstance(engine, NativeEngine), "it was checked"
        most = options.tree_budget or MOST_NODES

        def make(decoder: DraftDecoder) -> DraftSource:
            return DraftModelSource(
                decoder,
                capacity=min(session.capacity + most, parts.ctx),
                vocab_size=min(engine.info.vocab_size, self._target.engine.info.vocab_size),
                temperature=options.sampling.temperature,
                held_rows=engine.ops_name in ("torch", "native"),
                round_nodes=self._round_nodes(),
            )

        return source_of(
            make, _EngineDecoder(engine), draft=engine, target=target, place=draft.place
        )


class _EngineDecoder:
    """A draft model's engine as the decoder that drafting needs."""

    def __init__(self, engine: NativeEngine) -> None:
        self.cache = engine.cache
        self.forward = engine.run


def family_draft(target: LoadedModel) -> str | None:
    """A small model of the target's family among those on this machine, to draft with unasked.

    Only where weights are streamed: where all is resident, a second model in memory would be a
    surprise, and its guesses cost a CPU about what they save.
    """
    from localrt.drafts.family import find_family_draft

    if not target.engine.info.streamed:
        return None
    found = find_family_draft(target.path, Settings.from_environment())
    return None if found is None else found.name


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
