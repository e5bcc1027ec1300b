"""A draft model's work on a virtual card's clock: its passes are computed here and charged there.

Where a target's time is simulated, so is its draft's: on the card a pass takes what the card would
take, with token ids going there and logits coming back; on the CPU what it took. Whatever else
drafting does takes the CPU's time. A draft's cache never outgrows the memory that was set aside.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from localrt.formatting import format_bytes
from localrt.offload.cards.clock import Clock
from localrt.offload.planner.draft_costs import DraftCosts
from localrt.quant.ops.protocol import Batch, KVCache
from localrt.speculative.draft_model import DraftDecoder
from localrt.speculative.source import Check, DraftFailedError, DraftSource
from localrt.speculative.tree import TokenTree

__all__ = ["CardDraftDecoder", "ClockedSource", "HostDraftDecoder", "RoomyDraftDecoder"]


class RoomyDraftDecoder:
    """See ``DraftDecoder``: its caches together stay within ``room`` bytes of a card's memory."""

    def __init__(self, decoder: DraftDecoder, kv_nbytes: Callable[[int], int], room: int) -> None:
        self._decoder = decoder
        self._kv_nbytes = kv_nbytes
        self._room = room
        self._lock = threading.Lock()
        self._caches: WeakSet[KVCache] = WeakSet()

    def cache(self, capacity: int) -> KVCache:
        """See ``DraftDecoder``."""
        cache = self._decoder.cache(capacity)
        with self._lock:
            self._caches.add(cache)
        return cache

    def forward(
        self,
        batch: Batch,
        *,
        rows: Sequence[int] | None = None,
        check: Callable[[], None] | None = None,
    ) -> npt.NDArray[np.float32]:
        """See ``DraftDecoder``.

        Raises:
            DraftFailedError: its caches would outgrow their room.
        """
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
        return self._decoder.forward(batch, rows=rows, check=check)


class _ClockedDecoder:
    """Passes on a clock. ``seconds`` is the real time that they took so far."""

    def __init__(self, decoder: DraftDecoder, clock: Clock) -> None:
        self._decoder = decoder
        self._clock = clock
        self.seconds = 0.0

    def cache(self, capacity: int) -> KVCache:
        """See ``DraftDecoder``."""
        return self._decoder.cache(capacity)

    def _timed(
        self, batch: Batch, rows: Sequence[int] | None, check: Callable[[], None] | None
    ) -> npt.NDArray[np.float32]:
        started = time.perf_counter()
        try:
            return self._decoder.forward(batch, rows=rows, check=check)
        finally:
            self.seconds += time.perf_counter() - started


class HostDraftDecoder(_ClockedDecoder):
    """A draft on the CPU: a pass takes what it took."""

    def forward(
        self,
        batch: Batch,
        *,
        rows: Sequence[int] | None = None,
        check: Callable[[], None] | None = None,
    ) -> npt.NDArray[np.float32]:
        """See ``DraftDecoder``."""
        clock = self._clock
        after = clock.now()
        started = clock.begin("cpu")
        try:
            return self._timed(batch, rows, check)
        finally:
            clock.end("cpu", "draft", started, after=after)


class CardDraftDecoder(_ClockedDecoder):
    """A draft on a virtual card: a pass takes what ``costs`` say, its computing here nothing."""

    def __init__(self, decoder: DraftDecoder, clock: Clock, costs: DraftCosts) -> None:
        super().__init__(decoder, clock)
        self._costs = costs

    def forward(
        self,
        batch: Batch,
        *,
        rows: Sequence[int] | None = None,
        check: Callable[[], None] | None = None,
    ) -> npt.NDArray[np.float32]:
        """See ``DraftDecoder``."""
        clock, costs = self._clock, self._costs
        count = len(batch.tokens)
        wanted = count if rows is None else len(rows)
        held = max(span.cache.length for span in batch.spans)
        there = clock.now() + costs.there(count)
        started = clock.begin("gpu")
        try:
            return self._timed(batch, rows, check)
        finally:
            cost = costs.computing(count, wanted, held)
            ended = clock.end("gpu", "draft", started, after=there, cost_s=cost)
            # Who waits for the logits is the CPU, which goes on once they are there.
            if wanted:
                waited = clock.begin("cpu")
                clock.end("cpu", "logits", waited, after=ended + costs.back(wanted), cost_s=0.0)


class ClockedSource:
    """See ``DraftSource``: one whose drafting beside its decoder's passes takes the CPU's time."""

    def __init__(self, source: DraftSource, decoder: _ClockedDecoder, clock: Clock) -> None:
        self._source = source
        self._decoder = decoder
        self._clock = clock

    @property
    def name(self) -> str:
        """See ``DraftSource``."""
        return self._source.name

    def begin(self, history: Sequence[int]) -> None:
        """See ``DraftSource``."""
        self._source.begin(history)

    def propose(
        self, history: Sequence[int], budget: int, depth: int, *, check: Check | None = None
    ) -> TokenTree:
        """See ``DraftSource``."""
        clock, passes = self._clock, self._decoder.seconds
        began = time.perf_counter()
        try:
            return self._source.propose(history, budget, depth, check=check)
        finally:
            beside = time.perf_counter() - began - (self._decoder.seconds - passes)
            started = clock.begin("cpu")
            after = clock.now()
            clock.end("cpu", "drafting", started, after=after, cost_s=max(0.0, beside))

    def close(self) -> None:
        """See ``DraftSource``."""
        self._source.close()
