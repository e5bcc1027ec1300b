"""Models: the screen that lists, gets and deletes them, and a switch to another one."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from textual.app import App
from textual.pilot import Pilot
from textual.widgets import OptionList, Static

import localrt
from localrt import DraftOffer, FoundModel, LocalModel, Preview, Runnable, Variant
from localrt.common.errors import (
    CancelledError,
    CheckpointError,
    LocalrtError,
    OfflineError,
    StorageError,
)
from localrt.common.progress import Progress, ProgressCallback
from localrt.hub.names import find_known
from localrt.tui import ChatApp
from localrt.tui.chat.bars import Phase
from localrt.tui.loading_line import LoadingLine
from localrt.tui.screens.dialogs import Choose, Confirm
from localrt.tui.screens.models import ModelsScreen
from tests.tui import screen
from tests.tui.conftest import asked, running, until
from tests.tui.fakes import FakeModel
from tests.tui.screen import idle

NOW = time.time()
MODELS = [
    LocalModel("smollm2", Path("/m/a"), 98_000_000, "gguf", "Q4_1", NOW),
    LocalModel("org/chat:Q4_K_M", Path("/m/b"), 4_100_000_000, "gguf", "Q4_K_M", NOW),
    LocalModel("org/huge", Path("/m/c"), 90_000_000_000, "safetensors", None, NOW),
]
PREVIEWS = {
    "smollm2": Preview(
        fits=True,
        weight_bytes=98_000_000,
        tok_s=45.0,
        verdict="Good for chat: 45 tok/s, all of it in memory",
    ),
    "org/chat:Q4_K_M": Preview(
        fits=False, weight_bytes=4_100_000_000, read_bytes=410_000_000, tok_s=6.04
    ),
    "org/huge": Preview(fits=False, weight_bytes=90_000_000_000, problem="does not fit: too large"),
    "org/new-GGUF:Q4_0": Preview(fits=True, weight_bytes=100),  # once it has been pulled
}


class FakeLibrary:
    """``asked`` is what would have reached the network; a pull waits for ``gate``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in vars(FakeLibrary):
            if not name.startswith("_"):
                monkeypatch.setattr(localrt, name, getattr(self, name))
        disk = shutil.disk_usage(".")._replace(free=81_000_000_000)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
        self.budgets: dict[str, Any] = {}
        self.here = list(MODELS)
        self.previews: dict[str, Any] = dict(PREVIEWS)
        self.runs: list[Runnable] = []
        self.asked: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.error: LocalrtError | None = None

    def list_models(self) -> list[LocalModel]:
        return list(self.here)

    def uses(self) -> dict[str, float]:
        return {"org/chat:Q4_K_M": time.time() - 7200}

    def preview(self, name: str, **budgets: Any) -> Preview:
        self.budgets = budgets
        if isinstance(self.previews[name], LocalrtError):
            raise self.previews[name]
        return self.previews[name]

    def recommended(self) -> list[Runnable]:
        return self.runs

    def preview_size(self, nbytes: int, *, ram: Any) -> Preview:
        return Preview(fits=nbytes < 10**9, weight_bytes=nbytes, read_bytes=nbytes // 2)

    def search_models(self, words: str) -> list[FoundModel]:
        self.asked.append(f"search {words}")
        if self.error is not None:
            raise self.error
        return [
            FoundModel("org/new-GGUF", 12_000, 3, ("gguf",), False, "2026-02-17"),
            FoundModel("org/chat", 900, 3, ("gguf",), True, ""),
        ]

    def list_variants(self, repo: str, *, ram: str) -> list[Variant]:
        self.asked.append(f"variants {repo} for {ram}")
        return [
            Variant(f"{repo}:Q2_K", "Q2_K", 300_000_000),
            Variant(f"{repo}:Q4_0", "Q4_0", 500_000_000, why="the largest that runs well"),
            Variant(repo, "f16", 2 * 10**9),
        ]

    def pull(self, name: str, *, progress: ProgressCallback, cancel: threading.Event) -> LocalModel:
        self.asked.append(f"pull {name}")
        progress(Progress("download", 50, 100, "bytes", "new.gguf"))
        while not self.gate.wait(0.005):
            if cancel.is_set():
                raise CancelledError("the download was cancelled")
        if self.error is not None:
            raise self.error
        self.here.append(LocalModel(name, Path("/m/new"), 100, "gguf", "Q4_0", NOW))
        return self.here[-1]

    def find_draft(self, model: LocalModel) -> DraftOffer:
        return DraftOffer("org/new-eagle3", f"a head drafts for {model.name}", here=False)

    def remove_model(self, name: str, *, packed_only: bool = False) -> int:
        if self.error is not None:
            raise self.error
        freed = next(model.bytes for model in self.here if model.name == name)
        self.here = [model for model in self.here if model.name != name]
        return freed


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    return FakeLibrary(monkeypatch)


# -- the screen alone ------------------------------------------------------------------------------


class Bare(App[None]):
    CSS_PATH = Path(__file__).parents[2] / "tui" / "app.tcss"

    def __init__(self, library: FakeLibrary) -> None:
        super().__init__()
        self.library = library
        self.models = ModelsScreen({"ram": "4GB", "ctx": None, "revision": "x"}, current="smollm2")
        self.chosen: list[str | None] = []

    def on_mount(self) -> None:
        self.push_screen(self.models, self.chosen.append)


def rows(app: Bare) -> list[str]:
    options = app.models.query_one(OptionList)
    return [str(options.get_option_at_index(i).prompt) for i in range(options.option_count)]


def files(app: Bare) -> list[str]:
    """Names of the rows that are paths."""
    # A long path goes on below; the last line has the facts.
    return [Path(row.rpartition("\n")[0].replace("\n  ", "")).name for row in rows(app)]


def about(app: Bare) -> str:
    return str(app.models.query_one("#about", Static).render())


def toasts(app: Bare) -> list[str]:
    return [each.message for each in app._notifications]


@asynccontextmanager
async def opened(
    library: FakeLibrary, size: tuple[int, int] = (100, 30)
) -> AsyncIterator[tuple[Bare, Pilot[None]]]:
    app = Bare(library)
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: len(rows(app)) == 3 and "smollm2" in "".join(rows(app)))
        yield app, pilot


