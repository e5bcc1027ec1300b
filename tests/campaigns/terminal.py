"""Signals at any moment, and bytes as real terminals send them, to the app in a pseudo-terminal."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import termios
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import psutil

from localrt import History
from localrt.common.settings import CRASH_REPORT
from tests.campaigns.campaign import Run, campaign
from tests.tui.test_ending import DATA, MODES, SEQUENCE, Shell, kept_answer
from tests.waits import wait_for

SENTENCE, DRAFT = "A whole sentence.", "a draft"
ENDING = (
    *(signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGABRT),
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGKILL),
)
# What opens and closes dialogs, moves, and changes the layout: nothing that sends or quits.
KEYS = ("\x0f", "\x1bOP", "\x1bOQ", "\x1bOR", "\x1bOS", "\x1b[15~", "\x06", "\x10", "\x1b", "x")
KEYS += ("\x1b[A", "\x1b[B", "\x1b[5~", "\x1b[6~", "\x1b[H", "\x1b[F", "\t", "\x1b[Z")
KEYS += ("\x1b[<64;10;10M", "\x1b[I", "\x1b[O")
# And what also edits, marks, sends and commands.
ALL_KEYS = (
    *KEYS,
    *"\r\r\n\x7f\x01\x05\x0b\x0c\x0e\x12\x13\x14\x15\x17\x19",
    *("\x18\x05", "\x1bc", "\x1be", "\x1by", "\x1bz", "\x1b[3~", "\x1b[C", "\x1b[D"),
    *("\x1b[1;2A", "\x1b[1;2D", "\x1b[1;3A", "\x1b[1;3B", "\x1b[1;3C", "\x1b[1;3D"),
    *("\x1b[1;5A", "\x1b[1;5C", "\x1b[1;5H", "\x1b[1;5F", "\x1b[200~a\nb\x1b[201~"),
    *("the sea ", "é😀", "/", "@", "/model\r", "/set temperature 2\r", "/help\r", "/fold\r"),
    *("/delete\r", "/attach x\r"),
)
START, END = "\x1b[200~", "\x1b[201~"
PASTED = (
    *("\r", "\n", "\t", "\x1b", "\x03", "\x04", "\x11", "\x1a", "\x7f", "\x00", "\x9b", "/quit\r"),
    *("\x1b[13u", "\x1b[106;5u", "\x1b[27;5;106~", "\x1b[99;5u", "\x1bOM", "\x1b[<0;3;4M"),
    *("\x1b]2;title\x07", "\x1b]52;c;eA==\x1b\\", "\x1b[2J", "\x1b[?1049l", "\x1bP+q\x1b\\"),
    *("\x1b[I", "\x1b[201", "\x1b[20", f"{END}/quit\r", f"{END}\x11", f"{END}\r{START}", "é", "😀"),
)


def restored(shell: Shell) -> bool:
    """Whether the terminal is as it was before the app."""
    return not shell.modes & MODES and termios.tcgetattr(shell.slave) == shell.before


def ended(shell: Shell) -> bool:
    """Whether the app has ended; what it writes is read, as a terminal does."""
    shell.read()
    return not Path(f"/proc/{shell.app}").exists()


def end(process: int) -> None:
    """Kill an app that has not ended."""
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def resumed(shell: Shell) -> bool:
    """Whether the app runs in its terminal; if it is stopped, it is told to go on."""
    with suppress(psutil.NoSuchProcess):
        if psutil.Process(shell.app).status() == psutil.STATUS_STOPPED:
            os.kill(shell.app, signal.SIGCONT)
    return shell.modes >= MODES


def signal_at_any_moment(number: signal.Signals, chance: random.Random, folder: Path) -> None:
    """Send a signal to the app while it starts, answers, or shows a dialog."""
    with ExitStack() as stack:
        shell = Shell(folder, stack)
        stack.callback(end, shell.app)
        if answering := chance.random() < 0.8:
            shell.answer(DRAFT)
            for _ in range(chance.randrange(6)):
                shell.type(chance.choice(KEYS))
        time.sleep(chance.random() * 0.5)
        os.kill(shell.app, number)
        if number == signal.SIGTSTP:
            wait_for(lambda: restored(shell) or not answering)
            time.sleep(0.2)  # until it has stopped, at its start too
            wait_for(lambda: resumed(shell))
            os.kill(shell.app, signal.SIGTERM)
        wait_for(lambda: ended(shell))
        status = shell.status
        wait_for(lambda: restored(shell))
        rest = SEQUENCE.sub("", shell.read().decode(errors="replace").rpartition("\x1b[?1004l")[2])
        assert "Traceback" not in rest, f"ended with {status} and a traceback"
    kept = kept_answer(folder) if answering else SENTENCE
    assert kept == SENTENCE, f"kept {kept!r} of the answer"


def paste(chance: random.Random, folder: Path) -> None:
    """Paste words with control characters between them, split anywhere."""
    words = [f"w{number}" for number in range(chance.randint(2, 8))]
    text = "".join(chance.choice(PASTED) + word for word in words)
    data = f"{START}{text}{END}".encode()
    with ExitStack() as stack:
        shell = Shell(folder, stack)
        wait_for(lambda: "2004" in shell.modes)
        wait_for(lambda: shell.shows("ready"))
        places = sorted(chance.randrange(len(data)) for _ in range(chance.randrange(4)))
        for begin, end in zip((0, *places), (*places, len(data)), strict=True):
            os.write(shell.master, data[begin:end])
        wait_for(lambda: shell.shows(words[-1]) or shell.leader.poll() is not None)
        os.kill(shell.app, signal.SIGTERM)
        wait_for(lambda: ended(shell))
        draft = (folder / DATA / "draft.txt").read_text("utf-8")
    with History(folder / DATA / "history.db") as history:
        turns = [turn for entry in history.list() for turn in history.open(entry.id).turns]
    assert not turns, f"{text!r} was sent"
    assert [word for word in words if word in draft] == words, f"{text!r} became {draft!r}"


def keys(chance: random.Random, folder: Path) -> None:
    """Type and click, partly faster than the app: it goes on, unless it is told to quit."""
    with ExitStack() as stack:
        shell = Shell(folder, stack)
        stack.callback(end, shell.app)
        wait_for(lambda: "2004" in shell.modes)
        for _ in range(chance.randrange(20, 200)):
            if ended(shell):
                break
            place = f"{chance.randint(1, 80)};{chance.randint(1, 24)}"
            click = f"\x1b[<{chance.choice((0, 2, 32, 64))};{place}{chance.choice('Mm')}"
            with suppress(BlockingIOError):  # a terminal, too, drops what nobody reads
                shell.type(click if chance.random() < 0.1 else chance.choice(ALL_KEYS))
            time.sleep(chance.choice((0, chance.random() * 0.1)))
        time.sleep(0.5)
    report = folder / DATA / CRASH_REPORT
    assert not report.exists(), report.read_text("utf-8")[-1000:]


CASES = {
    **{number.name: partial(signal_at_any_moment, number) for number in (*ENDING, signal.SIGTSTP)},
    "pastes": paste,
    "keys": keys,
}


def terminal(run: Run) -> None:
    """The terminal is as it was, what was said is kept, and what is pasted is text."""
    # Shells in the background and nohup ignore these, and so would the app before it is ready.
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    for case, attempt in CASES.items():
        while run.goes_on(case):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    attempt(run.random(case), Path(folder))
                except (AssertionError, ProcessLookupError) as error:  # it has ended by itself
                    run.found(case, f"{error}")
            run.tried(case)


if __name__ == "__main__":
    campaign("terminal", terminal, count=50)
