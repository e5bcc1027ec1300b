"""What is typed and pasted arrives, as a terminal sends it."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from textual.command import CommandList
from textual.events import Key, Paste
from textual.message import Message
from textual.pilot import Pilot
from textual.widgets import OptionList

from localrt import History
from localrt.tui.app import ChatApp
from localrt.tui.inputs import Input, letter_size
from localrt.tui.screens.dialogs import Choose, Palette
from localrt.tui.terminal import PasteParser
from tests.tui import screen
from tests.tui.conftest import running
from tests.tui.fakes import FakeModel
from tests.tui.test_models_screen import PREVIEWS, FakeLibrary
from tests.waits import wait_for, wait_in_loop

if os.name != "nt":
    from tests.tui.test_ending import Shell
pytestmark = pytest.mark.skipif(os.name == "nt", reason="Textual's parser of Unix terminals")

DEL, LEFT, RIGHT, DELETE, HOME = "\x7f", "\x1b[D", "\x1b[C", "\x1b[3~", "\x1b[H"
START, END = "\x1b[200~", "\x1b[201~"


def messages(parser: PasteParser, *reads: str) -> list[tuple[str, str | None]]:
    """Of reads without a pause, and of one after them."""
    found = [event for read in reads if read for event in parser.feed(read)]
    return described([*found, *parser.typed()])


def described(found: Iterable[Message]) -> list[tuple[str, str | None]]:
    return [
        (type(event).__name__, getattr(event, "text", getattr(event, "key", None)))
        for event in found
    ]


async def in_one_read(app: ChatApp, pilot: Pilot[None], text: str) -> None:
    for event in list(PasteParser().feed(text)):
        app.post_message(event)
    await pilot.pause()


# -- pastes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain\ttext",
        "\x1b[31mred\x1b[0m line\rsecond",
        "one\x1b[106;5utwo\x1b[27;5;109~three",
        "up \x1b[A, alone \x1b, twice \x1b\x1b, at the end \x1b",
        "\x1b" + "0" * 32 + "]2;title",
        "half an end \x1b[201, \x1b[20",
        "a mark \x1b[200~ again",
    ],
)
def test_paste_is_whole_wherever_reads_end(text: str) -> None:
    data = f"a{START}{text}{END}b\x1b[A"
    expected = [("Key", "a"), ("Paste", text), ("Key", "b"), ("Key", "up")]
    for place in range(len(data) + 1):
        assert messages(PasteParser(), data[:place], data[place:]) == expected
    assert messages(PasteParser(), *data) == expected


@pytest.mark.parametrize(
    ("rest", "text"),
    [
        ("ls\r", "ls\r"),
        (f"\r{START}two", "\rtwo"),
        (f"\x1b[13u{END}{START}{END}\x03", "\x1b[13u\x03"),
    ],
)
def test_an_end_mark_within_a_paste(rest: str, text: str) -> None:
    """What follows it is not obeyed, wherever reads end."""
    data = f"{START}one{END}{rest}{END}"
    for place in range(len(data) + 1):
        found = messages(PasteParser(), data[:place], data[place:])
        assert {kind for kind, _ in found} == {"Paste"}
        assert "".join(pasted or "" for _, pasted in found) == f"one{text}"


def test_pause_within_a_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than Textual waits for the rest of an escape sequence."""
    now = 0.0
    monkeypatch.setattr("textual._parser.get_time", lambda: now)
    parser = PasteParser()
    for read in ("\x1b[2", "00", "~text", "\x1b", "[2", "01~"):
        found = messages(parser, read)
        now += 1.0
        assert list(parser.tick()) == []
    assert found == [("Paste", "text")]
    assert messages(parser, "\x1b") == []
    now += 1.0
    assert [getattr(event, "key", "") for event in parser.tick()] == ["escape"]


UNTIL_KEY = [("Paste", "abc"), ("Paste", ""), ("Key", "x")]


