"""What a loaded model is (``Model.info``) and is doing just now (``Model.status()``).

Memory against its budgets, what the pipeline has read and computed, the generation in progress.
Counts grow from the loading on: two snapshots give rates (``Status.since``). Taking one costs well
under a millisecond, waits for no pass, and works from any thread. What would help is another's
business (``localrt/planning/outlook.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from localrt.engine.protocol import EngineInfo
from localrt.engine.types import Metrics

_NAMES = {"ssd": "The disk", "link": "The link to the card", "cpu": "The CPU", "gpu": "The card"}
_BUSY = 0.6  # a resource that is busy for less of the time does not set the pace


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo(EngineInfo):
    """What was loaded and how it runs. ``ctx`` is the context in use, in tokens.

    ``notes`` are lines that a user should see: a plain chat format, a shortened context.
    ``quantization`` is its name in ``list_models``, or what weights are unpacked to where that was
    chosen.
    ``pooling`` is what an embedding model's files say of it, ``"rank"`` a reranker's; "" of others.
    """

    name: str
    path: Path
    ctx: int
    has_chat_template: bool
    notes: tuple[str, ...] = ()
    pooling: str = ""
    quantization: str = ""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes in use, and the most that may be; None where nothing bounds them.

    ``forecast`` is what loading has expected of caches and passes as they have been so far: the
    peak, not what is used now. None where nobody knows.
    """

    used: int
    budget: int | None = None
    forecast: int | None = None

    @property
    def share(self) -> float | None:
        """Of the budget."""
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
        """Seconds."""
        return sum(end - start for start, end in self.spans)


@dataclass(frozen=True, slots=True)
class PassTrace:
    """The last pass through a streamed model: how long it took, its lanes, and the seconds in which
    nothing was computed, since weights were not there yet.
    """

    seconds: float
    lanes: tuple[LaneUse, ...]
    waited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Rates between two snapshots; None where a thing is not known or did not happen.

    ``busy`` are shares of the time, ``pass_bytes`` what one pass has read from the SSD, ``why`` is
    one sentence on what sets the pace.
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
    """A snapshot. Bytes, seconds, counts since loading; None where the engine does not tell.

    ``kv`` is what caches take, against one full context. ``metrics`` are those of the generation in
    progress (``generating``), or of the last one. ``streamed``: weights are read or copied in each
    pass; ``token_bytes`` is what one token needs of the weights, once ``Model.advise`` has found
    out. ``ceiling_tok_s`` and ``predicted_tok_s`` are the plan's, without guesses. ``clock_s`` is
    when it was taken, as ``time.perf_counter`` has it.
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
        """Tokens that a pass gives: more than one where guesses come true."""
        metrics = self.metrics
        return (metrics and metrics.accepted_per_pass) or 1.0

    def share_of_ceiling(self, tok_s: float | None) -> float | None:
        """What ``tok_s`` is of the ceiling; guesses that come true raise both."""
        if tok_s is None or not self.ceiling_tok_s:
            return None
        return tok_s / self.per_pass / self.ceiling_tok_s

    def since(self, before: Status) -> Flow:
        """What has happened between ``before`` and this snapshot of the same model."""
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
            text += ": weights that do not fit in the card's memory are copied for every pass"
        return text + "."

    def _why_resident(self, tok_s: float | None) -> str:
        if self.token_bytes is None or not tok_s:
            return "All weights are in memory: reading them and computing with them sets the pace."
        size, reached = self.token_bytes / 1e6, self.token_bytes * tok_s / self.per_pass / 1e9
        return (
            "All weights are in memory: reading them and computing with them sets the pace, "
            f"{size:,.0f} MB per pass, {reached:.1f} GB/s."
        )
