"""The lines around the composer: the search, the hint, and the footer.

On a narrow terminal the less important parts of the footer go first.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from rich.cells import cell_len
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.content import Content
from textual.reactive import reactive
from textual.timer import Timer
from textual.widget import Widget
from textual.widgets import Static
from textual.worker import Worker, WorkerError

from localrt.common.formatting import format_rate
from localrt.tui.chat.blocks import AnswerBlock, TurnBlock, UserTurn
from localrt.tui.chat.view import ConversationView
from localrt.tui.conversation.generation import SERVERS, AnswerUpdate
from localrt.tui.inputs import Input
from localrt.tui.text import clean, guess_texts, human_count
from localrt.tui.themes import FAINT

if TYPE_CHECKING:
    from localrt import Metrics

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
        self._search: Worker[None] | None = None
        self._line = Input(placeholder="in this conversation", compact=True)
        self._count = Static("", id="find-count", markup=False)

    def compose(self) -> ComposeResult:
        yield Static("Find")
        yield self._line
        yield self._count
        yield Static(f" · {_KEYS}", id="find-keys", markup=False)

    def open(self, query: str = "") -> None:
        """Open with this query or the previous one; if already open, go to the next match."""
        if self.display and self._line.has_focus and not query:
            self.call_later(self.action_move, 1)
            return
        self.display = True
        self._line.value = query or self._line.value
        self._line.focus()
        self._line.action_end()
        self._find()

    def close(self) -> bool:
        """Hide the bar; returns whether it was open."""
        if not self.display:
            return False
        self.display = False
        self.workers.cancel_node(self)
        self._view.end_find()
        self._back.focus()
        return True

    def action_close(self) -> None:
        self.close()

    async def action_move(self, step: int) -> None:
        if self._search is not None:  # it would begin at the first match again
            with suppress(WorkerError):  # another one was begun
                await self._search.wait()
        self._view.find_next(step)
        self._tell()

    async def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        await self.action_move(1)

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        if self.display:
            self._find()

    def on_resize(self) -> None:
        """Show only the query and the count on a narrow terminal."""
        self.set_class(self.size.width < 70, "-tight")

    def _find(self) -> None:
        """Search in a thread; the latest search counts."""
        self._search = self.run_worker(partial(self._found, self._line.value), exclusive=True)

    async def _found(self, query: str) -> None:
        await self._view.find(query)
        self._tell()

    def _tell(self) -> None:
        place, total = self._view.match_count
        text = f"{place} of {total}" if total else "not found"
        self._count.update(text if self._line.value.strip() else "")


_CONFIRM_SECONDS = 2.0  # seconds in which a second Ctrl+C quits
_FLASH_SECONDS = 3.0


class HintLine(Static):
    """Shows the hint, or for a moment a question or a flash, or why a message was refused."""

    def __init__(self) -> None:
        super().__init__(id="hint", markup=False)
        self._hint = self._question = self._flash = self._text = self.refusal = ""
        self._ends: dict[str, Timer] = {}

    @property
    def confirming(self) -> bool:
        """Whether a second press of the key would confirm."""
        return bool(self._question)

    def confirm(self, question: str) -> None:
        """Ask for the same key again, for two seconds."""
        self._question = question
        self._show_for("_question", _CONFIRM_SECONDS)

    def withdraw(self) -> None:
        """Take the question back: another key was pressed."""
        self._question = ""
        self.show(self._hint)

    def refuse(self, reason: str) -> None:
        """Say why something was refused, until it is empty."""
        self.refusal, self._flash = reason, ""
        self.show(self._hint)

    def flash(self, text: str) -> None:
        self._flash = text
        self._show_for("_flash", _FLASH_SECONDS)

    def show(self, hint: str) -> None:
        """Show a hint from now on; empty for none."""
        self._hint = hint
        moment = self._question or self._flash
        self.set_class(bool(self.refusal and not moment), "-refusal")
        text = clean(moment or self.refusal or hint)
        if text != self._text:  # an update would lay out the whole screen again
            self._text = text
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
    """The hint about waiting messages; ``elsewhere``: they wait for another window's answer."""
    reason = " for the answer in another window" if elsewhere else ""
    if count == 1:
        return f"1 message waits{reason}: Esc takes it back"
    return f"{count} messages wait{reason}: Esc takes them back"


def turn_hint(block: TurnBlock) -> str:
    """The hint that lists actions for the marked turn."""
    parts = ["Enter menu", "Alt+C copy", "Alt+E edit"]
    if not isinstance(block, UserTurn):
        parts.append("Ctrl+R again")
    if block.branches > 1:
        parts.append(f"Alt+←→ branch {block.branch}/{block.branches}")
    if block.foldable:
        parts.append("Ctrl+T unfold")
    return " · ".join([*parts, "Esc"])


