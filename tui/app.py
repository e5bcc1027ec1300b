"""The chat app: one screen, one model, one conversation at a time.

It opens at once and loads the model in a thread; what is written meanwhile waits and is sent when
the model is ready. The same queue holds messages written during an answer. The app looks at its
threads on a timer; it computes nothing itself and knows localrt's public API only.
"""

from __future__ import annotations

import asyncio
import select
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.timer import Timer
from textual.widgets import Static, TextArea

from localrt.errors import LocalrtError
from localrt.tui.commands import Command, as_typed, help_text, hint, read_line
from localrt.tui.composer import Composer
from localrt.tui.conversation import Conversation, Kind
from localrt.tui.footer import Footer, Phase, Status
from localrt.tui.loading import LoadingLine
from localrt.tui.pace import FRAME_SECONDS
from localrt.tui.session import Session
from localrt.tui.text import one_line
from localrt.tui.turns import Turns, explained
from localrt.tui.work import Loading, News

if TYPE_CHECKING:
    from localrt import Model
    from localrt.engine.types import ProgressCallback

__all__ = ["ChatApp", "run_chat"]

_CONFIRM_SECONDS = 2.0  # in which a second Ctrl+C quits
_GOODBYE_SECONDS = 2.0  # that a thread gets to end when the app does


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
    app = ChatApp(
        load,
        model_name=model_name,
        system=system,
        options=options,
        chat_path=chat_path,
        type_ahead=_line_waiting(),
    )
    app.run()
    if app.failure is not None:
        print(f"localrt: {app.failure}", file=sys.stderr)
        return 1
    return app.return_code or 0


def _line_waiting() -> bool:
    """Whether a line was typed before the app started: the terminal made its Enter a line feed."""
    try:
        return bool(select.select([sys.stdin], [], [], 0)[0])
    except (OSError, ValueError):  # Windows selects on sockets only
        return False


