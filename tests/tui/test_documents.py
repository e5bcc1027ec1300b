"""Documents in messages: read, searched if they are too long, shown under their labels."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from localrt.documents import index, reading
from localrt.documents.kinds import Page
from localrt.tui import ChatApp
from localrt.tui.loading_line import WorkLine
from tests.documents.samples import RED, pdf
from tests.documents.test_index import Meanings
from tests.models.tiny_encoders import ENCODERS, save_encoder, word_pieces
from tests.tui import screen
from tests.tui.conftest import asked, plain_chat, running, until
from tests.tui.fakes import FakeLoader, FakeModel

LONG = pdf(*(f"Page about topic{n}. " + "More words here. " * 20 for n in range(40)))


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    (tmp_path / "short.pdf").write_bytes(pdf("One", RED))
    (tmp_path / "long.pdf").write_bytes(LONG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("files")
async def test_document(model: FakeModel) -> None:
    async with running(model) as (app, pilot):
        await asked(pilot, "Read @short.pdf")
        text = "short.pdf:\n```\n[page 1]\nOne\n\n[page 2]\n[no text]\n```\n"
        assert model.given("user") == [f"Read {text}"]
        assert "▸ short.pdf, 2 pages" in screen.shown(app)
        (told,) = (line for line in screen.notices(app) if "short.pdf" in line)
        assert told == "short.pdf: 1 of 2 pages have little or no text, and are not shown."


@pytest.mark.usefixtures("files")
async def test_pages_that_are_pictures() -> None:
    model = FakeModel(sees=True)
    async with running(model) as (_, pilot):
        await asked(pilot, "Read @short.pdf now")
        first, picture, last = model.given("user")[0]
        assert first["text"].endswith("[no text: see its picture]\n```\n ")
        assert picture["image"].startswith(b"\xff\xd8")
        assert last["text"] == " now"


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("attached", [False, True])
async def test_long_document(attached: bool) -> None:
    model = FakeModel(ctx=1000)
    async with running(model) as (app, pilot):
        if attached:
            await screen.say(pilot, "/attach long.pdf")
            await until(pilot, lambda: "[long.pdf, 40 pages]" in screen.composer(app).text)
        await asked(pilot, "More about topic17?" if attached else "More about topic17? @long.pdf")
        (sent,) = model.given("user")
        assert "long.pdf (40 pages) is too long to show." in sent
        assert "[long.pdf, page 18]\nPage about topic17." in sent
        assert len(sent.split()) < 800
        assert any("does not fit the context" in line for line in screen.notices(app))
        assert "pieces of 40 pages" in screen.shown(app)
        assert "page 18" not in screen.shown(app)
        await pilot.press("ctrl+t")
        assert "[long.pdf, page 18]" in screen.shown(app), "where the pieces are from"


async def test_bad_document(model: FakeModel, files: Path) -> None:
    (files / "bad.pdf").write_bytes(b"%PDF-1.7")
    async with running(model) as (app, pilot):
        await screen.say(pilot, "Read @bad.pdf")
        await until(pilot, lambda: screen.refused(app))
        assert "bad.pdf is not a PDF file that can be read" in screen.refused(app)[0]
        assert screen.composer(app).text == "Read @bad.pdf"


def test_plain_chat(files: Path) -> None:
    model = FakeModel(ctx=1000)
    lines = ["/attach short.pdf", "What is it?", "@long.pdf More about topic17?"]
    text = plain_chat(FakeLoader(model), files, lines)
    short, long = model.given("user")
    assert short.startswith("short.pdf:\n```\n[page 1]\nOne")
    assert "[long.pdf, page 18]\nPage about topic17." in long
    assert "long.pdf does not fit the context: the model gets" in text


class Opened(Meanings):
    """Opens itself, and counts how often it is closed."""

    closed = 0

    def __call__(self) -> Opened:
        return self

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_error: object) -> None:
        self.closed += 1


@pytest.mark.usefixtures("files")
async def test_search_by_meaning() -> None:
    model, embedder = FakeModel(ctx=1000), Opened("m")
    async with running(model, embedder=embedder) as (app, pilot):
        await asked(pilot, "Zebra? @short.pdf")
        assert not embedder.embedded
        await asked(pilot, "Zebra? @long.pdf")
        assert any("pieces matching the message" in line for line in screen.notices(app))
        assert (embedder.embedded, embedder.closed) == (40 + 1, 1)


def test_plain_search_by_meaning(files: Path) -> None:
    embedder, load = Opened("m"), FakeLoader(FakeModel(ctx=1000))
    text = plain_chat(load, files, ["Zebra? @long.pdf"], embedder=embedder)
    assert "pieces matching the message" in text
    assert (embedder.embedded, embedder.closed) == (40 + 1, 1)


@pytest.mark.parametrize("there", [True, False])
async def test_embedding_model_of_the_settings(files: Path, there: bool) -> None:
    (files / "config.toml").write_text('embedding_model = "./encoder"\n')
    if there:
        save_encoder(ENCODERS["bert"], files / "encoder")
        word_pieces(files / "encoder")
    async with running(FakeModel(ctx=1000), config=files) as (app, pilot):
        await asked(pilot, "Zebra? @short.pdf")
        assert not screen.refused(app)
        await screen.say(pilot, "Zebra? @long.pdf")
        if there:
            await until(pilot, lambda: len(screen.answers(app)) == 2 and screen.idle(app))
            assert any("pieces matching the message" in line for line in screen.notices(app))
        else:
            await until(pilot, lambda: screen.refused(app))
            assert "no such file or folder: ./encoder" in screen.refused(app)[-1]
            assert screen.composer(app).text == "Zebra? @long.pdf"


QUESTION = "More about topic17? @long.pdf"


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch, where: ModuleType) -> Iterator[threading.Event]:
    """After its second page, a document is read on when this is set."""
    pages_of, event = where.pages_of, threading.Event()

    def pages(*arguments: object, **options: object) -> Iterator[Page]:
        for page in pages_of(*arguments, **options):
            yield page
            if page.number == 2:
                event.wait()

    monkeypatch.setattr(where, "pages_of", pages)
    yield event
    event.set()


def progress(app: ChatApp) -> str:
    """The line of the work that runs."""
    line = app.query_one(WorkLine)
    return str(line.render()) if line.display else ""


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("where", "key"),
    [(reading, "escape"), (index, "escape"), (index, "ctrl+n")],
    ids=["reading", "indexing", "another conversation"],
)
async def test_reading_is_shown_and_stopped(held: threading.Event, key: str) -> None:
    model = FakeModel(ctx=1000)
    async with running(model) as (app, pilot):
        composer = screen.composer(app)
        await screen.say(pilot, QUESTION)
        await until(pilot, lambda: "5%  2 of 40 pages" in progress(app))
        assert "Esc" in screen.hint(app)
        await pilot.press(*"next")
        assert composer.text == "next", "the app takes keys meanwhile"
        await pilot.press("enter")
        await until(pilot, lambda: "Not yet" in screen.hint(app))
        assert composer.text == "next", "messages keep their order"
        await pilot.press(key)
        await until(pilot, lambda: composer.text == f"{QUESTION}\n\nnext")
        assert screen.refused(app) == ["stopped: nothing was sent"]
        assert not progress(app)
        assert not model.seen
        held.set()
        await asked(pilot, "")
        assert "[long.pdf, page 18]\nPage about topic17." in model.given("user")[0]
        assert model.given("user")[0].endswith("\n\nnext")


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("where", [index])
async def test_the_app_goes_on_while_files_are_read(held: threading.Event) -> None:
    model = FakeModel(ctx=1000)
    async with running(model) as (app, pilot):
        model.hold()
        await screen.say(pilot, "First")
        await screen.say(pilot, QUESTION)
        await until(pilot, lambda: progress(app))
        model.release()
        await until(pilot, lambda: screen.answers(app) == ["Hello there."] and screen.idle(app))
        await screen.say(pilot, "/retry")
        await until(pilot, lambda: screen.notices(app, "error"))
        assert "/retry has to wait" in screen.notices(app, "error")[-1]
        assert screen.composer(app).text == "/retry"
        held.set()
        await until(pilot, lambda: len(screen.answers(app)) == 2 and screen.idle(app))
        assert "topic17" in model.given("user")[-1]


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("where", [reading])
async def test_attaching_is_stopped(model: FakeModel, held: threading.Event) -> None:
    async with running(model) as (app, pilot):
        composer = screen.composer(app)
        await screen.say(pilot, "/attach long.pdf")
        await until(pilot, lambda: progress(app))
        await pilot.press("ctrl+c")
        await until(pilot, lambda: composer.text == "/attach long.pdf")
        held.set()
        await pilot.press("enter")
        await until(pilot, lambda: composer.text == "[long.pdf, 40 pages] ")


def test_plain_chat_shows_and_stops(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pages_of = reading.pages_of

    def pages(source: Path, name: str, *options: Any, **more: Any) -> Iterator[Page]:
        for page in pages_of(source, name, *options, **more):
            yield page
            if page.number == 100 and name == "stopped.pdf":
                raise KeyboardInterrupt

    monkeypatch.setattr(reading, "pages_of", pages)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    for name in ("whole", "stopped"):
        (files / f"{name}.pdf").write_bytes(pdf(*["Words"] * 200))
    model = FakeModel()
    lines = ["Read @stopped.pdf", "/attach stopped.pdf", "Read @whole.pdf"]
    text = plain_chat(FakeLoader(model), files, lines)
    assert "Error: the message was not sent\n" in text
    assert "Error: nothing was attached\n" in text
    assert len(model.seen) == 1
    told = capsys.readouterr().err.splitlines()
    assert told[-5:] == [f"Reading whole.pdf: {percent} %" for percent in (0, 25, 50, 75, 100)]
    assert told[:3] == [f"Reading stopped.pdf: {percent} %" for percent in (0, 25, 50)]
