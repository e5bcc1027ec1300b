"""The chat app: it opens at once, loads the model in a thread, and ends without losing anything.

What is on screen is ``chat_screen.py``; which conversation and model it is about, ``desk.py``. The
app computes nothing itself and knows localrt's public API only.
"""

from __future__ import annotations

import asyncio
import select
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from textual.app import App, SystemCommand
from textual.events import Resize
from textual.screen import Screen
from textual.timer import Timer

from localrt.errors import LocalrtError
from localrt.tui.chat_screen import ChatScreen
from localrt.tui.desk import Desk, Usual
from localrt.tui.dialogs import SMALLEST, TooSmall
from localrt.tui.footer import Phase
from localrt.tui.key_choices import chosen_keys
from localrt.tui.keys import KEYS, Key, rebound
from localrt.tui.models_library import Library
from localrt.tui.models_switch import LoadByName, Switch
from localrt.tui.pace import FRAME_SECONDS, spare_collector
from localrt.tui.preferences import PreferencesFile, config_folder
from localrt.tui.presets import Presets
from localrt.tui.settings_work import SettingsWork
from localrt.tui.text import one_line, short_name
from localrt.tui.themes import offered, register
from localrt.tui.turns import explained
from localrt.tui.work import Loading

if TYPE_CHECKING:
    from localrt import History, Model
    from localrt.progress import ProgressCallback

__all__ = ["ChatApp", "run_chat"]

_GOODBYE_SECONDS = 2.0  # that a thread gets to end when the app does


