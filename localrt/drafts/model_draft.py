"""A draft model loaded for a target, and its draft sources for sessions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from localrt.common.errors import OptionError
from localrt.common.formatting import format_bytes
from localrt.common.option_names import option
from localrt.engine.native.engine import NativeEngine
from localrt.engine.options import Options
from localrt.loading.load import LoadedModel
from localrt.loading.options import LoadOptions
from localrt.quant.ops.kv import KVCache
from localrt.quant.ops.protocol import Batch, Span
from localrt.speculative.source import (
    MOST_NODES,
    Check,
    Drafter,
    DraftFailedError,
    DraftSource,
    Rows,
)
from localrt.speculative.tree_source import TreeSource

if TYPE_CHECKING:
    from localrt.engine.protocol import EngineSession
    from localrt.models.tokenizers import Tokenizer

_ROUND_NODES = 128
_ROUND_LOGITS = 16 << 20


class CacheRoom:
    """Limits all caches of a draft together to ``room`` bytes of GPU memory."""

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
        """Raise DraftFailedError if ``rows`` more rows in ``growing`` would exceed ``room``."""
        with self._lock:
            lengths = {each: each.length + rows * (each is growing) for each in self._caches}
            need = sum(max(each.nbytes, self._kv_nbytes(n)) for each, n in lengths.items())
        if need > self._room:
            raise DraftFailedError(
                f"the draft's keys and values need {format_bytes(need)} of the GPU's memory, and "
                f"{format_bytes(self._room)} were set aside"
            )


class EngineDrafter(Drafter):
    """A small model with its target's vocabulary, as checked by the caller.

    One of the two may have additional tokens at the end: only those below ``vocab_size`` are read
    and drafted. Caches stay within ``room``.
    """

    name = "model"

    def __init__(
        self, engine: NativeEngine, vocab_size: int, *, room: CacheRoom | None = None
    ) -> None:
        self._engine = engine
        self._vocab = vocab_size
        self._room = room

    def cache(self, capacity: int) -> KVCache:
        cache = self._engine.cache(capacity)
        if self._room is not None:
            self._room.add(cache)
        return cache

    def compute(
        self, cache: KVCache, rows: Rows, *, check: Check | None
    ) -> npt.NDArray[np.float32]:
        count, unknown = len(rows.tokens), max(rows.tokens)
        if unknown >= self._vocab:
            raise DraftFailedError(f"the draft's vocabulary has no token {unknown}")
        if self._room is not None:
            self._room.check(cache, count)
        span = Span(cache, count, rows.mask)
        batch = Batch(np.array(rows.tokens, np.int64), rows.positions, (span,))
        wanted = range(count - rows.wanted, count)
        logits = self._engine.run(batch, rows=wanted, check=check)
        return logits[:, : self._vocab]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlace:
    """The chosen load options: ``target`` and ``draft`` for the pair, ``alone`` for the target
    without a draft. ``draft`` is None if it is not used; ``note`` says why. If ``target`` is None,
    the target gets the memory that the loaded draft leaves.

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
        assert isinstance(parts.engine, NativeEngine), "it was checked"
        self._engine = engine = parts.engine
        self._vocab = min(engine.info.vocab_size, target.engine.info.vocab_size)
        self._room = None
        ours, theirs = target.engine.info.weight_bytes, engine.info.weight_bytes
        share = 1.5 * theirs / max(ours, 1)  # estimated from weight sizes if there is no plan
        if place is not None:
            share = place.level_share or share
            if place.cache_room is not None:
                self._room = CacheRoom(engine.kv_nbytes, place.cache_room)
        self.level_share = min(1.0, share)

    def source(self, session: EngineSession, options: Options) -> DraftSource:
        info = self._target.engine.info
        round_nodes = _ROUND_NODES
        if info.streamed:  # little memory
            round_nodes = max(8, _ROUND_LOGITS // (4 * info.vocab_size))
        capacity = session.capacity + (options.tree_budget or MOST_NODES)
        return TreeSource(
            EngineDrafter(self._engine, self._vocab, room=self._room),
            capacity=min(capacity, self._parts.ctx),
            temperature=options.sampling.temperature,
            round_nodes=round_nodes,
        )

    def close(self) -> None:
        self._parts.engine.close()


def _problem(draft: LoadedModel, target: LoadedModel) -> str:
    """Return why ``draft`` cannot draft for ``target``; empty if it can."""
    if not isinstance(draft.engine, NativeEngine):
        return "needs the native engine, which does not know it"
    ours, theirs = target.engine.info.vocab_size, draft.engine.info.vocab_size
    if target.tokenizer is not None or draft.tokenizer is not None:
        problem = vocabulary_problem(target.tokenizer, draft.tokenizer)
    else:
        problem = f"it has {theirs} tokens and the model {ours}" if ours != theirs else ""
    if not problem:
        return ""
    return (
        f"has another vocabulary: {problem}; name a smaller model of the same family, or leave "
        f"{option('draft')} out"
    )


def vocabulary_problem(target: Tokenizer | None, draft: Tokenizer | None) -> str:
    """Return at which token two vocabularies differ; empty if one is a prefix of the other, since
    models of one family differ in unused tokens at the end.
    """
    if target is None or draft is None:
        return "one of the two models has no tokenizer to compare"
    ours, theirs = target.token_text, draft.token_text
    common = min(target.vocab_size, draft.vocab_size)
    differ = [token for token in range(common) if ours(token) != theirs(token)]
    if not differ:
        return ""
    first = differ[0]
    more = f" (and {len(differ) - 1} more differ)" if len(differ) > 1 else ""
    return f"token {first} is {theirs(first)!r}, in the model {ours(first)!r}{more}"