class ChatApp(App[None]):
    """The app behind ``run_chat``, with the same arguments.

    ``type_ahead`` says that lines typed before the start are waiting on the terminal.
    """

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
        type_ahead: bool = False,
    ) -> None:
        super().__init__()
        self._system = system
        self._options = options
        self._chat_path = chat_path
        self._loading = Loading(load)
        self._session: Session | None = None
        # Why the model could not be loaded, in one line.
        self.failure: str | None = None
        self._confirming: Timer | None = None
        self._conversation = Conversation()
        self._turns = Turns(self._conversation)
        self._loading_line = LoadingLine()
        self._hint = Static(id="hint", markup=False)
        self._hint_shown = ""
        self._composer = Composer(type_ahead=type_ahead)
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
        self._turns.cancel()
        await asyncio.to_thread(self._end_work)

    def _end_work(self) -> None:
        ended = self._turns.join(_GOODBYE_SECONDS)
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
        return self._session is None or self._turns.answering

    # -- the timer -------------------------------------------------------------------------------

    async def _tick(self) -> None:
        if self._turns.answering:
            self._watch_answer()
        elif self._session is None and self.failure is None:
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
        self.failure = explained(error)
        self._loading_line.display = False
        self._conversation.add_notice(self.failure, "error")
        self._conversation.add_notice("Press Enter or Ctrl+Q to leave.")
        self._composer.placeholder = ""
        self._update_status(phase=Phase.FAILED)

    async def _open(self, session: Session) -> None:
        info = session.model.info
        self._loading_line.display = False
        waiting = self._turns.take_back()  # they come below what the model says of itself
        if self._chat_path is not None:
            await self._open_saved(session, self._chat_path)
        for line in (session.describe(), *info.notes):
            self._conversation.add_notice(line)
        for message in waiting:
            self._turns.add(message, waiting=True)
        self._update_status(
            model=_short_name(info.name),
            engine=f"{info.engine} {info.format}".strip(),
            phase=Phase.READY,
            ctx=info.ctx,
        )
        self._composer.placeholder = "Message (/help for commands and keys)"
        self._session = session
        self._send_next()

    async def _open_saved(self, session: Session, path: Path) -> None:
        try:
            await asyncio.to_thread(session.load, path)
            session.chat.set(**self._options)
            if self._system is not None:
                session.chat.system = self._system
            await self._show_messages(session)
        except LocalrtError as error:
            self._conversation.add_notice(one_line(error), "error")

    def _watch_answer(self) -> None:
        news = self._turns.look()
        if news is None:
            return
        self._show_metrics(news)
        if news.done:
            self._update_status(phase=Phase.READY, percent=None)
            self._give_back(self._turns.end(news, cut_off=self._cut_off()))
            self._send_next()
        self._show_hint()

    def _show_metrics(self, news: News) -> None:
        metrics = news.metrics
        if metrics is not None and metrics.completion_tokens:
            self._update_status(
                phase=Phase.GENERATING,
                percent=None,
                rate=metrics.decode_tok_s,
                per_pass=metrics.accepted_per_pass,
                sources=metrics.accepted_by_source,
                used=metrics.prompt_tokens + metrics.completion_tokens,
            )
        elif news.prefill is not None and news.prefill.total:
            percent = min(100 * news.prefill.done // news.prefill.total, 100)
            self._update_status(phase=Phase.PREFILL, percent=percent)

    # -- sending ---------------------------------------------------------------------------------

    async def on_composer_submitted(self, event: Composer.Submitted) -> None:
        """A command runs now, a message when the model is free."""
        if self.failure is not None:
            self._leave()
            return
        line = read_line(event.text)
        if isinstance(line, Command):
            await self._run_command(line)
        else:
            self._turns.add(line, waiting=self._busy)
            self._send_next()
        self._show_hint()

    def on_composer_enter_on_empty(self) -> None:
        """After a failure Enter leaves; otherwise there is nothing to send."""
        if self.failure is not None:
            self._leave()

    def _send_next(self) -> None:
        if self._session is not None and self._turns.send_next(self._session.chat):
            self._update_status(phase=Phase.PREFILL, percent=None, rate=None, sources=None)
            self._ticker.resume()

    def _cut_off(self) -> str:
        status = self._footer.status
        if status.ctx is not None and status.used >= status.ctx - 1:
            return "cut off: the context is full; /clear begins anew"
        return "cut off at max_tokens; /set max_tokens changes it"

    def _give_back(self, messages: list[str]) -> None:
        """Return messages to the composer, as they were typed."""
        if messages:
            self._composer.put_back("\n\n".join(map(as_typed, messages)))

    # -- commands --------------------------------------------------------------------------------

    async def _run_command(self, command: Command) -> None:
        if command.name == "quit":
            await self.action_quit()
        elif command.name == "help":
            self._say(help_text())
        elif not command.known:
            self._say(f"No command /{command.name}: /help lists them, // sends a slash", "error")
        elif self._session is None or self._turns.answering:
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
            elif message["role"] == "assistant" and content:
                self._conversation.add_answer(content)
            elif message["role"] == "assistant":
                self._conversation.add_notice("stopped", "mark")
            else:
                self._say(f"{message['role']}: {content}")
        used = await asyncio.to_thread(session.tokens)
        self._update_status(used=used, rate=None)

    # -- keys ------------------------------------------------------------------------------------

    def action_stop(self) -> None:
        """Stop the answer; messages that wait come back to the composer."""
        self._turns.cancel()
        self._give_back(self._turns.take_back())
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
        self._turns.cancel()
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
        if self.failure is None:
            self.exit()
        else:
            self.exit(return_code=1)

    # -- small lines -----------------------------------------------------------------------------

    def on_text_area_changed(self, event: TextArea.Changed) -> None:
        """Show the commands that fit what is being written."""
        self._show_hint()

    def _show_hint(self) -> None:
        text = self._hint_text()
        if text != self._hint_shown:  # an update lays the whole screen out again
            self._hint_shown = text
            self._hint.update(text)

    def _hint_text(self) -> str:
        if self._confirming is not None:
            return "Ctrl+C again quits"
        if command := hint(self._composer.text):
            return command
        if self._turns.waiting == 1:
            return "1 message waits: Esc takes it back"
        if self._turns.waiting:
            return f"{self._turns.waiting} messages wait: Esc takes them back"
        if self._turns.answering and not self._conversation.follows:
            return "More below: Ctrl+End"
        return ""

    def _say(self, text: str, kind: Kind = "info") -> None:
        self._conversation.add_notice(text, kind)
        self._conversation.follow()

    def _update_status(self, **changes: Any) -> None:
        self._footer.status = replace(self._footer.status, **changes)


def _short_name(name: str) -> str:
    """The last part of a path or hub id, at most 40 characters."""
    last = name.replace("\\", "/").rstrip("/").rpartition("/")[2] or name
    return last if len(last) <= 40 else f"{last[:39]}…"
