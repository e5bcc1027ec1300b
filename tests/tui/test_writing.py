"""What helps with writing: labels for long texts and files, ``@file``, the editor, the menu."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.events import Key, Paste

from localrt.common.errors import LocalrtError, OptionError, StorageError
from localrt.tui import ChatApp
from localrt.tui.chat.composer import edited
from localrt.tui.commands import completion, suggestions
from localrt.tui.conversation.attachments import (
    Attachments,
    Fold,
    SentMessage,
    read_attachment,
    read_folds,
)
from localrt.tui.mentions import as_mention, mentions
from tests.tui import screen
from tests.tui.conftest import asked, cleared, running, until
from tests.tui.fakes import FakeModel
from tests.tui.screen import idle

LONG = "".join(f"line {n}\n" for n in range(30))


# -- attachments ----------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.text(max_size=20), st.text(min_size=1, max_size=40)), max_size=4))
def test_labels_round_trip(parts: list[tuple[str, str]]) -> None:
    attachments = Attachments()
    typed = sent = ""
    for text, pasted in parts:
        text = text.replace("[", "(")
        typed += text + attachments.add("pasted", pasted)
        sent += text + pasted
    draft = attachments.expanded(typed)
    assert draft.text == sent
    assert [sent[fold.start : fold.end] for fold in draft.folds] == [text for _, text in parts]
    again = Attachments()
    assert again.expanded(again.folded(draft)).text == sent


def test_bad_folds() -> None:
    assert read_folds([[0, 5, "a"], [7, 9, "b"]], 9) == (Fold(0, 5, "a"), Fold(7, 9, "b"))
    assert read_folds([[3, 1, "a"], [0, 99, "b"], "x", [1, 2], None], 9) == ()
    assert read_folds("no list", 9) == ()


async def test_long_pastes(model: FakeModel, tmp_path: Path) -> None:
    path = tmp_path / "notes.py"
    path.write_bytes(b"print('```')\n")
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
        for keys in (["tab"], ["backspace", "tab"]):  # after the space that follows it, too
            composer.put("")
            await paste()
            await pilot.press(*keys)
            assert composer.text.rstrip() == LONG.rstrip()

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


def test_cannot_attach(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\x7fELF\x00\x01")
    (tmp_path / "picture").write_bytes(b"\x89PNG\r\n\x1a\n\x01\x02\x03")
    for name in ("binary", "picture"):
        with pytest.raises(OptionError):
            read_attachment(str(tmp_path / name))
    with pytest.raises(OptionError):
        read_attachment("")
    with pytest.raises(StorageError, match="cannot read"):
        read_attachment(str(tmp_path / "nowhere"))
    if Path("/dev/zero").exists():
        with pytest.raises(OptionError, match="regular"):
            read_attachment("/dev/zero")


@pytest.mark.parametrize(
    ("data", "text", "encoding"),
    [
        ("é".encode(), "é", ""),
        ("é".encode("utf-8-sig"), "é", ""),
        ("é".encode("utf-16"), "é", "utf-16"),
        (b"\xfe\xff" + "é".encode("utf-16-be"), "é", "utf-16"),
        ("é".encode("utf-32"), "é", "utf-32"),
        ("naïve\n".encode("utf-16-le"), "naïve", "utf-16-le"),
        ("naïve\n".encode("utf-16-be"), "naïve", "utf-16-be"),
        ("“naïve” — 5 €".encode("cp1252"), "“naïve” — 5 €", "cp1252"),
    ],
)
def test_encodings(tmp_path: Path, data: bytes, text: str, encoding: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(data)
    file = read_attachment(str(path))
    assert file.text == f"a.txt:\n```txt\n{text}\n```\n"
    told = f"a.txt is not UTF-8: it was read as {encoding}." if encoding else ""
    assert file.note == told


def test_system_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("locale.getpreferredencoding", lambda setlocale: "shift_jis")
    (tmp_path / "a.txt").write_bytes("日本語".encode("shift_jis"))
    file = read_attachment(str(tmp_path / "a.txt"))
    assert "日本語" in file.text
    assert "shift_jis" in file.note


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("one.py", "[one.py, 10 B]"),
        ("pkg/one.py", "[pkg/one.py, 2 lines]"),
        ("pkg", "[pkg/, 2 files]"),
        ("pkg/", "[pkg/, 2 files]"),
        ("empty", "[empty/, 0 files]"),
        ("{root}/pkg/one.py", "[one.py, 2 lines]"),
    ],
)
def test_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, label: str) -> None:
    for folder in ("pkg/sub", "pkg/.git", "empty"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "one.py").write_bytes(b"print('')\n")
    (tmp_path / "pkg" / "one.py").write_bytes(b"a\nb\n")
    (tmp_path / "pkg" / "sub" / "two.py").write_bytes(b"a\n")
    (tmp_path / "pkg" / ".git" / "config").write_bytes(b"a\n")
    monkeypatch.chdir(tmp_path)
    file = read_attachment(path.format(root=tmp_path))
    assert Attachments().add_file(file) == label
    if path.startswith("pkg") and "one" not in path:
        listed = "Files in pkg/:\n```\none.py (4 B)\nsub/two.py (2 B)\n```\n"
        texts = "\npkg/one.py:\n```py\na\nb\n```\n\npkg/sub/two.py:\n```py\na\n```\n"
        assert file.text == listed + texts


def test_same_label() -> None:
    attachments = Attachments()
    mine = attachments.add("a.py", "mine\n", "1 line")
    theirs = SentMessage("theirs\n", (Fold(0, 7, "a.py, 1 line"),))
    assert attachments.folded(theirs) == "[a.py 2, 1 line]"
    assert attachments.text_of(mine) == "mine\n"


# -- the editor ------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script as the editor")
def test_editor_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_editor(model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_menu(model: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert composer.text == "/attach ", "it takes a path"
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


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes.txt").write_text("milk\n")
    (tmp_path / "Makefile").write_text("all:\n")
    (tmp_path / "two words.md").write_text("# Two\n")
    (tmp_path / "novel").mkdir()
    (tmp_path / "novel" / "one.md").write_bytes(b"It was dark.\n")
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
    assert [mention.path for mention in mentions(as_mention("two words.md"))] == ["two words.md"]


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
        listed = "Files in novel/:\n```\none.md (13 B)\n```\n"
        assert sent == f"List {listed}\nnovel/one.md:\n```md\nIt was dark.\n```\n"
        Path("old.txt").write_bytes("é".encode("latin-1"))
        await asked(pilot, "Read @old.txt")
        assert "old.txt is not UTF-8: it was read as cp1252." in screen.notices(app)


@pytest.mark.usefixtures("files")
async def test_missing_file(model: FakeModel) -> None:
    async with running(model) as (app, pilot):
        for _ in range(2):
            await screen.say(pilot, "" if screen.composer(app).text else "Read @nowhere.txt now")
            await until(pilot, lambda: screen.composer(app).text == "Read @nowhere.txt now")
            await until(pilot, lambda: screen.refused(app))
        assert screen.users(app) == []
        (problem,) = screen.refused(app)
        assert problem.startswith("cannot read nowhere.txt: No such file")
        assert "`@nowhere.txt` in backticks is sent as text" in problem
        screen.composer(app).put("")
        await asked(pilot, "Is `@nowhere.txt` there, ann@home.org?")
        assert screen.users(app) == ["Is `@nowhere.txt` there, ann@home.org?"]
