"""The terminal: what it sends arrives, and however the app ends, it is as it was before."""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import pytest
from textual.drivers._writer_thread import MAX_QUEUED_WRITES
from textual.message import Message

from localrt import History, Turn
from localrt.tui.terminal import PasteParser, Writer, copied_by_tool
from tests.waits import wait_for

if os.name != "nt":
    import pty
    import termios
pytestmark = pytest.mark.skipif(os.name == "nt", reason="terminals of Unix")
slow = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent.parent
DEL, LEFT = "\x7f", "\x1b[D"
START, END = "\x1b[200~", "\x1b[201~"
# As a shell: it leads the terminal's session, and outlives the app.
LEADER = """
import fcntl, signal, subprocess, sys, termios, time
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
app = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=sys.stdin)
signal.signal(signal.SIGHUP, lambda *_: app.send_signal(signal.SIGHUP))
print(app.pid, flush=True)
print(app.wait(), flush=True)
time.sleep(600)
"""
APP = """
import sys
from tests.tui.fakes import FakeLoader, FakeModel
from localrt.tui import run_chat
{broken}
model = FakeModel(["A whole sentence. ", "and the rest"])
model.hold()
model.allow(1)
sys.exit(run_chat(FakeLoader(model), model_name="tiny-model", system=None, options={}))
"""
SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
MODES = {"1000", "1003", "1006", "2004", "1004", "1049"}
F3 = "\x1bOR"
DATA = Path("data") / "localrt"


class Shell:
    """The app in a pseudo-terminal, under a process that stays when it ends."""

    def __init__(
        self, folder: Path, stack: ExitStack, broken: str = "", term: str = "xterm", app: str = APP
    ) -> None:
        self.folder = folder
        self.master, self.slave = pty.openpty()
        stack.callback(os.close, self.slave)
        stack.callback(self.close)
        os.set_blocking(self.master, False)
        termios.tcsetwinsize(self.slave, (24, 80))
        self.before = termios.tcgetattr(self.slave)
        self.written = b""
        environment = {**os.environ, "XDG_DATA_HOME": str(folder / "data"), "TERM": term}
        environment |= {"XDG_CONFIG_HOME": str(folder), "PYTHONPATH": str(ROOT)}
        self.leader = subprocess.Popen(
            [sys.executable, "-c", LEADER, app.replace("{broken}", broken)],
            stdin=self.slave,
            stderr=self.slave,
            stdout=subprocess.PIPE,
            start_new_session=True,
            cwd=ROOT,
            env=environment,
        )
        stack.enter_context(self.leader)
        stack.callback(self.leader.kill)
        assert self.leader.stdout is not None
        self.out = self.leader.stdout
        self.app = int(self.out.readline())

    def close(self) -> None:
        if self.master >= 0:
            os.close(self.master)
            self.master = -1

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def read(self) -> bytes:
        """All that was written to the terminal so far."""
        try:
            while some := os.read(self.master, 1 << 16):
                self.written += some
        except BlockingIOError:
            pass
        return self.written

    def shows(self, text: str) -> bool:
        return text in SEQUENCE.sub("", self.read().decode(errors="replace"))

    @property
    def modes(self) -> set[str]:
        """The modes that are on."""
        on = set[str]()
        for number, letter in re.findall(rb"\x1b\[\?(\d+)([hl])", self.read()):
            (on.add if letter == b"h" else on.discard)(number.decode())
        return on

    @property
    def status(self) -> int:
        return int(self.out.readline())

    def answer(self, draft: str) -> None:
        """Let the model say a sentence, and begin a message."""
        wait_for(lambda: "2004" in self.modes)
        self.type("Hi\r")
        wait_for(lambda: self.shows("A whole sentence."))
        self.type(draft)
        wait_for(lambda: self.shows(draft))

    def ended(self) -> str:
        """End the app as a logout does; the message that it kept."""
        os.kill(self.app, signal.SIGTERM)
        assert self.status == 143
        return draft(self.folder)


# -- ends ------------------------------------------------------------------------------------------


def kept(folder: Path) -> list[Turn]:
    """The turns of the conversation used last, as they are kept by now."""
    with History(folder / DATA / "history.db") as history:
        found = history.list()
        return list(history.open(found[0].id).turns) if found else []


def draft(folder: Path) -> str:
    """The message that is kept with the conversation used last, or without one."""
    with History(folder / DATA / "history.db") as history:
        return "".join(row["text"] for row in history._database.rows("SELECT text FROM draft"))


