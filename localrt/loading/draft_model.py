"""Draft models of a target, and the choice of one for a generation (options to ``Speculation``).

``Drafts`` holds the drafts of one loaded model; each is loaded when first used, and a note says if
memory is too small for it. ``ModelDraft`` is a loaded draft: its caches never outgrow the GPU
memory reserved for them. For a draft with another vocabulary, the text so far is encoded with its
tokenizer, and the paths of its tree with the target's; if the two split text differently, some
draft tokens are useless.
"""

from __future__ import annotations

import codecs
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from localrt.common.errors import LocalrtError, MemoryBudgetError, OptionError
from localrt.common.formatting import format_bytes
from localrt.common.option_names import option
from localrt.common.settings import Settings
from localrt.engine.native.engine import NativeEngine
from localrt.engine.options import Options
from localrt.engine.speculation import MakeSource, Speculation
from localrt.loading.draft_family import family_draft, find_head
from localrt.loading.options import LoadOptions
from localrt.loading.parts import LoadedModel
from localrt.models.heads import has_prediction_block
from localrt.quant.ops.kv import KVCache
from localrt.quant.ops.protocol import Batch, Span
from localrt.speculative.ngram import Archive, NgramSource, common_length
from localrt.speculative.source import (
    DEPTH,
    MOST_NODES,
    Check,
    Drafter,
    DraftFailedError,
    DraftSource,
    Rows,
)
from localrt.speculative.tree import ROOT, TokenTree
from localrt.speculative.tree_source import TreeSource
from localrt.speculative.tuner import TreeSize, Tuner

if TYPE_CHECKING:
    from localrt.engine.protocol import EngineSession
    from localrt.models.tokenizers import Tokenizer
_BEFORE = "\n"  # some tokenizers add a space at the start of a text


class TranslatedSource(DraftSource):
    """Translates between tokenizers: ``source`` drafts in ``theirs``, its caller uses ``ours``."""

    def __init__(self, source: DraftSource, ours: Tokenizer, theirs: Tokenizer) -> None:
        self.name = source.name
        self._source = source
        self._ours, self._theirs = ours, theirs
        self._seen: list[int] = []  # of our tokens
        self._told: list[int] = []  # the same text in their tokens
        # Pairs (number of our tokens, of their tokens) that end at the same whole character.
        self._marks: list[tuple[int, int]] = [(0, 0)]

    def propose(
        self, history: Sequence[int], budget: int, depth: int, *, check: Check | None = None
    ) -> TokenTree:
        if not self._follow(history):
            return TokenTree.empty()
        tree = self._source.propose(self._told, budget, depth, check=check)
        return self._translated(tree, budget, depth)

    def _follow(self, history: Sequence[int]) -> bool:
        """Update ``_told`` to ``history``; return False if that ends within a character."""
        kept = common_length(self._seen, history)
        while self._marks[-1][0] > kept:
            self._marks.pop()
        ours, theirs = self._marks[-1]
        del self._told[theirs:]
        text, whole = _spelled(self._ours, history[ours:])
        self._seen = list(history[:ours])
        if not whole:
            return False
        if theirs:
            self._told += _inside(self._theirs, text)
        else:
            self._told = self._theirs.encode(text, parse_special=True)
        self._seen = list(history)
        if self._told:
            self._marks.append((len(history), len(self._told)))
        return bool(self._told)

    def _translated(self, tree: TokenTree, budget: int, depth: int) -> TokenTree:
        """Translate the whole characters of each path of ``tree``, the likeliest path first."""
        nodes: dict[tuple[int, int], int] = {}
        tokens: list[int] = []
        parents: list[int] = []
        scores: list[float] = []
        inner = set(tree.parents.tolist())
        leaves = [node for node in range(len(tree.tokens)) if node not in inner]
        for leaf in sorted(leaves, key=lambda node: -tree.scores[node]):
            path = _path(tree, leaf)
            text, _ = _spelled(self._theirs, tree.tokens[path].tolist())
            ends = np.cumsum([len(self._theirs.token_bytes(int(tree.tokens[n]))) for n in path])
            parent, at, score = ROOT, 0, 0.0
            for token in _inside(self._ours, text)[:depth]:
                at += len(self._ours.token_bytes(token))
                known = path[min(int(np.searchsorted(ends, at)), len(path) - 1)]
                score = min(score, float(tree.scores[known]))
                node = nodes.get((parent, token))
                if node is None:
                    if len(tokens) == budget:
                        break
                    node = nodes[parent, token] = len(tokens)
                    tokens.append(token)
                    parents.append(parent)
                    scores.append(score)
                parent, score = node, scores[node]
        return TokenTree.of(tokens, parents, scores, self.name)


