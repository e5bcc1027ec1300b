"""What a loaded model is (``Model.info``) and is doing just now (``Model.status()``).

Memory and its budgets, what the pipeline has read and computed, the generation in progress. Counts
start at loading: two snapshots give rates (``Status.since``). A snapshot takes well under a
millisecond, waits for no pass, and works from any thread. ``localrt/planning/recommend.py`` says
what would help. ``Watch`` makes the snapshots: it sees every session and every chunk of a model,
and takes no lock that a pass holds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

from localrt.common.errors import LocalrtError
from localrt.common.settings import Settings
from localrt.common.speeds import keep_speed
from localrt.engine.protocol import Engine, EngineInfo, EngineSession
from localrt.engine.types import Chunk, Metrics
from localrt.models.weight_store import PassTask
from localrt.offload.memory import current_rss, ram_budget

_NAMES = {"ssd": "The disk", "link": "The link to the GPU", "cpu": "The CPU", "gpu": "The GPU"}
_ENOUGH_TOKENS = 32  # of an answer whose speed is kept there
_DRAFTED = 1.05  # tokens per pass from which drafts matter
_BUSY = 0.6  # a resource that is busy for a smaller share does not set the pace


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo(EngineInfo):
    """What was loaded and how it runs. ``ctx`` is the context in use, in tokens.

    ``notes`` are lines for the user: a plain chat format, a shortened context. ``sees``: messages
    may have pictures. ``writes``: it generates text; other models only embed or rank texts.
    """

    name: str
    path: Path
    ctx: int
    has_chat_template: bool
    notes: tuple[str, ...] = ()
    pooling: str = ""
    quantization: str = ""
    sees: bool = False
    writes: bool = True


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes in use, and their limit; None if there is no limit.

    ``forecast`` is the peak that loading expected for the caches and passes so far, not the present
    use. None if unknown.
    """

    used: int
    budget: int | None = None
    forecast: int | None = None

    @property
    def share(self) -> float | None:
        """The used share of the budget."""
        return min(1.0, self.used / self.budget) if self.budget else None


@dataclass(frozen=True, slots=True)
class LaneUse:
    """When ``resource`` (``"ssd"``, ``"link"``, ``"cpu"``, ``"gpu"``) was busy in a pass.

    ``spans`` are (start, end) in seconds from the pass's beginning, apart and in order.
    """

    resource: str
    spans: tuple[tuple[float, float], ...]

    @property
    def busy_s(self) -> float:
        """The sum of the spans, in seconds."""
        return sum(end - start for start, end in self.spans)


@dataclass(frozen=True, slots=True)
class PassTrace:
    """The last pass through a streamed model: its duration, its lanes, and the seconds in which
    nothing was computed because weights were missing.
    """

    seconds: float
    lanes: tuple[LaneUse, ...]
    waited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Rates between two snapshots; None if unknown or if nothing happened.

    ``busy`` has shares of the time, ``pass_bytes`` is what one pass has read from the SSD, ``why``
    says in one sentence what sets the pace.
    """

    seconds: float
    tok_s: float | None
    ssd_bytes_s: float | None
    link_bytes_s: float | None
    pass_bytes: float | None
    expert_hit_rate: float | None
    busy: Mapping[str, float]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A snapshot. Bytes, seconds, counts since loading; None if the engine does not report it.

    ``kv`` is the size of caches, against one full context. ``metrics`` belong to the generation in
    progress (``generating``), or to the last one. ``streamed``: weights are read or copied in each
    pass; ``token_bytes`` is how many weight bytes one token needs, once ``Model.advise`` knows it.
    ``ceiling_tok_s`` and ``predicted_tok_s`` come from the plan, without drafts. ``clock_s`` is the
    time of the snapshot by ``time.perf_counter``.
    """

    clock_s: float
    streamed: bool
    generating: bool
    ram: MemoryUse
    vram: MemoryUse | None
    kv: MemoryUse | None
    weight_bytes: int
    token_bytes: int | None = None
    tokens: int = 0
    passes: int | None = None
    ssd_read_bytes: int | None = None
    link_bytes: int | None = None
    busy_s: Mapping[str, float] | None = None
    expert_uses: int = 0
    expert_hits: int = 0
    predicted_tok_s: float | None = None
    ceiling_tok_s: float | None = None
    metrics: Metrics | None = None
    last_pass: PassTrace | None = None

    @property
    def per_pass(self) -> float:
        """Tokens per pass: more than one if draft tokens are accepted."""
        metrics = self.metrics
        return (metrics and metrics.accepted_per_pass) or 1.0

    def share_of_ceiling(self, tok_s: float | None) -> float | None:
        """``tok_s`` as a share of the ceiling; accepted draft tokens raise both."""
        if tok_s is None or not self.ceiling_tok_s:
            return None
        return tok_s / self.per_pass / self.ceiling_tok_s

    def since(self, before: Status) -> Flow:
        """Return the rates between ``before`` and this snapshot of the same model."""
        seconds = max(self.clock_s - before.clock_s, 0.0)

        def rate(now: int | None, then: int | None) -> float | None:
            return None if now is None or then is None or not seconds else (now - then) / seconds

        busy: dict[str, float] = {}
        if self.busy_s is not None and before.busy_s is not None and seconds:
            for name, value in self.busy_s.items():
                busy[name] = min(1.0, max(0.0, value - before.busy_s.get(name, 0.0)) / seconds)
        passes = (self.passes or 0) - (before.passes or 0)
        read = (self.ssd_read_bytes or 0) - (before.ssd_read_bytes or 0)
        uses = self.expert_uses - before.expert_uses
        tokens = rate(self.tokens, before.tokens)
        return Flow(
            seconds=seconds,
            tok_s=tokens,
            ssd_bytes_s=rate(self.ssd_read_bytes, before.ssd_read_bytes),
            link_bytes_s=rate(self.link_bytes, before.link_bytes),
            pass_bytes=read / passes if passes else None,
            expert_hit_rate=(self.expert_hits - before.expert_hits) / uses if uses else None,
            busy=busy,
            why=self._why(busy, read / passes if passes else None, tokens),
        )

    def _why(self, busy: Mapping[str, float], pass_bytes: float | None, tok_s: float | None) -> str:
        if not self.streamed:
            return self._why_resident(tok_s)
        shares = {name: busy[name] for name in _NAMES if name in busy}
        if not shares:
            return ""
        name = max(shares, key=lambda each: shares[each])
        percent = f"{100 * shares[name]:.0f} %"
        if shares[name] < _BUSY:
            return (
                f"Nothing is busy all the time ({_NAMES[name].lower()} {percent}): reading and "
                "computing wait for one another."
            )
        text = f"{_NAMES[name]} sets the pace, busy {percent} of the time"
        if name == "ssd" and pass_bytes:
            text += f": every pass reads {pass_bytes / 1e6:,.0f} MB that do not fit in memory"
        elif name == "link":
            text += ": weights that do not fit in the GPU's memory are copied for every pass"
        return text + "."

    def _why_resident(self, tok_s: float | None) -> str:
        if self.token_bytes is None or not tok_s:
            return "All weights are in memory: reading them and computing with them sets the pace."
        size, reached = self.token_bytes / 1e6, self.token_bytes * tok_s / self.per_pass / 1e9
        return (
            "All weights are in memory: reading them and computing with them sets the pace, "
            f"{size:,.0f} MB per pass, {reached:.1f} GB/s."
        )


