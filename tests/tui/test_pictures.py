"""Pictures in messages: attached, dropped, shown, refused, kept, exported."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, UnidentifiedImageError
from textual.events import Paste

from localrt import History, KeptPicture, OptionError, system
from localrt.history.pictures import new_picture, small_image
from localrt.tui.chat.blocks import GUTTER
from localrt.tui.chat.thumbnails import Thumbnail, cells, find_graphics
from localrt.tui.chat.view import ConversationView
from localrt.tui.conversation.attachments import (
    Attachments,
    draft_of,
    read_attachment,
)
from localrt.tui.conversation.export import Exporter
from localrt.tui.mentions import dropped, mentions, with_mentions
from tests.picture_files import READ, REFUSED
from tests.tui import screen
from tests.tui.conftest import Opening, asked, plain_chat, running, until
from tests.tui.fakes import FakeLoader, FakeModel


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


# -- in the app ------------------------------------------------------------------------------------


async def test_send_picture(seeing: FakeModel, photo: Path) -> None:
    async with running(seeing) as (app, pilot):
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


async def test_paste_picture(seeing: FakeModel, photo: Path) -> None:
    async with running(seeing) as (app, pilot):
        composer = screen.composer(app)
        composer.insert("Look:")
        app.post_message(Paste(f"'{photo}' "))
        await until(pilot, lambda: "@" in composer.text)
        assert composer.text == f'Look: @"{photo}" '
        await pilot.press("enter")
        await until(pilot, lambda: screen.idle(app) and screen.answers(app))
        assert seeing.seen[0].messages[0]["content"] == parts("Look: ", photo.read_bytes())
        await pilot.press("up", "ctrl+u")
        composer.put("")
        app.post_message(Paste("'/not/there.png'"))
        await until(pilot, lambda: composer.text == "'/not/there.png'")


async def test_damaged_picture(seeing: FakeModel, tmp_path: Path) -> None:
    path = tmp_path / "half.png"
    noise = Image.effect_noise((60, 60), 50)
    noise.save(path)
    path.write_bytes(path.read_bytes()[:600])
    async with running(seeing) as (app, pilot):
        await screen.say(pilot, f"See @{path}")
        await until(pilot, lambda: screen.refused(app))
        assert "half.png is damaged" in screen.refused(app)[0]
        assert screen.composer(app).text == f"See @{path}"
        screen.composer(app).put("")
        await asked(pilot, "Hi")
        assert screen.refused(app) == []


@pytest.mark.parametrize("kind", READ)
async def test_files_of_pictures(seeing: FakeModel, tmp_path: Path, kind: str) -> None:
    data, media_type, (width, height) = READ[kind]
    path = tmp_path / f"a.{'mpo' if 'camera' in kind else media_type.removeprefix('image/')}"
    path.write_bytes(data)
    async with running(seeing) as (app, pilot):
        await asked(pilot, f"Look at @{path}")
        assert seeing.seen[0].messages[0]["content"] == parts("Look at ", data)
        assert f"{path.name}, {width} x {height}" in screen.shown(app)


@pytest.mark.parametrize("kind", REFUSED)
async def test_files_that_are_no_pictures(seeing: FakeModel, tmp_path: Path, kind: str) -> None:
    data, words = REFUSED[kind]
    path = tmp_path / f"a.{kind.lower() if kind.isupper() and kind != 'SVG' else 'png'}"
    path.write_bytes(data)
    async with running(seeing) as (app, pilot):
        await screen.say(pilot, f"Look at @{path}")
        await until(pilot, lambda: screen.refused(app))
        if path.suffix not in (".ppm", ".ico"):  # no text either
            assert words in screen.refused(app)[0]
        assert screen.composer(app).text == f"Look at @{path}"


async def test_model_cannot_see(model: FakeModel, photo: Path) -> None:
    async with running(model) as (app, pilot):
        text = f'What is in @"{photo}"?'
        await screen.say(pilot, text)
        await until(pilot, lambda: screen.refused(app))
        said = "tiny-model cannot see pictures: the message was not sent"
        assert screen.refused(app) == [said]
        assert screen.composer(app).text == text
        assert (model.seen, app.state.conversation.turns) == ([], ())


async def test_model_that_loads_cannot_see(model: FakeModel, photo: Path) -> None:
    loader = FakeLoader(model, held=True)
    async with running(loader, ready=False) as (app, pilot):
        await screen.say(pilot, f'What is in @"{photo}"?')
        await until(pilot, lambda: screen.waiting(app))
        loader.gate.set()
        await until(pilot, lambda: screen.refused(app))
        assert screen.composer(app).text == "What is in [my photo.png, 8 x 4]?"
        assert (screen.users(app), model.seen) == ([], [])


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
        await pilot.press("alt+up", "alt+up", "alt+up", "alt+up", "alt+up", "alt+up", "alt+e")
        assert screen.composer(app).text == "What is in [my photo.png, 8 x 4]?"


async def test_no_color(seeing: FakeModel, photo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with running(seeing) as (app, pilot):
        await asked(pilot, f'@"{photo}"')
        assert "my photo.png, 8 x 4" in screen.shown(app)
        assert "▀" not in screen.shown(app)


# -- drawing ---------------------------------------------------------------------------------------


def kept(size: tuple[int, int] = (8, 4), color: str = "red") -> KeptPicture:
    return new_picture(file_of(color, size), name="a.png")


def test_cells() -> None:
    assert cells(kept((400, 200)), 80) == (40, 10)
    assert cells(kept((400, 200)), 20) == (20, 5)
    assert cells(kept((10, 400)), 80) == (1, 12)
    assert cells(kept((400, 1)), 80) == (40, 1)


def test_kitty(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        out = io.StringIO()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.__stdout__", out)
            lines = Thumbnail(kept((20, 10))).lines(20, "kitty")
    assert [line.cell_length for line in lines] == [20] * 5
    assert set(re.findall("\U0010eeee", lines[0].text)) == {"\U0010eeee"}
    assert out.getvalue().startswith("\x1b_G")
    assert "c=20,r=5" in out.getvalue()


async def test_sixels(seeing: FakeModel, photo: Path) -> None:
    async with running(seeing, graphics="sixel") as (app, pilot):
        await asked(pilot, f'@"{photo}"')
        view = app.query_one(ConversationView)
        strips = view.render_lines(view.size.region)
        drawn = [strip for strip in strips if any("\x1bP" in part.text for part in strip)]
        assert len(drawn) == 2
        assert {strip.cell_length for strip in strips} == {view.size.width}
        assert f"\x1b[{view.size.width - GUTTER}D\x1bP" in [*drawn[0]][-1].text
        assert "\x1bP" not in view.render_line(strips.index(drawn[0])).text
        await pilot.press("f1")
        await until(pilot, lambda: not view.screen.is_active)
        covered = view.render_lines(view.size.region)
        assert not any("\x1bP" in part.text for strip in covered for part in strip)


def test_graphics_by_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TERM_PROGRAM", raising=False)
    monkeypatch.delenv("LC_TERMINAL", raising=False)
    assert find_graphics() == ""
    monkeypatch.setenv("TERM", "xterm-kitty")
    assert find_graphics() == ""  # no terminal: pytest has the output


def test_small_image() -> None:
    side = Image.new("RGB", (40, 20), "blue")
    side.getexif()[0x0112] = 6
    stream = io.BytesIO()
    side.save(stream, "JPEG", exif=side.getexif())
    picture = new_picture(stream.getvalue())
    assert (picture.width, picture.height) == (20, 40)
    assert small_image(picture, 3, 6).size == (3, 6)
    stream = io.BytesIO()
    Image.new("RGBA", (4, 4), (0, 0, 0, 0)).save(stream, "PNG")
    assert small_image(new_picture(stream.getvalue()), 1, 1).getpixel((0, 0)) == (255, 255, 255)
    with pytest.raises(OptionError, match="damaged"):
        small_image(new_picture(file_of(size=(90, 90))[:60]), 1, 1)


def test_lost_picture_is_a_line(photo: Path) -> None:
    with History(":memory:") as history:
        turn = history.new(model="m").add("user", [{"type": "image", "image": photo}])
        history._database.rows("DELETE FROM turn_picture")
        assert draft_of(turn).captions == ["my photo.png, 8 x 4"]
        assert Thumbnail(turn.pictures[0]).lines(40, "") == []


# -- paths -----------------------------------------------------------------------------------------


def _escaped(path: Path) -> str:
    """As a shell takes it."""
    text = str(path)
    return f'"{text}"' if system.IS_WINDOWS else text.replace(" ", "\\ ")


def test_dropped(photo: Path) -> None:
    other = photo.with_name("b.jpg")
    other.write_bytes(b"")
    path = str(photo)
    escaped = _escaped(photo)
    escapes = () if system.IS_WINDOWS else (escaped, f"{escaped} ")
    url = photo.as_uri()
    for text in (path, f"'{path}'", f'"{path}"', url, f"{url}\n", *escapes):
        assert dropped(text) == [path], text
    assert dropped(f"\"{path}\" '{other}'") == [path, str(other)]
    assert dropped(f"{url}\n{other.as_uri()}") == [path, str(other)]
    for text in (
        "photo.png",
        "see photo.png",
        f"What is {escaped}",
        "it's.png",
        "/nowhere.png",
        "",
    ):
        assert dropped(text) == [], text


def test_paths_in_plain_lines(photo: Path) -> None:
    escaped = _escaped(photo)
    written = f'@"{photo}"'
    assert with_mentions(str(photo)) == written
    assert with_mentions(f"{escaped} what is it?") == f"{written} what is it?"
    assert with_mentions(f"Is '{photo}' red?") == f"Is {written} red?"
    for text in (f"`{escaped}`", "/export a.png", "see /nowhere.png"):
        assert with_mentions(text) == text
    (mention,) = mentions(f"@{escaped}, please")
    assert mention.path == str(photo)


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


# -- kept and exported -----------------------------------------------------------------------------


async def test_export(seeing: FakeModel, photo: Path, tmp_path: Path) -> None:
    async with running(seeing) as (app, pilot):
        await asked(pilot, f'@"{photo}" What is it? @"{photo}"')
        conversation = app.state.conversation
        Exporter().export(conversation, str(tmp_path / "my chat.md"))
        Exporter().export(conversation, str(tmp_path / "chat.json"))
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


# -- the plain chat --------------------------------------------------------------------------------


def test_plain_chat(seeing: FakeModel, photo: Path, tmp_path: Path) -> None:
    lines = [
        f'What is in @"{photo}"?',
        f"/attach {photo}",
        "And this?",
        f"{_escaped(photo)} again",
        "/show",
    ]
    out = plain_chat(FakeLoader(seeing), tmp_path, lines)
    data = photo.read_bytes()
    sent = [seen.messages[-1]["content"] for seen in seeing.seen]
    assert sent == [
        parts("What is in ", data, "?"),
        parts(data, " And this?"),
        parts(data, " again"),
    ]
    assert "my photo.png is attached to the next message." in out
    assert out.count("Picture: my photo.png, 8 x 4, 64 tokens") == 6


def test_plain_chat_cannot_see(model: FakeModel, photo: Path, tmp_path: Path) -> None:
    lines = [f'What is in @"{photo}"?', "", f"/attach {photo}", "/retry"]
    out = plain_chat(FakeLoader(model), tmp_path, lines)
    said = "Error: tiny-model cannot see pictures: the message was not sent"
    assert f"{said}; an empty line sends it without them" in out
    assert out.count(said) == 2
    sent = [seen.messages[-1]["content"] for seen in model.seen]
    assert sent == ["What is in my photo.png?"] * 2


# -- from the clipboard ----------------------------------------------------------------------------


def hold(monkeypatch: pytest.MonkeyPatch, held: Any) -> None:
    def grab() -> Any:
        if isinstance(held, Exception):
            raise held
        return held

    monkeypatch.setattr("PIL.ImageGrab.grabclipboard", grab)


async def test_attach_clipboard(seeing: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    hold(monkeypatch, Image.new("RGB", (8, 4), "red"))
    async with running(seeing) as (app, pilot):
        composer = screen.composer(app)
        composer.put("/attach")
        await pilot.press("enter")
        await until(pilot, lambda: "clipboard-" in composer.text)
        label = composer.text
        await pilot.press("tab")
        assert composer.text == label, "a picture has no text to unfold"
        await pilot.press("enter")
        await until(pilot, lambda: screen.idle(app) and screen.answers(app))
    (part,) = (p for p in seeing.seen[0].messages[0]["content"] if p["type"] == "image")
    assert Image.open(io.BytesIO(part["image"])).size == (8, 4)


def test_clipboard(photo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold(monkeypatch, [str(photo)])
    copied = read_attachment("")
    (page,) = copied.pictures
    assert (copied.name, page.picture) == (photo.name, photo.read_bytes())
    for held, message in (
        (None, "no picture in the clipboard"),
        ([], "no picture in the clipboard"),
        (UnidentifiedImageError("text"), "no picture in the clipboard"),
        (NotImplementedError("wl-paste or xclip is required"), "wl-paste or xclip is required"),
        (OSError("no display"), "cannot be read"),
    ):
        hold(monkeypatch, held)
        with pytest.raises(OptionError, match=message):
            read_attachment("")