async def test_list_and_previews(library: FakeLibrary) -> None:
    async with opened(library) as (app, pilot):
        shown = rows(app)
        assert "org/chat:Q4_K_M" in shown[0]  # the one used last
        assert "4.1 GB · gguf Q4_K_M · localrt · used 2 h ago" in shown[0]
        assert shown[1].startswith("● smollm2")
        assert "not used yet" in shown[1]
        room = str(app.models.query_one("#room", Static).render())
        assert room == "3 models take 94 GB, 81 GB free"
        await until(pilot, lambda: "Good for chat: 45 tok/s" in about(app))
        await until(pilot, lambda: "· fits in RAM" in rows(app)[1])
        # What does not fit is asked about.
        await pilot.press("down")
        await until(pilot, lambda: "does not fit" in about(app))
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, Confirm))
        await pilot.press("n")
        await pilot.pause()
        assert app.chosen == []
        # A preview before loading.
        await pilot.press("up", "up")
        await until(pilot, lambda: "streams 410 MB per token, about 6 tok/s" in about(app))
        await pilot.press("enter")
        await until(pilot, lambda: app.chosen == ["org/chat:Q4_K_M"])
        assert library.asked == []  # nothing but the disk was looked at
        assert library.budgets == {"ram": "4GB"}


async def test_recommended(library: FakeLibrary) -> None:
    known, speed = find_known("gemma4:e2b"), SimpleNamespace(weights=3_100_000_000, tok_s=21.4)
    assert known is not None
    library.runs = [Runnable(known, "Q4_K_M", cast(Any, speed))]
    app = Bare(library)
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: len(rows(app)) == 4 and "smollm2" in "".join(rows(app)))
        assert "gemma4:e2b" in rows(app)[3]
        assert "runs well on this PC · Q4_K_M · 3.1 GB · 21.4 tok/s" in rows(app)[3]
        await pilot.press("pagedown", "enter")
        await until(pilot, lambda: library.asked == [f"variants {known.repo} for 4GB"])
        await pilot.press("escape", *"chat")
        await until(pilot, lambda: "gemma4:e2b" not in "".join(rows(app)))