def kept_answer(folder: Path) -> str:
    return kept(folder)[-1].content.strip()


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("SIGTERM", 143),
        pytest.param("SIGSEGV", -11, marks=slow),
        pytest.param("SIGKILL", -9, marks=slow),
    ],
)
def test_signals(name: str, status: int, tmp_path: Path) -> None:
    with ExitStack() as stack:
        shell = Shell(tmp_path, stack)
        shell.answer("a draft")
        assert shell.modes >= MODES
        assert termios.tcgetattr(shell.slave) != shell.before
        if status < 0:  # a signal that the app cannot see
            wait_for(lambda: draft(tmp_path) == "a draft")
        os.kill(shell.app, getattr(signal, name))
        assert shell.status == status
        wait_for(lambda: not shell.modes & MODES)
        wait_for(lambda: termios.tcgetattr(shell.slave) == shell.before)
        rest = shell.read().rpartition(b"\x1b[?1049h")[2]
        assert b"\x1b[<u" in rest, "of the keys' protocol"
        assert rest.rfind(b"\x1b[?25h") > rest.rfind(b"\x1b[?25l")
    assert kept_answer(tmp_path) == "A whole sentence."
    assert draft(tmp_path) == "a draft"


@slow
def test_closed_terminal(tmp_path: Path) -> None:
    """Its window is closed, or the connection is lost: nothing can be written any more."""
    with ExitStack() as stack:
        shell = Shell(tmp_path, stack)
        shell.answer("a draft")
        shell.close()
        assert shell.status == 129
    assert draft(tmp_path) == "a draft"


def test_a_lost_terminal_holds_nobody_up() -> None:
    """However much is still to be written."""

    class Gone(io.StringIO):
        encoding = "utf-8"

        def fileno(self) -> int:
            raise OSError(errno.EIO, "Input/output error")

    writer = Writer(Gone())
    for _ in range(MAX_QUEUED_WRITES):
        writer.write("x")
    writer.start()
    for _ in range(2 * MAX_QUEUED_WRITES):
        writer.write("x")
    writer.stop()


BREAKS = """
from localrt.tui.chat.bars import Footer
from localrt.tui.chat.screen import ChatScreen
def fail(self):
    pasted = self.app.chat.composer.text
    raise ValueError(pasted)
async def work(screen):
    fail(screen)
"""


@slow
@pytest.mark.parametrize(
    "broken",
    [
        "lambda self: self.run_worker(work(self))",
        "lambda self: (setattr(Footer, 'render', fail), self.footer.refresh())",
    ],
    ids=["worker", "render"],
)
def test_crash(broken: str, tmp_path: Path) -> None:
    with History(tmp_path / DATA / "history.db") as history:
        history.new(model="m").keep_draft("what was written: ")
        history._database.rows("UPDATE draft SET writer = ''")
    with ExitStack() as stack:
        shell = Shell(tmp_path, stack, f"{BREAKS}ChatScreen.action_panel = {broken}")
        wait_for(lambda: shell.shows("what was written"))  # the draft of before
        shell.type("Hi\r")
        wait_for(lambda: shell.shows("A whole sentence."))
        shell.type("secret word")
        wait_for(lambda: shell.shows("secret word"))
        shell.type(F3)
        assert shell.status == 1
        assert not shell.modes & MODES
        assert termios.tcgetattr(shell.slave) == shell.before
        after = SEQUENCE.sub("", shell.read().rpartition(b"\x1b[?1004l")[2].decode())
    report = tmp_path / DATA / "crash-report.txt"
    assert after.count("\n") == 1
    assert after.startswith("localrt: the app ended because of an error in it (ValueError)")
    assert str(report) in after
    assert "in fail" in report.read_text("utf-8")
    assert "ValueError" in report.read_text("utf-8")
    assert "secret" not in report.read_text("utf-8") + after
    assert stat.S_IMODE(report.stat().st_mode) == 0o600
    assert kept_answer(tmp_path) == "A whole sentence."
    assert draft(tmp_path) == "secret word"


# -- what arrives ----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands: what comes after a pause is another thing."""
    monkeypatch.setattr("localrt.tui.terminal.get_time", lambda: 100.0)


def described(found: Iterable[Message]) -> list[tuple[str, str | None]]:
    return [
        (type(event).__name__, getattr(event, "text", getattr(event, "key", None)))
        for event in found
    ]


