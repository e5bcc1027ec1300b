"""``@file`` in a message: what is taken for a file, what stays text, what goes along."""

from __future__ import annotations

from pathlib import Path

import pytest

from localrt.tui.commands import completion, mentions, suggestions, written
from tests.tui import screen
from tests.tui.conftest import asked, running, until
from tests.tui.fakes import FakeModel


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes.txt").write_text("milk\n")
    (tmp_path / "Makefile").write_text("all:\n")
    (tmp_path / "two words.md").write_text("# Two\n")
    (tmp_path / "novel").mkdir()
    (tmp_path / "novel" / "one.md").write_text("It was dark.\n")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("What is in @notes.txt?", ["notes.txt"]),
        ("(@novel/one.md) and @Makefile, please", ["novel/one.md", "Makefile"]),
        ('@"two words.md" is short', ["two words.md"]),
        ("see @nowhere.txt and @no/such", ["nowhere.txt", "no/such"]),
        ("mail ann@notes.txt, or @ann", []),
        ("what is in @novel, and in @novel/?", ["novel", "novel/"]),
        ("`@notes.txt` and\n```\n@notes.txt\n```", []),
        ("```python\n@notes.txt", []),
        ("@app.route('/')\ndef index(): ...\n@property\n@pytest.fixture", []),
        ("meet @ 5, a @@ b", []),
    ],
)
def test_mentions(text: str, named: list[str]) -> None:
    assert [mention.path for mention in mentions(text)] == named


@pytest.mark.usefixtures("files")
def test_complete_mentions() -> None:
    def lines(text: str) -> list[str]:
        return [each.line for each in suggestions(text)]

    assert lines("read @no") == ["read @notes.txt ", "read @novel/"]
    assert lines("read @novel/") == ["read @novel/ ", "read @novel/one.md "]
    assert lines("@tw") == lines('@"tw') == ['@"two words.md" ']
    assert lines("read @notes.txt") == lines("ann@no") == lines("`@no") == []
    assert completion("read @novel/o") == "ne.md "
    assert [mention.path for mention in mentions(written("two words.md"))] == ["two words.md"]


@pytest.mark.usefixtures("files")
async def test_mentioned_file(model: FakeModel) -> None:
    async with running(model) as (app, pilot):
        composer = screen.composer(app)
        await pilot.press(*"In @no")
        await until(pilot, lambda: screen.menu(app) == ["@notes.txt", "@novel/"])
        await pilot.press("down", "enter")
        assert composer.text == "In @novel/", "Enter takes the row and sends nothing"
        await until(pilot, lambda: screen.menu(app) == ["@novel/", "@novel/one.md"])
        await pilot.press("down", "enter")
        assert composer.text == "In @novel/one.md "
        await pilot.press(*"?")
        await asked(pilot, "")
        sent = model.last_chat.messages[0]["content"]
        assert sent == "In novel/one.md:\n```md\nIt was dark.\n```\n ?"
        assert "▸ novel/one.md, 13 B" in screen.shown(app)
        await pilot.press(*"List @novel")
        await pilot.press("enter")
        assert composer.text == "List @novel/"
        await asked(pilot, "")
        sent = model.last_chat.messages[2]["content"]
        assert sent == "List Files in novel/:\n```\none.md (13 B)\n```\n"
        Path("old.txt").write_bytes("é".encode("latin-1"))
        await asked(pilot, "Read @old.txt")
        assert "old.txt is not UTF-8: it was read as cp1252." in screen.notices(app)


@pytest.mark.usefixtures("files")
async def test_missing_file(model: FakeModel) -> None:
    async with running(model) as (app, pilot):
        for _ in range(2):
            await screen.say(pilot, "" if screen.composer(app).text else "Read @nowhere.txt now")
            await until(pilot, lambda: screen.composer(app).text == "Read @nowhere.txt now")
            await until(pilot, lambda: screen.notices(app, "error"))
        assert screen.users(app) == []
        (problem,) = screen.notices(app, "error")
        assert problem.startswith("cannot read nowhere.txt: No such file")
        assert "`@nowhere.txt` in backticks is sent as text" in problem
        screen.composer(app).put("")
        await asked(pilot, "Is `@nowhere.txt` there, ann@home.org?")
        assert screen.users(app) == ["Is `@nowhere.txt` there, ann@home.org?"]