_Session = TypeVar("_Session", bound=EngineSession)
_BUDGET_S = 2.0  # how long a budget from the system is valid
_TASKS = 4096  # more than a pass has
_FIRST = "layers.0.attention"  # the name of a pass's first task
_COMPUTE = ("cpu", "gpu")
_FINEST = 400  # closer spans, as a share of a pass, are joined


class Watch:
    """Watches one model; the speed of its answers is kept by its ``name``."""

    def __init__(self, engine: Engine, *, ctx: int, name: str = "") -> None:
        self._engine, self._name = engine, name
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
        """Count the cache of ``session`` while it exists; return the session."""
        with self._lock:
            self._sessions.add(session)
        return session

    def over(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """Yield the same chunks and count them."""
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
                if chunk.finish_reason is not None:
                    self._keep_speed(metrics)
        finally:
            with self._lock:
                self._running -= 1
            if isinstance(chunks, Generator):
                chunks.close()

    def _keep_speed(self, metrics: Metrics) -> None:
        """Keep the speed of an answer that was alone, and without drafts, for later plans."""
        enough = metrics.completion_tokens >= _ENOUGH_TOKENS and self._running == 1
        speed, plain = metrics.decode_tok_s, (metrics.accepted_per_pass or 1.0) < _DRAFTED
        if self._name and enough and plain and speed is not None:
            keep_speed(Settings.from_environment().data_dir, self._name, speed)

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
            vram=self._vram(),
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
        """Return the budget of the process; the system is asked only now and then."""
        now = time.monotonic()
        if self._budget is None or now - self._budget[0] > _BUDGET_S:
            self._budget = now, ram_budget(self._engine.ram)
        return self._budget[1]

    def _kv(self, sessions: Sequence[EngineSession]) -> MemoryUse | None:
        used = 0
        for session in sessions:
            try:
                used += session.nbytes
            except (AttributeError, LocalrtError):  # it is being closed
                continue
        try:
            return MemoryUse(used, self._engine.kv_nbytes(self._ctx))
        except LocalrtError:  # the model is closed
            return None

    def _vram(self) -> MemoryUse | None:
        try:
            use = self._engine.gpu_use
        except LocalrtError:  # the model is closed
            return None
        return None if use is None else MemoryUse(use.used, use.limit)

    # -- lanes -----------------------------------------------------------------------------------

    def _trace(self, lanes: bool | None) -> PassTrace | None:
        if lanes is not None and lanes != self._recording:
            self._recording = lanes
            self._engine.weights.tasks(_TASKS if lanes else 0)
        return last_pass(self._engine.weights.tasks()) if self._recording else None


def last_pass(tasks: Sequence[PassTask]) -> PassTrace | None:
    """Return the last finished pass among ``tasks``, which are sorted by their ends."""
    computed: list[PassTask] = []
    later = False  # whether a later pass has begun
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


def _pass(tasks: Sequence[PassTask], computed: Sequence[PassTask], first: int) -> PassTrace:
    """Trace a pass: ``computed`` has its tasks, last first; ``first`` indexes its first task."""
    start, end = computed[-1].start, max(task.end for task in computed)
    spans: dict[str, list[tuple[float, float]]] = {}
    # Reads that began before the pass ended before its first computation, or during it.
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
    """Sort spans, and join those that overlap or are at most ``gap`` apart."""
    merged: list[tuple[float, float]] = []
    for low, high in sorted(spans):
        if merged and low <= merged[-1][1] + gap:
            merged[-1] = merged[-1][0], max(merged[-1][1], high)
        else:
            merged.append((low, high))
    return tuple(merged)
