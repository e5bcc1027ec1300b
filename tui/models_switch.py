"""Another model in the place of the present one: parked, unloaded, loaded, and what if it fails.

The conversation stays on the screen. Parking and unloading happen in the thread that loads, so that
there is never more than one model in memory. Knows the app; the models screen chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from localrt.errors import CancelledError
from localrt.tui.dialogs import Confirm
from localrt.tui.footer import Phase
from localrt.tui.text import short_name
from localrt.tui.turns import explained
from localrt.tui.work import Loading

if TYPE_CHECKING:
    from localrt import Model
    from localrt.progress import ProgressCallback
    from localrt.tui.app import ChatApp
    from localrt.tui.session import Session

__all__ = ["LoadByName", "Switch"]

LoadByName = Callable[[str, "ProgressCallback"], "Model"]


class Switch:
    """``load`` loads a model by name; None: the app has the one that it was started with."""

    def __init__(self, app: ChatApp, load: LoadByName | None) -> None:
        self._app = app
        self._load = load
        self._name = ""  # of the model on its way
        self._before: str | None = None  # what was loaded until then
        self._running: Loading | None = None

    @property
    def possible(self) -> bool:
        """Whether models can be loaded by name."""
        return self._load is not None

    def to(self, name: str) -> None:
        """Begin; whoever answers is not interrupted."""
        app, chat, load = self._app, self._app.chat, self._load
        if load is None or chat.turns.answering or not app.loaded:
            what = "is answering: Esc stops it" if chat.turns.answering else "is still loading"
            chat.say(f"Another model has to wait: this one {what}", "error")
            return
        session, model = app.desk.part()
        self._name = name
        self._before = None if model is None else model.info.name
        app.failure = None
        chat.closed(short_name(name))
        self._running = Loading(lambda progress: _exchange(session, model, load, name, progress))
        app.watch_loading(self._running)

    def cancel(self) -> bool:
        """Stop loading, if it goes on; whether there was something to stop."""
        if self._running is None or self._running.done:
            return False
        self._running.abandon()
        self._app.chat.flash(f"Stopping to load {short_name(self._name)}")
        return True

    def ended(self, error: Exception | None) -> bool:
        """Loading has ended; whether it was this one's and failed: then it is told here."""
        running, self._running = self._running, None
        if running is None or error is None:
            return False
        app, chat, name = self._app, self._app.chat, short_name(self._name)
        chat.update_status(phase=Phase.EMPTY, model="")
        chat.composer.placeholder = "Write now: it is sent when a model is loaded"
        if isinstance(error, CancelledError):
            chat.say(f"{name} was not loaded: stopped")
        else:
            chat.say(f"{name} was not loaded: {explained(error)}", "error")
        before, self._before = self._before, None
        if before is None or before == self._name:
            return True

        def answered(yes: bool | None) -> None:
            if yes:
                self.to(before)

        question = f"{name} was not loaded. Load {short_name(before)} again?"
        app.push_screen(Confirm(question, "load it"), answered)
        return True


def _exchange(
    session: Session | None,
    model: Model | None,
    load: LoadByName,
    name: str,
    progress: ProgressCallback,
) -> Model:
    """Park, unload, load."""
    if session is not None:
        session.leave()
    if model is not None:
        model.unload()
    return load(name, progress)