def _spelled(tokenizer: Tokenizer, tokens: Sequence[int]) -> tuple[str, bool]:
    """Decode ``tokens``; return the whole characters, and whether no partial one follows."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(b"".join(map(tokenizer.token_bytes, tokens)))
    return text, not decoder.getstate()[0]


def _path(tree: TokenTree, leaf: int) -> list[int]:
    """Return the nodes from the root's child to ``leaf``, in order."""
    path = [leaf]
    while (parent := int(tree.parents[path[-1]])) != ROOT:
        path.append(parent)
    return path[::-1]


def _inside(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of ``text`` as they are in the middle of a text."""
    before = tokenizer.encode(_BEFORE, add_special=False)
    both = tokenizer.encode(_BEFORE + text, add_special=False, parse_special=True)
    if both[: len(before)] == before:
        return both[len(before) :]
    return tokenizer.encode(text, add_special=False, parse_special=True)


_ROUND_NODES = 128
_ROUND_LOGITS = 16 << 20
_MORE_TOKENS = 2  # at most this many times the tokens in the draft's vocabulary


class CacheRoom:
    """Limits the caches of a draft to ``room`` bytes of GPU memory in all."""

    def __init__(self, kv_nbytes: Callable[[int], int], room: int) -> None:
        self._kv_nbytes = kv_nbytes
        self._room = room
        self._lock = threading.Lock()
        self._caches: WeakSet[KVCache] = WeakSet()

    def add(self, cache: KVCache) -> None:
        """Count a new cache until it is freed."""
        with self._lock:
            self._caches.add(cache)

    def check(self, growing: KVCache, rows: int) -> None:
        """Raise DraftFailedError if ``rows`` more rows in ``growing`` would exceed the room."""
        with self._lock:
            lengths = {each: each.length + rows * (each is growing) for each in self._caches}
            need = sum(max(each.nbytes, self._kv_nbytes(n)) for each, n in lengths.items())
        if need > self._room:
            raise DraftFailedError(
                f"the draft's keys and values need {format_bytes(need)} of the GPU's memory, and "
                f"{format_bytes(self._room)} were set aside"
            )


class EngineDrafter(Drafter):
    """A small model with its target's vocabulary; the caller checks that the two are equal.

    It drafts only tokens below ``vocab_size``, as its logits may have more columns than the
    target's. Its caches stay within ``room``.
    """

    name = "model"

    def __init__(
        self,
        engine: NativeEngine,
        vocab_size: int,
        *,
        room: CacheRoom | None = None,
    ) -> None:
        self._engine = engine
        self._vocab = vocab_size
        self._room = room
        self.held_rows = engine.ops_name in ("torch", "native")

    def cache(self, capacity: int) -> KVCache:
        cache = self._engine.cache(capacity)
        if self._room is not None:
            self._room.add(cache)
        return cache

    def compute(
        self, cache: KVCache, rows: Rows, *, check: Check | None
    ) -> npt.NDArray[np.float32]:
        count = len(rows.tokens)
        if self._room is not None:
            self._room.check(cache, count)
        span = Span(cache, count, rows.mask)
        batch = Batch(np.array(rows.tokens, np.int64), rows.positions, (span,))
        wanted = range(count - rows.wanted, count)
        logits = self._engine.run(batch, rows=wanted, check=check)
        return logits[:, : self._vocab]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlace:
    """Chosen load options: ``target`` and ``draft`` for a pair, ``alone`` for the target without
    a draft. ``draft`` is None if it is not used; ``note`` says why. If ``target`` is None, the
    target gets the memory that the loaded draft leaves.

    ``cache_room`` is the GPU memory for the draft's KV cache, in bytes. ``level_share`` is the
    forecast cost of one draft level as a share of a plain step.
    """

    alone: LoadOptions
    target: LoadOptions | None = None
    draft: LoadOptions | None = None
    line: str = ""
    note: str = ""
    cache_room: int | None = None
    level_share: float | None = None


class ModelDraft:
    """The draft model ``parts``, loaded as ``name`` for ``target``. ``place`` is its plan, if any.

    Raises:
        OptionError: it cannot draft for this model; its engine has been closed.
    """

    kind = "model"
    at_once = False

    def __init__(
        self, name: str, parts: LoadedModel, target: LoadedModel, place: DraftPlace | None = None
    ) -> None:
        self._parts = parts
        self._target = target
        problem = _problem(parts, target)
        if problem:
            parts.engine.close()
            raise OptionError(f"draft {name} {problem}")
        self._engine = engine = _native(parts)
        self.translated = bool(vocabulary_problem(target.tokenizer, parts.tokenizer))
        self._shared = min(engine.info.vocab_size, target.engine.info.vocab_size)
        self._room = None
        ours, theirs = target.engine.info.weight_bytes, engine.info.weight_bytes
        share = 1.5 * theirs / max(ours, 1)  # estimated from weight sizes if there is no plan
        if place is not None:
            share = place.level_share or share
            if place.cache_room is not None:
                self._room = CacheRoom(engine.kv_nbytes, place.cache_room)
        self.level_share = min(1.0, share)

    def source(self, session: EngineSession, options: Options) -> DraftSource:
        """Return the draft source for a session."""
        info = self._target.engine.info
        drafter = EngineDrafter(
            self._engine,
            self._engine.info.vocab_size if self.translated else self._shared,
            room=self._room,
        )
        round_nodes = _ROUND_NODES
        if info.streamed:  # memory is tight
            round_nodes = max(8, _ROUND_LOGITS // (4 * info.vocab_size))
        capacity = session.capacity + (options.tree_budget or MOST_NODES)
        source = TreeSource(
            drafter,
            capacity=min(capacity * (_MORE_TOKENS if self.translated else 1), self._parts.ctx),
            temperature=options.sampling.temperature,
            round_nodes=round_nodes,
        )
        ours, theirs = self._target.tokenizer, self._parts.tokenizer
        if not self.translated or ours is None or theirs is None:
            return source
        return TranslatedSource(source, ours, theirs)

    def close(self) -> None:
        """Free the model."""
        self._parts.engine.close()


def _native(parts: LoadedModel) -> NativeEngine:
    assert isinstance(parts.engine, NativeEngine), "it was checked"
    return parts.engine


def _problem(draft: LoadedModel, target: LoadedModel) -> str:
    """Say why ``draft`` cannot draft for ``target``; empty if it can."""
    if not isinstance(draft.engine, NativeEngine):
        return "needs the native engine, which does not know it"
    if target.tokenizer is not None and draft.tokenizer is not None:
        return ""  # a draft with another vocabulary is translated
    problem = vocabulary_problem(target.tokenizer, draft.tokenizer)
    if not problem:
        ours, theirs = (p.engine.info.vocab_size for p in (target, draft))
        if ours != theirs:
            problem = f"it has {theirs} tokens and the model {ours}"
    return f"has another vocabulary: {problem}" if problem else ""


def vocabulary_problem(target: Tokenizer | None, draft: Tokenizer | None) -> str:
    """Say at which token two vocabularies differ; empty if they are equal."""
    if target is None or draft is None:
        if target is draft:
            return ""
        return "one of the two models has no tokenizer to compare"
    ours, theirs = target.token_text, draft.token_text
    common = min(target.vocab_size, draft.vocab_size)
    differ = [token for token in range(common) if ours(token) != theirs(token)]
    if differ:
        first = differ[0]
        more = f" (and {len(differ) - 1} more differ)" if len(differ) > 1 else ""
        return f"token {first} is {theirs(first)!r}, in the model {ours(first)!r}{more}"
    if target.vocab_size != draft.vocab_size:
        longer, who = (ours, "the model") if target.vocab_size > common else (theirs, "it")
        return (
            f"it has {draft.vocab_size} tokens and the model {target.vocab_size}: only {who} has "
            f"token {common}, {longer(common)!r}"
        )
    return ""


class Draft(Protocol):
    """What drafts for a loaded model besides lookups.

    ``level_share`` is the assumed cost of a draft level as a share of a plain step, or of all
    levels ``at_once``.
    """

    kind: str
    level_share: float
    at_once: bool

    def source(self, session: EngineSession, options: Options) -> DraftSource:
        """Return the draft source for a session."""

    def close(self) -> None:
        """Free its weights."""


# Loads the draft of a name for a loaded model.
LoadDraft = Callable[[str, LoadedModel], Draft]
PLUS_NGRAM = "+ngram"
MTP = "mtp"
_LOOKUP = "ngram"
_Loaded = tuple[Draft | None, str]  # the draft, or None; a note for the user


class Drafts:
    """The drafts of one loaded model. Thread-safe; each is loaded once, when first used.

    ``load`` loads a draft model. If it raises ``MemoryBudgetError``, the draft is not used: answers
    are the same without it.
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
            known = self._made.get(key)
            if known is None:
                known = self._made[key] = self._make(name, engine, options)
            return known

    def add(self, name: str, draft: Draft | None, note: str = "") -> None:
        """Add a loaded draft, or the ``note`` why there is none."""
        with self._lock:
            self._drafts[name] = draft, note

    def load(self, name: str) -> None:
        """Load a draft that is asked for by name; for ``"auto"``, the head that it uses, if any.

        Raises:
            LocalrtError: it cannot be found or loaded, or does not fit the model.
        """
        if name == "auto":
            own = self._head if self._takes_auto() else None
            if own is None:
                return
            name, asked = own, False
        else:
            self._native(name)
            asked = True
        with self._lock:
            self._drafts[name] = self._load_model(name, asked=asked)

    def close(self) -> None:
        """Free all drafts."""
        with self._lock:
            drafts, self._drafts = self._drafts, {}
            self._made.clear()
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
        """Whether ``auto`` speculates at all: with other ops a row's bits, and so a token, may
        depend on the rows in the batch.
        """
        engine = self._target.engine
        return isinstance(engine, NativeEngine) and engine.ops_name == "native"

    @cached_property
    def _head(self) -> str | None:
        """What ``auto`` drafts with besides lookups, if the model has it: its MTP block, or a head
        that was published for it.
        """
        target = self._target
        if not target.engine.info.streamed and has_prediction_block(target.path):
            return MTP
        return find_head(target.path, Settings.from_environment())

    @cached_property
    def _family(self) -> str | None:
        """The name of the draft model that ``auto`` uses where there is no head, if any."""
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
        tuner = self._tuners.setdefault(
            drafter,
            Tuner(levels, streamed=engine.counts() is not None, mixture=engine.is_mixture),
        )
        if draft is not None:
            tuner.sources[draft.kind].cost.at_once = draft.at_once
        size = None
        if explicit:
            assert options.tree_budget is not None
            size = TreeSize(options.tree_budget, options.tree_depth or DEPTH)
        archive = self.archive if lookup else None
        return Speculation(makers, tuner, fixed=size, archive=archive, note=note, shared=("head",))

    def _draft(self, name: str, options: Options) -> _Loaded:
        known = self._drafts.get(name)
        if known is None:
            known = self._drafts[name] = self._load_model(name, asked=options.draft != "auto")
        return known

    def _load_model(self, name: str, *, asked: bool) -> _Loaded:
        """Load a draft. Unless it was ``asked`` for by name, a failure is only a note."""
        try:
            draft = self._load(name, self._target)
        except MemoryBudgetError as error:
            hint = "" if asked else "; named as the draft when loading, it would be given room"
            return None, f"draft {name} is not used: {error.marked}{hint}"
        except LocalrtError as error:
            if asked:
                raise
            told = isinstance(error, OptionError)  # it names the draft already
            return None, error.marked if told else f"draft {name} is not used: {error.marked}"
        if asked or draft.kind == "head":
            return draft, ""
        return draft, f"draft {name} was found on this machine"
