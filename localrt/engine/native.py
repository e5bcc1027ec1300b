"""The native engine: a decoder of ``localrt.models`` on an ``Ops`` implementation.

It turns tokens into passes: prefill in chunks, one pass at a time, KV bookkeeping per session. It
does not know text, sampling, or where weights came from.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from localrt.engine.base import (
    Check,
    EngineInfo,
    EngineSession,
    Forecast,
    Forecaster,
    Logits,
)
from localrt.engine.features import FeatureRows
from localrt.engine.prompt_cache import PutBlocks
from localrt.engine.rates import RecentRates
from localrt.errors import ContextOverflowError, LocalrtError, MemoryBudgetError, OptionError
from localrt.models.decoder import Decoder
from localrt.offload.budget import format_bytes
from localrt.offload.trace import PipelineCounts, Task
from localrt.placement_choice import for_weights_and_caches
from localrt.quant.ops.experts import Routing
from localrt.quant.ops.host_array import vector_to_host
from localrt.quant.ops.kv_blocks import BlockCache, Bytes
from localrt.quant.ops.protocol import Batch, KVCache, Ops, Span
from localrt.speculative.costs import Mixture
from localrt.speculative.tree import TokenTree

if TYPE_CHECKING:
    from localrt.offload.clock import Clock
    from localrt.offload.decoder import PlacedDecoder
    from localrt.offload.planner import Plan

__all__ = ["NativeEngine", "NativeSession"]

Forward: TypeAlias = Callable[..., Logits]  # of a decoder

# Rows of one prefill pass: enough for the matrix units, few enough for progress and small scratch.
_PREFILL_ROWS = 512
# Rows whose logits are made at once where all are wanted: 39 MB at a vocabulary of 151,936.
_LOGIT_ROWS = 64


class NativeEngine:
    """See the ``Engine`` protocol.

    ``pass_rows`` is the most rows of a prefill pass. ``pipeline`` is the decoder again where it
    streams, ``forecaster`` says what was planned of it for a rate of the disk, at first
    ``ssd_bytes_s``, and ``plan`` is what it was placed by.
    """

    def __init__(
        self,
        decoder: Decoder | PlacedDecoder,
        info: EngineInfo,
        *,
        pass_rows: int = _PREFILL_ROWS,
        pipeline: PlacedDecoder | None = None,
        forecaster: Forecaster | None = None,
        ssd_bytes_s: float = 0.0,
        plan: Plan | None = None,
    ) -> None:
        self.plan = plan
        self._decoder: Decoder | PlacedDecoder | None = decoder
        self._pipeline = pipeline
        self.pass_rows = pass_rows
        self._forecaster = forecaster
        self._vram = 0 if plan is None else plan.request.budgets.vram
        self._taken = 0  # bytes of the RAM budget that are neither weights nor caches
        self._rates = RecentRates(ssd_bytes_s)
        # An implementation may know a quicker way through the same pass (CUDA graphs).
        sparse = decoder.config.sparse  # who computes is decided on the way
        graphed = None if sparse else getattr(decoder.ops, "graphed", None)
        self._forward: Forward | None = graphed(decoder.forward) if graphed else decoder.forward
        self.info = info
        self._turn = threading.Lock()

    def session(self, capacity: int) -> NativeSession:
        """A new, empty session."""
        return NativeSession(self, self._loaded().cache(capacity))

    def close(self) -> None:
        """Free the weights once the pass in flight has ended."""
        with self._turn:
            if self._pipeline is not None:
                self._pipeline.close()
            self._decoder = self._forward = self._pipeline = self._forecaster = None

    def counts(self) -> PipelineCounts | None:
        """What the pipeline has done so far; None where everything is resident."""
        pipeline = self._pipeline
        return None if pipeline is None else pipeline.counts()

    @property
    def virtual_clock(self) -> Clock | None:
        """The clock of a virtual card; None where time is the wall's."""
        pipeline = self._pipeline
        return pipeline.clock if pipeline is not None and pipeline.simulated else None

    @property
    def forecast(self) -> Forecast | None:
        """What was planned, for the disk as it has been lately; None where all is resident."""
        counts = self.counts()
        if self._forecaster is None or counts is None:
            return None
        return self._forecaster(self._rates.now(counts))

    @property
    def card_memory(self) -> tuple[int, int] | None:
        """Bytes used of a card that weights are streamed to, and the most that may be."""
        pipeline = self._pipeline
        return None if pipeline is None else pipeline.card_memory

    @property
    def mixture(self) -> Mixture | None:
        """What the experts of a mixture are of a token's work; None of a dense model."""
        return Mixture.of(self._loaded().config)

    def watch_routing(self, watch: Callable[[int, Routing], None]) -> None:
        """Tell ``watch`` of every choice of experts, with the layer's number among the sparse."""
        self._loaded().watch_routing(watch)

    def trace(self, keep: int | None = None) -> list[Task]:
        """The tasks that the pipeline remembers; ``keep`` says how many from now on."""
        pipeline = self._pipeline
        if pipeline is None:
            return []
        if keep is not None:
            pipeline.trace.keep(keep)
        return pipeline.trace.tasks()

    def forward(
        self,
        cache: KVCache,
        tokens: Sequence[int],
        check: Check | None,
        *,
        want_logits: bool,
        features: Logits | None = None,
    ) -> Logits | None:
        """One pass that appends ``tokens``; logits (vocab,) of the last row where wanted.

        ``features``: see ``Decoder.forward``.
        """
        with self._turn:
            rows = [len(tokens) - 1] if want_logits else []
            batch = Batch.extend([(cache, tokens)])
            logits = self._pass(batch, rows=rows, check=check, features=features)
            return logits[0] if want_logits else None

    # -- trees and drafts (``localrt.engine.speculation``) -----------------------------------------

    @property
    def ops_name(self) -> str:
        """The implementation that computes."""
        return self._loaded().ops.name

    @property
    def hidden_size(self) -> int:
        """Columns of the features."""
        return self._loaded().config.hidden_size

    def final_norm(self) -> tuple[Logits, float]:
        """The weights (D,) and the epsilon of the norm before the head."""
        decoder = self._loaded()
        weights = np.empty(decoder.config.hidden_size, np.float32)
        vector_to_host(decoder.norm, weights)
        return weights / np.float32(decoder.config.logit_scale), decoder.config.norm_eps

    @contextmanager
    def alone(self) -> Iterator[Ops]:
        """The implementation, for whoever computes with it himself: no pass runs meanwhile."""
        with self._turn:
            yield self._loaded().ops

    def cache(self, capacity: int) -> KVCache:
        """An empty KV cache, for whoever makes passes of his own."""
        return self._loaded().cache(capacity)

    @property
    def attention_key(self) -> str:
        """Names windows, rotary frequencies and the like: some follow the context's length."""
        specs = repr(self._loaded().config.attention)
        return hashlib.sha256(specs.encode()).hexdigest()[:12]

    def reserve(self, cache: KVCache, length: int) -> None:
        """Make room in ``cache`` for ``length`` tokens that do not come from a pass."""
        with self._turn:
            self._loaded().reserve(cache, length)

    def run(
        self,
        batch: Batch,
        *,
        rows: Sequence[int] | None = None,
        check: Check | None = None,
        features: Logits | None = None,
    ) -> Logits:
        """One pass; logits (rows, vocab) of the chosen rows, the caller's own."""
        with self._turn:
            return self._pass(batch, rows=rows, check=check, features=features)

    # -- many sequences in one pass (``localrt.engine.batch``) -----------------------------------

    def kv_nbytes(self, length: int) -> int:
        """Bytes of one sequence's cache once grown to ``length`` tokens."""
        decoder = self._loaded()
        return decoder.ops.kv_nbytes(decoder.config.attention, length)

    def free_memory(self) -> int | None:
        """Bytes free on the device's own memory; None where caches lie in RAM."""
        return self._loaded().ops.free_memory()

    def reclaimable(self) -> int:
        """Bytes of weights in RAM that would be streamed where caches need their room."""
        return 0 if self._pipeline is None else self._pipeline.reclaimable

    def set_ram_budget(self, nbytes: int) -> bool:
        """Have the process take ``nbytes`` of RAM at most from the next pass on.

        False where nothing is streamed: weights then stay where they are.

        Raises:
            MemoryBudgetError: what cannot be streamed takes more; nothing changes then.
        """
        with self._turn:
            self._loaded()
            if self._pipeline is None or self.plan is None:
                return False
            elsewhere = self.plan.request.budgets.ram - for_weights_and_caches(self.plan)
            elsewhere += self._taken
            words = f"the budget is {format_bytes(nbytes)} of RAM now"
            try:
                self._pipeline.set_ram_budget(nbytes - elsewhere, words)
            except MemoryBudgetError as error:
                raise MemoryBudgetError(
                    f"{format_bytes(nbytes)} of RAM is too little for the model as it was loaded: "
                    "what cannot be streamed and the conversations take more"
                ) from error
            return True

    def take_ram(self, nbytes: int) -> None:
        """Leave ``nbytes`` of the RAM budget to something else; below zero gives them back.

        Raises:
            MemoryBudgetError: so much cannot be given; nothing changes then.
        """
        with self._turn:
            self._loaded()
            if self._pipeline is not None:
                self._pipeline.take_ram(nbytes)
                self._taken += nbytes

    def set_vram_budget(self, nbytes: int) -> None:
        """Have ``nbytes`` of the card's memory at most. More than before is not used.

        Raises:
            MemoryBudgetError: what cannot be streamed takes more; nothing changes then.
        """
        with self._turn:
            self._loaded()
            less = self._vram - nbytes
            if self._pipeline is None or less <= 0:
                return
            words = f"the budget is {format_bytes(nbytes)} of GPU memory now"
            if self._pipeline.shrink_card(less, words) < less:
                raise MemoryBudgetError(
                    f"the card cannot give back {format_bytes(less)}: load the model again with "
                    f"gpu_memory={nbytes}"
                )
            self._vram = nbytes

    def extend_batch(
        self,
        parts: Sequence[tuple[EngineSession, Sequence[int]]],
        *,
        wanted: Sequence[int],
        check: Check | None = None,
    ) -> Logits:
        """See the ``BatchEngine`` protocol."""
        sequences = []
        for session, tokens in parts:
            assert isinstance(session, NativeSession), "sessions belong to one engine"
            assert session._cache is not None, "the session is open"
            sequences.append((session._cache, tokens))
        ends = list(accumulate(len(tokens) for _, tokens in parts))
        features: Logits | None = None
        if any(isinstance(s, NativeSession) and s._features is not None for s, _ in parts):
            features = np.empty((ends[-1], self.hidden_size), np.float32)
        with self._turn:
            rows = [ends[part] - 1 for part in wanted]
            batch = Batch.extend(sequences)
            logits = self._pass(batch, rows=rows, check=check, features=features)
        for (session, tokens), end in zip(parts, ends, strict=True):
            assert isinstance(session, NativeSession)
            session._tokens += tokens
            if session._features is not None and features is not None:
                session._features.room(len(tokens))[:] = features[end - len(tokens) : end]
                session._features.advance(len(tokens))
        return logits

    def logits(
        self, tokens: Sequence[int], *, first: int = 0, check: Check | None = None
    ) -> Iterator[Logits]:
        """Logits after each of ``tokens`` from index ``first`` on, computed from nothing.

        Pieces (n, vocab) in order, n at most 64: all rows at once would be large. Each piece is the
        caller's own.
        """
        cache = self._loaded().cache(len(tokens))
        for start in range(0, first, self.pass_rows):
            chunk = tokens[start : min(start + self.pass_rows, first)]
            self.forward(cache, chunk, check, want_logits=False)
        rows = min(_LOGIT_ROWS, self.pass_rows)
        for start in range(first, len(tokens), rows):
            with self._turn:
                batch = Batch.extend([(cache, tokens[start : start + rows])])
                piece = self._pass(batch, check=check)
            yield piece

    def _pass(self, batch: Batch, *, features: Logits | None = None, **options: Any) -> Logits:
        decoder = self._loaded()
        if features is not None:  # what is recorded as a graph gives logits only
            return decoder.forward(batch, features=features, **options)
        assert self._forward is not None, "there is one as long as there is a decoder"
        logits: Logits = self._forward(batch, **options)
        return logits

    def _loaded(self) -> Decoder | PlacedDecoder:
        if self._decoder is None:
            raise LocalrtError("the model is closed: load it again")
        return self._decoder


