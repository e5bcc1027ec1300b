"""The main screen: conversation, composer, hint, footer, and what keys and messages set going.

It looks at the answering thread on a timer and computes nothing itself. Loading the model is the
app's; what can be done with a turn, and what slash commands do, have files of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from textual.app import ComposeResult
from textual.events import Key
from textual.timer import Timer
from textual.widgets import Static, TextArea

from localrt.errors import LocalrtError
from localrt.tui.blocks import Kind
from localrt.tui.commands import Command, read_line
from localrt.tui.composer import Composer
from localrt.tui.conversation import Conversation
from localrt.tui.footer import Footer, Phase, Status
from localrt.tui.hints import Hints
from localrt.tui.loading import LoadingLine
from localrt.tui.menu import CommandMenu
from localrt.tui.pace import FRAME_SECONDS
from localrt.tui.panel import LivePanel
from localrt.tui.showing import draft_of
from localrt.tui.slash import Slash
from localrt.tui.text import one_line, short_name
from localrt.tui.turn_actions import TurnActions
from localrt.tui.turns import Turns
from localrt.tui.window_keys import WindowKeys
from localrt.tui.work import News

if TYPE_CHECKING:
    from localrt.tui.desk import Desk
    from localrt.tui.session import Session

__all__ = ["ChatScreen"]

_STARTING_SECONDS = 0.3  # in which keys may still come that were meant for the composer


class ChatScreen(WindowKeys):
    """``desk`` says which conversation is shown."""

    def __init__(self, desk: Desk, *, model: str, type_ahead: bool = False) -> None:
        super().__init__(id="chat")
        self.desk = desk
        self.view = Conversation()
        self.turns = Turns(self.view, desk.talk)
        self.loading_line = LoadingLine()
        self.menu = CommandMenu()
        self.composer = Composer(self.menu, type_ahead=type_ahead)
        self.composer.placeholder = "Write now: it is sent when the model is ready"
        self.panel = LivePanel()
        self.footer = Footer()
        self.footer.status = Status(model=model)
        self.actions = TurnActions(self)
        self.slash = Slash(self)
        self.hints = Hints(self)
        self._hint = Static(id="hint", markup=False)
        self._hint_shown = ""
        self._memory_said: str | None = None
        self._ticker: Timer | None = None
        self._starting = True
        self._leaving: set[asyncio.Task[None]] = set()

    def compose(self) -> ComposeResult:
        """Panel, conversation, loading line, menu, hint, composer, footer."""
        yield self.panel
        yield self.view
        yield self.loading_line
        yield self.menu
        yield self._hint
        yield self.composer
        yield self.footer

    def on_mount(self) -> None:
        """The composer is ready at once."""
        self.composer.focus()
        self.set_timer(_STARTING_SECONDS, self._started)
        self._ticker = self.set_interval(FRAME_SECONDS, self._watch_answer, pause=True)
        self.show_talk()

    def _started(self) -> None:
        self._starting = False

    # -- the conversation on the desk ------------------------------------------------------------

    def opened(self, session: Session) -> None:
        """The model is ready: say what it is, send what waits."""
        info = session.model.info
        waiting = self.turns.take_back()  # they come below what the model says of itself
        for line in (session.describe(), *info.notes, *session.notes):
            self.view.add_notice(line)
        for draft in waiting:
            self.turns.add(draft, waiting=True)
        self.update_status(
            model=short_name(info.name),
            engine=f"{info.engine} {info.format}".strip(),
            phase=Phase.READY,
            ctx=info.ctx or None,  # a server may not tell
        )
        self.composer.placeholder = "Message (/ for commands, F1 for help)"
        self.panel.take(session.model)
        self.count_tokens()

    def closed(self, name: str) -> None:
        """The model is gone, and another one of this name is on its way."""
        self.panel.take(None)
        self.loading_line.progress, self.loading_line.display = None, True
        self.footer.status = Status(model=name)
        self.composer.placeholder = "Write now: it is sent when the model is ready"

    def show_talk(self) -> None:
        """Show the conversation that lies on the desk."""
        self.turns.talk = self.desk.talk
        self.turns.sync()
        turns = self.desk.talk.turns
        self.composer.remember(draft_of(turn) for turn in turns if turn.role == "user")
        if turns and turns[-1].role == "user":
            self.view.add_notice("Not answered: Ctrl+R (or /retry) answers it", "mark")
        self.view.follow()

    def put(self, change: Callable[[], Session | None], said: str = "") -> None:
        """Put another conversation on the desk; the one that is left is parked in a thread."""
        if not self.idle("open", loading=True):
            return
        try:
            left = change()
        except LocalrtError as error:
            self.say(one_line(error), "error")
            return
        if left is not None:
            task = asyncio.create_task(asyncio.to_thread(left.leave))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
        if self.desk.talk is not self.turns.talk:
            self.actions.editing = None
            waiting = self.turns.take_back()
            self.view.clear()
            self.show_talk()
            for draft in waiting:
                self.turns.add(draft, waiting=True)
            if self.desk.session is not None:
                for line in self.desk.session.notes:
                    self.view.add_notice(line)
            self.update_status(rate=None, used=0)
            self.count_tokens()
        if said:
            self.say(said)

    def count_tokens(self) -> None:
        """Show how much of the context the conversation takes, when that is known."""
        session = self.desk.session
        if session is None or not self.desk.talk.turns:
            return

        async def count() -> None:
            try:
                used = await asyncio.to_thread(session.tokens)
            except LocalrtError:
                return
            if session is self.desk.session and not self.turns.answering:
                self.update_status(used=used, rate=None)

        self.run_worker(count(), exclusive=True, group="tokens")

    async def left(self) -> None:
        """Wait until conversations that were left are parked."""
        if self._leaving:
            await asyncio.wait(self._leaving)

    # -- answering -------------------------------------------------------------------------------

    def idle(self, what: str, *, loading: bool = False) -> bool:
        """Whether nothing is being answered, nor (unless ``loading``) loaded; says so if not."""
        if self.turns.answering:
            self.say(f"/{what} has to wait: the model is answering: Esc stops it", "error")
        elif self.desk.session is None and not loading:
            self.say(f"/{what} has to wait: the model is still loading", "error")
        else:
            return True
        return False

    def send_next(self) -> None:
        """Send the first message in line, if the model is free."""
        session = self.desk.session
        if session is not None and self.turns.send_next(session.chat):
            self._answering()

    def answer_again(self, question: int) -> None:
        """Answer a user's turn once more."""
        if self.desk.session is not None:
            self.turns.answer_again(self.desk.session.chat, question)
            self.view.follow()
            self._answering()

    def _answering(self) -> None:
        self.update_status(phase=Phase.PREFILL, percent=None, rate=None, sources=None)
        self.panel.begin()
        if self._ticker is not None:
            self._ticker.resume()

    def _watch_answer(self) -> None:
        news = self.turns.look()
        if news is None:
            return
        self._show_metrics(news)
        if news.done:
            status = self.footer.status
            full = status.ctx is not None and status.used >= status.ctx - 1
            self.update_status(phase=Phase.READY, percent=None)
            back = self.turns.end(news, full=full)
            self._say_memory(news)
            if back:
                self.composer.put_back(back)
            self.send_next()
            if not self.turns.answering and self._ticker is not None:
                self._ticker.pause()
                self.panel.end()
        self.show_hint()

    def _say_memory(self, news: News) -> None:
        """Weights had to leave memory, or came back: why it is slower now, once."""
        said = news.metrics.memory if news.metrics is not None else None
        if said != self._memory_said:
            self._memory_said = said
            if said:
                self.view.add_notice(said)

    def _show_metrics(self, news: News) -> None:
        metrics = news.metrics
        if metrics is not None and metrics.completion_tokens:
            self.update_status(
                phase=Phase.GENERATING,
                percent=None,
                rate=metrics.decode_tok_s,
                per_pass=metrics.accepted_per_pass,
                sources=metrics.accepted_by_source,
                used=metrics.prompt_tokens + metrics.completion_tokens,
            )
        elif news.prefill is not None and news.prefill.total:
            percent = min(100 * news.prefill.done // news.prefill.total, 100)
            self.update_status(phase=Phase.PREFILL, percent=percent)

    # -- what is written -------------------------------------------------------------------------

    async def on_composer_submitted(self, event: Composer.Submitted) -> None:
        """A command runs now, a message when the model is free."""
        if self.app.failure is not None:
            await self.app.action_quit()
            return
        line = read_line(event.line)
        if isinstance(line, Command):
            await self.slash.run(line)
        elif self.actions.editing is None or self.idle("edit"):
            after = self.actions.take_edit()
            self.view.mark(None)
            busy = self.desk.session is None or self.turns.answering
            self.turns.add(self.composer.chips.expanded(line), waiting=busy, after=after)
            self.send_next()
        else:
            self.composer.put(event.line)
        self.show_hint()

    async def on_composer_enter_on_empty(self) -> None:
        """On a marked turn: what can be done with it. After a failure Enter leaves."""
        if self.app.failure is not None:
            await self.app.action_quit()
        elif self.view.marked is not None:
            self.actions.menu()

    def on_command_menu_chosen(self) -> None:
        """A row was clicked."""
        self.composer.choose()

    def on_text_area_changed(self, event: TextArea.Changed) -> None:
        """Show the commands that fit what is being written."""
        self.menu.show_for(self.composer.text)
        self.show_hint()

    def on_conversation_clicked(self, event: Conversation.Clicked) -> None:
        """A click marks a turn, or unmarks it."""
        if not self.get_selected_text():
            self.view.mark(None if event.block is self.view.marked else event.block)
            self.show_hint()

    def on_key(self, event: Key) -> None:
        """Text that was typed before there was a composer is for it: it would have taken it."""
        if self._starting and (event.is_printable or event.key in ("enter", "ctrl+j")):
            event.stop()
            self.composer.post_message(Key(event.key, event.character))

    # -- small lines -----------------------------------------------------------------------------

    def say(self, text: str, kind: Kind = "info") -> None:
        """A line of the app, at the end of the conversation."""
        self.view.add_notice(text, kind)
        self.view.follow()

    def flash(self, text: str) -> None:
        """A line above the composer, for a moment."""
        self.hints.flash(text)

    def show_hint(self) -> None:
        """Show what is worth knowing just now."""
        text = self.hints.text()
        if text != self._hint_shown:  # an update lays the whole screen out again
            self._hint_shown = text
            self._hint.update(text)

    def update_status(self, **changes: Any) -> None:
        """Change the footer."""
        self.footer.status = replace(self.footer.status, **changes)
