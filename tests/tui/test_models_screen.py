"""The models screen: what is listed, what is asked for, and that no network is touched unasked."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from textual.app import App
from textual.pilot import Pilot
from textual.widgets import OptionList, Static

import localrt
from localrt import DraftOffer, FoundModel, LocalModel, Preview, Variant
from localrt.common.errors import (
    CancelledError,
    CheckpointError,
    LocalrtError,
    OfflineError,
    StorageError,
)
from localrt.common.progress import Progress, ProgressCallback
from localrt.hub.names import find_known
from localrt.tui.loading_line import LoadingLine
from localrt.tui.screens.dialogs import Choose, Confirm
from localrt.tui.screens.models import ModelsScreen
from tests.tui.conftest import until

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
        self.asked: list[str] = []
        self.planned: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.error: LocalrtError | None = None

    def list_models(self) -> list[LocalModel]:
        return list(self.here)

    def uses(self) -> dict[str, float]:
        return {"org/chat:Q4_K_M": time.time() - 7200}

    def preview(self, name: str, **budgets: Any) -> Preview:
        self.planned.append(name)
        self.budgets = budgets
        if isinstance(self.previews[name], LocalrtError):
            raise self.previews[name]
        return self.previews[name]

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
        if packed_only:
            self.asked.append(f"remove the copies of {name}")
            return 0
        freed = next(model.bytes for model in self.here if model.name == name)
        self.here = [model for model in self.here if model.name != name]
        return freed


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


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    return FakeLibrary(monkeypatch)


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


@pytest.mark.parametrize("planned", [False, True])
async def test_damaged_file(
    library: FakeLibrary, planned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked at before the present model goes, however quickly Enter comes."""
    monkeypatch.setattr("localrt.tui.screens.models._PAUSE", 0.01 if planned else 60.0)
    library.previews["org/chat:Q4_K_M"] = CheckpointError("the file is truncated")
    async with opened(library) as (app, pilot):
        await pilot.press("up")
        if planned:
            await until(pilot, lambda: "truncated" in about(app))
        await pilot.press("enter", "enter")
        await until(pilot, lambda: "Q4_K_M: the file is truncated" in about(app))
        assert "cannot be read" in rows(app)[0]
        assert app.screen is app.models
        await pilot.press("escape")
        await until(pilot, lambda: app.chosen == [None])


async def test_row_passed_quickly(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localrt.tui.screens.models._PAUSE", 1.0)
    async with opened(library) as (_, pilot):
        await until(pilot, lambda: library.planned == ["smollm2"])
        await pilot.press("down", "up", "up", "down", "up")
        await until(pilot, lambda: len(library.planned) == 2)
        assert library.planned == ["smollm2", "org/chat:Q4_K_M"]


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


@pytest.mark.parametrize("name", ["gemma4:e2b", "qwen3:8b", "smollm2:1.7b"])
async def test_short_name(library: FakeLibrary, name: str) -> None:
    """As the first screen names a model: without a search, its files are offered."""
    async with opened(library) as (app, pilot):
        app.models.line.value = name
        await until(pilot, lambda: rows(app) and rows(app)[0].startswith(f"↓ {name}\n"))
        assert library.asked == []
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, Choose))
        known = find_known(name)
        assert known is not None
        assert library.asked == [f"variants {known.repo} for 4GB"]


async def found(pilot: Pilot[None], app: Bare) -> None:
    """The variants of a hub model are offered."""
    await pilot.press(*"new", "enter")
    await until(pilot, lambda: "org/new-GGUF" in "".join(rows(app)))
    await pilot.press("enter")
    await until(pilot, lambda: isinstance(app.screen, Choose))


async def test_stopped_pull(library: FakeLibrary) -> None:
    async with opened(library) as (app, pilot):
        await found(pilot, app)
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
        library.here.insert(0, replace(MODELS[0], name="new"))  # by another program
        await pilot.press("ctrl+d", "y")
        await until(pilot, lambda: any("Permission" in toast for toast in toasts(app)))
        await until(pilot, lambda: len(rows(app)) == 4)
        library.error = None
        await pilot.press("ctrl+d", "y")  # the highlight has stayed
        await until(pilot, lambda: len(rows(app)) == 3)
        assert [model.name for model in library.here] == ["new", "smollm2", "org/huge"]


async def test_delete_packed_copy(library: FakeLibrary) -> None:
    theirs = replace(MODELS[1], name="ollama:chat:8b", place="Ollama", aliases=("fast",))
    packed = replace(theirs, packed=(Path("/s/chat"),), packed_bytes=4_200_000_000)
    library.here[1:] = [theirs, replace(packed, name="ollama:packed")]
    for model in library.here:
        library.previews[model.name] = Preview(fits=True, weight_bytes=4, tok_s=45.0)
    async with opened(library) as (app, pilot):
        await pilot.press(*"fast")
        await until(pilot, lambda: "ollama:chat:8b (fast)" in rows(app)[0])
        await until(pilot, lambda: "45 tok/s" in about(app))
        await pilot.press("ctrl+d")
        await until(pilot, lambda: "`ollama rm" in about(app))
        assert "Ollama · packed copy 4.2 GB" in rows(app)[1]
        await pilot.press("down", "ctrl+d")
        await until(pilot, lambda: isinstance(app.screen, Confirm))
        await pilot.press("y")
        await until(pilot, lambda: library.asked == ["remove the copies of ollama:packed"])


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
