"""Gives the terminal back however the app ends, also if it is killed or crashes in native code.

A shell script, a child of the app, reads a pipe from it. If the pipe ends without a word, the
script undoes what the app had set.
"""

from __future__ import annotations

import os
import re
import subprocess
import termios
import tty
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from select import select

from textual._time import get_time
from textual._xterm_parser import BRACKETED_PASTE_END as END
from textual._xterm_parser import BRACKETED_PASTE_START as START
from textual._xterm_parser import XTermParser
from textual.drivers import linux_driver, web_driver
from textual.drivers.linux_driver import LinuxDriver
from textual.events import Paste
from textual.message import Message

# It writes what LinuxDriver does as it ends. A shell may have the terminal by then: the modes are
# set back only while they are the app's, which alone turns off the keys' signals.
_WATCH = r"""trap '' HUP INT QUIT TERM TTIN TTOU
exec 3<&1
read -r word && exit
printf '\033[?2026l\033[?2004l\033[?7h\033[?2048l\033[?1000l\033[?1003l\033[?1015l\033[?1006l'
printf '\033[<u\033[?1049l\033[?25h\033[?1004l'
case $(stty -a <&3) in *-isig*) stty "$1" <&3 ;; esac
"""

_PAUSE = 3.0  # seconds; a paste that pauses so long is shown: its end may be lost
# A read that is a single key (not Esc, with which marks begin), or a new paste.
_KEY = re.compile(
    r"(?!\x1b\[201~)(\x1b?[^\x1b[]|\[|\x1bO.|\x1b\[[\d;:<]*[A-Za-z~]|\x1b\[200~.*)", re.DOTALL
)


class PasteParser(XTermParser):
    """Textual's parser reads what follows an escape character in a paste as keys. Here everything
    between the marks is the paste; after a pause, a single key ends it too.
    """

    _recent = ""  # the last characters outside a paste
    _paste: str | None = None
    _fed = 0.0  # when something came last

    def feed(self, data: str) -> Iterable[Message]:
        if not data:
            yield from super().feed(data)
        if self._paused and _KEY.fullmatch(data):
            yield self._ended(self._paste or "")
        self._fed = get_time()
        while data:
            if self._paste is not None:
                searched = max(len(self._paste) - len(END), 0)
                self._paste += data
                end = self._paste.find(END, searched)
                if end < 0:
                    return
                text, data = self._paste[:end], self._paste[end + len(END) :]
                yield self._ended(text)
                continue
            before, mark, data = (self._recent + data).partition(START)
            yield from super().feed((before + mark)[len(self._recent) :])
            self._recent = "" if mark else before[1 - len(START) :]
            self._paste = "" if mark else None

    @property
    def _paused(self) -> bool:
        return self._paste is not None and get_time() - self._fed >= _PAUSE

    def _ended(self, text: str) -> Paste:
        self._paste = None
        list(super().feed(END))  # for Textual, which has seen the paste's start, but not its text
        return Paste(text)

    def tick(self) -> Iterable[Message]:
        """Show the part of a paste that has arrived. On a slow line the pause may be within the
        mark that begins a paste: it is not taken for keys.
        """
        if self._paused and self._paste:
            mark = max(size for size in range(len(END)) if self._paste.endswith(END[:size]))
            text = self._paste[: len(self._paste) - mark]
            self._paste = END[:mark]
            if text:
                yield Paste(text)
        if not any(self._recent.endswith(START[:size]) for size in range(3, len(START))):
            yield from super().tick()


for module in (linux_driver, web_driver):
    setattr(module, "XTermParser", PasteParser)  # noqa: B010 - what both drivers make


@contextmanager
def unread(terminal: int) -> Iterator[bool]:
    """Whether anything was typed that can be read now, be it only the beginning of a line."""
    modes = termios.tcgetattr(terminal)
    tty.setcbreak(terminal, termios.TCSANOW)
    try:
        yield bool(select([terminal], [], [], 0)[0])
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, modes)


class RestoringDriver(LinuxDriver):
    """Textual's driver; the script above runs beside it while the app has the terminal."""

    _watcher: subprocess.Popen[bytes] | None = None

    def start_application_mode(self) -> None:
        """Without ``sh`` or ``stty`` there is no watcher."""
        file, pipe, none = self._file, subprocess.PIPE, subprocess.DEVNULL
        with suppress(OSError, subprocess.CalledProcessError):
            modes = subprocess.check_output(["stty", "-g"], stdin=file, stderr=none, text=True)
            command = ["sh", "-c", _WATCH, "sh", modes.strip()]
            self._watcher = self._watcher or subprocess.Popen(
                command, stdin=pipe, stdout=file, stderr=none, process_group=0
            )
        if self._key_thread is None and os.isatty(self.fileno):
            with unread(self.fileno) as typed:
                early = os.read(self.fileno, 1 << 16) if typed else b""
            # The terminal has made a line feed of Enter.
            text = early.decode(errors="replace").replace("\n", "\r")
            for event in PasteParser().feed(text) if text else ():
                self.process_message(event)
        super().start_application_mode()  # type: ignore[no-untyped-call]

    @property
    def _writes(self) -> bool:
        """False once the terminal is gone: the queue, which nobody empties, would fill up."""
        return self._writer_thread is not None and self._writer_thread.is_alive()

    def write(self, data: str) -> None:
        if self._writes:
            super().write(data)

    def close(self) -> None:
        if self._writes:
            super().close()
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.communicate(b"done\n")