@pytest.mark.parametrize(
    ("reads", "expected"),
    [
        ([f"{START}abc", 9, "x"], UNTIL_KEY),
        ([f"{START}abc", 9, "\x03"], [*UNTIL_KEY[:2], ("Key", "ctrl+c")]),
        ([f"{START}abc", 9, "\x1b[99;5u"], [*UNTIL_KEY[:2], ("Key", "ctrl+c")]),
        ([f"{START}abc", 9, LEFT, "x"], [*UNTIL_KEY[:2], ("Key", "left"), ("Key", "x")]),
        (
            [f"{START}abc", 9, "\x1b[<0;3;4M", "x"],
            [*UNTIL_KEY[:2], ("MouseDown", None), UNTIL_KEY[2]],
        ),
        ([f"{START}abc", 9, f"{START}d{END}"], [*UNTIL_KEY[:2], ("Paste", "d")]),
        ([f"{START}abc", 9, f"def{END}x"], [UNTIL_KEY[0], ("Paste", "def"), UNTIL_KEY[2]]),
        ([f"{START}abc", 9, "def\r", f"g{END}"], [UNTIL_KEY[0], ("Paste", "def\rg")]),
        ([f"{START}abc", 9, END, "x"], UNTIL_KEY),
        ([f"{START}abc\x1b[2", 9, "01~", "x"], UNTIL_KEY),
        (
            [f"{START}abc\x1b[2", 9, f"0{END}", "x"],
            [UNTIL_KEY[0], ("Paste", "\x1b[20"), UNTIL_KEY[2]],
        ),
        ([START, 9, "x"], UNTIL_KEY[1:]),
        ([f"{START}abc", 9, "\x1b", 9, "[201~", "x"], UNTIL_KEY),
        ([f"{START}abc", 9, "\x1b[", 9, "201~", "x"], UNTIL_KEY),
        ([f"{START}abc", 9, "\x1bf"], [*UNTIL_KEY[:2], ("Key", "ctrl+right")]),
        ([f"{START}abc", 9, "["], [*UNTIL_KEY[:2], ("Key", "left_square_bracket")]),
        ([f"{START}abc", 9, "\x1bOR"], [*UNTIL_KEY[:2], ("Key", "f3")]),
        ([f"{START}ab", 1, "c", 1, END, "x"], [UNTIL_KEY[0], UNTIL_KEY[2]]),
        ([f"{START}a", 1, "\x03", 1, LEFT, 1, END], [("Paste", f"a\x03{LEFT}")]),
    ],
)
def test_paste_without_its_end(
    reads: list[str | int], expected: list[tuple[str, str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A paste that stops is shown, and a key alone ends it; what comes after a pause, as a slow
    line sends it, is the paste's, and only what follows its mark is typed."""
    now = 100.0
    monkeypatch.setattr("localrt.tui.terminal.get_time", lambda: now)
    parser, found = PasteParser(), []
    for read in reads:
        if isinstance(read, int):
            now += read
            found += described(parser.tick())
        else:
            found += messages(parser, read)
    assert found == expected


def test_paste_without_its_end_in_a_terminal(tmp_path: Path) -> None:
    with ExitStack() as stack:
        shell = Shell(tmp_path, stack, "import localrt.tui.terminal as t; t._PAUSE = 0.2")
        wait_for(lambda: "2004" in shell.modes)
        shell.type(f"{START}pasted")
        wait_for(lambda: shell.shows("pasted"))
        shell.type("!")
        wait_for(lambda: shell.shows("!"))
        shell.type("\x11")
        assert shell.status == 0


LOG_TEXT = "> \ufffd[31mred\ufffd[0m line\nsecond\ufffd]2;PWNED\ufffd\ufffd52;c;eA==\ufffd\nthird."
LOG = "\x1b[31mred\x1b[0m line\rsecond\x1b]2;PWNED\x07\x9d52;c;eA==\x9c\x1b[106;5uthird"


@pytest.mark.parametrize("pieces", [1, 3, 0], ids=["whole", "split", "bytes"])
def test_paste_in_a_terminal(pieces: int, tmp_path: Path) -> None:
    """It arrives whole, and the terminal gets none of its control characters."""
    with ExitStack() as stack:
        shell = Shell(tmp_path, stack)
        wait_for(lambda: "2004" in shell.modes and shell.shows("Message (/ for commands"))
        shell.type("> ")
        wait_for(lambda: shell.shows("> "))
        before = len(shell.read())
        size = len(LOG) // pieces + 1 if pieces else 1
        shell.type(START)
        for start in range(0, len(LOG), size):
            shell.type(LOG[start : start + size])
        shell.type(f"{END}.")
        wait_for(lambda: shell.shows("third."))
        written = shell.read()[before:]
        assert shell.ended() == LOG_TEXT
    assert not any(each in written for each in (b"\x1b]2;PWNED", b"\x07", "\x9d".encode()))


EARLY = f"ab{DEL}c{START}one\rtwo{END}{LEFT}x\x1b[O"
EARLY_TEXT = "acone\ntwx!o"
SLOW = """
import time
from localrt.tui.chat.screen import ChatScreen
mount = ChatScreen.on_mount
ChatScreen.on_mount = lambda self: (time.sleep(1), mount(self))[1]
"""


@pytest.mark.parametrize(
    ("mode", "broken", "term"),
    [
        ("", SLOW, "xterm"),
        ("1049", "", "xterm"),
        ("2004", SLOW, "xterm"),
        ("", "", "xterm-kitty"),  # which is asked before whether it draws pictures
    ],
)
def test_what_comes_before_the_first_screen(
    mode: str, broken: str, term: str, tmp_path: Path
) -> None:
    """Before the app reads, as it begins to, and in one go with the loss of the terminal's focus:
    nothing is lost or out of order."""
    with ExitStack() as stack:
        shell = Shell(tmp_path, stack, broken, term)
        wait_for(lambda: not mode or mode in shell.modes)
        line = "" if "kitty" in term else "one\r"  # a whole line keeps the app from asking
        shell.type(EARLY.replace("one\r", line))
        wait_for(lambda: shell.shows("ready"))
        shell.type("!")
        wait_for(lambda: shell.shows("!"))
        assert shell.ended() == EARLY_TEXT.replace("one\n", line and "one\n")


def test_lines_typed_before_the_start(tmp_path: Path) -> None:
    """Their Enter, which the terminal makes a line feed by then, sends them."""
    with ExitStack() as stack:
        shell = Shell(tmp_path, stack)
        shell.type("Hi\rmore\rand")
        wait_for(lambda: shell.shows("A whole sentence.") and shell.shows("1 message waits"))
        shell.type("!")
        wait_for(lambda: shell.shows("!"))
        assert shell.ended() == "more\n\nand!"


async def test_undo_of_a_long_paste(model: FakeModel) -> None:
    async with running(model) as (app, pilot):
        composer = screen.composer(app)
        composer.put("before ")
        lines = "\n".join(["x"] * 9)
        app.post_message(Paste(lines))
        await pilot.press("alt+z")
        assert composer.text == "before "
        await pilot.press("ctrl+y")
        assert composer.text == f"before {lines}"
        await pilot.press("f7", "delete", "alt+z", "ctrl+underscore")
        assert composer.text == "before "
        await pilot.press("!")
        assert composer.text == "before !"


async def test_a_page_in_a_list_that_is_not_drawn_yet(model: FakeModel) -> None:
    """The command palette fills such a list, and keys may come sooner than its place."""
    async with running(model) as (app, _):
        options = OptionList("one", "two")
        options.display = False
        await app.screen.mount(options)
        options.highlighted = 0
        options.action_page_down()
        options.action_page_up()
        assert options.highlighted == 0


@pytest.mark.parametrize("keys", ["enter enter enter", "escape escape", "enter escape"])
async def test_keys_that_close_the_palette_twice(model: FakeModel, keys: str) -> None:
    async with running(model) as (app, pilot):
        await screen.say(pilot, "first")
        await pilot.press("ctrl+p", *"help")
        await wait_in_loop(lambda: app.screen.query_one(CommandList).option_count, pilot.pause)
        for key in keys.split():
            app.post_message(Key(key, None))
        await wait_in_loop(lambda: not isinstance(app.screen, Palette), pilot.pause)
        await pilot.press("escape")
        assert app.screen is app.chat


async def test_one_palette_is_open(model: FakeModel) -> None:
    async with running(model) as (app, pilot):
        for key in ("ctrl+p", "f1", "ctrl+p", "escape", "escape", "ctrl+p", "escape"):
            app.post_message(Key(key, None))
        await wait_in_loop(lambda: app.screen is app.chat, pilot.pause)
        await pilot.press("ctrl+p", "f1", "ctrl+p")
        assert sum(isinstance(each, Palette) for each in app.screen_stack) == 1


# -- control characters ----------------------------------------------------------------------------

CONTROLS = ["\x1b]2;title\x07", "\x9d52;c;eA==\x9c", "\x7f", "\x85", "\u202eabc"]
PLACES = {
    "composer": (),
    "find": ("ctrl+f",),
    "conversations": ("ctrl+o",),
    "name": ("f2",),
    "palette": ("ctrl+p",),
    "models": ("f4",),
    "option": ("f5", *["down"] * 9, "enter"),
    "system prompt": ("f5", *["down"] * 3, "enter"),
}


@pytest.mark.parametrize("keys", PLACES.values(), ids=PLACES)
async def test_pasted_controls_are_not_obeyed(
    model: FakeModel, keys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeLibrary(monkeypatch)
    async with running(model, load_by_name=lambda name, progress: model) as (app, pilot):
        await screen.say(pilot, "first")
        await pilot.press(*keys)
        await pilot.pause()
        for text in CONTROLS:
            app.post_message(Paste(f"<{text}>"))
        await pilot.pause()
        field = app.focused
        assert field is not None
        written = getattr(field, "value", getattr(field, "text", ""))
        assert written.count("<") == len(CONTROLS)
        assert not any(unicodedata.category(c) == "Cc" or c == "\u202e" for c in written)


HOSTILE = " ".join(CONTROLS)
SHOWING = {
    "conversation": (),
    "earlier message": ("up",),
    "message to edit": ("alt+e",),
    "what an editor wrote": ("ctrl+g",),
    "conversations": ("ctrl+o",),
    "name": ("f2",),
    "models": ("f4",),
    "settings": ("f5",),
    "system prompt": ("f5", *["down"] * 3, "enter"),
    "question": (*"/delete", "enter"),
}


@pytest.mark.parametrize("keys", SHOWING.values(), ids=SHOWING)
async def test_controls_of_other_texts_are_not_obeyed(
    keys: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    async with running(
        model,
        load_by_name=lambda name, progress: model,
        history=lambda: History(tmp_path / "h.db"),
        resume=True,
    ) as (app, pilot):
        await pilot.press(*keys)
        await pilot.pause()
        drawn = "".join(strip.text for strip in screen.lines(app))
        assert drawn.count("]2;title") == drawn.count("\ufffd]2;title") > 1
        assert not any(unicodedata.category(c) == "Cc" or c == "\u202e" for c in drawn)


async def test_terminal_gets_no_control_that_nobody_cleaned(model: FakeModel) -> None:
    async with running(model) as (app, pilot):
        await app.push_screen(Choose("<\x1b]2;title\x07>", [("a", "a")]))
        await pilot.pause()
        assert any("<]2;title>" in strip.text for strip in screen.lines(app))


# -- typing ----------------------------------------------------------------------------------------

TYPED = {
    "full-width space": "\u3000",
    "no-break space": "\u00a0",
    "narrow no-break space": "\u202f",
    "thin space": "\u2009",
    "non-joiner": "\u200c",
    "joiner": "\u200d",
    "right-to-left mark": "\u200f",
    "soft hyphen": "\u00ad",
    "private use": "\ue0b0",
    "new emoji": "\U0001fae8",
    "unassigned": "\U0001fadd",
}
FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
LETTERS = {
    "accent": "e\u0301",
    "variation": "\u2764\ufe0f",
    "family": FAMILY,
    "flag": "\U0001f1e9\U0001f1ea",
    "regional flag": "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
    "skin": "\U0001f44d\U0001f3fd",
    "keycap": "1\ufe0f\u20e3",
    "thai": "\u0e01\u0e33",
    "hindi": "\u0928\u093f",
    "jamo": "\u1112\u1161\u11ab",
    "plain": "x",
}
ORDER = {
    "backspace": (f"abc{DEL}d", "abd"),
    "hangul": (f"안{DEL}안녕{DEL}녕하", "안녕하"),
    "left": (f"ab{LEFT}c", "acb"),
    "home": (f"bc{HOME}a{DELETE}", "ac"),
    "right": (f"bc{HOME}{RIGHT}a", "bac"),
    **{f"typed {name}": (f"a{text}b", f"a{text}b") for name, text in TYPED.items()},
    **{f"backspace {name}": (f"a{text}{DEL}b", "ab") for name, text in LETTERS.items()},
    **{f"left {name}": (f"a{t}{LEFT}b", f"ab{t}") for name, t in LETTERS.items()},
    **{f"right {name}": (f"{t}a{HOME}{RIGHT}b", f"{t}ba") for name, t in LETTERS.items()},
    **{f"delete {name}": (f"{t}a{HOME}{DELETE}b", "ba") for name, t in LETTERS.items()},
}


@pytest.mark.parametrize("key", ["escape", "ctrl+f"], ids=["area", "line"])
async def test_typed_in_one_read(model: FakeModel, key: str) -> None:
    async with running(model) as (app, pilot):
        await pilot.press(key)
        field = app.focused
        name = "value" if isinstance(field, Input) else "text"
        for what, (typed, expected) in ORDER.items():
            await in_one_read(app, pilot, typed)
            assert getattr(field, name) == expected, what
            setattr(field, name, "")


def test_letters_are_graphemes() -> None:
    regex = pytest.importorskip("regex")
    text = "".join(LETTERS.values()) + "\U0001f1e9\U0001f1ea" * 2 + "à la\u0300 ñ 한국어 กำ"
    place = 0
    for letter in regex.findall(r"\X", text):
        assert letter_size(text, place, 1) == len(letter)
        place += len(letter)
        assert letter_size(text, place, -1) == len(letter)
