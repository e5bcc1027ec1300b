"""What helps with writing: labels for long texts and files, the editor, the command menu."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.events import Key, Paste

from localrt.errors import LocalrtError, OptionError, StorageError
from localrt.tui import ChatApp
from localrt.tui.chat.blocks import UserTurn
from localrt.tui.chat.editor import edited
from localrt.tui.conversation.attachments import (
    LARGEST_FILE,
    Attachments,
    Draft,
    Fold,
    read_attachment,
    read_folds,
)
from tests.tui import screen
from tests.tui.conftest import cleared, running, until
from tests.tui.fakes import FakeModel
from tests.tui.screen import idle

LONG = "".join(f"line {n}\n" for n in range(30))


# -- attachments ----------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.text(max_size=20), st.text(min_size=1, max_size=40)), max_size=4))
def test_labels_expand_and_fold_again(parts: list[tuple[str, str]]) -> None:
    attachments = Attachments()
    typed = sent = ""
    for written, pasted in parts:
        written = written.replace("[", "(")
        typed += written + attachments.add("pasted", pasted)
        sent += written + pasted
    draft = attachments.expanded(typed)
    assert draft.text == sent
    assert [sent[fold.start : fold.end] for fold in draft.folds] == [text for _, text in parts]
    again = Attachments()
    assert again.expanded(again.folded(draft)).text == sent


def test_folds_that_make_no_sense_are_left_out() -> None:
    assert read_folds([[0, 5, "a"], [7, 9, "b"]], 9) == (Fold(0, 5, "a"), Fold(7, 9, "b"))
    assert read_folds([[3, 1, "a"], [0, 99, "b"], "x", [1, 2], None], 9) == ()
    assert read_folds("no list", 9) == ()


async def test_long_pastes_and_files_are_folded_under_a_label(
    model: FakeModel, tmp_path: Path
) -> None:
    path = tmp_path / "notes.py"
    path.write_text("print('```')\n")
    async with running(model) as (app, pilot):
        composer = screen.composer(app)

        async def paste() -> None:
            app.post_message(Paste(LONG))
            await pilot.pause()

        await pilot.press(*"See")
        await paste()
        assert composer.text == "See [pasted, 30 lines] "
        await pilot.press("enter")
        await until(pilot, lambda: screen.answers(app) and idle(app))
        assert model.last_chat.messages[0]["content"] == "See " + LONG.rstrip("\n") + "\n"
        assert "▸ pasted, 30 lines" in screen.shown(app)
        assert "line 29" not in screen.shown(app)
        await pilot.press("up")
        assert composer.text == "See [pasted, 30 lines]"
        await pilot.press("down", "ctrl+t")
        assert "line 29" in screen.shown(app)

        # Backspace takes a label, Tab unfolds it.
        await paste()
        await pilot.press("backspace", "backspace")
        assert composer.text == ""
        await paste()
        await pilot.press("backspace", "tab")
        assert composer.text == LONG

        await cleared(pilot)
        await screen.say(pilot, f"/attach {path}")
        await until(pilot, lambda: "[notes.py" in composer.text)
        await pilot.press(*"What?", "enter")
        await until(pilot, lambda: screen.answers(app) and idle(app))
        sent = model.last_chat.messages[0]["content"]
        assert sent == "notes.py:\n````py\nprint('```')\n````\n What?"

        # Refused messages come back with their labels.
        model.answer, model.error = [], StorageError("too long")
        await paste()
        await pilot.press("enter")
        await until(pilot, lambda: screen.notices(app, "error"))
        assert composer.text == "[pasted, 30 lines]"


def test_what_cannot_be_attached(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\x7fELF\x00\x01")
    (tmp_path / "latin").write_bytes("é".encode("latin-1"))
    (tmp_path / "large").write_bytes(b"a" * (LARGEST_FILE + 1))
    for name in ("binary", "latin", "large", "."):
        with pytest.raises(OptionError):
            read_attachment(str(tmp_path / name))
    with pytest.raises(OptionError):
        read_attachment("")
    with pytest.raises(StorageError, match="cannot read"):
        read_attachment(str(tmp_path / "nowhere"))
    if Path("/dev/zero").exists():
        with pytest.raises(OptionError, match="regular"):
            read_attachment("/dev/zero")


def test_a_fold_is_wrapped_with_its_text() -> None:
    turn = UserTurn("a" * 50, folds=Draft("", (Fold(10, 40, "middle"),)).folds)
    assert turn.shown().plain == "a" * 10 + "▸ middle" + "a" * 10
    turn.toggle()
    assert turn.shown().plain == "a" * 50


# -- the editor ------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script as the editor")
def test_text_is_what_the_editor_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "editor"
    script.write_text('#!/bin/sh\nprintf " more\\n" >> "$2"\n')
    script.chmod(0o755)
    monkeypatch.setenv("VISUAL", f"{script} --wait")
    assert edited("some") == "some more"
    script.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(LocalrtError, match="status 3"):
        edited("some")
    monkeypatch.setenv("VISUAL", "no-such-editor-anywhere")
    with pytest.raises(OptionError, match="no-such-editor"):
        edited("some")


async def test_the_editor_gets_the_terminal(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    suspended = []

    @contextmanager
    def suspend(app: ChatApp) -> Iterator[None]:
        suspended.append(app)
        yield

    async with running(model) as (app, pilot):
        await pilot.press("ctrl+g")  # a test has no terminal to give away
        await until(pilot, lambda: bool(screen.notices(app, "error")))
        monkeypatch.setattr(ChatApp, "suspend", suspend)
        monkeypatch.setattr("localrt.tui.chat.screen.edited", lambda text: text + " and more")
        for keys in (["ctrl+g"], ["ctrl+x", "ctrl+e"]):
            screen.composer(app).put("")
            await pilot.press(*"Hi", *keys)
            await until(pilot, lambda: screen.composer(app).text == "Hi and more")
        assert suspended == [app, app]


# -- the menu --------------------------------------------------------------------------------------


async def test_the_menu_is_walked_and_chosen_from(
    model: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "report.txt").write_text("x")
    monkeypatch.chdir(tmp_path)
    async with running(model) as (app, pilot):
        composer = screen.composer(app)
        await pilot.press("/", "e")
        assert screen.menu(app) == ["/edit", "/editor", "/export [PATH]"]
        await pilot.press("down", "down", "tab")
        assert composer.text == "/export "
        await pilot.press("escape")
        assert screen.menu(app) == []
        composer.put("/att")
        await pilot.pause()
        await pilot.press("enter")
        assert composer.text == "/attach ", "it needs a path"
        await pilot.press(*"re", "tab")
        assert composer.text == "/attach report.txt"
        composer.put("/syst")
        await pilot.pause()
        await pilot.press("enter")
        assert "No system prompt" in screen.notices(app)[-1]
        # Keys may come in a burst.
        for key in ("/", "a", "t", "t", "tab", "r", "e", "tab", "enter"):
            app.post_message(Key(key, key if len(key) == 1 else None))
        await until(pilot, lambda: "[report.txt" in composer.text)