class NativeSession:
    """See the ``EngineSession`` protocol."""

    def __init__(self, engine: NativeEngine, cache: KVCache) -> None:
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
        if self._cache is None:
            raise LocalrtError("the session is closed")
        logits: Logits | None = None
        most = self._engine.pass_rows
        for start in range(0, len(tokens), most):
            chunk = list(tokens[start : start + most])
            last = start + len(chunk) == len(tokens)
            features = None if self._features is None else self._features.room(len(chunk))
            logits = self._engine.forward(
                self._cache, chunk, check, want_logits=last, features=features
            )
            self._tokens += chunk
            if self._features is not None:
                self._features.advance(len(chunk))
            if on_progress is not None:
                on_progress(start + len(chunk))
        assert logits is not None, "the last chunk asks for logits"
        return logits

    def extend_tree(self, token: int, tree: TokenTree, *, check: Check | None = None) -> Logits:
        """See ``TreeSession``."""
        if self._cache is None:
            raise LocalrtError("the session is closed")
        held, rows = len(self._tokens), 1 + len(tree)
        self._cache.trim(held)
        tokens = np.concatenate([[token], tree.tokens])
        positions = np.concatenate([[held], tree.positions(held)])
        span = Span(self._cache, rows, tree.pass_mask())
        features = None if self._features is None else self._features.open(rows)
        logits = self._engine.run(Batch(tokens, positions, (span,)), check=check, features=features)
        self._open = tokens.tolist()
        return logits

    def keep(self, rows: Sequence[int]) -> None:
        """See ``TreeSession``."""
        if self._cache is None:
            raise LocalrtError("the session is closed")
        self._cache.select(len(self._tokens), rows)
        if self._features is not None:
            self._features.keep(rows)
        self._tokens += [self._open[row] for row in rows]
        self._open = []

    def counts(self) -> PipelineCounts | None:
        """See ``EngineSession``."""
        return self._engine.counts()

    @property
    def forecast(self) -> Forecast | None:
        """See ``EngineSession``."""
        return self._engine.forecast

    def trim(self, length: int) -> None:
        """Forget everything after the first ``length`` tokens."""
        if self._cache is not None:
            self._cache.trim(length)
        if self._features is not None:
            self._features.trim(length)
        del self._tokens[length:]

    @property
    def kv_layout(self) -> str:
        """See ``BlockSession``. What keys depend on beside the weights is part of it."""
        blocks = self._blocks
        layout = "" if blocks is None else blocks.kv_layout
        return f"{layout} {self._engine.attention_key}" if layout else ""

    @property
    def block_bytes(self) -> int:
        """See ``BlockSession``."""
        assert self._blocks is not None, "who has a layout has blocks"
        return self._blocks.block_bytes

    def take_blocks(self, first: int, count: int) -> Bytes:
        """See ``BlockSession``."""
        assert self._blocks is not None, "who has a layout has blocks"
        return self._blocks.take_blocks(first, count)

    def put_tokens(self, tokens: Sequence[int], read: Callable[[PutBlocks], int]) -> int:
        """See ``BlockSession``."""
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