async def test_damaged_file(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked at before the present model goes, however quickly Enter comes."""
    monkeypatch.setattr("localrt.tui.screens.models._PAUSE", 60.0)
    library.previews["org/chat:Q4_K_M"] = CheckpointError("the file is truncated")
    async with opened(library) as (app, pilot):
        await pilot.press("up")
        await pilot.press("enter", "enter")
        await until(pilot, lambda: "Q4_K_M: the file is truncated" in about(app))
        assert "cannot be read" in rows(app)[0]
        assert app.screen is app.models
        await pilot.press("escape")
        await until(pilot, lambda: app.chosen == [None])


async def test_search(library: FakeLibrary) -> None:
    async with opened(library) as (app, pilot):
        await until(pilot, lambda: "45 tok/s" in about(app))
        await pilot.press("ctrl+s")
        assert "Type a name first" in about(app)
        await pilot.press(*"chat")
        await until(pilot, lambda: len(rows(app)) == 2)
        assert "Search the hub for “chat”" in rows(app)[1]
        assert library.asked == []
        await pilot.press("ctrl+s")
        await until(pilot, lambda: len(rows(app)) == 2 and "org/new-GGUF" in rows(app)[1])
        assert library.asked == ["search chat"]
        assert "12k downloads · gguf · 2026-02-17" in rows(app)[1]
        # An error of the hub is a line.
        library.error = OfflineError("offline mode is on: switch it off")
        await pilot.press("escape", *"new", "enter")
        await until(pilot, lambda: "offline mode is on" in about(app))
        # The files of a short name, as the first screen has them, are offered without a search.
        library.asked.clear()
        app.models.line.value = "gemma4:e2b"
        await until(pilot, lambda: "↓ gemma4:e2b\n" in "".join(rows(app)[:1]))
        assert library.asked == []
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, Choose))
        known = find_known("gemma4:e2b")
        assert known is not None
        assert library.asked == [f"variants {known.repo} for 4GB"]


async def test_stopped_pull(library: FakeLibrary) -> None:
    async with opened(library) as (app, pilot):
        await pilot.press(*"new", "enter")
        await until(pilot, lambda: "org/new-GGUF" in "".join(rows(app)))
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, Choose))
        offered = app.screen.query_one(OptionList)
        choices = [str(each.prompt) for each in offered.options]
        assert choices[:2] == ["Q4_0  500 MB  recommended", "Q2_K  300 MB  fits in RAM"]
        why = [str(each.render()) for each in app.screen.query(Static)]
        assert "Q4_0: the largest that runs well" in why[0]
        library.gate.clear()
        await pilot.press("enter")
        line = app.models.query_one(LoadingLine)
        await until(pilot, lambda: line.display and "50%" in str(line.render()))
        await pilot.press("escape")
        await until(pilot, lambda: "again resumes it" in about(app))
        assert app.chosen == []
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, Choose))
        await pilot.press("enter")
        await until(pilot, lambda: line.display)
        library.gate.set()
        await until(pilot, lambda: len(rows(app)) == 4)
        place = app.models.query_one(OptionList).highlighted
        assert place is not None
        assert "org/new-GGUF:Q4_0" in rows(app)[place]
        assert not line.display
        assert toasts(app) == ["a head drafts for org/new-GGUF:Q4_0"]
        await pilot.press("x", "escape", "escape")  # the search, then the screen
        await until(pilot, lambda: app.chosen == [None])


async def test_delete(library: FakeLibrary) -> None:
    async with opened(library) as (app, pilot):
        await pilot.press("ctrl+d")  # the loaded one
        await pilot.pause()
        assert app.screen is app.models
        await pilot.press("up", "ctrl+d")
        await until(pilot, lambda: isinstance(app.screen, Confirm))
        await pilot.press("n")
        assert len(library.here) == 3
        library.error = StorageError("cannot delete x: Permission denied")
        await pilot.press("ctrl+d", "y")
        await until(pilot, lambda: any("Permission" in toast for toast in toasts(app)))
        library.error = None
        await pilot.press("ctrl+d", "y")
        await until(pilot, lambda: len(rows(app)) == 2)
        assert [model.name for model in library.here] == ["smollm2", "org/huge"]


async def test_paths(library: FakeLibrary, tmp_path: Path) -> None:
    (tmp_path / "more" / "deep").mkdir(parents=True)
    for name in ("model-a.gguf", "notes.txt", "more/b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    file = tmp_path / "more" / "b.gguf"
    for each in (file, tmp_path / "model-a.gguf"):  # the latter where the keys come slowly
        library.previews[str(each)] = Preview(fits=True, weight_bytes=4, tok_s=45.0)
    async with opened(library, size=(200, 30)) as (app, pilot):
        app.models.line.value = f"{tmp_path}/mo"
        await until(pilot, lambda: files(app) == ["model-a.gguf", "more"])
        await pilot.press("down", "enter")  # a folder is looked into
        await until(pilot, lambda: files(app) == ["b.gguf", "deep"])
        await until(pilot, lambda: "about 45 tok/s" in about(app))
        await pilot.press("enter")
        await until(pilot, lambda: app.chosen == [str(file)])
        assert library.asked == []


# -- another model in the place of the present one -------------------------------------------------

CHAT = "org/chat:Q4_K_M"


class Shelf:
    """``load_by_name`` of the app: models by name; waits for ``gate``."""

    def __init__(self) -> None:
        self.first = FakeModel(name="smollm2")
        self.models: dict[str, Any] = {CHAT: FakeModel(name=CHAT)}
        self.asked: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.unloaded_first: bool | None = None

    def __call__(self, name: str, progress: ProgressCallback) -> Any:
        self.asked.append(name)
        self.unloaded_first = self.first.unloaded
        while not self.gate.wait(0.005):
            progress(Progress("load", 1, 2, "bytes"))
        found = self.models[name]
        if isinstance(found, Exception):
            raise found
        return found

    def running(self, **arguments: Any) -> AbstractAsyncContextManager[tuple[ChatApp, Pilot[None]]]:
        return running(self.first, load_by_name=self, **arguments)


async def test_switch_model() -> None:
    shelf = Shelf()
    other = shelf.models[CHAT]
    async with shelf.running() as (app, pilot):
        await asked(pilot, "Hi")
        await pilot.press("f4")
        await until(pilot, lambda: isinstance(app.screen, ModelsScreen))
        await until(pilot, lambda: app.screen.query("#room").first().render().plain)  # type: ignore[union-attr]
        shelf.gate.clear()
        await pilot.press("up", "enter")
        await until(pilot, lambda: shelf.asked == [CHAT])
        assert shelf.unloaded_first is True  # never two models in memory
        assert shelf.first.chats[-1].closed
        await screen.say(pilot, "And you?")
        assert screen.waiting(app) == ["And you?"]
        assert screen.phase(app) is Phase.LOADING
        shelf.gate.set()
        await until(pilot, lambda: len(screen.answers(app)) == 2 and idle(app))
        assert any("So far with smollm2" in line for line in screen.notices(app))
        assert other.given() == ["Hi", "Hello there.", "And you?"]
        # During an answer, what was asked for comes after it.
        shelf.models["smollm2"] = shelf.first
        other.hold()
        await screen.say(pilot, "Third")
        app.load_model("smollm2")
        await pilot.pause()
        assert shelf.asked == [CHAT]
        assert "smollm2 will be loaded when this answer ends" in screen.notices(app)[-1]
        await screen.say(pilot, "Fourth")
        other.release()
        await until(pilot, lambda: len(screen.answers(app)) == 4 and idle(app))
        assert shelf.asked == [CHAT, "smollm2"]
        assert shelf.first.given()[-1] == "Fourth"
    assert other.closed


async def test_failure_offers_previous_model() -> None:
    shelf = Shelf()
    shelf.models = {"broken": CheckpointError("broken.gguf is truncated"), "smollm2": shelf.first}
    async with shelf.running() as (app, pilot):
        app.load_model("broken")
        await until(pilot, lambda: isinstance(app.screen, Confirm))
        assert screen.notices(app, "error") == ["broken was not loaded: broken.gguf is truncated"]
        assert screen.phase(app) is Phase.EMPTY
        assert app.failure is None
        await pilot.press("n")
        await screen.say(pilot, "Hi")  # waits in line
        assert screen.waiting(app) == ["Hi"]
        app.load_model("smollm2")
        await until(pilot, lambda: screen.answers(app) == ["Hello there."] and idle(app))
        app.load_model("broken")
        await until(pilot, lambda: isinstance(app.screen, Confirm))
        await pilot.press("y")
        await until(pilot, lambda: idle(app) and shelf.asked[-1] == "smollm2")


async def test_enter_says_no_yes(model: FakeModel) -> None:
    """Enter may be pressed twice, or meant for the composer: what is named is y."""
    async with running(model) as (app, pilot):
        await asked(pilot, "Hi")
        await screen.say(pilot, "/delete")
        await until(pilot, lambda: isinstance(app.screen, Confirm))
        await pilot.press("enter", "enter")
        await pilot.pause()
        assert isinstance(app.screen, Confirm)
        await pilot.press("n")
        await until(pilot, lambda: not isinstance(app.screen, Confirm))
        assert screen.users(app) == ["Hi"]


async def test_stopped_loading() -> None:
    shelf = Shelf()
    shelf.gate.clear()
    async with shelf.running() as (app, pilot):
        app.load_model(CHAT)
        await until(pilot, lambda: shelf.asked)
        await pilot.press("escape")
        await until(pilot, lambda: isinstance(app.screen, Confirm))
        assert any("stopped" in line for line in screen.notices(app))
        assert not app.stop_loading()  # nothing is left to stop
        shelf.models["smollm2"] = shelf.first
        shelf.gate.set()
        await pilot.press("y")
        await until(pilot, lambda: idle(app))


async def test_models_of_a_server() -> None:
    def list_models() -> list[tuple[str, str]]:
        if not there:
            raise StorageError("the server does not answer")
        return there

    there: list[tuple[str, str]] = []
    shelf = Shelf()
    async with shelf.running(list_models=list_models) as (app, pilot):

        def rows() -> list[str]:
            return [str(each.prompt) for each in app.screen.query_one(OptionList).options]

        await pilot.press("f4")
        await until(pilot, lambda: rows() == ["the server does not answer"])
        await pilot.press("escape")
        there += [("smollm2", "context 8,192 · loaded"), (CHAT, "")]
        await screen.say(pilot, "/models chat")
        await until(pilot, lambda: rows() == [f"  {CHAT}"])
        await pilot.press("escape")
        await until(pilot, lambda: rows()[0] == "● smollm2\n  context 8,192 · loaded")
        await pilot.press("down", "enter")
        await until(pilot, lambda: shelf.asked == [CHAT] and idle(app))
