"""One sequence on the native engine: its tokens, its KV cache, and the rows of a tree in between.

Passes are the engine's. It does not know weights, text or sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from localrt.engine.native.features import FeatureRows
from localrt.engine.protocol import (
    Check,
    EngineInfo,
    EngineSession,
    Forecast,
    Logits,
    PutBlocks,
)
from localrt.errors import ContextOverflowError, LocalrtError, OptionError
from localrt.models.timing import PipelineCounts
from localrt.quant.ops.kv import BlockCache, Bytes
from localrt.quant.ops.protocol import KVCache
from localrt.speculative.tree import TokenTree

__all__ = ["NativeSession", "Passes"]


class Passes(Protocol):
    """What a session needs of its engine. ``attention_key``: what keys depend on beside weights."""

    info: EngineInfo
    pass_rows: int

    @property
    def hidden_size(self) -> int:
        """Columns of the hidden states."""

    @property
    def attention_key(self) -> str:
        """Part of ``kv_layout``."""

    def forward(
        self,
        cache: KVCache,
        tokens: Sequence[int],
        check: Check | None,
        *,
        want_logits: bool,
        features: Logits | None = None,
    ) -> Logits | None:
        """One pass that appends ``tokens``; logits (vocab,) of the last row where wanted."""

    def extend_trees(
        self,
        parts: Sequence[tuple[EngineSession, int, TokenTree]],
        *,
        check: Check | None = None,
    ) -> list[Logits]:
        """See ``Engine``."""

    def reserve(self, cache: KVCache, length: int) -> None:
        """Make room in ``cache`` for ``length`` tokens that do not come from a pass."""

    def logit_rows(self) -> int | None:
        """Rows with logits that a pass may have; None: as many as wanted."""

    def counts(self) -> PipelineCounts | None:
        """See ``EngineSession``."""

    def forecast(self) -> Forecast | None:
        """See ``EngineSession``."""


class NativeSession(EngineSession):
    """See ``EngineSession``."""

    takes_trees = True

    def __init__(self, engine: Passes, cache: KVCache) -> None:
        self._engine = engine
        self._cache: KVCache | None = cache
        self._tokens: list[int] = []
        self._open: list[int] = []  # the tokens of a tree's rows, until some are kept
        self._features: FeatureRows | None = None
        self.capacity = cache.capacity

    def record_features(self) -> FeatureRows:
        """From now on, the hidden states of the tokens that are computed; the same in each call."""
        if self._features is None:
            self._features = FeatureRows(len(self._tokens), self._engine.hidden_size)
        return self._features

    @property
    def tree_rows(self) -> int | None:
        """See ``EngineSession``."""
        return self._engine.logit_rows()

    @property
    def tokens(self) -> Sequence[int]:
        """What the cache holds."""
        return self._tokens

    @property
    def nbytes(self) -> int:
        """Bytes that the cache takes now."""
        return self._cache.nbytes if self._cache is not None else 0

    def extend(
        self,
        tokens: Sequence[int],
        *,
        check: Check | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> Logits:
        """Append ``tokens`` in passes of the engine's rows; logits after the last."""
        if not tokens:
            raise OptionError("there are no tokens to compute")
        vocab = self._engine.info.vocab_size
        if min(tokens) < 0 or max(tokens) >= vocab:
            raise OptionError(f"token ids must be from 0 to {vocab - 1}")
        if len(self._tokens) + len(tokens) > self.capacity:
            raise ContextOverflowError(
                f"{len(self._tokens) + len(tokens)} tokens do not fit a context of {self.capacity}"
            )
        logits: Logits | None = None
        most = self._engine.pass_rows
        for start in range(0, len(tokens), most):
            chunk = list(tokens[start : start + most])
            last = start + len(chunk) == len(tokens)
            features = None if self._features is None else self._features.room(len(chunk))
            logits = self._engine.forward(
                self.cache, chunk, check, want_logits=last, features=features
            )
            self._tokens += chunk
            if self._features is not None:
                self._features.advance(len(chunk))
            if on_progress is not None:
                on_progress(start + len(chunk))
        assert logits is not None, "the last chunk asks for logits"
        return logits

    def extend_tree(self, token: int, tree: TokenTree, *, check: Check | None = None) -> Logits:
        """See ``EngineSession``."""
        (logits,) = self._engine.extend_trees([(self, token, tree)], check=check)
        return logits

    def keep(self, rows: Sequence[int]) -> None:
        """See ``EngineSession``."""
        self.cache.select(len(self._tokens), rows)
        if self._features is not None:
            self._features.keep(rows)
        self._tokens += [self._open[row] for row in rows]
        self._open = []

    # -- passes of several sequences, which the engine makes ---------------------------------------

    @property
    def cache(self) -> KVCache:
        """Its keys and values.

        Raises:
            LocalrtError: the session is closed.
        """
        if self._cache is None:
            raise LocalrtError("the session is closed")
        return self._cache

    @property
    def records(self) -> bool:
        """Whether hidden states are recorded."""
        return self._features is not None

    def appended(self, tokens: Sequence[int], features: Logits | None) -> None:
        """A pass has computed ``tokens``, with these hidden states (n, D) if it was asked."""
        self._tokens += tokens
        if self._features is not None and features is not None:
            self._features.room(len(tokens))[:] = features
            self._features.advance(len(tokens))

    def opened(self, rows: Sequence[int], features: Logits | None) -> None:
        """A pass has computed a tree's rows, these tokens: ``keep`` will say what is wanted."""
        self._open = list(rows)
        if self._features is not None and features is not None:
            self._features.open(len(rows))[:] = features

    def counts(self) -> PipelineCounts | None:
        """See ``EngineSession``."""
        return self._engine.counts()

    def forecast(self) -> Forecast | None:
        """See ``EngineSession``."""
        return self._engine.forecast()

    def trim(self, length: int) -> None:
        """Forget everything after the first ``length`` tokens."""
        if self._cache is not None:
            self._cache.trim(length)
        if self._features is not None:
            self._features.trim(length)
        del self._tokens[length:]

    @property
    def kv_layout(self) -> str:
        """See ``EngineSession``. What keys depend on beside the weights is part of it."""
        blocks = self._blocks
        layout = "" if blocks is None else blocks.kv_layout
        return f"{layout} {self._engine.attention_key}" if layout else ""

    @property
    def block_bytes(self) -> int:
        """See ``EngineSession``."""
        assert self._blocks is not None, "who has a layout has blocks"
        return self._blocks.block_bytes

    def take_blocks(self, first: int, count: int) -> Bytes:
        """See ``EngineSession``."""
        assert self._blocks is not None, "who has a layout has blocks"
        return self._blocks.take_blocks(first, count)

    def put_tokens(self, tokens: Sequence[int], read: Callable[[PutBlocks], int]) -> int:
        """See ``EngineSession``."""
        blocks = self._blocks
        if blocks is None:
            return 0
        self.trim(0)
        self._features = None
        self._engine.reserve(blocks, len(tokens))
        held = read(blocks.put_blocks)
        blocks.advance(held)
        self._tokens = list(tokens[:held])
        return held

    @property
    def _blocks(self) -> BlockCache | None:
        cache: object = self._cache
        return cache if isinstance(cache, BlockCache) else None

    def close(self) -> None:
        """Free the cache."""
        self._cache = self._features = None
        self._tokens = []
