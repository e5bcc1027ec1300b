"""Documents in messages: read, searched if they are too long, shown under their labels."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.documents.samples import RED, pdf
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
        assert told == "short.pdf: 1 of 2 pages have no text, and are not shown."


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
        await until(pilot, lambda: screen.notices(app, "error"))
        assert "bad.pdf is not a PDF file that can be read" in screen.notices(app, "error")[0]
        assert screen.composer(app).text == "Read @bad.pdf"


def test_plain_chat(files: Path) -> None:
    model = FakeModel(ctx=1000)
    lines = ["/attach short.pdf", "What is it?", "@long.pdf More about topic17?"]
    text = plain_chat(FakeLoader(model), files, lines)
    short, long = model.given("user")
    assert short.startswith("short.pdf:\n```\n[page 1]\nOne")
    assert "[long.pdf, page 18]\nPage about topic17." in long
    assert "long.pdf does not fit the context: the model gets" in text
