"""What is typed: commands, names of files, keys, pastes, undo, completions, the editor."""

from __future__ import annotations

import os
import sys
import unicodedata
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from textual.events import Key, Paste
from textual.pilot import Pilot

from localrt import History
from localrt.common.errors import OptionError
from localrt.engine.option_help import OPTION_HELP
from localrt.engine.options import OPTION_NAMES
from localrt.tui import ChatApp
from localrt.tui.chat.composer import edited
from localrt.tui.chat.screen import ChatScreen
from localrt.tui.commands import (
    COMMANDS,
    PLAIN_COMMANDS,
    Command,
    completion,
    read_line,
    suggestions,
)
from localrt.tui.inputs import Input
from localrt.tui.mentions import as_mention, mentions
from localrt.tui.plain import PlainChat
from localrt.tui.screens.dialogs import Choose, help_page
from localrt.tui.terminal import PasteParser
from localrt.tui.text import pasted
from tests.tui import screen
from tests.tui.conftest import asked, running, until
from tests.tui.fakes import FakeModel
from tests.tui.test_models import PREVIEWS, FakeLibrary

# -- lines -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("hello /set", "hello /set"),
        ("//etc/hosts", "/etc/hosts"),
        ("/SET  temperature   0.2 ", Command("set", "temperature   0.2")),
        ("/system Be brief.\nBe kind.", Command("system", "Be brief.\nBe kind.")),
        ("/ ", Command("", "")),
    ],
)
def test_reading(typed: str, read: Command | str) -> None:
    assert read_line(typed) == read


def test_tables_of_commands_and_options() -> None:
    for entry in COMMANDS:
        room, _, action = (entry.action or entry.name).rpartition(".")
        assert entry.run or hasattr(ChatApp if room else ChatScreen, f"action_{action}")
    for entry in PLAIN_COMMANDS:
        assert entry.run or hasattr(PlainChat, f"_do_{entry.name}")
    not_in_the_app = {"context_tokens", "logprobs", "min_indent", "line_seconds"}
    not_in_the_app |= {"tool_choice", "parallel_tool_calls"}
    assert set(OPTION_HELP) == set(OPTION_NAMES) - not_in_the_app
    text = help_page().plain
    assert all(entry.usage in text for entry in COMMANDS)
    assert "Ctrl+O" in text


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes.txt").write_text("milk\n")
    (tmp_path / "Makefile").write_text("all:\n")
    (tmp_path / "two words.md").write_text("# Two\n")
    (tmp_path / "novel").mkdir()
    (tmp_path / "novel" / "one.md").write_bytes(b"It was dark.\n")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("files")
def test_completions() -> None:
    def labels(text: str) -> list[str]:
        return [item.label for item in suggestions(text)]

    def lines(text: str) -> list[str]:
        return [each.line for each in suggestions(text)]

    assert labels("/") == [entry.usage for entry in COMMANDS]
    assert labels("/ren") == labels("/rename my") == ["/rename TITLE"]
    assert labels("/set top") == ["top_k", "top_p"]
    assert labels("//s") == labels("s") == labels("/x") == labels("/system a\nb") == []
    assert labels("/attach no") == ["notes.txt", "novel/"]
    for path in ("nowhere/x", "~nobody9/x"):
        assert labels(f"/attach {path}") == ["/attach [PATH]"]
    assert completion("/ne") == "w"
    assert completion("/lo") == "ad "
    assert completion("/set te") == "mperature "
    assert completion("/new") == completion("/") == completion("//cl") == ""
    assert lines("read @no") == ["read @notes.txt ", "read @novel/"]
    assert lines("read @novel/") == ["read @novel/ ", "read @novel/one.md "]
    assert lines("@tw") == lines('@"tw') == ['@"two words.md" ']
    assert lines("read @notes.txt") == lines("ann@no") == lines("`@no") == []
    assert completion("read @novel/o") == "ne.md "
    assert [mention.path for mention in mentions(as_mention("two words.md"))] == ["two words.md"]


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("What is in @notes.txt?", ["notes.txt"]),
        ("(@novel/one.md) and @Makefile, please", ["novel/one.md", "Makefile"]),
        ('@"two words.md" is short', ["two words.md"]),
        ("mail ann@notes.txt, or @ann", []),
        ("what is in @novel, and in @novel/?", ["novel", "novel/"]),
        ("`@notes.txt` and\n```\n@notes.txt\n```", []),
        ("@app.route('/')\ndef index(): ...\n@property\n@pytest.fixture", []),
        ("meet @ 5, a @@ b", []),
    ],
)
def test_mentions(text: str, named: list[str]) -> None:
    assert [mention.path for mention in mentions(text)] == named


