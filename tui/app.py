"""The chat app: one screen, one model, one conversation at a time.

It opens at once and loads the model in a thread; what is written meanwhile waits and is sent when
the model is ready. The same queue holds messages written during an answer. The app looks at its
threads on a timer; it computes nothing itself and knows localrt's public API only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.timer import Timer
from textual.widgets import Static, TextArea

from localrt.errors import LocalrtError
from localrt.tui.answer import Answer
from localrt.tui.commands import Command, help_text, matching, read_line
from localrt.tui.composer import Composer
from localrt.tui.conversation import Conversation, Kind, UserTurn
from localrt.tui.footer import Footer, Phase, Status
from localrt.tui.loading import LoadingLine
from localrt.tui.pace import FRAME_SECONDS, Pace
from localrt.tui.session import Session
from localrt.tui.text import one_line
from localrt.tui.work import Generation, Loading, News

if TYPE_CHECKING:
    from localrt import Model
    from localrt.engine.types import ProgressCallback

__all__ = ["ChatApp", "run_chat"]

_CONFIRM_SECONDS = 2.0  # in which a second Ctrl+C quits
_GOODBYE_SECONDS = 3.0  # that a thread gets to end when the app does


def run_chat(
    load: Callable[[ProgressCallback], Model],
    *,
    model_name: str,
    system: str | None,
    options: dict[str, Any],
    chat_path: Path | None = None,
) -> int:
    """Open the app until the user leaves; the process's exit status.

    Args:
        load: called once, in a thread; its callback may raise ``CancelledError`` to end it.
        model_name: shown until the model says its own name.
        system: system prompt of a new conversation.
        options: generation options by name, over the model's defaults.
        chat_path: a saved conversation to go on with.

    Returns:
        0, or 1 when the model could not be loaded (the reason is on stderr then).
    """
    app = ChatApp(load, model_name=model_name, system=system, options=options, chat_path=chat_path)
    app.run()
    return app.return_code or 0


class ChatApp(App[None]):
    """The app behind ``run_chat``, with the same arguments."""

    TITLE = "localrt"
    CSS_PATH = Path(__file__).with_name("app.tcss")
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c", "interrupt", "Copy, stop or quit", show=False, priority=True),
        Binding("escape", "stop", "Stop the answer", show=False),
    ]

    def __init__(
        self,
        load: Callable[[ProgressCallback], Model],
        *,
        model_name: str,
        system: str | None,
        options: dict[str, Any],
        chat_path: Path | None = None,
    ) -> None:
        super().__init__()
        self._system = system
        self._options = options
        self._chat_path = chat_path
        self._loading = Loading(load)
        self._session: Session | None = None
        self._failure: str | None = None
        self._generation: Generation | None = None
        self._turn: UserTurn | None = None  # the message being answered
        self._answer: Answer | None = None
        self._waiting: deque[UserTurn] = deque()
        self._pace = Pace()
        self._confirming: Timer | None = None
        self._conversation = Conversation()
        self._loading_line = LoadingLine()
        self._hint = Static(id="hint", markup=False)
        self._composer = Composer()
        self._footer = Footer()
        self._footer.status = Status(model=_short_name(model_name))

    def compose(self) -> ComposeResult:
        """Conversation, loading line, hint, composer, footer."""
        yield self._conversation
        yield self._loading_line
        yield self._hint
        yield self._composer
        yield self._footer

    def on_mount(self) -> None:
        """Begin to load; the composer is ready at once."""
        if self.console.color_system == "standard":
            self._use_terminal_colors()
        self._composer.placeholder = "Write now: it is sent when the model is ready"
        self._composer.focus()
        self._loading.start()
        self._ticker = self.set_interval(FRAME_SECONDS, self._tick)

    async def on_unmount(self) -> None:
        """End the threads, then free the model."""
        self._loading.abandon()
        if self._generation is not None:
            self._generation.cancel()
        await asyncio.to_thread(self._end_work)

    def _end_work(self) -> None:
        ended = self._generation is None or self._generation.join(_GOODBYE_SECONDS)
        loaded = self._loading.join(_GOODBYE_SECONDS)
        if ended and loaded and self._loading.model is not None:
            self._loading.model.close()

    def _use_terminal_colors(self) -> None:
        """A terminal with 16 colours has its own palette: no theme reads well squeezed into it."""
        if "ansi-dark" in self.available_themes:
            self.theme = "ansi-dark"
        else:  # Textual before 8
            self.theme = "textual-ansi"
            self.ansi_color = True

    @property
    def _busy(self) -> bool:
        return self._session is None or self._generation is not None

    # -- the timer -------------------------------------------------------------------------------

    async def _tick(self) -> None:
        if self._generation is not None:
            self._watch_answer(self._generation)
        elif self._session is None and self._failure is None:
            await self._watch_loading()
        else:
            self._ticker.pause()

    async def _watch_loading(self) -> None:
        self._loading_line.progress = self._loading.progress
        if self._loading.error is not None:
            self._fail(self._loading.error)
        elif self._loading.model is not None:
            try:
                session = Session(self._loading.model, self._system, self._options)
            except LocalrtError as error:
                self._fail(error)
            else:
                await self._open(session)

    def _fail(self, error: Exception) -> None:
        self._failure = _explained(error)
        self._loading_line.display = False
        self._conversation.add_notice(self._failure, "error")
        self._conversation.add_notice("Press Enter or Ctrl+Q to leave.")
        self._composer.placeholder = ""
        self._update_status(phase=Phase.FAILED)

    async def _open(self, session: Session) -> None:
        info = session.model.info
        self._loading_line.display = False
        self._conversation.add_notice(session.describe(), before=0)
        for place, note in enumerate(info.notes, start=1):
            self._conversation.add_notice(note, before=place)
        self._update_status(
            model=_short_name(info.name),
            engine=f"{info.engine} {info.format}".strip(),
            phase=Phase.READY,
            ctx=info.ctx,
        )
        self._composer.placeholder = "Message (/help for commands and keys)"
        self._session = session
        if self._chat_path is not None:
            await self._open_saved(session, self._chat_path)
        self._send_next()

    async def _open_saved(self, session: Session, path: Path) -> None:
        try:
            await asyncio.to_thread(session.load, path)
            session.chat.set(**self._options)
        except LocalrtError as error:
            self._conversation.add_notice(one_line(error), "error")
            return
        if self._system is not None:
            session.chat.system = self._system
        await self._show_messages(session)

    def _watch_answer(self, generation: Generation) -> None:
        if not generation.done and not self._pace.due():
            return
        news = generation.take()
        assert self._answer is not None
        if news.text:
            self._answer.write(news.text)
        self._show_metrics(news)
        if news.done:
            self._end_answer(news)
        self._show_hint()

    def _show_metrics(self, news: News) -> None:
        metrics = news.metrics
        if metrics is not None and metrics.completion_tokens:
            self._update_status(
                phase=Phase.GENERATING,
                percent=None,
                rate=metrics.decode_tok_s,
                used=metrics.prompt_tokens + metrics.completion_tokens,
            )
        elif news.prefill is not None and news.prefill.total:
            percent = min(100 * news.prefill.done // news.prefill.total, 100)
            self._update_status(phase=Phase.PREFILL, percent=percent)

    # -- sending ---------------------------------------------------------------------------------

    async def on_composer_submitted(self, event: Composer.Submitted) -> None:
        """A command runs now, a message when the model is free."""
        if self._failure is not None:
            self._leave()
            return
        line = read_line(event.text)
        if isinstance(line, Command):
            await self._run_command(line)
        else:
            self._waiting.append(self._conversation.add_user(line, waiting=self._busy))
            self._send_next()
        self._show_hint()

    def on_composer_enter_on_empty(self) -> None:
        """After a failure Enter leaves; otherwise there is nothing to send."""
        if self._failure is not None:
            self._leave()

    def _send_next(self) -> None:
        if self._session is None or self._generation is not None or not self._waiting:
            return
        self._turn = self._waiting.popleft()
        self._turn.sent()
        self._answer = self._conversation.add_answer(after=self._turn)
        self._generation = Generation(self._session.chat, self._turn.message)
        self._update_status(phase=Phase.PREFILL, percent=None, rate=None)
        self._pace = Pace()
        self._generation.start()
        self._ticker.resume()

    def _end_answer(self, news: News) -> None:
        assert self._answer is not None
        assert self._turn is not None
        answer, turn = self._answer, self._turn
        self._generation = self._turn = self._answer = None
        self._update_status(phase=Phase.READY, percent=None)
        if answer.source:
            answer.finish()
        else:
            answer.remove()
        last = answer if answer.source else turn
        if news.error is not None:
            if answer.source:
                self._conversation.add_notice(_explained(news.error), "error", after=last)
            else:
                turn.remove()
                self._take_back(turn)
                self._conversation.add_notice(_explained(news.error), "error")
        elif news.finish_reason == "cancelled":
            self._conversation.add_notice("stopped", "mark", after=last)
        elif news.finish_reason == "length":
            self._conversation.add_notice(self._length_mark(), "mark", after=last)
        self._send_next()

    def _length_mark(self) -> str:
        status = self._footer.status
        if status.ctx is not None and status.used >= status.ctx - 1:
            return "cut off: the context is full; /clear begins anew"
        return "cut off at max_tokens; /set max_tokens changes it"

    def _take_back(self, *unsent: UserTurn) -> None:
        """Give messages that were not answered, and those waiting, back to the composer."""
        turns = [*unsent, *self._waiting]
        for turn in self._waiting:
            turn.remove()
        self._waiting.clear()
        if turns:
            self._composer.put_back("\n\n".join(_as_typed(turn.message) for turn in turns))

    # -- commands --------------------------------------------------------------------------------

    async def _run_command(self, command: Command) -> None:
        if command.name == "quit":
            await self.action_quit()
        elif command.name == "help":
            self._say(help_text())
        elif not command.known:
            self._say(f"No command /{command.name}: /help lists them, // sends a slash", "error")
        elif self._session is None or self._generation is not None:
            why = "is still loading" if self._session is None else "is answering: Esc stops it"
            self._say(f"/{command.name} has to wait: the model {why}", "error")
        else:
            try:
                await self._run_on(self._session, command)
            except LocalrtError as error:
                self._say(one_line(error), "error")

    async def _run_on(self, session: Session, command: Command) -> None:
        match command.name:
            case "set":
                self._say(session.set(command.argument))
            case "system":
                self._say(session.system(command.argument))
            case "save":
                self._say(await asyncio.to_thread(session.save, command.argument))
            case "load":
                done = await asyncio.to_thread(session.load, command.argument)
                await self._show_messages(session)
                self._say(done)
            case "clear":
                session.chat.clear()
                await self._conversation.clear()
                self._update_status(used=0, rate=None)
                self._say("New conversation")

    async def _show_messages(self, session: Session) -> None:
        await self._conversation.clear()
        for message in session.chat.messages:
            content = str(message["content"])
            if message["role"] == "user":
                self._conversation.add_user(content)
            elif message["role"] == "assistant":
                self._conversation.add_answer(content)
            else:
                self._say(f"{message['role']}: {content}")
        used = await asyncio.to_thread(session.tokens)
        self._update_status(used=used, rate=None)

    # -- keys ------------------------------------------------------------------------------------

    def action_stop(self) -> None:
        """Stop the answer; messages that wait come back to the composer."""
        if self._generation is not None:
            self._generation.cancel()
        self._take_back()
        self._show_hint()

    async def action_interrupt(self) -> None:
        """Ctrl+C: copy what is selected, else stop; the second one in a row quits."""
        if self._confirming is not None:
            await self.action_quit()
            return
        selected = self._composer.selected_text or self.screen.get_selected_text()
        if selected:
            self.copy_to_clipboard(selected)
            self.screen.clear_selection()
            return
        if self._generation is not None:
            self._generation.cancel()
        self._confirming = self.set_timer(_CONFIRM_SECONDS, self._stop_confirming)
        self._show_hint()

    def _stop_confirming(self) -> None:
        self._confirming = None
        self._show_hint()

    def action_scroll_conversation(self, where: str) -> None:
        """Scroll by ``page_up`` or ``page_down``, or to ``home`` or ``end``."""
        getattr(self._conversation, f"scroll_{where}")(animate=False)
        self.call_after_refresh(self._show_hint)

    async def action_quit(self) -> None:
        """Leave; a running answer is stopped."""
        self._leave()

    def _leave(self) -> None:
        if self._failure is None:
            self.exit()
        else:
            self.exit(return_code=1, message=Text(f"localrt: {self._failure}"))

    # -- small lines -----------------------------------------------------------------------------

    def on_text_area_changed(self, event: TextArea.Changed) -> None:
        """Show the commands that fit what is being written."""
        self._show_hint()

    def _show_hint(self) -> None:
        self._hint.update(self._hint_text())

    def _hint_text(self) -> str:
        if self._confirming is not None:
            return "Ctrl+C again quits"
        entries = matching(self._composer.text)
        if len(entries) == 1:
            return f"{entries[0].usage}  {entries[0].does}"
        if entries:
            return "  ".join(entry.usage for entry in entries)
        if self._waiting:
            if len(self._waiting) == 1:
                return "1 message waits: Esc takes it back"
            return f"{len(self._waiting)} messages wait: Esc takes them back"
        if self._generation is not None and not self._conversation.follows:
            return "More below: Ctrl+End"
        return ""

    def _say(self, text: str, kind: Kind = "info") -> None:
        self._conversation.add_notice(text, kind)
        self._conversation.follow()

    def _update_status(self, **changes: Any) -> None:
        self._footer.status = replace(self._footer.status, **changes)


def _explained(error: Exception) -> str:
    """One line for the user; anything but localrt's own errors is a bug, and says so."""
    if isinstance(error, LocalrtError):
        return one_line(error)
    return f"{type(error).__name__}: {one_line(error)} (a bug in localrt: please report it)"


def _as_typed(message: str) -> str:
    return f"/{message}" if message.startswith("/") else message


def _short_name(name: str) -> str:
    """The last part of a path or hub id, at most 40 characters."""
    last = name.replace("\\", "/").rstrip("/").rpartition("/")[2] or name
    return last if len(last) <= 40 else f"{last[:39]}…"
