"""The native engine: a decoder of ``localrt.models`` on an ``Ops`` implementation.

It turns tokens into passes: prefill in chunks, one pass at a time, KV bookkeeping per session. It
does not know text, sampling, or where weights came from.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate, pairwise, zip_longest
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from localrt.engine.native.ram_meter import RamMeter
from localrt.engine.native.rates import RecentRates
from localrt.engine.native.session import NativeSession
from localrt.engine.protocol import (
    Check,
    Engine,
    EngineInfo,
    EngineSession,
    Forecast,
    Forecaster,
    Logits,
)
from localrt.errors import LocalrtError, MemoryBudgetError
from localrt.formatting import format_bytes
from localrt.models.decoder import Decoder
from localrt.models.residency import Residency
from localrt.models.timing import Clock, PipelineCounts, Task
from localrt.quant.ops.arrays import vector_to_host
from localrt.quant.ops.experts import Routing
from localrt.quant.ops.protocol import Batch, KVCache, Ops, Span
from localrt.speculative.costs import Mixture
from localrt.speculative.tree import TokenTree

if TYPE_CHECKING:
    from localrt.offload.account import RamForecast
    from localrt.offload.planner import Plan

__all__ = ["NativeEngine", "NativeSession"]

Forward: TypeAlias = Callable[..., Logits]  # of a decoder

# Rows of one prefill pass: enough for the matrix units, few enough for progress and small scratch.
_PREFILL_ROWS = 512
# Rows whose logits are made at once where all are wanted: 39 MB at a vocabulary of 151,936.
_LOGIT_ROWS = 64


class NativeEngine(Engine):
    """See ``Engine``.

    ``pass_rows`` is the most rows of a prefill pass. Of a decoder that streams, ``plan`` is what it
    was placed by, and ``forecaster`` says what was planned for a rate of the disk, at first
    ``ssd_bytes_s``. ``ram`` forecasts the memory of the process.
    """

    shares_passes = True

    def __init__(
        self,
        decoder: Decoder,
        info: EngineInfo,
        *,
        pass_rows: int = _PREFILL_ROWS,
        forecaster: Forecaster | None = None,
        ssd_bytes_s: float = 0.0,
        plan: Plan | None = None,
        ram: RamForecast | None = None,
    ) -> None:
        self.plan = plan
        self._ram = RamMeter(ram)
        self._decoder: Decoder | None = decoder
        self._residency = decoder.residency
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
        return NativeSession(self, self.cache(capacity))

    def close(self) -> None:
        """Free the weights once the pass in flight has ended."""
        with self._turn:
            self._residency.close()
            self._residency = Residency()  # no weights: nothing to ask of it
            self._decoder = self._forward = self._forecaster = None

    def counts(self) -> PipelineCounts | None:
        """What the pipeline has done so far; None where everything is resident."""
        return self._residency.counts()

    @property
    def simulated(self) -> bool:
        """Whether a virtual card's clock counts."""
        return self.virtual_clock is not None

    @property
    def virtual_clock(self) -> Clock | None:
        """The clock of a virtual card; None where time is the wall's."""
        clock = self._residency.clock
        return clock if clock is not None and clock.simulated else None

    def forecast(self) -> Forecast | None:
        """What was planned, for the disk as it has been lately; None where all is resident."""
        counts = self.counts()
        if self._forecaster is None or counts is None:
            return None
        return self._forecaster(self._rates.now(counts))

    @property
    def card_memory(self) -> tuple[int, int] | None:
        """Bytes used of a card that weights are streamed to, and the most that may be."""
        return self._residency.memory.card

    @property
    def mixture(self) -> Mixture | None:
        """What the experts of a mixture are of a token's work; None of a dense model."""
        return Mixture.of(self._loaded().config)

    def watch_routing(self, watch: Callable[[int, Routing], None]) -> None:
        """Tell ``watch`` of every choice of experts, with the layer's number among the sparse."""
        self._loaded().residency.watch_routing(watch)

    def trace(self, keep: int | None = None) -> list[Task]:
        """The tasks that the pipeline remembers; ``keep`` says how many from now on."""
        return self._residency.tasks(keep)

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
        vector_to_host(decoder.residency.norm, weights)
        return weights / np.float32(decoder.config.logit_scale), decoder.config.norm_eps

    def hidden_states(
        self, texts: Sequence[Sequence[int]], *, check: Check | None = None
    ) -> Generator[tuple[int, Logits], None, None]:
        """See ``Engine``. Texts share passes; long ones go on from pass to pass."""
        weights, eps = self.final_norm()
        waiting = deque(range(len(texts)))
        unfinished: tuple[int, KVCache] | None = None
        while waiting or unfinished is not None:
            room = self.pass_rows
            parts: list[tuple[int, KVCache, Sequence[int]]] = []
            while room and (waiting or unfinished is not None):
                if unfinished is None:
                    index = waiting.popleft()
                    unfinished = index, self.cache(len(texts[index]))
                index, cache = unfinished
                piece = texts[index][cache.length : cache.length + room]
                parts.append((index, cache, piece))
                room -= len(piece)
                if cache.length + len(piece) < len(texts[index]):
                    break
                unfinished = None
            rows = np.empty((sum(len(piece) for _, _, piece in parts), len(weights)), np.float32)
            batch = Batch.extend([(cache, piece) for _, cache, piece in parts])
            self.run(batch, rows=[], check=check, features=rows)
            scale = np.sqrt(np.square(rows).mean(axis=1, keepdims=True) + eps)
            rows = rows / scale * weights
            at = 0
            for index, _, piece in parts:
                yield index, rows[at : at + len(piece)]
                at += len(piece)

    @contextmanager
    def alone(self) -> Iterator[Ops]:
        """The implementation, for whoever computes with it himself: no pass runs meanwhile."""
        with self._turn:
            yield self._loaded().ops

    def cache(self, capacity: int) -> KVCache:
        """An empty KV cache, for whoever makes passes of his own."""
        return self._ram.holds(self._loaded().cache(capacity))

    @cached_property
    def attention_key(self) -> str:
        """Names windows, rotary frequencies and the like: some follow the context's length."""
        specs = repr(self._loaded().config.attention)
        return hashlib.sha256(specs.encode()).hexdigest()[:12]

    def reserve(self, cache: KVCache, length: int) -> None:
        """Make room in ``cache`` for ``length`` tokens that do not come from a pass."""
        with self._turn:
            self._loaded().residency.reserve(cache, length)

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

    # -- many sequences in one pass (``localrt.engine.batch``) -------------------------------------

    def kv_nbytes(self, length: int) -> int:
        """Bytes of one sequence's cache once grown to ``length`` tokens."""
        decoder = self._loaded()
        return decoder.ops.kv_nbytes(decoder.config.attention, length)

    def free_memory(self) -> int | None:
        """Bytes free on the device's own memory; None where caches lie in RAM."""
        return self._loaded().ops.free_memory()

    def logit_rows(self) -> int | None:
        """Rows with logits that a pass may have within the budget; None: as many as wanted."""
        return self._ram.logit_rows

    def idle_sessions(self, capacity: int) -> int:
        """See ``Engine``."""
        if self.info.streamed:
            return 1
        most = super().idle_sessions(capacity)
        return 1 + self._ram.idle_caches(self.kv_nbytes(capacity), most - 1)

    def ram_forecast(self) -> int | None:
        """See ``Engine``."""
        return self._ram.forecast()

    def reclaimable(self) -> int:
        """Bytes of weights in RAM that would be streamed where caches need their room."""
        return self._residency.memory.reclaimable

    def set_ram_budget(self, nbytes: int) -> None:
        """Have the process take ``nbytes`` of RAM at most from the next pass on, if streamed.

        Raises:
            MemoryBudgetError: what cannot be streamed takes more; nothing changes then.
        """
        with self._turn:
            self._loaded()
            if self.plan is None:  # what it holds stays: its next passes have other limits
                self._ram.set_budget(nbytes)
                return
            elsewhere = self.plan.request.budgets.ram - self.plan.for_weights_and_caches()
            elsewhere += self._taken
            words = f"the budget is {format_bytes(nbytes)} of RAM now"
            try:
                self._residency.memory.set_budget(nbytes - elsewhere, words)
            except MemoryBudgetError as error:
                raise MemoryBudgetError(
                    f"{format_bytes(nbytes)} of RAM is too little for the model as it was loaded: "
                    "what cannot be streamed and the conversations take more"
                ) from error

    def take_ram(self, nbytes: int) -> None:
        """Leave ``nbytes`` of the RAM budget to something else; below zero gives them back.

        Raises:
            MemoryBudgetError: so much cannot be given; nothing changes then.
        """
        with self._turn:
            self._loaded()
            if self._residency.memory.streams:
                self._residency.memory.take(nbytes)
                self._taken += nbytes

    def set_vram_budget(self, nbytes: int) -> None:
        """Have ``nbytes`` of the card's memory at most. More than before is not used.

        Raises:
            MemoryBudgetError: what cannot be streamed takes more; nothing changes then.
        """
        with self._turn:
            self._loaded()
            less = self._vram - nbytes
            if not self._residency.memory.streams or less <= 0:
                return
            words = f"the budget is {format_bytes(nbytes)} of GPU memory now"
            if self._residency.memory.shrink_card(less, words) < less:
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
        """See ``Engine``."""
        return self._extend((), parts, wanted, check)

    def extend_trees(
        self,
        parts: Sequence[tuple[EngineSession, int, TokenTree]],
        beside: Sequence[tuple[EngineSession, Sequence[int]]] = (),
        *,
        wanted: Sequence[int] = (),
        check: Check | None = None,
    ) -> list[Logits]:
        """See ``Engine``."""
        logits = self._extend(parts, beside, wanted, check)
        ends = list(accumulate((1 + len(tree) for _, _, tree in parts), initial=0))
        trees = [logits[start:end] for start, end in pairwise(ends)]
        return [*trees, *logits[ends[-1] :]]

    def _extend(
        self,
        parts: Sequence[tuple[EngineSession, int, TokenTree]],
        beside: Sequence[tuple[EngineSession, Sequence[int]]],
        wanted: Sequence[int],
        check: Check | None,
    ) -> Logits:
        """One pass; logits of the trees' rows, and of the last rows ``wanted`` of those beside."""
        sessions = _own([*(part[0] for part in parts), *(part[0] for part in beside)])
        tokens = [np.concatenate([[token], tree.tokens]) for _, token, tree in parts]
        tokens += [np.asarray(ids, np.int64) for _, ids in beside]
        positions, spans = [], []
        for session, ids, tree in zip_longest(sessions, tokens, (tree for _, _, tree in parts)):
            held = len(session.tokens)
            session.cache.trim(held)
            alone = tree is None or not len(tree)
            positions.append(
                np.arange(held, held + len(ids))
                if alone
                else np.concatenate([[held], tree.positions(held)])
            )
            spans.append(Span(session.cache, len(ids), None if alone else tree.pass_mask()))
        ends = list(accumulate(map(len, tokens)))
        features = self._feature_rows(sessions, ends[-1])
        batch = Batch(np.concatenate(tokens), np.concatenate(positions), tuple(spans))
        trees = ends[len(parts) - 1] if parts else 0
        rows = [*range(trees), *(ends[len(parts) + part] - 1 for part in wanted)]
        logits = self.run(batch, rows=rows, check=check, features=features)
        for at, (session, ids, end) in enumerate(zip(sessions, tokens, ends, strict=True)):
            states = None if features is None else features[end - len(ids) : end]
            done = session.opened if at < len(parts) else session.appended
            done(ids.tolist(), states)
        return logits

    def _feature_rows(self, sessions: Sequence[NativeSession], rows: int) -> Logits | None:
        """Room for a pass's hidden states, where one of its sessions records them."""
        if not any(session.records for session in sessions):
            return None
        return np.empty((rows, self.hidden_size), np.float32)

    def logits(
        self, tokens: Sequence[int], *, first: int = 0, check: Check | None = None
    ) -> Iterator[Logits]:
        """Logits after each of ``tokens`` from index ``first`` on, computed from nothing.

        Pieces (n, vocab) in order, n at most 64: all rows at once would be large. Each piece is the
        caller's own.
        """
        cache = self.cache(len(tokens))
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
        logits: Logits
        if features is not None:  # what is recorded as a graph gives logits only
            logits = decoder.forward(batch, features=features, **options)
        else:
            assert self._forward is not None, "there is one as long as there is a decoder"
            logits = self._forward(batch, **options)
        self._ram.passed(len(batch.tokens), len(logits))
        return logits

    def _loaded(self) -> Decoder:
        if self._decoder is None:
            raise LocalrtError("the model is closed: load it again")
        return self._decoder


def _own(sessions: Iterable[EngineSession]) -> list[NativeSession]:
    found = []
    for session in sessions:
        assert isinstance(session, NativeSession), "sessions belong to one engine"
        found.append(session)
    return found
