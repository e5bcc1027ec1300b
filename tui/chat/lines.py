"""The lines around the composer: the search, the hint, and the footer.

On a narrow terminal the less important parts of the footer go first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.content import Content
from textual.reactive import reactive
from textual.timer import Timer
from textual.widget import Widget
from textual.widgets import Input, Static

from localrt.common.formatting import format_rate
from localrt.tui.chat.blocks import Answer, Block, UserTurn
from localrt.tui.chat.view import ConversationView
from localrt.tui.conversation.generation import SERVERS, AnswerUpdate
from localrt.tui.text import guess_texts, human_count
from localrt.tui.themes import FAINT

_KEYS = "Enter next · Up previous · Esc closes"


class FindBar(Horizontal):
    """Hidden until ``open``."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,ctrl+j", "move(1)", show=False),
        Binding("up,shift+enter", "move(-1)", show=False),
        Binding("escape", "close", show=False),
        Binding("pageup", "screen.scroll_conversation('page_up')", show=False),
        Binding("pagedown", "screen.scroll_conversation('page_down')", show=False),
    ]

    def __init__(self, view: ConversationView, back: Widget) -> None:
        super().__init__(id="find")
        self._view, self._back = view, back
        self._words = Input(placeholder="in this conversation", compact=True)
        self._count = Static("", id="find-count", markup=False)

    def compose(self) -> ComposeResult:
        yield Static("Find")
        yield self._words
        yield self._count
        yield Static(f" · {_KEYS}", id="find-keys", markup=False)

    def open(self, words: str = "") -> None:
        """Show it, with these words or those of before; open already, go to the next match."""
        if self.display and self._words.has_focus and not words:
            self.action_move(1)
            return
        self.display = True
        self._words.value = words or self._words.value
        self._words.focus()
        self._words.action_end()
        self._find()

    def close(self) -> bool:
        """Hide it; whether it was open."""
        if not self.display:
            return False
        self.display = False
        self._view.find("")
        self._back.focus()
        return True

    def action_close(self) -> None:
        self.close()

    def action_move(self, step: int) -> None:
        self._view.find_next(step)
        self._tell()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.action_move(1)

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        if self.display:
            self._find()

    def on_resize(self) -> None:
        """A narrow terminal shows the words and their count alone."""
        self.set_class(self.size.width < 70, "-tight")

    def _find(self) -> None:
        self._view.find(self._words.value)
        self._tell()

    def _tell(self) -> None:
        place, total = self._view.found
        text = f"{place} of {total}" if total else "not found"
        self._count.update(text if self._words.value.strip() else "")


_CONFIRM_SECONDS = 2.0  # in which a second Ctrl+C quits
_FLASH_SECONDS = 3.0


class HintLine(Static):
    """Shows ``hint``, unless a question or a flash is there for a moment."""

    def __init__(self) -> None:
        super().__init__(id="hint", markup=False)
        self._hint = self._question = self._flash = self._shown = ""
        self._ends: dict[str, Timer] = {}

    @property
    def confirming(self) -> bool:
        """Whether the same key once more means it."""
        return bool(self._question)

    def confirm(self, question: str) -> None:
        """Ask for the same key again, for two seconds."""
        self._question = question
        self._show_for("_question", _CONFIRM_SECONDS)

    def flash(self, text: str) -> None:
        self._flash = text
        self._show_for("_flash", _FLASH_SECONDS)

    def show(self, hint: str) -> None:
        """What to show from now on; empty for nothing."""
        self._hint = hint
        text = self._question or self._flash or hint
        if text != self._shown:  # an update lays the whole screen out again
            self._shown = text
            self.update(text)

    def _show_for(self, name: str, seconds: float) -> None:
        if name in self._ends:
            self._ends[name].stop()
        self._ends[name] = self.set_timer(seconds, lambda: self._end(name))
        self.show(self._hint)

    def _end(self, name: str) -> None:
        setattr(self, name, "")
        self.show(self._hint)


def waiting_hint(count: int, *, elsewhere: bool = False) -> str:
    """For messages that wait in line; ``elsewhere``: for the answer in another window."""
    reason = " for the answer in another window" if elsewhere else ""
    if count == 1:
        return f"1 message waits{reason}: Esc takes it back"
    return f"{count} messages wait{reason}: Esc takes them back"


def turn_hint(block: Block) -> str:
    """What can be done with the marked turn."""
    parts = ["Enter menu", "Alt+C copy"]
    parts.append("Alt+E edit" if isinstance(block, UserTurn) else "Ctrl+R again")
    if block.branches > 1:
        parts.append(f"Alt+←→ branch {block.branch}/{block.branches}")
    if block.foldable:
        parts.append("Ctrl+T unfold")
    return " · ".join([*parts, "Esc"])


def turn_menu(block: Block) -> list[tuple[str, str]]:
    """Actions that make sense for a turn, and what the menu calls them."""
    menu = [("copy", "Copy")]
    if isinstance(block, Answer):
        if block.code:
            menu.append(("copy_code", f"Copy its last code block (of {len(block.code)})"))
        menu.append(("retry", "Answer again"))
    elif isinstance(block, UserTurn):
        menu += [("edit", "Edit and send again"), ("retry", "Answer it again")]
    if block.branches > 1:
        menu += [("branch(-1)", "Previous branch"), ("branch(1)", "Next branch")]
    if block.foldable:
        menu.append(("fold", "Show or hide the folded text"))
    return menu


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
        return self.status.ctx is not None and self.status.used >= self.status.ctx - 1

    def render(self) -> Content:
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