@pytest.mark.parametrize(
    "end",
    [
        "\r\n",
        "\x1b[27;5;106~",  # Ctrl+J as tmux writes it with extended keys
        "\x1b[106;5u",
    ],
)
def test_line_ends_of_a_paste(end: str) -> None:
    assert pasted(f"one{end}two") == "one\ntwo"


# -- the editor ------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script as the editor")
def test_editor_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "editor"
    rights = 'ls -ld "$2" "$(dirname "$2")" | cut -c1-10 > rights\n'
    script.write_text(f'#!/bin/sh\n{rights}printf " more\\n" >> "$2"\n')
    script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VISUAL", f"{script} --wait")
    before = os.umask(0)
    assert edited("some") == "some more"
    os.umask(before)
    assert (tmp_path / "rights").read_text("utf-8").split() == ["drwx------", "-rw-------"]
    monkeypatch.setenv("VISUAL", "no-such-editor-anywhere")
    with pytest.raises(OptionError, match="no-such-editor"):
        edited("some")


# -- keys ------------------------------------------------------------------------------------------


async def test_writing(model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    suspended: list[bool] = []
    monkeypatch.setattr(
        "textual.app.App.action_suspend_process", lambda app: suspended.append(True)
    )
    async with running(model) as (app, pilot):
        composer = screen.composer(app)
        await pilot.press("enter", "space", "enter")
        assert screen.users(app) == []  # blank text is not sent
        composer.put("")
        app.post_message(Paste("one\rtwo\n"))
        await pilot.pause()
        assert composer.text == "one\ntwo\n"
        assert screen.users(app) == []
        for key in ("ctrl+j", "shift+enter", "alt+enter"):
            composer.put("")
            await pilot.press("a", key, "b")
            assert composer.text == "a\nb"
        await pilot.press("enter")
        await until(pilot, lambda: screen.users(app) == ["a\nb"])

        # An undo of a paste of several lines, and its end.
        composer.put("before ")
        lines = "\n".join(["x"] * 9)
        app.post_message(Paste(lines))
        await pilot.press("alt+z")
        assert composer.text == "before "
        await pilot.press("ctrl+y")
        assert composer.text == f"before {lines}"

        # Ctrl+Z suspends, from windows too.
        for count, window in enumerate(("", "f1"), 1):
            await pilot.press(*filter(None, [window]), "ctrl+z")
            assert len(suspended) == count or os.name == "nt"


async def test_prompt_history(model: FakeModel) -> None:
    async with running(model) as (app, pilot):
        for text in ("first", "second\nline", "second\nline"):
            await screen.say(pilot, text)
        composer = screen.composer(app)
        await pilot.press(*"draft")
        places = ["second\nline", "first", "first"]
        for key, text in zip(["up"] * 3, places, strict=True):
            await pilot.press(key)
            assert composer.text == text
        await pilot.press("down", "up", "up")  # up moves inside the text first
        assert composer.text == "first"
        await pilot.press("down", "down")
        assert composer.text == "draft"


@pytest.mark.usefixtures("files")
async def test_menu(model: FakeModel) -> None:
    async with running(model) as (app, pilot):
        composer = screen.composer(app)
        await pilot.press("/", "e")
        assert screen.menu(app) == ["/edit", "/editor", "/export [PATH]"]
        await pilot.press("down", "down", "tab")
        assert composer.text == "/export "
        await pilot.press("escape")
        assert screen.menu(app) == []
        composer.put("/syst")
        await pilot.pause()
        await pilot.press("enter")
        assert "No system prompt" in screen.notices(app)[-1]
        composer.put("")
        # Keys may come in a burst.
        for key in ("/", "a", "t", "t", "tab", "n", "o", "t", "tab", "enter"):
            app.post_message(Key(key, key if len(key) == 1 else None))
        await until(pilot, lambda: "[notes.txt" in composer.text)

        # Names of files: Enter takes the row, and sends nothing.
        composer.put("")
        await pilot.press(*"In @no")
        await until(pilot, lambda: screen.menu(app) == ["@notes.txt", "@novel/"])
        await pilot.press("down", "enter")
        assert composer.text == "In @novel/"
        await until(pilot, lambda: screen.menu(app) == ["@novel/", "@novel/one.md"])
        await pilot.press("down", "enter")
        assert composer.text == "In @novel/one.md "
        await pilot.press(*"?")
        await asked(pilot, "")
        sent = model.last_chat.messages[0]["content"]
        assert sent == "In novel/one.md:\n```md\nIt was dark.\n```\n ?"
        assert "▸ novel/one.md, 13 B" in screen.shown(app)


# -- letters ---------------------------------------------------------------------------------------

DEL, LEFT, RIGHT, DELETE, HOME = "\x7f", "\x1b[D", "\x1b[C", "\x1b[3~", "\x1b[H"
TYPED = {"full-width space": "\u3000", "joiner": "\u200d", "private use": "\ue0b0"}
LETTERS = {
    "accent": "e\u0301",
    "family": "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "flag": "\U0001f1e9\U0001f1ea",
    "keycap": "1\ufe0f\u20e3",
    "jamo": "\u1112\u1161\u11ab",
    "plain": "x",
}
ORDER = {
    "hangul": (f"안{DEL}안녕{DEL}녕하", "안녕하"),
    **{f"typed {name}": (f"a{text}b", f"a{text}b") for name, text in TYPED.items()},
    **{f"backspace {name}": (f"a{text}{DEL}b", "ab") for name, text in LETTERS.items()},
    **{f"left {name}": (f"a{t}{LEFT}b", f"ab{t}") for name, t in LETTERS.items()},
    **{f"right {name}": (f"{t}a{HOME}{RIGHT}b", f"{t}ba") for name, t in LETTERS.items()},
    **{f"delete {name}": (f"{t}a{HOME}{DELETE}b", "ba") for name, t in LETTERS.items()},
}


async def test_typed_in_one_read(model: FakeModel) -> None:
    """In a field of several lines, and of one."""
    async with running(model) as (app, pilot):
        for key in ("escape", "ctrl+f"):
            await pilot.press(key)
            field = app.focused
            name = "value" if isinstance(field, Input) else "text"
            for what, (typed, expected) in ORDER.items():
                for event in list(PasteParser().feed(typed)):
                    app.post_message(event)
                await pilot.pause()
                assert getattr(field, name) == expected, what
                setattr(field, name, "")
            app.post_message(Paste(f"<{HOSTILE}>"))
            await pilot.pause()
            written = getattr(field, name)
            assert written.startswith("<")
            assert not harmful(written)


# -- control characters ----------------------------------------------------------------------------

HOSTILE = "\x1b]2;title\x07 \x9d52;c;eA==\x9c \x7f \x85 \u202e\u2066\u2028abc"
PLACES = {
    "conversation": (),
    "what an editor wrote": ("ctrl+g",),
    "conversations": ("ctrl+o",),
    "name": ("f2",),
    "models": ("f4",),
    "system prompt": ("f5", *["down"] * 3, "enter"),
    "question": (*"/delete", "enter"),
}


def harmful(text: str) -> bool:
    return any(unicodedata.category(c) == "Cc" or c in "\u202e\u2066\u2028" for c in text)


async def left(app: ChatApp, pilot: Pilot[Any]) -> None:
    """Close windows and the find bar, and empty the composer."""
    while app.screen is not app.chat or app.focused is not screen.composer(app):
        await pilot.press("escape")
    await pilot.press("escape")
    screen.composer(app).put("")
    await pilot.pause()


async def test_controls_of_other_texts_are_not_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages, titles, names of models, what an editor wrote: of files that others made."""
    library = FakeLibrary(monkeypatch)
    library.here = [replace(library.here[0], name=HOSTILE)]
    library.previews = {HOSTILE: PREVIEWS["smollm2"]}
    with History(tmp_path / "h.db") as history:
        conversation = history.new(model=HOSTILE, system=HOSTILE)
        conversation.set(title=HOSTILE)
        conversation.add("user", HOSTILE)
        conversation.add("assistant", HOSTILE)
    monkeypatch.setattr(ChatApp, "suspend", nullcontext)
    monkeypatch.setattr("localrt.tui.chat.screen.edited", lambda text: HOSTILE)
    model = FakeModel(name=HOSTILE)

    def drawn() -> str:
        return "".join(strip.text for strip in screen.lines(app))

    async with running(
        model,
        load_by_name=lambda name, progress: model,
        history=lambda: History(tmp_path / "h.db"),
        resume=True,
    ) as (app, pilot):
        for place, keys in PLACES.items():
            await pilot.press(*keys)
            await until(pilot, lambda: "]2;title" in drawn())
            text = drawn()
            assert text.count("]2;title") == text.count("\ufffd]2;title"), place
            assert not harmful(text), place
            await left(app, pilot)
        # Of what nobody cleaned, the terminal gets no control either.
        await app.push_screen(Choose("<\x1b]2;title\x07>", [("a", "a")]))
        await pilot.pause()
        assert "<]2;title>" in drawn()


# -- the palette -----------------------------------------------------------------------------------
