"""However the app ends, the terminal and what was written come back."""

from __future__ import annotations

import errno
import io
import os
import pty
import re
import signal
import stat
import subprocess
import sys
import termios
from contextlib import ExitStack
from pathlib import Path

import pytest
from textual.drivers._writer_thread import MAX_QUEUED_WRITES

from localrt import History
from localrt.tui.terminal import Writer, keep_draft
from tests.waits import wait_for

ROOT = Path(__file__).resolve().parent.parent.parent
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
        return (self.folder / DATA / "draft.txt").read_text("utf-8")


def kept_answer(folder: Path) -> str:
    with History(folder / DATA / "history.db") as history:
        return history.open(history.list()[0].id).turns[-1].content.strip()


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGTERM, 143),
        (signal.SIGHUP, 129),
        (signal.SIGQUIT, 131),
        (signal.SIGABRT, -6),
        (signal.SIGSEGV, -11),
        (signal.SIGBUS, -7),
        (signal.SIGKILL, -9),
    ],
)
def test_signals(number: int, status: int, tmp_path: Path) -> None:
    with ExitStack() as stack:
        shell = Shell(tmp_path, stack)
        shell.answer("a draft")
        assert shell.modes >= MODES
        assert termios.tcgetattr(shell.slave) != shell.before
        os.kill(shell.app, number)
        assert shell.status == status
        wait_for(lambda: not shell.modes & MODES)
        wait_for(lambda: termios.tcgetattr(shell.slave) == shell.before)
        rest = shell.read().rpartition(b"\x1b[?1049h")[2]
        assert b"\x1b[<u" in rest, "of the keys' protocol"
        assert rest.rfind(b"\x1b[?25h") > rest.rfind(b"\x1b[?25l")
    assert kept_answer(tmp_path) == "A whole sentence."
    draft = tmp_path / DATA / "draft.txt"
    assert draft.is_file() == (status > 0)
    if status > 0:
        assert draft.read_text("utf-8") == "a draft"


def test_closed_terminal(tmp_path: Path) -> None:
    """Its window is closed, or the connection is lost: nothing can be written any more."""
    with ExitStack() as stack:
        shell = Shell(tmp_path, stack)
        shell.answer("a draft")
        shell.close()
        assert shell.status == 129
    assert (tmp_path / DATA / "draft.txt").read_text("utf-8") == "a draft"


def test_a_lost_terminal_holds_nobody_up() -> None:
    """However much is still to be written."""
    writer = Writer(Gone())
    for _ in range(MAX_QUEUED_WRITES):
        writer.write("x")
    writer.start()
    for _ in range(2 * MAX_QUEUED_WRITES):
        writer.write("x")
    writer.stop()


class Gone(io.StringIO):
    encoding = "utf-8"

    def fileno(self) -> int:
        raise OSError(errno.EIO, "Input/output error")


FLOOD = """
from pathlib import Path
from localrt.tui.chat.screen import ChatScreen
def flood(self):
    Path("{mark}").touch()
    for _ in range(1000):
        self.app._driver.write("x" * 4096)
ChatScreen.action_panel = flood
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_terminal_that_does_not_read(number: int, status: int, tmp_path: Path) -> None:
    """Nobody waits for it; it is restored once it reads again."""
    with ExitStack() as stack:
        shell = Shell(tmp_path, stack, FLOOD.format(mark=tmp_path / "mark"))
        shell.answer("a draft")
        shell.type(F3)
        wait_for((tmp_path / "mark").exists)
        os.kill(shell.app, number)
        assert shell.status == status
        wait_for(lambda: not shell.modes & MODES)
        wait_for(lambda: termios.tcgetattr(shell.slave) == shell.before)
    assert kept_answer(tmp_path) == "A whole sentence."
    assert (tmp_path / DATA / "draft.txt").read_text("utf-8") == "a draft"


BREAKS = """
from localrt.tui.chat.bars import Footer
from localrt.tui.chat.screen import ChatScreen
def fail(self):
    pasted = self.app.chat.composer.text
    raise ValueError(pasted)
async def work(screen):
    fail(screen)
"""


@pytest.mark.parametrize(
    "broken",
    [
        "fail",
        "lambda self: self.set_timer(0.001, lambda: fail(self))",
        "lambda self: self.run_worker(work(self))",
        "lambda self: (setattr(Footer, 'render', fail), self.footer.refresh())",
    ],
    ids=["handler", "timer", "worker", "render"],
)
def test_crash(broken: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        shell = Shell(tmp_path, stack, f"{BREAKS}ChatScreen.action_panel = {broken}")
        shell.answer("secret word")
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
    assert (tmp_path / DATA / "draft.txt").read_text("utf-8") == "secret word"


def test_draft_comes_back(tmp_path: Path) -> None:
    keep_draft(tmp_path / DATA, "what was written")
    with ExitStack() as stack:
        shell = Shell(tmp_path, stack)
        wait_for(lambda: shell.shows("what was written"))
        assert not (tmp_path / DATA / "draft.txt").exists()
