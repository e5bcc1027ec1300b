"""The last line of the screen: model, state, speed, context, keys.

On a narrow terminal the less important parts go first. Knows numbers, not where they come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from localrt.common.formatting import format_rate
from localrt.tui.conversation.background import SERVERS, AnswerUpdate
from localrt.tui.text import guess_texts, human_count
from localrt.tui.themes import FAINT

_GAP = " · "


class Phase(StrEnum):
    """What the model is doing."""

    LOADING = "loading"
    READY = "ready"
    SERVERS = "starting MCP servers"
    PREFILL = "reading prompt"
    GENERATING = "answering"
    TOOLS = "using tools"
    FAILED = "failed"
    EMPTY = "no model"


# Colour, and what to press.
_SHOWN = {
    Phase.LOADING: ("$text-warning", "Ctrl+Q quit"),
    Phase.READY: ("$text-success", "/help"),
    Phase.SERVERS: ("$text-accent", "Esc stop"),
    Phase.PREFILL: ("$text-accent", "Esc stop"),
    Phase.GENERATING: ("$text-accent", "Esc stop"),
    Phase.TOOLS: ("$text-accent", "Esc stop"),
    Phase.FAILED: ("$text-error", "Enter quit"),
    Phase.EMPTY: ("$text-warning", "F4 models"),
}


@dataclass(frozen=True, slots=True)
class Status:
    """What the footer shows. Percent of the prefill, tokens per second, tokens of the context.

    ``per_pass`` are tokens of a target pass, ``sources`` the share that each source guessed.
    """

    model: str = ""
    engine: str = ""
    phase: Phase = Phase.LOADING
    percent: int | None = None
    rate: float | None = None
    used: int = 0
    ctx: int | None = None
    per_pass: float | None = None
    sources: Mapping[str, float] | None = None

    @property
    def guesses(self) -> str:
        """``guessed 58 %, 2.4 tokens per pass``; empty where no guess came true."""
        texts = guess_texts(self.per_pass, self.sources)
        return f"guessed {', '.join(texts)}" if texts else ""

    @property
    def state(self) -> str:
        """``reading prompt 43 %``, ``answering``."""
        return self.phase if self.percent is None else f"{self.phase} {self.percent} %"


@dataclass(frozen=True, slots=True)
class _Part:
    text: str
    style: str
    rank: int  # the highest goes first when there is no room


class Footer(Widget):
    """One line; assign ``status`` to change it."""

    status: reactive[Status] = reactive(Status())

    def change(self, **changes: Any) -> None:
        """Change parts of the status."""
        self.status = replace(self.status, **changes)

    def show(self, update: AnswerUpdate) -> None:
        """How far an answer is, and how fast."""
        metrics, prefill = update.metrics, update.prefill
        if metrics is not None and metrics.completion_tokens:
            self.change(
                phase=Phase.GENERATING,
                percent=None,
                rate=metrics.decode_tok_s,
                per_pass=metrics.accepted_per_pass,
                sources=metrics.accepted_by_source,
                used=metrics.prompt_tokens + metrics.completion_tokens,
            )
        elif prefill is not None:
            phase = Phase.SERVERS if prefill.stage == SERVERS else Phase.PREFILL
            percent = None
            if prefill.total:
                percent = min(100 * prefill.done // prefill.total, 100)
            self.change(phase=phase, percent=percent)

    @property
    def full(self) -> bool:
        """Whether the context is."""
        return self.status.ctx is not None and self.status.used >= self.status.ctx - 1

    def render(self) -> Content:
        """The line at the present width."""
        return footer_line(self.status, self.size.width)


def footer_line(status: Status, width: int) -> Content:
    """The status in ``width`` columns."""
    color, keys = _SHOWN[status.phase]
    rate = "" if status.rate is None else f"{format_rate(status.rate)} tok/s"
    context = ""
    if status.ctx is not None:
        context = f"context {human_count(status.used)} of {human_count(status.ctx)}"
    left, right = _fitting(
        [
            _Part(status.model, "bold", 1),
            _Part(status.engine, FAINT, 5),
            _Part(status.state, color, 0),
        ],
        [
            _Part(status.guesses, FAINT, 6),
            _Part(rate, "$foreground", 2),
            _Part(context, FAINT, 3),
            _Part(keys, FAINT, 4),
        ],
        width - 2,
    )
    line_left, line_right = _joined(left), _joined(right)
    gap = max(width - 2 - line_left.cell_length - line_right.cell_length, 0)
    return Content.assemble(" ", line_left, " " * gap, line_right, " ")


def _joined(parts: Sequence[_Part]) -> Content:
    pieces: list[Content | tuple[str, str]] = []
    for part in parts:
        if pieces:
            pieces.append((_GAP, FAINT))
        pieces.append((part.text, part.style))
    return Content.assemble(*pieces)


def _fitting(left: Sequence[_Part], right: Sequence[_Part], width: int) -> tuple[list[_Part], ...]:
    """The parts of both sides that fit ``width`` columns, least important ones dropped."""
    parts = [part for part in (*left, *right) if part.text]
    while True:
        sides = tuple([part for part in side if part in parts] for side in (left, right))
        need = sum(Content(part.text).cell_length for part in parts)
        need += len(_GAP) * sum(max(len(side) - 1, 0) for side in sides) + 2 * bool(sides[1])
        if need <= width or len(parts) <= 1:
            return sides
        parts.remove(max(parts, key=lambda part: part.rank))
