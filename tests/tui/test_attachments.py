"""What a message takes with it: long texts, files, pictures, documents, under their labels."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from textual.events import Paste

from localrt import History, KeptPicture, OptionError, system
from localrt.common.errors import StorageError
from localrt.documents import index, reading
from localrt.documents.kinds import Page
from localrt.history.export import Exporter
from localrt.history.pictures import new_picture
from localrt.tui import ChatApp
from localrt.tui.chat.thumbnails import Thumbnail, cells
from localrt.tui.conversation.attachments import (
    Attachments,
    Fold,
    SentMessage,
    draft_of,
    read_attachment,
    read_folds,
)
from localrt.tui.loading_line import WorkLine
from localrt.tui.mentions import dropped, with_mentions
from tests.documents.samples import RED, pdf
from tests.tui import screen
from tests.tui.conftest import Opening, asked, cleared, running, until
from tests.tui.fakes import FakeLoader, FakeModel
from tests.tui.screen import idle

# -- labels ----------------------------------------------------------------------------------------


def kept(size: tuple[int, int] = (8, 4), color: str = "red") -> KeptPicture:
    return new_picture(file_of(color, size), name="a.png")


def test_labels() -> None:
    attachments = Attachments()
    red, blue = kept(color="red"), kept(color="blue")
    labels = [attachments.add_picture(each) for each in (red, blue, red)]
    assert labels == ["[a.png, 8 x 4]", "[2: a.png, 8 x 4]", "[a.png, 8 x 4]"]
    note = attachments.add("note", "x\ny\n")
    draft = attachments.expanded(f"{note} {labels[0]} to {labels[1]}")
    assert draft.text == "x\ny\n  to "
    assert [(each.place, each.digest) for each in draft.pictures] == [
        (5, red.digest),
        (9, blue.digest),
    ]
    assert attachments.folded(draft) == f"{note} {labels[0]} to {labels[1]}"
    mine = attachments.add("a.py", "mine\n", "1 line")
    theirs = SentMessage("theirs\n", (Fold(0, 7, "a.py, 1 line"),))
    assert attachments.folded(theirs) == "[a.py 2, 1 line]"
    assert attachments.text_of(mine) == "mine\n"
    # What a history says may be damaged.
    assert read_folds([[0, 5, "a"], [3, 1, "a"], [0, 99, "b"], "x"], 9) == (Fold(0, 5, "a"),)


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("one.py", "[one.py, 10 B]"),
        ("pkg/one.py", "[pkg/one.py, 2 lines]"),
        ("pkg", "[pkg/, 2 files]"),
        ("{root}/pkg/one.py", "[one.py, 2 lines]"),
    ],
)
def test_labels_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, label: str
) -> None:
    (tmp_path / "pkg" / "sub").mkdir(parents=True)
    (tmp_path / "one.py").write_bytes(b"print('')\n")
    (tmp_path / "pkg" / "one.py").write_bytes(b"a\nb\n")
    (tmp_path / "pkg" / "sub" / "two.py").write_bytes(b"a\n")
    monkeypatch.chdir(tmp_path)
    assert Attachments().add_file(read_attachment(path.format(root=tmp_path))) == label


def test_cannot_attach(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\x7fELF\x00\x01")
    (tmp_path / "half.png").write_bytes(file_of(size=(90, 90))[:60])
    for name in ("binary", "half.png", ""):
        with pytest.raises(OptionError):
            read_attachment(name and str(tmp_path / name))
    with pytest.raises(StorageError, match="cannot read"):
        read_attachment(str(tmp_path / "nowhere"))


LONG = "".join(f"line {n}\n" for n in range(30))


async def test_long_pastes(model: FakeModel, tmp_path: Path) -> None:
    path = tmp_path / "notes.py"
    path.write_bytes(b"print('```')\n")
    async with running(model) as (app, pilot):
        composer = screen.composer(app)

        async def paste() -> None:
            app.post_message(Paste(LONG.replace("\n", "\r")))
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
        await pilot.press("tab")
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


async def test_named_files(
    model: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with running(model) as (app, pilot):
        await screen.say(pilot, "Read @nowhere.txt now")
        await until(pilot, lambda: screen.refused(app))
        assert screen.composer(app).text == "Read @nowhere.txt now"
        assert screen.users(app) == []
        (problem,) = screen.refused(app)
        assert problem.startswith("cannot read nowhere.txt: No such file")
        assert "`@nowhere.txt` in backticks is sent as text" in problem
        screen.composer(app).put("")
        await asked(pilot, "Is `@nowhere.txt` there, ann@home.org?")
        assert screen.users(app) == ["Is `@nowhere.txt` there, ann@home.org?"]
        Path("old.txt").write_bytes("é".encode("latin-1"))
        await asked(pilot, "Read @old.txt")
        assert "old.txt is not UTF-8: it was read as cp1252." in screen.notices(app)


# -- pictures --------------------------------------------------------------------------------------


def file_of(color: str = "red", size: tuple[int, int] = (8, 4)) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", size, color).save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "my photo.png"
    path.write_bytes(file_of())
    return path


@pytest.fixture
def seeing() -> FakeModel:
    return FakeModel(sees=True)


def parts(*content: str | bytes) -> list[dict[str, Any]]:
    return [
        {"type": "text", "text": each}
        if isinstance(each, str)
        else {"type": "image", "image": each}
        for each in content
    ]


def hold(monkeypatch: pytest.MonkeyPatch, held: Any) -> None:
    """What is in the clipboard."""

    def grab() -> Any:
        if isinstance(held, Exception):
            raise held
        return held

    monkeypatch.setattr("PIL.ImageGrab.grabclipboard", grab)


async def test_pictures(seeing: FakeModel, photo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(seeing) as (app, pilot):
        composer = screen.composer(app)
        await asked(pilot, f'What is in @"{photo}"?')
        (message,) = seeing.seen[0].messages
        assert message["content"] == parts("What is in ", photo.read_bytes(), "?")
        shown = screen.shown(app)
        assert "What is in ▣ my photo.png?" in shown
        assert "my photo.png, 8 x 4, 64 tokens" in shown
        assert "▀" * 8 in shown
        await asked(pilot, "And now?")
        assert [m["role"] for m in seeing.seen[1].messages] == ["user", "assistant", "user"]
        assert seeing.seen[1].messages[0] == message

        # A path that is pasted, or dropped.
        composer.insert("Look:")
        app.post_message(Paste(f"'{photo}' "))
        await until(pilot, lambda: "@" in composer.text)
        assert composer.text == f'Look: @"{photo}" '
        await asked(pilot, "")
        assert seeing.given("user")[-1] == parts("Look: ", photo.read_bytes())

        # One from the clipboard.
        hold(monkeypatch, Image.new("RGB", (8, 4), "red"))
        composer.put("/attach")
        await pilot.press("enter")
        await until(pilot, lambda: "clipboard-" in composer.text)
        await asked(pilot, "")
        (part,) = (p for p in seeing.given("user")[-1] if p["type"] == "image")
        assert Image.open(io.BytesIO(part["image"])).size == (8, 4)


async def test_model_that_cannot_see(model: FakeModel, photo: Path) -> None:
    loader = FakeLoader(model, held=True)
    async with running(loader, ready=False) as (app, pilot):
        await screen.say(pilot, f'What is in @"{photo}"?')
        await until(pilot, lambda: screen.waiting(app))
        loader.gate.set()
        await until(pilot, lambda: screen.refused(app))
        assert screen.composer(app).text == "What is in [my photo.png, 8 x 4]?"
        assert (screen.users(app), model.seen) == ([], [])
        said = "tiny-model cannot see pictures: the message was not sent"
        assert screen.refused(app) == [said]


async def test_earlier_picture_for_model_that_cannot_see(
    seeing: FakeModel, model: FakeModel, photo: Path, opening: Opening
) -> None:
    async with running(seeing, history=opening) as (app, pilot):
        await asked(pilot, f'What is in @"{photo}"?')
    async with running(model, history=opening, resume=True) as (app, pilot):
        assert "of earlier pictures it gets the names" in screen.shown(app)
        await pilot.press("ctrl+r")
        await until(pilot, lambda: screen.refused(app))
        assert "cannot see pictures" in screen.refused(app)[0]
        await asked(pilot, "Really?")
        assert model.seen[0].messages[0]["content"] == "What is in [my photo.png]?"
    async with running(seeing, history=opening, resume=True) as (app, pilot):
        assert "my photo.png, 8 x 4, 64 tokens" in screen.shown(app)
        await asked(pilot, "Sure?")
        first = seeing.seen[-1].messages[0]
        assert first["content"] == parts("What is in ", photo.read_bytes(), "?")


def test_drawing(
    capsys: pytest.CaptureFixture[str], photo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cells(kept((400, 200)), 80) == (40, 10)
    with capsys.disabled():
        out = io.StringIO()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.__stdout__", out)
            lines = Thumbnail(kept((20, 10))).lines(20, "kitty")
    assert [line.cell_length for line in lines] == [20] * 5
    assert out.getvalue().startswith("\x1b_G")
    # A picture that is lost is a line.
    with History(":memory:") as history:
        turn = history.new(model="m").add("user", [{"type": "image", "image": photo}])
        history._database.rows("DELETE FROM turn_picture")
        assert draft_of(turn).captions == ["my photo.png, 8 x 4"]
        assert Thumbnail(turn.pictures[0]).lines(40, "") == []


def escaped(path: Path) -> str:
    """As a shell takes it."""
    text = str(path)
    return f'"{text}"' if system.IS_WINDOWS else text.replace(" ", "\\ ")


def test_paths(photo: Path) -> None:
    other = photo.with_name("b.jpg")
    other.write_bytes(b"")
    path, url = str(photo), photo.as_uri()
    shell = escaped(photo)
    escapes = () if system.IS_WINDOWS else (shell, f"{shell} ")
    for text in (path, f"'{path}'", f'"{path}"', url, f"{url}\n", *escapes):
        assert dropped(text) == [path], text
    assert dropped(f"\"{path}\" '{other}'") == [path, str(other)]
    assert dropped(f"{url}\n{other.as_uri()}") == [path, str(other)]
    for text in ("photo.png", f"What is {shell}", "it's.png", "/nowhere.png", ""):
        assert dropped(text) == [], text
    written = f'@"{photo}"'
    assert with_mentions(path) == written
    assert with_mentions(f"{shell} what is it?") == f"{written} what is it?"
    assert with_mentions(f"Is '{photo}' red?") == f"Is {written} red?"
    for text in (f"`{shell}`", "/export a.png", "see /nowhere.png"):
        assert with_mentions(text) == text


async def test_export(seeing: FakeModel, photo: Path, tmp_path: Path) -> None:
    async with running(seeing) as (app, pilot):
        await asked(pilot, f'@"{photo}" What is it? @"{photo}"')
        conversation = app.state.conversation
        Exporter().export(conversation, conversation.turns, str(tmp_path / "my chat.md"))
        Exporter().export(conversation, conversation.turns, str(tmp_path / "chat.json"))
        await screen.say(pilot, f"/load {tmp_path / 'chat.json'}")
        await until(pilot, lambda: app.state.conversation is not conversation)
        (turn, _) = app.state.conversation.turns
        assert draft_of(turn).pictures == conversation.turns[0].pictures
    text = (tmp_path / "my chat.md").read_text("utf-8")
    link = "![1-my-photo.png](my%20chat-pictures/1-my-photo.png)"
    assert f"{link} What is it? {link}" in text
    folder = tmp_path / "my chat-pictures"
    assert [path.name for path in folder.iterdir()] == ["1-my-photo.png"]
    assert (folder / "1-my-photo.png").read_bytes() == photo.read_bytes()
    record = json.loads((tmp_path / "chat.json").read_text("utf-8"))
    first, _, last = record["messages"][0]["content"]
    uri = "data:image/png;base64," + base64.b64encode(photo.read_bytes()).decode()
    assert first == last == {"type": "image", "image": uri, "name": "my photo.png"}


def test_clipboard(photo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold(monkeypatch, [str(photo)])
    copied = read_attachment("")
    (page,) = copied.pictures
    assert (copied.name, page.picture) == (photo.name, photo.read_bytes())
    for held, message in (
        (None, "no picture in the clipboard"),
        (NotImplementedError("wl-paste or xclip is required"), "wl-paste or xclip is required"),
        (OSError("no display"), "cannot be read"),
    ):
        hold(monkeypatch, held)
        with pytest.raises(OptionError, match=message):
            read_attachment("")


# -- documents -------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    (tmp_path / "short.pdf").write_bytes(pdf("One", RED))
    pages = (f"Page about topic{n}. " + "More words here. " * 20 for n in range(40))
    (tmp_path / "long.pdf").write_bytes(pdf(*pages))
    monkeypatch.chdir(tmp_path)
    return tmp_path


QUESTION = "More about topic17? @long.pdf"


async def test_documents(files: Path) -> None:
    model = FakeModel(ctx=1000)
    async with running(model) as (app, pilot):
        await asked(pilot, "Read @short.pdf")
        text = "short.pdf:\n```\n[page 1]\nOne\n\n[page 2]\n[no text]\n```\n"
        assert model.given("user") == [f"Read {text}"]
        assert "▸ short.pdf, 2 pages" in screen.shown(app)
        (told,) = (line for line in screen.notices(app) if "short.pdf" in line)
        assert told == "short.pdf: 1 of 2 pages have little or no text, and are not shown."

        for attached in (False, True):
            await cleared(pilot)
            if attached:
                await screen.say(pilot, "/attach long.pdf")
                await until(pilot, lambda: "[long.pdf, 40 pages]" in screen.composer(app).text)
            await asked(pilot, "More about topic17?" if attached else QUESTION)
            (sent,) = model.given("user")
            assert "long.pdf (40 pages) is too long to show." in sent
            assert "[long.pdf, page 18]\nPage about topic17." in sent
            assert len(sent.split()) < 800
            assert any("does not fit the context" in line for line in screen.notices(app))
            assert "pieces of 40 pages" in screen.shown(app)
        assert "page 18" not in screen.shown(app)
        await pilot.press("ctrl+t")
        assert "[long.pdf, page 18]" in screen.shown(app), "where the pieces are from"


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """After its second page, a document is read on, or into the index, when this is set."""
    event = threading.Event()

    def holding(pages_of: Any) -> Any:
        def pages(*arguments: object, **options: object) -> Iterator[Page]:
            for page in pages_of(*arguments, **options):
                yield page
                if page.number == 2:
                    event.wait()

        return pages

    for module in (reading, index):
        monkeypatch.setattr(module, "pages_of", holding(module.pages_of))
    yield event
    event.set()


def progress(app: ChatApp) -> str:
    """The line of the work that runs."""
    line = app.query_one(WorkLine)
    return str(line.render()) if line.display else ""


@pytest.mark.usefixtures("files")
async def test_reading_is_shown_and_stopped(held: threading.Event) -> None:
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
        await pilot.press("escape")
        await until(pilot, lambda: composer.text == f"{QUESTION}\n\nnext")
        assert screen.refused(app) == ["stopped: nothing was sent"]
        assert not progress(app)
        assert not model.seen

        held.set()
        await asked(pilot, "")
        assert "[long.pdf, page 18]\nPage about topic17." in model.given("user")[0]
        assert model.given("user")[0].endswith("\n\nnext")
