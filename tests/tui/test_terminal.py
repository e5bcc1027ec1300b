"""The real command in a real terminal: tmux, the demo model, a kill in the middle of an answer."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from localrt import History
from localrt.history import Turn
from tests.real_models import real_model

pytestmark = [
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed"),
    pytest.mark.real,
    pytest.mark.timeout(900),
]

ROOT = Path(__file__).resolve().parent.parent.parent
SECONDS = 120  # for one thing to be seen


class Terminal:
    """A tmux server of its own with one window, 100 by 30."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._socket = f"localrt-test-{uuid.uuid4().hex[:8]}"
        settings = [f"{name}={value}" for name, value in environment.items()]
        # A size in the environment would count for more than the terminal's own.
        line = shlex.join(["env", "-u", "COLUMNS", "-u", "LINES", *settings, *command])
        # Again and again: after a kill the app's screen may still be there for a moment.
        line += "; status=$?; while echo ended with $status; do sleep 0.5; done"
        start = ["-f", os.devnull, "new-session", "-d", "-x", "100", "-y", "30", line]
        try:
            self.tmux(*start)
        except AssertionError:  # a busy machine: the server did not come up in time
            self.tmux(*start)

    def tmux(self, *arguments: str) -> str:
        command = ["tmux", "-L", self._socket, *arguments]
        done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def keys(self, *keys: str) -> None:
        self.tmux("send-keys", *keys)

    def screen(self) -> str:
        return self.tmux("capture-pane", "-p")

    def wait_for(self, text: str, *, gone: bool = False) -> str:
        deadline = time.monotonic() + SECONDS
        while (text in (shown := self.screen())) is gone:
            assert time.monotonic() < deadline, f"waited for {text!r}, {gone=}:\n{shown}"
            time.sleep(0.1)
        return shown

    def wait_below(self, text: str) -> None:
        """Until something is written below it."""
        deadline = time.monotonic() + SECONDS
        while not (shown := self.screen()).partition(text)[2].strip():
            assert time.monotonic() < deadline, f"waited for more than {text!r}:\n{shown}"
            time.sleep(0.1)

    def close(self) -> None:
        subprocess.run(
            ["tmux", "-L", self._socket, "kill-server"], check=False, capture_output=True
        )


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def terminal(data: Path) -> Iterator[Terminal]:
    command = [sys.executable, "-m", "localrt", "chat", str(real_model("smollm2"))]
    environment = {"XDG_DATA_HOME": str(data), "XDG_CONFIG_HOME": str(data)}
    environment["LOCALRT_OFFLINE"] = "1"
    terminal = Terminal([*command, "--seed", "1", "--max-tokens", "2000"], environment)
    yield terminal
    terminal.close()


def last_turns(data: Path) -> tuple[Turn, ...]:
    """The turns of the conversation used last, as they are kept by now."""
    with History(data / "localrt" / "history.db") as history:
        return tuple(history.open(history.list()[0].id).turns)


def process_of(data: Path) -> int:
    """The number of the app that uses this data folder."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes()
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if f"XDG_DATA_HOME={data}".encode() in environment and b"\0chat\0" in command:
            return int(entry.name)
    raise AssertionError("the app does not run")


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the process in /proc")
def test_killed_chat(terminal: Terminal, data: Path) -> None:
    terminal.keys("Hello", "Enter")  # before the app has even opened
    terminal.wait_for(" tok/s")
    terminal.wait_for("ready")
    terminal.keys("/set ignore_eos true", "Enter")
    terminal.wait_for("ignore_eos = true")
    terminal.keys("Count from one to five hundred.", "Enter")
    terminal.wait_for("answering")
    terminal.keys("C-o")
    assert "4 turns" in terminal.wait_for("Enter open")
    terminal.keys("Escape")
    terminal.wait_for("Enter open", gone=True)
    terminal.tmux("resize-window", "-x", "20", "-y", "6")
    terminal.wait_for("too small")
    terminal.tmux("resize-window", "-x", "60", "-y", "20")
    terminal.wait_for("Message")
    terminal.wait_for(" tok/s")
    deadline = time.monotonic() + SECONDS
    while not last_turns(data)[-1].content:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.kill(process_of(data), signal.SIGKILL)
    terminal.wait_for("ended with 137")
    *_, user, answer = last_turns(data)
    assert user.content == "Count from one to five hundred."
    assert answer.state == "cut"
    assert answer.content


def test_panel_wraps_screen(terminal: Terminal) -> None:
    terminal.keys("Write a long sentence about the sea.", "Enter")
    terminal.wait_for(" tok/s")
    terminal.wait_for("ready")
    shown = conversation(terminal.screen())
    for panel in (True, False):
        terminal.keys("F3")
        terminal.wait_for("F3 hides", gone=not panel)
        deadline = time.monotonic() + SECONDS
        while conversation(terminal.screen()) != shown:
            assert time.monotonic() < deadline, f"words are cut off:\n{terminal.screen()}"
            time.sleep(0.1)


def conversation(screen: str) -> list[str]:
    """The words above the composer, without the panel."""
    lines = screen.partition("╭")[0].splitlines()
    return " ".join(line.partition("│")[0] for line in lines).split()


def test_plain_on_a_dumb_terminal(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "localrt", "chat", str(real_model("smollm2"))]
    environment = {"XDG_DATA_HOME": str(tmp_path), "LOCALRT_OFFLINE": "1", "TERM": "dumb"}
    terminal = Terminal([*command, "--max-tokens", "1000"], environment)
    try:
        terminal.wait_for("You:")
        terminal.keys("/set ignore_eos true", "Enter")
        terminal.wait_for("ignore_eos = true")
        terminal.wait_below("ignore_eos = true")  # it asks again
        terminal.keys("Write down the numbers from 1 to 300.", "Enter")
        terminal.wait_below("to 300.")
        terminal.keys("C-c")
        terminal.wait_for("(stopped)")
        terminal.keys("/quit", "Enter")
        terminal.wait_for("ended with 0")
    finally:
        terminal.close()
