"""The models screen: local models, the hub's models, and each one's expected speed.

Typing narrows the list; a path lists files and folders that begin with it. Only searching the hub
and downloading, both on the user's request, use the network. A server's models are a plain list.
Both screens close with the name or path of the model to load. Knows the library, not the app.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeGuard, TypeVar

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.timer import Timer
from textual.widgets import OptionList, Static
from textual.worker import Worker, WorkType

import localrt
from localrt import FoundModel, LocalModel, Runnable
from localrt.common.errors import CancelledError, LocalrtError
from localrt.common.files import user_path
from localrt.common.formatting import format_bytes, format_rate
from localrt.hub.names import KNOWN_MODELS, KnownModel
from localrt.tui.conversation.generation import BackgroundTask
from localrt.tui.loading_line import LoadingLine
from localrt.tui.screens.dialogs import Choose, Confirm, SearchDialog, ask
from localrt.tui.text import clean, human_count, human_when, one_line, short_name
from localrt.tui.themes import FAINT

if TYPE_CHECKING:
    from localrt import DraftOffer, Preview, Variant

_Answer = TypeVar("_Answer")
_Row = LocalModel | KnownModel | FoundModel | Runnable | Path | Literal["search"]
_Pulled = tuple[str, "DraftOffer | None"]  # a model's name, and a draft model for it
_PREVIEWED = ("ram", "gpu_memory", "ctx", "kv_format", "device", "engine")
_PAUSE = 0.2  # seconds that a row is highlighted before its plan is computed
_FRAME = 0.1
_KEYS = "Enter load · Ctrl+D delete · Ctrl+S search the hub · Esc back"
_PULLING = "Esc stops the download; the downloaded part is kept"
_NOT_FOUND = "No model with that name on the hub"
_NO_FILE = "No folder or .gguf file with that name"
_MOST_PATHS, _MOST_NAMES = 50, 5


def is_path(text: str) -> bool:
    """Whether the text is clearly a path."""
    return text.startswith(("~", ".")) or Path(text).is_absolute()


def paths_of(text: str) -> list[Path]:
    """Folders and GGUF files whose path begins with the text."""
    if not is_path(text):
        return []
    start = user_path(text).absolute()
    inside = text.endswith(("/", os.sep)) or text in ("~", ".", "..")
    folder, first = (start, "") if inside else (start.parent, start.name)
    try:
        entries = sorted(each for each in folder.iterdir() if each.name.startswith(first))
        shown = [each for each in entries if first.startswith(".") or each.name[0] != "."]
        models = [each for each in shown if each.suffix.lower() == ".gguf" or each.is_dir()]
    except OSError:
        return []
    return models[:_MOST_PATHS]


def is_mere_folder(item: object) -> TypeGuard[Path]:
    """Whether ``item`` is a folder without a model."""
    if not isinstance(item, Path) or not item.is_dir():
        return False
    return not any((item / name).is_file() for name in ("config.json", "manifest.json"))


def shown_path(path: Path) -> str:
    """The path, abbreviated with ``~`` if possible."""
    home = Path.home()
    return str(Path("~") / path.relative_to(home) if path.is_relative_to(home) else path)


class ModelsScreen(SearchDialog[_Row]):
    """``options`` are the app's options of ``localrt.load``, with the budgets to plan for.
    ``current`` is the name of the model that is loaded.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+d,ctrl+delete", "delete", show=False, priority=True),
        Binding("ctrl+s", "search", show=False),
    ]

    def __init__(
        self, options: Mapping[str, Any], current: str | None = None, search: str = ""
    ) -> None:
        about, room = Static(id="about", markup=False), Static(id="room", classes="room")
        progress = LoadingLine()
        super().__init__(search, "Find a model", about, progress, room, keys=_KEYS)
        self._about, self._room, self._progress = about, room, progress
        chosen = {name: options.get(name) for name in _PREVIEWED}
        self._budgets = {name: each for name, each in chosen.items() if each is not None}
        self._current = current
        self._local_models: Sequence[LocalModel] = ()
        self._uses: Mapping[str, float] = {}
        self._recommended: Sequence[Runnable] = ()
        self._hub_models: Sequence[FoundModel] = ()
        self._hub_query = ""  # the last search on the hub
        self._asking = False  # keep showing "Asking the hub"
        self._previews: dict[str, Preview | str] = {}
        self._pull: BackgroundTask[_Pulled] | None = None
        self._pulled = ""  # the name of the model being downloaded
        self._wait: Timer | None = None

    def on_mount(self) -> None:
        self._ticker = self.set_interval(_FRAME, self._watch_pull, pause=True)
        self._look()
        self._later(self._recommend, "recommend")

    async def _recommend(self) -> None:
        """List what runs well on this PC, below the models that are here."""
        self._recommended = await asyncio.to_thread(localrt.recommended)
        if not self._recommended:
            return
        row = self.chosen
        here = _name(row) if isinstance(row, LocalModel | Path) else None
        self.fill(here, self.rows.highlighted or 0)

    def on_unmount(self) -> None:
        if self._pull is not None:
            self._pull.cancel()

    # -- the list --------------------------------------------------------------------------------

    def _look(self, keep: str | None = None) -> None:
        """List the folders again, in a thread; the highlight stays."""

        def read() -> tuple[list[LocalModel], Mapping[str, float], str]:
            models, uses = localrt.list_models(), localrt.uses()
            take = "1 model takes" if len(models) == 1 else f"{len(models)} models take"
            text = f"{take} {format_bytes(sum(each.bytes + each.packed_bytes for each in models))}"
            free = _free_bytes(models[0].path if models else Path.home())
            return models, uses, text + (f", {format_bytes(free)} free" if free else "")

        async def show() -> None:
            models, self._uses, text = await asyncio.to_thread(read)
            self._local_models = sorted(models, key=lambda each: -self._uses.get(each.name, 0.0))
            self._room.update(text)
            row = self.chosen
            here = _name(row) if isinstance(row, LocalModel | Path) else None
            self.fill(keep or here, self.rows.highlighted or 0)

        self._later(show, "look")

    def fill(self, keep: str | None = None, place: int = 0) -> None:
        """The rows that match the search; ``keep`` is highlighted, or else the row at ``place``."""
        words = self.search_text.lower().split()
        here = [model for model in self._local_models if _has(model, words)]
        listed = {model.path for model in here}
        rows: list[_Row] = [*here]
        rows += [path for path in paths_of(self.search_text.strip()) if path not in listed]
        names = {model.name.partition(":")[0] for model in here}
        if self._hub_query == self.search_text.strip() and self._hub_query:
            rows += [each for each in self._hub_models if each.name not in names]
        elif words and not is_path(self.search_text.strip()):
            known = (model for model in KNOWN_MODELS if model.repo not in names)
            fitting = (model for model in known if all(word in model.name for word in words))
            rows += [*islice(fitting, _MOST_NAMES), "search"]
        if not words:
            others = [each for each in self._recommended if each.model.repo not in names]
            rows += others[:_MOST_NAMES]
        name = keep or (self._current if not words else None)
        preview = [_name(row) if isinstance(row, LocalModel | Path) else None for row in rows]
        place = preview.index(name) if name is not None and name in preview else place
        none = "No models yet: type a name, or a path"
        if words:
            none = _NO_FILE if is_path(self.search_text.strip()) else _NOT_FOUND
        self.show(rows, none, highlighted=place)

    def draw(self, item: _Row) -> Content:
        if item == "search":
            words = clean(self.search_text.strip())
            return _drawn("? ", f"Search the hub for “{words}”", "Uses the network")
        if isinstance(item, KnownModel):
            return _drawn("↓ ", item.name, item.repo)
        if isinstance(item, Runnable):
            return _drawn("↓ ", item.model.name, " · ".join(_runs(item)))
        if isinstance(item, FoundModel):
            facts = [f"{human_count(item.downloads)} downloads", *item.kinds]
            facts += ["licence must be accepted"] if item.gated else []
            facts += [item.updated] if item.updated else []
            return _drawn("↓ ", clean(item.name), clean(" · ".join(facts)))
        preview = self._previews.get(_name(item))
        if isinstance(item, Path):
            facts = [format_bytes(item.stat().st_size)] if item.is_file() else ["folder"]
            facts += [] if preview is None else [_where(preview)]
            return _drawn("/ ", _title(item), " · ".join(facts))
        used = self._uses.get(item.name)
        facts = [format_bytes(item.bytes), f"{item.kind} {item.quantization or ''}".strip()]
        facts.append(item.where)
        facts += [f"packed copy {format_bytes(item.packed_bytes)}"] if item.packed else []
        facts.append(f"used {human_when(used, time.time())}" if used else "not used yet")
        if preview is not None:
            facts.append(_where(preview))
        mark = "● " if item.name == self._current else "  "
        return _drawn(mark, _title(item), " · ".join(facts))

    # -- expected speed --------------------------------------------------------------------------

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        """Plan for a row once it has been highlighted for a moment."""
        if self._wait is not None:
            self._wait.stop()
        row = self.chosen
        if self._asking or self._pull is not None:
            return
        if not isinstance(row, LocalModel | Path) or is_mere_folder(row):
            on_hub = isinstance(row, KnownModel | FoundModel | Runnable)
            self._say("Enter lists its files" if on_hub else "")
            return
        preview = self._previews.get(_name(row))
        self._say(f"{_title(row)}: {'…' if preview is None else _expected(preview)}")
        if preview is None:
            self._wait = self.set_timer(
                _PAUSE, lambda: self._later(partial(self._plan, row), "plan")
            )

    async def _plan(self, model: LocalModel | Path) -> None:
        name = _name(model)
        try:
            found: Preview | str = await asyncio.to_thread(localrt.preview, name, **self._budgets)
        except LocalrtError as error:
            found = one_line(error)
        self._previews[name] = found
        for place, row in enumerate(self.items):
            if isinstance(row, LocalModel | Path) and _name(row) == name:
                self.redraw(place)
                if place == self.rows.highlighted:
                    self._say(f"{_title(row)}: {_expected(found)}")

    def _say(self, text: str) -> None:
        self._about.update(clean(text))

    # -- keys ------------------------------------------------------------------------------------

    def action_leave(self) -> None:
        """Esc: stop the download; without one, empty the search, then close."""
        if self._pull is not None:
            self._pull.cancel()
        else:
            super().action_leave()

    def take(self, item: _Row) -> None:
        """Load a model, look into a folder, list a hub repository's files, or search."""
        if self._pull is not None:
            return
        if is_mere_folder(item):
            self.line.value = f"{_title(item)}{os.sep}"
            self.line.cursor_position = len(self.line.value)
        elif isinstance(item, LocalModel | Path):
            self._load(item)
        elif isinstance(item, KnownModel | FoundModel | Runnable):
            known = item.model if isinstance(item, Runnable) else item
            repo = known.name if isinstance(known, FoundModel) else known.repo
            self._later(partial(self._offer, repo), "hub")
        else:
            self.action_search()

    def _load(self, model: LocalModel | Path) -> None:
        """Close with the model, after asking if it does not fit; refuse if it cannot be read."""
        name = _name(model)
        if name == self._current:
            self._say("This model is loaded already")
            return
        preview = self._previews.get(name)
        if preview is None:
            self._later(partial(self._plan_and_load, model), "load")
        elif isinstance(preview, str):
            self._say(f"{_title(model)}: {preview}")
        elif preview.problem:
            dialog = Confirm(f"{_title(model)}: {preview.problem}\n\nLoad it anyway?", "load it")
            ask(self, dialog, lambda yes: self.dismiss(name))
        else:
            self.dismiss(name)

    async def _plan_and_load(self, model: LocalModel | Path) -> None:
        """Check the file before the current model is unloaded for it."""
        await self._plan(model)
        self._load(model)

    def action_delete(self) -> None:
        """Ask, then delete for good: if the files are not localrt's, only its packed copy."""
        model = self.chosen
        if not isinstance(model, LocalModel) or self._pull is not None:
            return
        if model.name == self._current:
            self._say("This model is loaded: load another one before you delete it")
            return
        what, packed_only = _title(model), model.how_to_delete != ""
        if packed_only and not model.packed:
            self._say(f"localrt does not delete it ({model.where}): {model.how_to_delete}")
            return
        copy = f"packed copy, {format_bytes(model.packed_bytes)}"
        question = f"Delete {what}, {format_bytes(model.bytes)}"
        question += f", and its {copy}" if model.packed else ""
        question += "? This cannot be undone."
        if packed_only:
            question = (
                f"{what}: delete the {copy}? The model stays: it is packed again when needed."
            )

        async def delete() -> None:
            try:
                freed = await asyncio.to_thread(
                    localrt.remove_model, model.name, packed_only=packed_only
                )
            except LocalrtError as error:
                self.notify(one_line(error), severity="error", markup=False)
            else:
                self._say(f"Deleted: {format_bytes(freed)} freed")
            self._previews.pop(model.name, None)
            self._look()

        ask(self, Confirm(question, "delete"), lambda yes: self._later(delete, "delete"))

    # -- the hub ---------------------------------------------------------------------------------

    def action_search(self) -> None:
        words = self.search_text.strip()
        if not words and self._pull is None:
            self._say("Type a name first: Ctrl+S then searches the hub for it")
        if not words or self._pull is not None:
            return

        async def search() -> None:
            self._say(f"Asking the hub for “{words}” …")
            found = await self._ask_hub(localrt.search_models, words)
            if found is None:
                return
            self._hub_models, self._hub_query = found, words
            self._say(f"{len(found)} on the hub" if found else _NOT_FOUND)
            if words == self.search_text.strip():
                self.fill()

        self._later(search, "hub")

    async def _offer(self, repo: str) -> None:
        """Ask which of a repository's files to download."""
        self._say(f"Asking the hub for the files of {repo} …")
        budgets = {k: v for k, v in self._budgets.items() if k in ("ram", "gpu_memory", "device")}
        variants = await self._ask_hub(partial(localrt.list_variants, **budgets), repo)
        if variants is None:
            return
        title, choices = f"Download of {repo}:", []
        for each in sorted(variants, key=lambda variant: not variant.why):
            expected = localrt.preview_size(each.bytes, ram=self._budgets.get("ram"))
            facts = f"{each.label}  {format_bytes(each.bytes)}  "
            choices.append((each.name, facts + _judged(each, str(expected))))
            title += f"\n{each.label}: {each.why}" if each.why else ""
        nothing = f"{repo} has no file that localrt reads (GGUF or safetensors)"
        self._say("" if choices else nothing)
        if choices:
            ask(self, Choose(clean(title), choices), self._download)

    async def _ask_hub(self, question: Callable[[str], _Answer], name: str) -> _Answer | None:
        """The hub's answer; None after an error, which is shown."""
        self._asking = True
        try:
            return await asyncio.to_thread(question, name)
        except Exception as error:  # noqa: BLE001 - the network may cause any error
            self._say(one_line(error))
            return None
        finally:
            self._asking = False

    def _download(self, name: str) -> None:
        if self._pull is not None:
            return

        def pull(task: BackgroundTask[_Pulled]) -> _Pulled:
            model = localrt.pull(name, progress=task.show, cancel=task.cancelled)
            return model.name, localrt.find_draft(model)

        self._pull, self._pulled = BackgroundTask(pull), name
        self._pull.start()
        self._say(f"Downloading {clean(name)}")
        self._show_pull(True)

    def _watch_pull(self) -> None:
        pull = self._pull
        if pull is None:
            return
        self._progress.progress = pull.progress
        if not pull.done:
            return
        self._pull = None
        self._show_pull(False)
        if pull.result is not None:
            name, draft = pull.result
            self.line.value = self.search_text = ""
            self._say(f"{clean(self._pulled)} is downloaded")
            if draft is not None:  # the highlighted row's text soon replaces that line
                self.notify(clean(draft.line), markup=False)
            self._look(keep=name)
        elif isinstance(pull.error, CancelledError):
            self._say("Stopped: downloading it again resumes it")
        elif pull.error is not None:
            self._say(one_line(pull.error))

    def _show_pull(self, visible: bool) -> None:
        self._progress.progress, self._progress.display = None, visible
        self.key_line.update(_PULLING if visible else _KEYS)
        (self._ticker.resume if visible else self._ticker.pause)()

    def _later(self, work: WorkType[None], group: str) -> None:
        # Pass a function, not a coroutine: a later worker may cancel it before it starts.
        self.run_worker(work, group=group, exclusive=True)