def messages(parser: PasteParser, *reads: str) -> list[tuple[str, str | None]]:
    """Of reads without a pause, and of one after them."""
    found = [event for read in reads if read for event in parser.feed(read)]
    return described([*found, *parser.typed()])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\x1b[31mred\x1b[0m line\rsecond",
        "one\x1b[106;5utwo\x1b[27;5;109~three",
        "up \x1b[A, alone \x1b, twice \x1b\x1b, at the end \x1b",
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
    [(f"\r{START}two", "\rtwo"), (f"\x1b[13u{END}{START}{END}\x03", "\x1b[13u\x03")],
)
def test_an_end_mark_within_a_paste(rest: str, text: str) -> None:
    """What follows it is not obeyed, wherever reads end."""
    data = f"{START}one{END}{rest}{END}"
    for place in range(len(data) + 1):
        found = messages(PasteParser(), data[:place], data[place:])
        assert {kind for kind, _ in found} == {"Paste"}
        assert "".join(pasted or "" for _, pasted in found) == f"one{text}"


ABC, STOPS, X = ("Paste", "abc"), ("Paste", ""), ("Key", "x")
OPEN = f"{START}abc"


@pytest.mark.parametrize(
    ("reads", "expected"),
    [
        ([OPEN, 9, "x"], [ABC, STOPS, X]),
        ([OPEN, 9, "\x03"], [ABC, STOPS, ("Key", "ctrl+c")]),
        ([OPEN, 9, LEFT, "x"], [ABC, STOPS, ("Key", "left"), X]),
        ([OPEN, 9, f"{START}d{END}"], [ABC, STOPS, ("Paste", "d")]),
        ([OPEN, 9, f"def{END}x"], [ABC, ("Paste", "def"), X]),
        ([OPEN, 9, END, "x"], [ABC, STOPS, X]),
        ([f"{OPEN}\x1b[2", 9, "01~", "x"], [ABC, STOPS, X]),
        ([OPEN, 9, "\x1b", 9, "[201~", "x"], [ABC, STOPS, X]),
        ([OPEN, 9, "\x1bOR"], [ABC, STOPS, ("Key", "f3")]),
        ([f"{START}ab", 1, "c", 1, END, "x"], [ABC, X]),
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


EARLY = f"ab{DEL}c{START}one\rtwo{END}{LEFT}x\x1b[O"
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
        pytest.param("2004", SLOW, "xterm", marks=slow),
        # It is asked before whether it draws pictures.
        pytest.param("", "", "xterm-kitty", marks=slow),
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
        assert shell.ended() == "acone\ntwx!o".replace("one\n", line and "one\n")


# -- the clipboard ---------------------------------------------------------------------------------

TEXT = "日本語 e\u0301 " * 30_000
WAYLAND, X11 = {"WAYLAND_DISPLAY": "x"}, {"DISPLAY": "x"}
SSH, TMUX = {"SSH_CONNECTION": "x"}, {"TMUX": "x"}
# What a tool does with the text that it has read.
ENDS = {
    "works": "sleep 60 &",  # as xclip, whose child keeps the text, and the output open
    "fails": "exit 1",
    "hangs": "exec sleep 60",
}


@pytest.mark.parametrize(
    ("tools", "variables", "taken"),
    [
        ("tmux wl-copy", TMUX | WAYLAND, "tmux"),
        ("wl-copy xclip", WAYLAND | X11, "wl-copy"),
        ("xsel", X11, "xsel"),
        ("clip.exe", {}, "clip.exe"),
        ("xclip pbcopy", X11 | SSH, None),
        ("xclip:hangs", X11, None),
        ("tmux:fails xclip", TMUX | X11, "xclip"),
    ],
)
def test_tools(
    tools: str,
    variables: dict[str, str],
    taken: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """These alone are there; each writes what it gets to a file beside it."""
    ends = {name: end or "works" for name, _, end in (t.partition(":") for t in tools.split())}
    for tool, end in ends.items():
        line = ENDS[end].replace("sleep", shutil.which("sleep") or "")
        script = tmp_path / tool
        script.write_text(f"#!/bin/sh\n{shutil.which('cat')} > {tmp_path}/{tool}.got\n{line}\n")
        script.chmod(0o755)
    if "hangs" in ends.values():
        monkeypatch.setattr("localrt.tui.terminal._SECONDS", 0.1)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in (TMUX | WAYLAND | X11 | SSH).keys() - variables.keys():
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert copied_by_tool(TEXT) is (taken is not None)
    got = [path.stem for path in tmp_path.glob("*.got") if ends[path.stem] == "works"]
    assert got == ([taken] if taken else [])
    if taken:
        encoding = "utf-16" if taken == "clip.exe" else "utf-8"
        assert (tmp_path / f"{taken}.got").read_bytes().decode(encoding) == TEXT