def run_chat(
    load: Callable[[ProgressCallback], Model],
    *,
    model_name: str,
    system: str | None,
    options: dict[str, Any],
    chat_path: Path | None = None,
    resume: bool = False,
    load_by_name: LoadByName | None = None,
    load_options: Mapping[str, Any] | None = None,
) -> int:
    """Open the app until the user leaves; the process's exit status.

    Args:
        load: called once, in a thread; its callback may raise ``CancelledError`` to end it.
        model_name: shown until the model says its own name.
        system: system prompt of a new conversation.
        options: generation options by name, over the model's defaults.
        chat_path: a saved conversation to go on with.
        resume: go on with the last conversation of the history.
        load_by_name: loads another model; its second argument is like that of ``load``.
        load_options: what ``load`` was told of budgets and the like, to plan for other models.

    Returns:
        0, or 1 when the model could not be loaded (the reason is on stderr then).
    """
    from localrt import History

    app = ChatApp(
        load,
        model_name=model_name,
        system=system,
        options=options,
        chat_path=chat_path,
        resume=resume,
        type_ahead=_line_waiting(),
        history=History,
        load_by_name=load_by_name,
        load_options=load_options,
        config=config_folder(),
    )
    spare_collector()
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

    ``type_ahead`` says that lines typed before the start are waiting on the terminal. ``history``
    opens the history, ``config`` is the folder of preferences; None keeps nothing.
    """

    TITLE = "localrt"
    CSS_PATH = Path(__file__).with_name("app.tcss")
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (70, "-normal"), (120, "-wide")]  # noqa: RUF012

    def __init__(
        self,
        load: Callable[[ProgressCallback], Model],
        *,
        model_name: str,
        system: str | None,
        options: dict[str, Any],
        chat_path: Path | None = None,
        resume: bool = False,
        type_ahead: bool = False,
        history: Callable[[], History] | None = None,
        load_by_name: LoadByName | None = None,
        load_options: Mapping[str, Any] | None = None,
        config: Path | None = None,
    ) -> None:
        super().__init__()
        register(self)
        self._preferences = PreferencesFile(config)
        self._liked = liked = self._preferences.load()
        self.keys: tuple[Key, ...] = KEYS
        self.animation_level = "none"  # frames that move nothing but bytes over SSH
        self._chat_path = chat_path
        self._loading = Loading(load)
        # Why the model could not be loaded, in one line.
        self.failure: str | None = None
        self.desk = Desk(
            history,
            model=short_name(model_name),
            system=system,
            options=options,
            on_problem=lambda line: self.chat.say(line, "error"),
            on_moved=self._moved,
            usual=Usual(liked.system, liked.options),
        )
        self.settings = SettingsWork(self.desk, self._preferences, Presets(config))
        self.library = Library(load_options)
        self.switch = Switch(self, load_by_name)
        if resume:
            self._resume()
        self.chat = ChatScreen(self.desk, model=short_name(model_name), type_ahead=type_ahead)
        self._ticker: Timer | None = None
        self._leaving_unsaved = False

    def get_default_screen(self) -> Screen[Any]:
        """The chat."""
        return self.chat

    def on_mount(self) -> None:
        """Begin to load."""
        if self.console.color_system == "standard":
            self._use_terminal_colors()
        for note in (*self.desk.notes, *self._like()):
            self.chat.view.add_notice(note, "error")
        self.watch_loading(self._loading)

    def _like(self) -> tuple[str, ...]:
        """Have it as the user likes it; what cannot be had is told."""
        liked, notes = self._liked, self._preferences.notes
        if liked.theme is not None and liked.theme not in self.available_themes:
            there = ", ".join(offered(self)[:6])
            notes += (f"There is no theme {liked.theme!r} (there are {there}, ...)",)
        elif liked.theme is not None and liked.theme in offered(self):
            self.theme = liked.theme
        keymap, problems = chosen_keys(liked.keys, {key.id: key.keys for key in KEYS})
        self.set_keymap(keymap)
        self.keys = rebound(keymap)
        hide = next(key.shown for key in self.keys if key.id == "panel")
        self.chat.panel.hide_key(hide)
        self.chat.panel.show(liked.panel)
        return (*notes, *problems)

    def remember(self, **liked: Any) -> None:
        """Have it so the next time too; what cannot be written is told."""
        try:
            self._preferences.remember(**liked)
        except LocalrtError as error:
            self.chat.say(f"Not remembered: {one_line(error)}", "error")

    async def on_unmount(self) -> None:
        """End the threads, park the conversation, free the model."""
        self._loading.abandon()
        self.chat.turns.cancel()
        await self.chat.left()
        await asyncio.to_thread(self._end_work)

    def _end_work(self) -> None:
        ended = self.chat.turns.join(_GOODBYE_SECONDS)
        loaded = self._loading.join(_GOODBYE_SECONDS)
        self.chat.turns.close()
        if ended and loaded and self._loading.model is not None:
            if self.desk.session is not None:
                self.desk.session.leave()
            self._loading.model.close()
        self.desk.close()

    def _use_terminal_colors(self) -> None:
        """A terminal with 16 colours has its own palette: no theme reads well squeezed into it."""
        if "ansi-dark" in self.available_themes:
            self.theme = "ansi-dark"
        else:  # Textual before 8
            self.theme = "textual-ansi"
            self.ansi_color = True

    def _resume(self) -> None:
        try:
            found = self.desk.list()
            if found:
                self.desk.open(found[0].id)
        except LocalrtError as error:
            self.desk.notes += (one_line(error),)

    def _moved(self, numbers: Mapping[int, int]) -> None:
        self.chat.turns.moved(numbers)

    # -- loading ---------------------------------------------------------------------------------

    @property
    def loaded(self) -> bool:
        """Whether nothing is being loaded."""
        return self._loading.done

    def watch_loading(self, loading: Loading) -> None:
        """Begin to load, and show how far it is."""
        self._loading = loading
        loading.start()
        self._ticker = self.set_interval(FRAME_SECONDS, self._watch_loading)

    def _watch_loading(self) -> None:
        self.chat.loading_line.progress = self._loading.progress
        if not self._loading.done:
            return
        if self._ticker is not None:
            self._ticker.stop()
        self.chat.loading_line.display = False
        model, error = self._loading.model, self._loading.error
        try:
            if model is None:
                raise error or LocalrtError("the model is not there")
            session = self.desk.take(model)
        except Exception as error:  # noqa: BLE001 - whatever it is, the app shows it
            if not self.switch.ended(error):
                self._fail(error)
        else:
            self.switch.ended(None)
            self.chat.opened(session)
            if self._chat_path is not None:
                path, self._chat_path = self._chat_path, None
                self.chat.put(lambda: self.desk.load(path))
            self.chat.send_next()

    def _fail(self, error: Exception) -> None:
        self.failure = explained(error)
        self.chat.view.add_notice(self.failure, "error")
        another = ", F4 to choose another model" if self.switch.possible else ""
        self.chat.view.add_notice(f"Press Enter or Ctrl+Q to leave{another}.")
        self.chat.composer.placeholder = ""
        self.chat.update_status(phase=Phase.FAILED)

    # -- window ----------------------------------------------------------------------------------

    def on_resize(self, event: Resize) -> None:
        """A terminal that is too small says so instead of showing half of everything."""
        self.chat.panel.fit(event.size)
        small = event.size.width < SMALLEST.width or event.size.height < SMALLEST.height
        shown = isinstance(self.screen, TooSmall)
        if small and not shown:
            self.push_screen(TooSmall())
        elif shown and not small:
            self.pop_screen()

    # -- palette and leaving ---------------------------------------------------------------------

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """The keys' table, themes, a picture, leaving."""
        for key in self.keys:
            if key.palette:
                yield SystemCommand(key.does, key.shown, self._doing(key.action))
        yield SystemCommand("Change the theme", "Colours", self._pick_theme)
        yield SystemCommand(
            "Save a picture of the screen",
            "An SVG file",
            lambda: self.set_timer(0.1, self.deliver_screenshot),
        )
        yield SystemCommand("Quit", "Ctrl+Q", self.action_quit)

    def _pick_theme(self) -> None:
        from localrt.tui.settings_dialogs import PickTheme

        def chosen(name: str | None) -> None:
            if name is not None:
                self.remember(theme=name)

        self.push_screen(PickTheme(), chosen)

    def _doing(self, action: str) -> Callable[[], Any]:
        async def do() -> None:
            await self.run_action(action, self.chat)

        return do

    async def action_quit(self) -> None:
        """Leave; a running answer is stopped. What cannot be kept is worth a question."""
        talk = self.desk.talk
        asked, self._leaving_unsaved = self._leaving_unsaved, True
        if talk.unsaved and not asked and not self.chat.turns.answering and not talk.save():
            self.chat.say(
                "This conversation is not on disk yet: /export PATH saves it elsewhere, "
                "quitting again leaves it",
                "error",
            )
            return
        if self.failure is None:
            self.exit()
        else:
            self.exit(return_code=1)