def turn_menu(block: TurnBlock) -> list[tuple[str, str]]:
    """Actions that make sense for a turn, and their menu labels."""
    menu = [("copy", "Copy")]
    if isinstance(block, AnswerBlock):
        if block.code:
            menu.append(("copy('code')", f"Copy its last code block (of {len(block.code)})"))
        menu += [("retry", "Answer again"), ("edit", "Edit this answer")]
    elif isinstance(block, UserTurn):
        menu += [("edit", "Edit and send again"), ("retry", "Answer it again")]
    menu.append(("command('fork')", "Copy all up to here to a new conversation"))
    menu.append(("command('remove')", "Remove this and all after it"))
    if block.branches > 1:
        menu += [("branch('prev')", "Previous branch"), ("branch", "Next branch")]
    if block.foldable:
        menu.append(("fold", "Show or hide the folded text"))
    return menu


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


# Colour and key hint; while the model is busy, Esc stops it.
_SHOWN = {
    Phase.LOADING: ("$text-warning", "Ctrl+Q quit"),
    Phase.READY: ("$text-success", "/help"),
    Phase.FAILED: ("$text-error", "Enter quit"),
    Phase.EMPTY: ("$text-warning", "F4 models"),
}


@dataclass(frozen=True, slots=True)
class StatusBar:
    """What the footer shows: ``percent`` of the prompt processed, ``used`` tokens of ``ctx``, the
    answer's ``metrics``; ``temporary``: nothing of the conversation is written to the disk.
    """

    model: str = ""
    engine: str = ""
    phase: Phase = Phase.LOADING
    percent: int | None = None
    used: int = 0
    ctx: int | None = None
    metrics: Metrics | None = None
    temporary: bool = False


class Footer(Widget):
    """One line; assign ``status`` to change it."""

    status: reactive[StatusBar] = reactive(StatusBar())

    def change(self, **changes: Any) -> None:
        self.status = replace(self.status, **changes)

    def show(self, update: AnswerUpdate) -> None:
        """Show an answer's progress and speed."""
        metrics, prefill = update.metrics, update.prefill
        if metrics is not None and metrics.completion_tokens:
            self.change(
                phase=Phase.GENERATING,
                percent=None,
                metrics=metrics,
                used=metrics.prompt_tokens + metrics.completion_tokens,
            )
        elif prefill is not None:
            phase = Phase.SERVERS if prefill.stage == SERVERS else Phase.PREFILL
            percent = None
            if prefill.total:
                percent = min(100 * prefill.done // prefill.total, 100)
            self.change(phase=phase, percent=percent)

    def render(self) -> Content:
        return footer_line(self.status, self.size.width)


_SHORTEST = 16  # fewest columns of a long model name


def footer_line(status: StatusBar, width: int) -> Content:
    """The status in ``width`` columns."""
    color, keys = _SHOWN.get(status.phase, ("$text-accent", "Esc stop"))
    state = status.phase if status.percent is None else f"{status.phase} {status.percent} %"
    rate = None if status.metrics is None else status.metrics.decode_tok_s
    guesses = ", ".join(guess_texts(status.metrics))
    context = ""
    if status.ctx is not None:
        context = f"context {human_count(status.used)} of {human_count(status.ctx)}"
    left = [(status.model, "bold", 1), (status.engine, FAINT, 5), (state, color, 0)]
    if status.temporary:
        left.append(("temporary", "$text-warning", 1))
    right = [
        (f"guessed {guesses}" if guesses else "", FAINT, 6),
        ("" if rate is None else f"{format_rate(rate)} tok/s", "$foreground", 2),
        (context, FAINT, 3),
        (keys, FAINT, 4),
    ]
    for most in range(6, -1, -1):  # parts with the highest number are dropped first
        start, end = (_joined([p[:2] for p in side if p[2] <= most]) for side in (left, right))
        gap = width - 2 - start.cell_length - end.cell_length
        room = cell_len(status.model) + gap - 2
        if gap < 2 and most < 5 and room >= _SHORTEST:
            short = Content(status.model).truncate(room, ellipsis=True).plain
            return footer_line(replace(status, model=short, engine=""), width)
        if gap >= 2 * bool(end):
            break
    return Content.assemble(" ", start, " " * max(gap, 0), end, " ")


def _joined(parts: Sequence[tuple[str, str]]) -> Content:
    shown = (Content.styled(text, style) for text, style in parts if text)
    return Content.styled(" · ", FAINT).join(shown)
