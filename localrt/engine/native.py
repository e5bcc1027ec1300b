"""The native engine: a decoder of ``localrt.models`` on an ``Ops`` implementation.

It turns tokens into passes: prefill in chunks, one pass at a time, KV bookkeeping per session. It
does not know text, sampling, or where weights came from.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from localrt.engine.base import Check, EngineInfo, Logits
from localrt.errors import ContextOverflowError, LocalrtError, OptionError
from localrt.models.decoder import Decoder
from localrt.quant.ops.protocol import Batch, KVCache

__all__ = ["NativeEngine", "NativeSession"]

Forward: TypeAlias = Callable[..., Logits]  # of a decoder

# Rows of one prefill pass: enough for the matrix units, few enough for progress and small scratch.
_PREFILL_ROWS = 512
# Rows whose logits are made at once where all are wanted: 39 MB at a vocabulary of 151,936.
_LOGIT_ROWS = 64


class NativeEngine:
    """See the ``Engine`` protocol."""

    def __init__(self, decoder: Decoder, info: EngineInfo) -> None:
        self._decoder: Decoder | None = decoder
        # An implementation may know a quicker way through the same pass (CUDA graphs).
        graphed = getattr(decoder.ops, "graphed", None)
        self._forward: Forward | None = graphed(decoder.forward) if graphed else decoder.forward
        self.info = info
        self._turn = threading.Lock()

    def session(self, capacity: int) -> NativeSession:
        """A new, empty session."""
        return NativeSession(self, self._loaded().cache(capacity))

    def close(self) -> None:
        """Free the weights once the pass in flight has ended."""
        with self._turn:
            self._decoder = self._forward = None

    def forward(
        self, cache: KVCache, tokens: Sequence[int], check: Check | None, *, want_logits: bool
    ) -> Logits | None:
        """One pass that appends ``tokens``; logits (vocab,) of the last row where wanted."""
        with self._turn:
            rows = [len(tokens) - 1] if want_logits else []
            batch = Batch.extend([(cache, tokens)])
            logits = self._pass(batch, rows=rows, check=check)
            return logits[0] if want_logits else None

    def logits(
        self, tokens: Sequence[int], *, first: int = 0, check: Check | None = None
    ) -> Iterator[Logits]:
        """Logits after each of ``tokens`` from index ``first`` on, computed from nothing.

        Pieces (n, vocab) in order, n at most 64: all rows at once would be large. Each piece is the
        caller's own.
        """
        cache = self._loaded().cache(len(tokens))
        for start in range(0, first, _PREFILL_ROWS):
            chunk = tokens[start : min(start + _PREFILL_ROWS, first)]
            self.forward(cache, chunk, check, want_logits=False)
        for start in range(first, len(tokens), _LOGIT_ROWS):
            with self._turn:
                batch = Batch.extend([(cache, tokens[start : start + _LOGIT_ROWS])])
                piece = self._pass(batch, check=check)
            yield piece

    def _pass(self, batch: Batch, **options: Any) -> Logits:
        self._loaded()
        assert self._forward is not None, "there is one as long as there is a decoder"
        logits: Logits = self._forward(batch, **options)
        return logits

    def _loaded(self) -> Decoder:
        if self._decoder is None:
            raise LocalrtError("the model is closed: load it again")
        return self._decoder


class NativeSession:
    """See the ``EngineSession`` protocol."""

    def __init__(self, engine: NativeEngine, cache: KVCache) -> None:
        self._engine = engine
        self._cache: KVCache | None = cache
        self._tokens: list[int] = []
        self.capacity = cache.capacity

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
        """Append ``tokens`` in passes of at most 512 rows; logits after the last."""
        if not tokens:
            raise OptionError("there are no tokens to compute")
        vocab = self._engine.info.vocab_size
        if min(tokens) < 0 or max(tokens) >= vocab:
            raise OptionError(f"token ids must be from 0 to {vocab - 1}")
        if len(self._tokens) + len(tokens) > self.capacity:
            raise ContextOverflowError(
                f"{len(self._tokens) + len(tokens)} tokens do not fit a context of {self.capacity}"
            )
        if self._cache is None:
            raise LocalrtError("the session is closed")
        logits: Logits | None = None
        for start in range(0, len(tokens), _PREFILL_ROWS):
            chunk = list(tokens[start : start + _PREFILL_ROWS])
            last = start + len(chunk) == len(tokens)
            logits = self._engine.forward(self._cache, chunk, check, want_logits=last)
            self._tokens += chunk
            if on_progress is not None:
                on_progress(start + len(chunk))
        assert logits is not None, "the last chunk asks for logits"
        return logits

    def trim(self, length: int) -> None:
        """Forget everything after the first ``length`` tokens."""
        if self._cache is not None:
            self._cache.trim(length)
        del self._tokens[length:]

    def close(self) -> None:
        """Free the cache."""
        self._cache = None
        self._tokens = []
