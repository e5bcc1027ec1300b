"""A draft model beside its target: a loaded model whose passes make guesses.

Its caches never outgrow the memory of a card that was set aside for them. Where the target's time
is simulated, so is its draft's: on the card a pass takes what the card would take, with token ids
going there and logits coming back; on the CPU what it took. Whatever else drafting does takes the
CPU's time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from localrt.drafts.placement import DraftPlace
from localrt.engine.native.engine import NativeEngine
from localrt.errors import OptionError
from localrt.formatting import format_bytes
from localrt.loading.parts import LoadedModel
from localrt.models.timing import Clock
from localrt.quant.ops.protocol import Batch, KVCache
from localrt.speculative.calibration import FirstChoices
from localrt.speculative.drafter import ModelDrafter
from localrt.speculative.plan import MOST_NODES
from localrt.speculative.source import DraftFailedError
from localrt.speculative.tree_source import TreeLimits, TreeSource

if TYPE_CHECKING:
    from localrt.engine.options import Options
    from localrt.engine.protocol import EngineSession
    from localrt.models.tokenizers import Tokenizer
    from localrt.offload.planner.draft_costs import DraftCosts

__all__ = ["CacheRoom", "DraftTime", "EngineDrafter", "ModelDraft", "vocabulary_problem"]

_ROUND_NODES = 128
_ROUND_LOGITS = 16 << 20


class CacheRoom:
    """The ``room`` bytes of a card's memory that a draft's caches share."""

    def __init__(self, kv_nbytes: Callable[[int], int], room: int) -> None:
        self._kv_nbytes = kv_nbytes
        self._room = room
        self._lock = threading.Lock()
        self._caches: WeakSet[KVCache] = WeakSet()

    def add(self, cache: KVCache) -> None:
        """A new one, which counts until it is freed."""
        with self._lock:
            self._caches.add(cache)

    def check(self, batch: Batch) -> None:
        """Raises DraftFailedError: with this pass the caches would outgrow their room."""
        growing = {id(span.cache): span.rows for span in batch.spans}
        with self._lock:
            need = sum(
                max(cache.nbytes, self._kv_nbytes(cache.length + growing.get(id(cache), 0)))
                for cache in self._caches
            )
        if need > self._room:
            raise DraftFailedError(
                f"the draft's keys and values need {format_bytes(need)} of the card's memory, and "
                f"{format_bytes(self._room)} were set aside"
            )


@dataclass(frozen=True, slots=True)
class DraftTime:
    """A draft's time on a virtual card's ``clock``. ``costs`` are those of a draft on the card."""

    clock: Clock
    costs: DraftCosts | None = None

    @contextmanager
    def of_pass(self, batch: Batch, wanted: int) -> Iterator[None]:
        """Around a pass that gives ``wanted`` rows of logits."""
        clock, costs = self.clock, self.costs
        if costs is None:
            after, started = clock.now(), clock.begin("cpu")
            try:
                yield
            finally:
                clock.end("cpu", "draft", started, after=after)
            return
        count = len(batch.tokens)
        held = max(span.cache.length for span in batch.spans)
        there, started = clock.now() + costs.there(count), clock.begin("gpu")
        try:
            yield
        finally:
            cost = costs.computing(count, wanted, held)
            ended = clock.end("gpu", "draft", started, after=there, cost_s=cost)
            # Who waits for the logits is the CPU, which goes on once they are there.
            if wanted:
                waited = clock.begin("cpu")
                clock.end("cpu", "logits", waited, after=ended + costs.back(wanted), cost_s=0.0)

    def add(self, seconds: float) -> None:
        """The CPU has worked for so long beside passes."""
        started = self.clock.begin("cpu")
        self.clock.end("cpu", "drafting", started, after=self.clock.now(), cost_s=seconds)


class EngineDrafter(ModelDrafter):
    """A draft model's engine, within its ``room`` and on its target's ``time``."""

    def __init__(
        self,
        engine: NativeEngine,
        vocab_size: int,
        *,
        room: CacheRoom | None = None,
        time: DraftTime | None = None,
    ) -> None:
        held_rows = engine.ops_name in ("torch", "native")
        super().__init__(engine.cache, self._run, vocab_size, held_rows=held_rows)
        self._engine = engine
        self._room = room
        self._time = time
        self._pass_s = 0.0  # real time
        self.prepares = time is None  # two threads would share one virtual clock

    def cache(self, capacity: int) -> KVCache:
        """See ``Drafter``."""
        cache = self._engine.cache(capacity)
        if self._room is not None:
            self._room.add(cache)
        return cache

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """See ``Drafter``."""
        if self._time is None:
            yield
            return
        passes, began = self._pass_s, time.perf_counter()
        try:
            yield
        finally:
            beside = time.perf_counter() - began - (self._pass_s - passes)
            self._time.add(max(0.0, beside))

    def _run(
        self,
        batch: Batch,
        *,
        rows: Sequence[int] | None = None,
        check: Callable[[], None] | None = None,
    ) -> npt.NDArray[np.float32]:
        if self._room is not None:
            self._room.check(batch)
        if self._time is None:
            return self._engine.run(batch, rows=rows, check=check)
        with self._time.of_pass(batch, len(batch.tokens) if rows is None else len(rows)):
            began = time.perf_counter()
            try:
                return self._engine.run(batch, rows=rows, check=check)
            finally:
                self._pass_s += time.perf_counter() - began


class ModelDraft:
    """The draft model ``parts``, loaded as ``name`` for ``target``. ``place`` is what was planned.

    Raises:
        OptionError: it cannot draft for this model; its engine is closed.
    """

    kind = "model"

    def __init__(
        self, name: str, parts: LoadedModel, target: LoadedModel, place: DraftPlace | None = None
    ) -> None:
        self._parts = parts
        self._target = target
        self._place = place
        problem = _problem(parts, target)
        if problem:
            parts.engine.close()
            raise OptionError(f"draft {name} {problem}")
        self._engine = engine = _native(parts)
        self._room = None
        if place is not None and place.cache_room is not None:
            self._room = CacheRoom(engine.kv_nbytes, place.cache_room)

    @property
    def level_share(self) -> float:
        """What a level is taken to cost of a target's step: as planned, or by the weights."""
        if self._place is not None and self._place.level_share is not None:
            return min(1.0, self._place.level_share)
        ours, theirs = (p.engine.info.weight_bytes for p in (self._target, self._parts))
        return min(1.0, 1.5 * theirs / max(ours, 1))

    def source(self, session: EngineSession, options: Options) -> TreeSource:
        """Guesses for a session."""
        place, info = self._place, self._target.engine.info
        clock = _native(self._target).virtual_clock
        drafter = EngineDrafter(
            self._engine,
            min(self._engine.info.vocab_size, info.vocab_size),
            room=self._room,
            time=None if clock is None else DraftTime(clock, place.costs if place else None),
        )
        round_nodes = _ROUND_NODES
        if info.streamed:  # memory is tight
            round_nodes = max(8, _ROUND_LOGITS // (4 * info.vocab_size))
        limits = TreeLimits(
            capacity=min(session.capacity + (options.tree_budget or MOST_NODES), self._parts.ctx),
            temperature=options.sampling.temperature,
            round_nodes=round_nodes,
        )
        remember = place.remember if place else None
        return TreeSource(drafter, limits, choices=FirstChoices(remember) if remember else None)

    def close(self) -> None:
        """Free the model."""
        self._parts.engine.close()


def _native(parts: LoadedModel) -> NativeEngine:
    assert isinstance(parts.engine, NativeEngine), "it was checked"
    return parts.engine


def _problem(draft: LoadedModel, target: LoadedModel) -> str:
    """Why a model cannot draft for another; empty where it can."""
    if not isinstance(draft.engine, NativeEngine):
        return "needs the native engine, which does not know it"
    problem = vocabulary_problem(target.tokenizer, draft.tokenizer)
    if not problem and target.tokenizer is None:
        ours, theirs = (p.engine.info.vocab_size for p in (target, draft))
        if ours != theirs:
            problem = f"it has {theirs} tokens and the model {ours}"
    return f"has another vocabulary: {problem}" if problem else ""


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