def _judged(variant: Variant, expected: str) -> str:
    if variant.drafts:
        return "drafts for the others"
    return "recommended" if variant.why else expected


def _has(model: LocalModel, words: Sequence[str]) -> bool:
    """Whether all words are in the model's names."""
    names = " ".join((model.name, *model.aliases)).lower()
    return all(word in names for word in words)


def _name(model: LocalModel | Path) -> str:
    """The name that loads the model."""
    return str(model) if isinstance(model, Path) else model.name


def _title(model: LocalModel | Path) -> str:
    """The name to show; for a store, whose name is its path, the last part."""
    if isinstance(model, Path):
        return clean(shown_path(model))
    name = short_name(model.name) if model.kind == "store" else model.name
    return clean(f"{name} ({', '.join(model.aliases)})" if model.aliases else name)


def _free_bytes(folder: Path) -> int | None:
    """Free bytes on the folder's disk; None if unknown."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _expected(preview: Preview | str) -> str:
    """The verdict of a preview; empty if there is none."""
    if isinstance(preview, str) or not preview.verdict:
        return str(preview)
    return f"{preview.verdict} (on a typical machine)" if preview.assumed else preview.verdict


def _where(preview: Preview | str) -> str:
    if isinstance(preview, str):
        return "cannot be read"
    if preview.problem:
        return "does not fit"
    if preview.fits:
        return "fits on the GPU" if preview.place == "GPU" else "fits in RAM"
    return "streamed"


def _runs(item: Runnable) -> list[str]:
    """What is known of a model that is not here yet."""
    facts = ["runs well on this PC", item.quantization or ""]
    if item.expected is not None:
        facts.append(format_bytes(item.expected.weights))
        facts.append(f"{format_rate(item.expected.tok_s)} tok/s")
    return facts


def _drawn(mark: str, title: str, facts: str) -> Content:
    below = f"\n  {facts}" if facts else ""
    return Content.assemble((mark, "$text-accent"), (title, "bold"), (below, FAINT))


_ServerRow = tuple[str, str]


class ServerModelsScreen(SearchDialog[_ServerRow]):
    """``list_models`` asks the server for names and facts; ``current`` is the one in use."""

    def __init__(
        self, list_models: Callable[[], Sequence[_ServerRow]], current: str | None, search: str = ""
    ) -> None:
        super().__init__(search, "Find a model on the server", keys="Enter use · Esc back")
        self._list_models, self._current = list_models, current
        self._rows: Sequence[_ServerRow] = ()
        self._none = "Asking the server ..."

    def on_mount(self) -> None:
        self.fill()
        _: Worker[None] = self.run_worker(self._look)

    async def _look(self) -> None:
        try:
            self._rows = await asyncio.to_thread(self._list_models)
        except LocalrtError as error:
            self._none = one_line(error)
        else:
            self._none = "No model with that name" if self._rows else "The server lists no models"
        self.fill()

    def fill(self) -> None:
        words = self.search_text.lower().split()
        rows = [row for row in self._rows if all(word in row[0].lower() for word in words)]
        names = [name for name, _ in rows]
        place = names.index(self._current) if self._current in names else 0
        self.show(rows, self._none, highlighted=place)

    def draw(self, item: _ServerRow) -> Content:
        name, facts = map(clean, item)
        return _drawn("● " if item[0] == self._current else "  ", name, facts)

    def take(self, item: _ServerRow) -> None:
        self.dismiss(None if item[0] == self._current else item[0])
