"""Makes the snapshots of ``Model.status()``: it sees every session and every chunk of a model.

It waits for no pass and takes no lock that a pass holds. What it counts is ``status.py``'s.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, TypeVar
from weakref import WeakSet

from localrt.answering.budgets import Budgets
from localrt.answering.status import LaneUse, MemoryUse, PassTrace, Status
from localrt.engine.protocol import Engine, EngineSession
from localrt.engine.types import Chunk, Metrics
from localrt.errors import LocalrtError
from localrt.models.residency import Task
from localrt.offload.memory.process import current_rss, ram_budget

_Session = TypeVar("_Session", bound=EngineSession)

_BUDGET_S = 2.0  # for which a budget that the system sets is good
_TASKS = 4096  # more than a pass has
_FIRST = "layers.0.attention"  # what a pass begins with
_COMPUTE = ("cpu", "gpu")
_FINEST = 400  # spans closer than this part of a pass are drawn as one anyway


class Watch:
    """Of one model."""

    def __init__(self, engine: Engine, budgets: Budgets, *, ctx: int) -> None:
        self._engine = engine
        self._budgets = budgets
        self._ctx = ctx
        self.token_bytes: int | None = None
        self.ceiling_tok_s: float | None = None
        self._lock = threading.Lock()
        self._sessions: WeakSet[EngineSession] = WeakSet()
        self._tokens = 0
        self._running = 0
        self._metrics: Metrics | None = None
        self._forecast: tuple[float, float] | None = None
        self._recording = False
        self._budget: tuple[float, int] | None = None

    def holds(self, session: _Session) -> _Session:
        """Count the cache of ``session`` as long as there is one; the same session."""
        with self._lock:
            self._sessions.add(session)
        return session

    def over(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """The same chunks, counted."""
        with self._lock:
            self._running += 1
        try:
            for chunk in chunks:
                metrics = chunk.metrics
                with self._lock:
                    self._tokens += len(chunk.token_ids)
                    self._metrics = metrics
                    if metrics.predicted_tok_s and metrics.ceiling_tok_s:
                        self._forecast = metrics.predicted_tok_s, metrics.ceiling_tok_s
                yield chunk
        finally:
            with self._lock:
                self._running -= 1
            if isinstance(chunks, Generator):
                chunks.close()

    def status(self, *, lanes: bool | None = None) -> Status:
        engine = self._engine
        with self._lock:
            sessions = list(self._sessions)
            tokens, running, metrics = self._tokens, self._running, self._metrics
            forecast = self._forecast
        trace = self._trace(lanes)
        counts = engine.counts()
        kv = self._kv(sessions)
        if forecast is None and engine.plan is not None:
            forecast = engine.plan.tok_s, engine.plan.ceiling_tok_s
        known: dict[str, Any] = {}
        if counts is not None:
            known = {
                "passes": counts.passes,
                "ssd_read_bytes": counts.ssd_read_bytes,
                "link_bytes": counts.link_bytes,
                "busy_s": counts.busy_s,
                "expert_uses": counts.expert_uses,
                "expert_hits": counts.expert_hits,
            }
        return Status(
            clock_s=time.perf_counter() if counts is None else counts.clock_s,
            streamed=engine.info.streamed,
            generating=running > 0,
            ram=MemoryUse(current_rss(), self._ram_budget(), engine.ram_forecast()),
            vram=self._vram(kv),
            kv=kv,
            weight_bytes=engine.info.weight_bytes,
            token_bytes=self.token_bytes,
            tokens=tokens,
            predicted_tok_s=None if forecast is None else forecast[0],
            ceiling_tok_s=self.ceiling_tok_s if forecast is None else forecast[1],
            metrics=metrics,
            last_pass=trace,
            **known,
        )

    # -- memory ----------------------------------------------------------------------------------

    def _ram_budget(self) -> int:
        """What the whole process may take; the system is asked now and then only."""
        now = time.monotonic()
        if self._budget is None or now - self._budget[0] > _BUDGET_S:
            self._budget = now, ram_budget(self._budgets.ram)
        return self._budget[1]

    def _kv(self, sessions: Sequence[EngineSession]) -> MemoryUse | None:
        used = 0
        for session in sessions:
            try:
                used += session.nbytes
            except (AttributeError, LocalrtError):  # it is just being closed
                continue
        try:
            return MemoryUse(used, self._engine.kv_nbytes(self._ctx))
        except LocalrtError:  # the model is closed
            return None

    def _vram(self, kv: MemoryUse | None) -> MemoryUse | None:
        engine = self._engine
        if (card := engine.residency.memory.gpu) is not None:
            return MemoryUse(*card)
        try:
            free = engine.free_memory()
        except LocalrtError:
            return None
        if free is None:
            return None
        used = engine.info.weight_bytes + (kv.used if kv is not None else 0)
        return MemoryUse(used, self._budgets.gpu_memory or used + free)

    # -- lanes -----------------------------------------------------------------------------------

    def _trace(self, lanes: bool | None) -> PassTrace | None:
        if lanes is not None and lanes != self._recording:
            self._recording = lanes
            self._engine.residency.tasks(_TASKS if lanes else 0)
        return last_pass(self._engine.residency.tasks()) if self._recording else None


def last_pass(tasks: Sequence[Task]) -> PassTrace | None:
    """The last finished pass among ``tasks``, which are in the order of their ends."""
    computed: list[Task] = []
    later = False  # whether another pass has begun behind what is looked at
    for index in range(len(tasks) - 1, -1, -1):
        task = tasks[index]
        if task.resource not in _COMPUTE:
            continue
        computed.append(task)
        if task.name == _FIRST:
            if later or computed[0].name.startswith("head"):
                return _pass(tasks, computed, index)
            later, computed = True, []
    return None


def _pass(tasks: Sequence[Task], computed: Sequence[Task], first: int) -> PassTrace:
    """``computed`` are its computations, the last one first, ``first`` where the first one is."""
    start, end = computed[-1].start, max(task.end for task in computed)
    spans: dict[str, list[tuple[float, float]]] = {}
    # Reads that began before the pass ended before its first computation, or in it.
    for task in tasks[max(0, first - 64) :]:
        low, high = max(task.start, start), min(task.end, end)
        if low < high:
            spans.setdefault(task.resource, []).append((low - start, high - start))
    seconds = end - start
    lanes = tuple(
        LaneUse(name, _merged(spans[name], seconds / _FINEST))
        for name in ("ssd", "link", *_COMPUTE)
        if name in spans
    )
    both = [span for name in _COMPUTE for span in spans.get(name, ())]
    busy = sum(high - low for low, high in _merged(both, 0.0))
    return PassTrace(seconds, lanes, max(0.0, seconds - busy))


def _merged(spans: Iterable[tuple[float, float]], gap: float) -> tuple[tuple[float, float], ...]:
    """In order; those that overlap, or are no further apart than ``gap``, as one."""
    merged: list[tuple[float, float]] = []
    for low, high in sorted(spans):
        if merged and low <= merged[-1][1] + gap:
            merged[-1] = merged[-1][0], max(merged[-1][1], high)
        else:
            merged.append((low, high))
    return tuple(merged)
