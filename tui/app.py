"""The chat app: it opens at once, loads the model in a thread, and ends without losing anything.

``chat/screen.py`` is the screen; ``conversation/state.py`` holds the conversation and its model.
The app computes nothing itself and knows localrt's public API only.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from textual.app import App, SystemCommand
from textual.binding import BindingType
from textual.driver import Driver
from textual.events import Event, Paste, Resize
from textual.events import Key as KeyPressed
from textual.filter import LineFilter
from textual.screen import Screen
from textual.timer import Timer
from textual.widget import AwaitMount
from textual.worker import Worker

import localrt
from localrt import History, Settings, system
from localrt.common.errors import CancelledError, LocalrtError
from localrt.history.presets import Defaults, PresetsFile
from localrt.mcp.toolbox import Toolbox
from localrt.tui.chat.bars import Phase
from localrt.tui.chat.message_queue import FRAME_SECONDS
from localrt.tui.chat.panel import LivePanel
from localrt.tui.chat.screen import ChatScreen
from localrt.tui.chat.thumbnails import Graphics, find_graphics
from localrt.tui.conversation.generation import BackgroundTask, loading
from localrt.tui.conversation.state import ChatState
from localrt.tui.keys import KEYS, Key, bindings, chosen_keys, rebound
from localrt.tui.preferences import PreferencesFile
from localrt.tui.screens.dialogs import SMALLEST, Ask, Confirm, HelpScreen, Palette, TooSmall, ask
from localrt.tui.terminal import copied_by_tool, write_report
from localrt.tui.text import clean, explained, one_line, pasted, short_name
from localrt.tui.themes import WithoutColor, WithoutControls, offered, register

if TYPE_CHECKING:
    from localrt import ChatModel
    from localrt.common.progress import ProgressCallback

    LoadByName = Callable[..., ChatModel]

_COPIED, _SENT = "Copied", "Perhaps copied (if not, use /export):"
_GOODBYE_SECONDS = 2.0  # seconds that threads get to end when the app does
_WITHOUT_CONTROLS = WithoutControls()


def run_chat(load: Callable[[ProgressCallback], ChatModel], **arguments: Any) -> int:
    """Open the app, with ``ChatApp``'s arguments, until the user leaves.

    Returns:
    """
    settings = Settings.from_environment()
    toolbox = Toolbox.open(settings.config_dir)
    history = partial(History, patient=True)
    arguments |= {"history": history, "config": settings.config_dir, "data": settings.data_dir}
    app = ChatApp(load, graphics=_graphics(), toolbox=toolbox, **arguments)
    spare_collector()
    try:
        app.run()
    finally:
        toolbox.close()
    if app.failure is not None:
        print(f"localrt: {app.failure}", file=sys.stderr)
        return 1
    return app.return_code or 0


def spare_collector() -> None:
    """Exclude everything imported so far from garbage collection: it lives as long as the process,
    and scanning it stops the app for 0.1 s at a time.
    """
    gc.collect()
    gc.freeze()


def _graphics() -> Graphics:
    """How the terminal draws pictures. It is not queried if keys are waiting: they would be read as
    its answer.
    """
    keys = system.typed_ahead(sys.stdin.fileno()) if sys.stdin.isatty() else nullcontext(True)
    with keys as typed:
        return "" if typed else find_graphics()


class ChatApp(App[None]):
    """The app. It answers with the model that ``load`` returns.

    Args:
        load: called once, in a thread; its callback may raise ``CancelledError`` to end it.
        model_name: shown until the model is loaded.
        system: system prompt of a new conversation.
        options: generation options by name, over the model's defaults.
        chat_path: a saved conversation to continue.
        resume: continue the last conversation of the history.
        history: opens the history; None keeps nothing.
        load_by_name: loads another model; its second argument is like that of ``load``, and ``ctx``
        is the context.
        list_models: asks a server for its models (names and facts); None if models are on this
        machine.
        load_options: budgets and other options of ``load``, to plan for other models.
        config: the folder of preferences; None keeps nothing.
        data: the folder for crash reports; None keeps nothing.
        toolbox: the tools of MCP servers that a model is offered.
        graphics: how the terminal draws pictures.
        embedder: opens a model to search files with; None: that of the preferences.
        welcome: called in a thread, for a line that newcomers see once the model is there.
    """

    TITLE = "localrt"
    CSS_PATH = Path(__file__).with_name("app.tcss")
    BINDINGS: ClassVar[list[BindingType]] = [*bindings(everywhere=True)]
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (70, "-normal"), (120, "-wide")]  # noqa: RUF012

    def __init__(
        self,
        load: Callable[[ProgressCallback], ChatModel],
        *,
        model_name: str,
        system: str | None,
        options: dict[str, Any],
        chat_path: Path | None = None,
        resume: bool = False,
        history: Callable[[], History] | None = None,
        load_by_name: LoadByName | None = None,
        list_models: Callable[[], Sequence[tuple[str, str]]] | None = None,
        load_options: Mapping[str, Any] | None = None,
        config: Path | None = None,
        data: Path | None = None,
        toolbox: Toolbox | None = None,
        graphics: Graphics = "",
        embedder: Callable[[], Any] | None = None,
        welcome: Callable[[], str] | None = None,
    ) -> None:
        super().__init__()
        self._welcome, self._data, self._chat_path = welcome, data, chat_path
        register(self)
        self.animation_level = "none"  # frames that would only send bytes over SSH
        self.preferences = PreferencesFile(config)
        self._preferred = self.preferences.load()
        self.keys: tuple[Key, ...] = KEYS
        # Why the model could not be loaded, or the app crashed, in one line.
        self.failure: str | None = None
        self._list_models, self._load_by_name = list_models, load_by_name
        self._load_options = load_options or {}
        self._loading: BackgroundTask[ChatModel] = loading(load)
        self._loading_name: str | None = None  # name of another model being loaded
        self._model_before: str | None = None  # the model loaded before
        self._next_model: str | None = None  # chosen while another was loading
        self._ticker: Timer | None = None
        self._asked_to_leave: Ask | None = None  # what to do with what is not saved
        self._asked = False
        self._copying = asyncio.Lock()
        self.state = ChatState(
            history,
            model=short_name(model_name),
            system=system,
            options=options,
            on_left=lambda session: self.chat.park(session),
            defaults=Defaults(self._preferred.system, self._preferred.options),
            presets=PresetsFile(config),
            toolbox=toolbox,
        )
        if resume:
            self._resume()
        elif chat_path is None:
            self.state.take_unsent()
        self.chat = ChatScreen(
            self.state,
            self.stop_loading,
            self.copy_to_clipboard,
            model=short_name(model_name),
            graphics=graphics,
        )
        if embedder is None and (name := self._preferred.embedding_model):
            how: dict[str, Any] = {"ram": self._load_options.get("ram"), "offline": True}
            embedder = lambda: localrt.embedder(name, **how)()  # noqa: E731
        self.chat.composer.attachments.embedder = embedder

    def get_default_screen(self) -> ChatScreen:
        return self.chat

    async def on_mount(self) -> None:
        # Keys and pastes that have already arrived are handled after this, with the composer
        # focused.
        await AwaitMount(self.chat, [self.chat])
        # After Ctrl+Z the terminal's screen is empty.
        self.app_resume_signal.subscribe(self, lambda app: app.refresh(layout=True))
        if self.console.color_system == "standard":
            self._use_terminal_colors()
        for note in (*self.state.notes, *self._apply_preferences()):
            self.chat.view.add_notice(note, "error")
        self._watch(self._loading)
        self.chat.watch_tools()
        for number in () if self.is_headless else system.LOGOUT_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._end, number)
            # At once, even while the loop waits for a terminal that does not read.
            signal.signal(number, self._hurry)

    def _resume(self) -> None:
        try:
            for last in self.state.list()[:1]:
                self.state.open(last.id)
        except LocalrtError as error:
            self.state.notes += (one_line(error),)

    async def run_action(self, *given: Any, **how: Any) -> bool:
        """Do what a key or a menu asks for. What another window has deleted is told, no end."""
        try:
            return await super().run_action(*given, **how)
        except LocalrtError as error:
            self.chat.queue.sync()  # what was left out for it
            self.chat.say(one_line(error), "error")
            return True

    async def on_event(self, event: Event) -> None:
        """Every paste, whatever widget gets it, has plain line ends and no control characters. Any
        other key than Ctrl+C's takes back the question whether to quit.
        """
        if isinstance(event, KeyPressed | Paste):
            again = next(key.keys for key in self.keys if key.id == "interrupt").split(",")
            if getattr(event, "key", "") not in again:
                self.chat.hint.withdraw()
        if isinstance(event, Paste) and not event.is_forwarded:
            event.text = clean(pasted(event.text))
            self.app_focus = True  # as for a key: the terminal may not have reported its focus
        await super().on_event(event)

    def copy_to_clipboard(self, text: str, what: str = "what was selected") -> None:
        """Copy with a tool of the desktop, else through the terminal, which does not confirm it."""

        async def copy() -> None:
            async with self._copying:  # one after another, so that the last copy wins
                copied = await asyncio.to_thread(copied_by_tool, text)
                if not copied:
                    latest = self._clipboard
                    super(ChatApp, self).copy_to_clipboard(text)
                    self._clipboard = latest
                self.chat.hint.flash(f"{_COPIED if copied else _SENT} {what}")

        self._clipboard = text  # for Ctrl+V
        _: Worker[None] = self.run_worker(copy, group="copy")

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Filters applied to each line before it is written to the terminal."""
        filters = (WithoutColor(),) if self.no_color else super().get_line_filters()
        return (*filters, _WITHOUT_CONTROLS)

    # -- preferences -----------------------------------------------------------------------------

    def _apply_preferences(self) -> tuple[str, ...]:
        """Apply the user's theme, keys and panel; returns lines about what cannot be applied."""
        preferred, notes = self._preferred, self.preferences.notes
        if preferred.theme is not None and preferred.theme not in self.available_themes:
            there = ", ".join(offered(self)[:6])
            notes += (f"No theme {preferred.theme!r} (available: {there}, ...)",)
        elif preferred.theme is not None and preferred.theme in offered(self):
            self.theme = preferred.theme
        keymap, problems = chosen_keys(preferred.keys, {key.id: key.keys for key in KEYS})
        self.set_keymap(keymap)
        self.keys = rebound(keymap)
        self.chat.panel.hide_key(next(key.label for key in self.keys if key.id == "panel"))
        self.chat.panel.show(preferred.panel)
        return (*notes, *problems)

    def remember(self, **preferred: object) -> None:
        """Save preferences; a failure is shown."""
        try:
            self.preferences.change(preferred)
        except LocalrtError as error:
            self.chat.say(f"Not saved: {one_line(error)}", "error")

    def on_live_panel_shown(self, event: LivePanel.Shown) -> None:
        """Remember for the next start whether the panel is open."""
        self.remember(panel=event.open or None)

    def _use_terminal_colors(self) -> None:
        """A terminal with 16 colours keeps its own palette: no theme looks good reduced to it."""
        if "ansi-dark" in self.available_themes:
            self.theme = "ansi-dark"
        else:  # Textual before 8
            self.theme = "textual-ansi"
            self.ansi_color = True

    # -- loading ---------------------------------------------------------------------------------

    def load_model(self, name: str, ctx: int | None = None) -> None:
        """Load another model in place of the current one, or with another context; the conversation
        stays.

        The current model is parked and unloaded in the loading thread, so that there is never more
        than one in memory. A running answer or load ends first.
        """
        if not self._loading.done:
            self._next_model = name
            self.chat.say(f"{short_name(name)} will be loaded after the model that is loading")
        else:
            what = f"{short_name(name)} will be loaded"
            self.chat.when_answered(what, lambda: self._exchange_model(name, ctx))

    def action_load_longer(self, ctx: int) -> None:
        """Load the model again with a longer context."""
        if self._load_by_name is not None:
            self.load_model(self.state.model_name, ctx)

    def _exchange_model(self, name: str, ctx: int | None) -> None:
        chat, load = self.chat, self._load_by_name
        assert load is not None, "there is no list to choose from without it"
        session, model = self.state.drop_model()

        def exchange(progress: ProgressCallback) -> ChatModel:
            if session is not None:
                session.leave()
            if model is not None:
                model.unload()
            return load(name, progress, **({} if ctx is None else {"ctx": ctx}))

        self._loading_name = name
        self._model_before = None if model is None else model.info.name
        self.failure = None
        chat.model_leaves(short_name(name))
        self._watch(loading(exchange))

    def stop_loading(self) -> bool:
        """Stop loading another model; returns whether one was loading."""
        if self._loading_name is None:
            return False
        self._loading.cancel()
        self.chat.hint.flash(f"Cancelling {short_name(self._loading_name)}")
        return True

    def _watch(self, task: BackgroundTask[ChatModel]) -> None:
        self._loading = task
        task.start()
        self._ticker = self.set_interval(FRAME_SECONDS, self._watch_loading)

    async def _watch_loading(self) -> None:
        self.chat.loading_line.progress = self._loading.progress
        for note in self._loading.take_notes():
            self.chat.say(note)
        if not self._loading.done:
            return
        if self._ticker is not None:
            self._ticker.stop()
        self.chat.loading_line.display = False
        other, self._loading_name = self._loading_name, None
        next_model, self._next_model = self._next_model, None
        try:
            if self._loading.result is None:
                raise self._loading.error or LocalrtError("the model is not there")
            session = self.state.take_model(self._loading.result)
        except Exception as error:  # noqa: BLE001 - the app shows any error
            if other is None:
                self._fail(error)
            elif next_model is None:
                self._offer_model_before(other, error)
            else:
                self.chat.say(f"{short_name(other)} was not loaded: {explained(error)}", "error")
        else:
            await self.chat.model_loaded(session)
            if self._welcome is not None:
                say = partial(self._say_welcome, self._welcome)
                _: Worker[None] = self.run_worker(say, exit_on_error=False)
                self._welcome = None
            if self._chat_path is not None:
                path, self._chat_path = self._chat_path, None
                self.chat.open_conversation(lambda: self.state.load(path))
        if next_model is not None:
            self.load_model(next_model)
        else:
            self.chat.call_next(self.chat.send_next)  # in what is being opened

    async def _say_welcome(self, welcome: Callable[[], str]) -> None:
        line = await asyncio.to_thread(welcome)
        if not self.state.conversation.turns:
            self.chat.say(line)

    def _fail(self, error: Exception) -> None:
        """Report that the first model could not be loaded."""
        self.failure = explained(error)
        self.chat.view.add_notice(self.failure, "error")
        another = ", F4 to choose another model" if self._load_by_name is not None else ""
        self.chat.view.add_notice(f"Press Enter or Ctrl+Q to leave{another}.")
        self.chat.composer.placeholder = ""
        if waiting := self.chat.queue.take_back():
            self.chat.composer.put_back(waiting)
        self.chat.footer.change(phase=Phase.FAILED)

    def _offer_model_before(self, other: str, error: Exception) -> None:
        """Report that another model could not be loaded, and offer the previous one."""
        chat, name = self.chat, short_name(other)
        chat.footer.change(phase=Phase.EMPTY, model="")
        chat.composer.placeholder = "Type a message: it is sent when a model is loaded"
        if isinstance(error, CancelledError):
            chat.say(f"{name} was not loaded: stopped")
        else:
            chat.say(f"{name} was not loaded: {explained(error)}", "error")
        before, self._model_before = self._model_before, None
        if before is not None and before != other:
            question = f"{name} was not loaded. Load {short_name(before)} again?"
            ask(chat, Confirm(question, "load it"), lambda yes: self.load_model(before))

    # -- windows: imported when first opened, so that the prompt appears sooner ----------

    def action_models(self, search: str = "") -> None:
        """Open the models screen with a search in it."""
        from localrt.tui.screens.models import ModelsScreen, ServerModelsScreen

        if self._load_by_name is None:
            self.chat.say("Models are chosen when the app starts: localrt chat MODEL", "error")
            return
        session = self.state.session
        current = None if session is None else session.model.info.name
        if self._list_models is not None:
            here = ServerModelsScreen(self._list_models, current, search)
            ask(self.chat, here, self.load_model)
        else:
            ask(self.chat, ModelsScreen(self._load_options, current, search), self.load_model)

    def action_settings(self) -> None:
        from localrt.tui.screens.settings import SettingsScreen

        self.push_screen(
            SettingsScreen(
                self.state,
                self.preferences,
                keys={key.does: key.label for key in self.keys},
                panel=self.chat.panel.is_open,
                show_panel=self.chat.panel.show,
            )
        )

    def action_help(self) -> None:
        self.push_screen(HelpScreen(self.keys))

    def _pick_theme(self) -> None:
        from localrt.tui.screens.settings import PickTheme

        ask(self.chat, PickTheme(self), lambda name: self.remember(theme=name))

    def on_resize(self, event: Resize) -> None:
        """Show a message if the terminal is too small, instead of a cut-off screen."""
        self.chat.panel.fit(event.size)
        small = event.size.width < SMALLEST.width or event.size.height < SMALLEST.height
        shown = isinstance(self.screen, TooSmall)
        if small and not shown:
            self.push_screen(TooSmall())
        elif shown and not small:
            self.pop_screen()

    def action_command_palette(self) -> None:
        """Open the palette, unless it is open, perhaps under the help."""
        if not any(isinstance(each, Palette) for each in self.screen_stack):
            self.push_screen(Palette())

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """The entries of the palette: the keys' actions, the theme, a screenshot, Quit."""

        def run(action: str) -> Callable[[], object]:
            return lambda: self.run_action(action, self.chat)

        for key in self.keys:
            if key.palette:
                yield SystemCommand(key.does, key.label, run(key.action))
        yield SystemCommand("Change the theme", "Colours", self._pick_theme)
        yield SystemCommand(
            "Save a picture of the screen",
            "An SVG file",
            lambda: self.set_timer(0.1, self.deliver_screenshot),
        )
        yield SystemCommand("Quit", "Ctrl+Q", self.action_quit)

    # -- leaving ---------------------------------------------------------------------------------

    async def action_quit(self) -> None:
        """Quit, stopping a running answer. What is not saved is asked for: it can be written to
        another folder, or given up.
        """
        self.chat.keep_draft()
        problem = await asyncio.to_thread(self.state.unsaved)
        if problem and not (self._asked_to_leave is not None and self._asked_to_leave.is_current):
            question = f"{problem}. Name a folder to write them to; quitting again gives them up."
            self._asked_to_leave = Ask(clean(question), check=self.state.write_unsaved)
            ask(self.chat, self._asked_to_leave, lambda folder: self._leave(asked=True))
        else:
            self._leave(asked=True)

    def _leave(self, *, asked: bool) -> None:
        self._asked = asked
        if self.failure is None:
            self.exit()
        else:
            self.exit(return_code=1)

    def get_driver_class(self) -> type[Driver]:
        driver = super().get_driver_class()
        if driver.__name__ != "LinuxDriver":  # but one of tests or of Windows
            return driver
        from localrt.tui.terminal import RestoringDriver

        return RestoringDriver

    def _hurry(self, _number: int, _frame: object) -> None:
        if (hurry := getattr(self._driver, "hurry", None)) is not None:
            hurry()

    def _end(self, number: int) -> None:
        """End on a signal, such as that of a logout."""
        self.chat.keep_draft()
        self.exit(return_code=128 + number)

    def _handle_exception(self, error: Exception) -> None:
        """Handle an error of a widget, timer or worker: end with one line and lose nothing."""
        if self._exception is None:
            with suppress(Exception):  # the app may be in any broken state
                self.chat.keep_draft()
            self.failure = write_report(error, self._data)
        super()._handle_exception(error)

    def _fatal_error(self) -> None:
        self._close_messages_no_wait()  # Textual's version prints the values of all variables

    def panic(self, *renderables: object) -> None:
        self._return_code, self.failure = 1, self.failure or "the terminal cannot be read any more"
        self._close_messages_no_wait()

    async def on_unmount(self) -> None:
        """End the threads, park the conversation, free the model."""
        self._loading.cancel()
        self.chat.queue.cancel()
        await self.chat.wait_for_parking()
        await asyncio.to_thread(self._end_work)

    def _end_work(self) -> None:
        self.chat.reader.stop(_GOODBYE_SECONDS)
        ended = self.chat.queue.join(_GOODBYE_SECONDS)
        loaded = self._loading.join(_GOODBYE_SECONDS)
        self.chat.queue.close()
        if ended and loaded and self._loading.result is not None:
            if self.state.session is not None:
                self.state.session.leave()
            self._loading.result.close()
        rest = self.state.close(asked=self._asked)
        self.failure = "; ".join(filter(None, (self.failure, rest))) or None
