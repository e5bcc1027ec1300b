"""The models screen: what is here and what it takes, what the hub has, and what to expect of each.

Typing narrows the list; asking the hub and downloading are things that a person chooses, else no
network is touched. Closes with the name of the model to load. Knows the library, not the app.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.css.query import NoMatches
from textual.timer import Timer
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from localrt.errors import CancelledError, LocalrtError
from localrt.tui.conversation.background import Task
from localrt.tui.loading_line import LoadingLine
from localrt.tui.screens.dialogs import Choose, Confirm, SearchScreen, ask
from localrt.tui.screens.library import Library
from localrt.tui.text import clean, human_bytes, human_count, human_when, one_line, short_name
from localrt.tui.themes import FAINT

if TYPE_CHECKING:
    from localrt import FoundModel, LocalModel, Preview

__all__ = ["ModelsScreen"]

_Found = TypeVar("_Found")
_PAUSE = 0.2  # seconds that a row is highlighted before it is planned for
_FRAME = 0.1
_KEYS = "Enter load · Ctrl+D delete · Ctrl+S search the hub · Esc back"
_PULLING = "Esc stops the download; what is here is kept"


@dataclass(frozen=True, slots=True)
class _Row:
    """One of the list: a model here, one of the hub, or neither (the row that asks)."""

    here: LocalModel | None = None
    found: FoundModel | None = None


class ModelsScreen(SearchScreen):
    """``current`` is the name of the model that is loaded."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+d,ctrl+delete", "delete", show=False, priority=True),
        Binding("ctrl+s", "search", show=False),
    ]
    DEFAULT_CSS = """
    ModelsScreen {
        & #about { height: auto; max-height: 4; margin: 1 0 0 0; }
        & LoadingLine { padding: 0; display: none; }
        & .room { color: $text-muted; }
    }
    """

    def __init__(self, library: Library, current: str | None = None, search: str = "") -> None:
        super().__init__()
        self._library = library
        self._current = current
        self._words = search
        self._here: Sequence[LocalModel] = ()
        self._uses: Mapping[str, float] = {}
        self._found: Sequence[FoundModel] = ()
        self._asked = ""  # the words that the hub was asked for
        self._asking = False  # the line about it is not to be overwritten
        self._rows: list[_Row] = []
        self._previews: dict[str, Preview | str] = {}
        self._pull: Task[str] | None = None
        self._pulled = ""  # the name of what is downloaded
        self._ticker: Timer | None = None
        self._wait: Timer | None = None

    def compose(self) -> ComposeResult:
        """Search line, list, what to expect, progress, keys."""
        with Vertical(classes="window tall"):
            yield Input(self._words, placeholder="Find a model", compact=True)
            yield OptionList(compact=True)
            yield Static(id="about", markup=False)
            yield LoadingLine()
            yield Static(id="room", classes="room", markup=False)
            yield Static(_KEYS, classes="keys", markup=False)

    def on_mount(self) -> None:
        """Look into the folders; the search line keeps the focus."""
        self.query_one(OptionList).can_focus = False
        self._ticker = self.set_interval(_FRAME, self._watch_pull, pause=True)
        self._look()

    def on_unmount(self) -> None:
        """Nobody waits for a download any more."""
        if self._pull is not None:
            self._pull.cancel()

    # -- the list --------------------------------------------------------------------------------

    def _look(self, keep: str | None = None) -> None:
        """Read the folders again, in a thread, and show what is there."""

        def read() -> tuple[list[LocalModel], Mapping[str, float], str]:
            models, uses = self._library.models(), self._library.uses()
            take = "1 model takes" if len(models) == 1 else f"{len(models)} models take"
            text = f"{take} {human_bytes(sum(model.bytes for model in models))}"
            free = self._library.free_bytes(models)
            return models, uses, text + (f", {human_bytes(free)} free" if free else "")

        async def show() -> None:
            models, uses, text = await asyncio.to_thread(read)
            self._here = sorted(models, key=lambda each: -uses.get(each.name, 0.0))
            self._uses = uses
            self.query_one("#room", Static).update(text)
            self._fill(keep)

        self._later(show(), "look")

    def _fill(self, keep: str | None = None) -> None:
        """The rows that fit the words."""
        words = self._words.lower().split()
        rows = [_Row(here=m) for m in self._here if all(word in m.name.lower() for word in words)]
        names = {row.here.name.partition(":")[0] for row in rows if row.here is not None}
        if self._asked == self._words.strip() and self._asked:
            rows += [_Row(found=each) for each in self._found if each.name not in names]
        elif words:
            rows.append(_Row())
        self._rows = rows
        options = self.query_one(OptionList)
        options.clear_options()
        now = time.time()
        options.add_options(Option(self._shown(row, now)) for row in rows)
        if not rows:
            none = "Nothing of that name on the hub" if words else "No models yet: type a name"
            options.add_option(Option(none, disabled=True))
            return
        name = keep or (self._current if not words else None)
        places = [i for i, row in enumerate(rows) if row.here is not None and row.here.name == name]
        options.highlighted = places[0] if places else 0

    def _shown(self, row: _Row, now: float) -> Content:
        if row.here is not None:
            name = row.here.name
            used, known = self._uses.get(name), self._previews.get(name)
            return _here_row(row.here, used, known, now, current=name == self._current)
        if row.found is not None:
            return _found_row(row.found)
        return _search_row(self._words.strip())

    @property
    def _chosen(self) -> _Row | None:
        place = self.query_one(OptionList).highlighted
        return self._rows[place] if place is not None and place < len(self._rows) else None

    def on_input_changed(self, event: Input.Changed) -> None:
        """Narrow the list."""
        if event.value != self._words:
            self._words = event.value
            self._fill()

    # -- what to expect --------------------------------------------------------------------------

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        """Plan for the row that stays highlighted for a moment."""
        if self._wait is not None:
            self._wait.stop()
        row = self._chosen
        if self._asking or self._pull is not None:
            return
        if row is None or row.here is None:
            self._about("" if row is None or row.found is None else "Enter shows what can be had")
            return
        known = self._previews.get(row.here.name)
        self._about(f"{_title(row.here)}: {'…' if known is None else known}")
        if known is None:
            name = row.here.name
            self._wait = self.set_timer(_PAUSE, lambda: self._plan(name))

    def _plan(self, name: str) -> None:
        async def plan() -> None:
            try:
                found: Preview | str = await asyncio.to_thread(self._library.preview, name)
            except LocalrtError as error:
                found = one_line(error)
            self._previews[name] = found
            row = self._chosen
            if row is not None and row.here is not None and row.here.name == name:
                self._about(f"{_title(row.here)}: {found}")
            self._redraw(name)

        self._later(plan(), "plan")

    def _redraw(self, name: str) -> None:
        for place, row in enumerate(self._rows):
            if row.here is not None and row.here.name == name:
                options = self.query_one(OptionList)
                options.replace_option_prompt_at_index(place, self._shown(row, time.time()))

    def _about(self, text: str) -> None:
        self.query_one("#about", Static).update(clean(text))

    # -- keys ------------------------------------------------------------------------------------

    def action_leave(self) -> None:
        """Esc: stop the download; without one, empty the search, then close."""
        if self._pull is not None:
            self._pull.cancel()
        else:
            super().action_leave()

    def count(self) -> int:
        """See ``SearchScreen``."""
        return len(self._rows)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Enter does what the row is for."""
        if event.value != self._words:
            self._words = event.value
            self._fill()
        self._do(self._chosen)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """So does a click."""
        self._do(self._rows[event.option_index] if event.option_index < len(self._rows) else None)

    def _do(self, row: _Row | None) -> None:
        if row is None or self._pull is not None:
            return
        if row.here is not None:
            self._load(row.here)
        elif row.found is not None:
            self._offer(row.found.name)
        else:
            self.action_search()

    def _load(self, model: LocalModel) -> None:
        """Close with it; what cannot fit is asked about first."""
        if model.name == self._current:
            self.notify("This one is loaded", markup=False)
            return
        known = self._previews.get(model.name)
        problem = known if isinstance(known, str) else "" if known is None else known.problem
        if not problem:
            self.dismiss(model.name)
            return
        dialog = Confirm(f"{_title(model)}: {problem}\n\nTry?", "try it")
        ask(self, dialog, lambda yes: self.dismiss(model.name))

    def action_delete(self) -> None:
        """Ask, then delete for good."""
        row = self._chosen
        if row is None or row.here is None or self._pull is not None:
            return
        model = row.here
        if model.name == self._current:
            self.notify("This one is loaded: load another before it is deleted", markup=False)
            return

        async def delete() -> None:
            try:
                freed = await asyncio.to_thread(self._library.delete, model.name)
            except LocalrtError as error:
                self.notify(one_line(error), severity="error", markup=False)
            else:
                self._about(f"Deleted {_title(model)}: {human_bytes(freed)} freed")
            self._previews.pop(model.name, None)
            self._look()

        question = f"Delete {_title(model)}, {human_bytes(model.bytes)}? This cannot be undone."
        ask(self, Confirm(question, "delete"), lambda yes: self._later(delete(), "delete"))

    # -- the hub ---------------------------------------------------------------------------------

    def action_search(self) -> None:
        """Ask the hub for the words."""
        words = self._words.strip()
        if not words or self._pull is not None:
            return

        async def search() -> None:
            self._about(f"Asking the hub for “{words}” …")
            found = await self._ask_hub(self._library.search, words)
            if found is None:
                return
            self._found, self._asked = found, words
            self._about(f"{len(found)} on the hub" if found else "Nothing of that name on the hub")
            if words == self._words.strip():
                self._fill()

        self._later(search(), "hub")

    def _offer(self, repo: str) -> None:
        """Ask which of a repository's files to download."""

        async def offer() -> None:
            self._about(f"Asking the hub what there is of {repo} …")
            variants = await self._ask_hub(self._library.variants, repo)
            if variants is None:
                return
            choices = [
                (each.name, f"{each.label}  {human_bytes(each.bytes)}  {expected}")
                for each in variants
                for expected in (self._library.preview_size(each.bytes),)
            ]
            nothing = f"{repo} has no file that localrt reads (GGUF or safetensors)"
            self._about("" if choices else nothing)
            if choices:
                ask(self, Choose(f"Download of {clean(repo)}:", choices), self._download)

        self._later(offer(), "hub")

    async def _ask_hub(self, question: Callable[[str], _Found], words: str) -> _Found | None:
        """What the hub answers; None after an error, which is shown."""
        self._asking = True
        try:
            return await asyncio.to_thread(question, words)
        except LocalrtError as error:
            self._about(one_line(error))
            return None
        finally:
            self._asking = False

    def _download(self, name: str) -> None:
        if self._pull is not None:
            return
        library, self._pulled = self._library, name
        self._pull = Task(lambda task: library.pull(name, task.show, task.cancelled))
        self._pull.start()
        self._about(f"Downloading {clean(name)}")
        self._show_pull(True)

    def _watch_pull(self) -> None:
        pull = self._pull
        if pull is None:
            return
        self.query_one(LoadingLine).progress = pull.progress
        if not pull.done:
            return
        self._pull = None
        self._show_pull(False)
        if pull.error is None:
            self.query_one(Input).value = ""
            self._words = ""
            self._about(f"{clean(self._pulled)} is here")
            self._look(keep=pull.result)
        elif isinstance(pull.error, CancelledError):
            self._about("Stopped: downloading it again goes on from here")
        else:
            self._about(one_line(pull.error))

    def _show_pull(self, shown: bool) -> None:
        line = self.query_one(LoadingLine)
        line.progress, line.display = None, shown
        self.query_one(".keys", Static).update(_PULLING if shown else _KEYS)
        if self._ticker is not None:
            (self._ticker.resume if shown else self._ticker.pause)()

    def _later(self, work: Coroutine[Any, Any, None], group: str) -> None:
        async def until_closed() -> None:
            try:
                await work
            except NoMatches:
                if self.display:  # while a screen closes, its widgets are gone before it is
                    raise

        self.run_worker(until_closed(), group=group, exclusive=True)


def _title(model: LocalModel) -> str:
    """A store's name is its path: the last part says enough."""
    return clean(short_name(model.name) if model.kind == "store" else model.name)


def _here_row(
    model: LocalModel,
    used: float | None,
    known: Preview | str | None,
    now: float,
    *,
    current: bool,
) -> Content:
    """A model on this machine: size, format, when it was ``used``, and where it would run.

    ``known`` is its preview, or why there is none. Times in seconds since the epoch.
    """
    facts = [human_bytes(model.bytes), f"{model.kind} {model.quantization or ''}".strip()]
    facts.append(f"used {human_when(used, now)}" if used else "not used yet")
    if known is not None:
        facts.append(_where(known))
    return _drawn("● " if current else "  ", _title(model), " · ".join(facts))


def _found_row(found: FoundModel) -> Content:
    """A model of the hub."""
    facts = [f"{human_count(found.downloads)} downloads", *found.kinds]
    facts += ["licence to be accepted"] if found.gated else []
    facts += [found.updated] if found.updated else []
    return _drawn("↓ ", clean(found.name), clean(" · ".join(facts)))


def _search_row(words: str) -> Content:
    """What asks the hub for ``words``."""
    return _drawn("? ", f"Search the hub for “{clean(words)}”", "Asks the network")


def _where(known: Preview | str) -> str:
    if isinstance(known, str):
        return "cannot be read"
    if known.problem:
        return "does not fit"
    if known.fits:
        return "on the card" if known.place == "card" else "in RAM"
    return "streamed"


def _drawn(mark: str, title: str, facts: str) -> Content:
    return Content.assemble((mark, "$text-accent"), (title, "bold"), (f"\n  {facts}", FAINT))
