"""The terminal: pastes, the clipboard, restoring it however the app ends, and reports of crashes.

A paste is what is between the terminal's marks, whatever that is. Text is copied with a tool of the
desktop or tmux, which reports whether it worked. If the app is killed or crashes in native code, a
shell script, its child, reads the end of a pipe and resets a Unix terminal. A crash saves an error
report in a private file, which names only code: values and error messages may contain the user's
text.
"""

from __future__ import annotations

import math
import os
import platform
import re
import subprocess
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from queue import Full
from typing import TextIO, cast

from textual._time import get_time
from textual._xterm_parser import BRACKETED_PASTE_END as END
from textual._xterm_parser import BRACKETED_PASTE_START as START
from textual._xterm_parser import XTermParser
from textual.drivers import linux_driver
from textual.drivers._writer_thread import WriterThread
from textual.drivers.linux_driver import LinuxDriver
from textual.events import Paste
from textual.message import Message

from localrt import system
from localrt.common.errors import StorageError
from localrt.common.files import write_text
from localrt.common.processes import program_path
from localrt.common.settings import CRASH_REPORT
from localrt.common.version import __version__

_PAUSE = 3.0  # seconds; a paste that pauses so long is shown: its end may be lost
_BURST = 0.05  # seconds; no person types so soon after a paste
# A read that is a single key (not Esc, with which marks begin), or a new paste.
_KEY = re.compile(
    r"(?!\x1b\[201~)(\x1b?[^\x1b[]|\[|\x1bO.|\x1b\[[\d;:<]*[A-Za-z~]|\x1b\[200~.*)", re.DOTALL
)


class PasteParser(XTermParser):
    """Textual's parser reads what follows an escape character in a paste as keys. Here everything
    between the marks is the paste; after a pause, a single key ends it too. Copied text may hold
    an end mark, to have the rest obeyed as keys: what comes right behind a paste, up to another end
    mark, is pasted too.
    """

    _recent = ""  # the last characters outside a paste
    _paste: str | None = None
    _behind: str | None = None  # what came right behind a paste
    _fed = 0.0  # when something came last

    def feed(self, data: str) -> Iterable[Message]:
        if not data:
            yield from super().feed(data)
            return
        if self._paused and _KEY.fullmatch(data):
            yield self._ended(self._paste or "")
        if get_time() - self._fed >= _BURST:
            yield from self.typed()
        self._fed = get_time()
        yield from self._read(data)

    def typed(self) -> Iterable[Message]:
        """What came right behind a paste, if no end mark will follow: it was typed."""
        typed, self._behind = self._behind, None
        yield from self._read(typed or "")

    def _read(self, data: str) -> Iterable[Message]:
        while data:
            if self._behind is not None:
                *pasted, self._behind = (self._behind + data).split(END)
                if text := "".join(pasted).replace(START, ""):
                    yield Paste(text)
                return
            if self._paste is not None:
                searched = max(len(self._paste) - len(END), 0)
                self._paste += data
                end = self._paste.find(END, searched)
                if end < 0:
                    return
                text, data = self._paste[:end], self._paste[end + len(END) :]
                yield self._ended(text)
                self._behind = ""
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
        if get_time() - self._fed >= _BURST:
            yield from self.typed()
        if self._paused and self._paste:
            mark = max(size for size in range(len(END)) if self._paste.endswith(END[:size]))
            text = self._paste[: len(self._paste) - mark]
            self._paste = END[:mark]
            if text:
                yield Paste(text)
        if not any(self._recent.endswith(START[:size]) for size in range(3, len(START))):
            yield from super().tick()


# (environment variable that must be set, or empty; command that copies its input). Pillow reads
# pictures with the same tools of Wayland and X11.
_TOOLS = (
    ("TMUX", "tmux load-buffer -w -"),
    ("WAYLAND_DISPLAY", "wl-copy"),
    ("DISPLAY", "xclip -selection clipboard"),
    ("DISPLAY", "xsel --clipboard --input"),
    ("", "pbcopy"),
    ("", "clip.exe"),
)
_SECONDS = 3.0


def copied_by_tool(text: str) -> bool:
    """Give the text to the first tool that accepts it; may take a few seconds."""
    for variable, command in _TOOLS:
        name, *arguments = command.split()
        remote = "SSH_CONNECTION" in os.environ and variable != "TMUX"
        if remote or not os.environ.get(variable, not variable):
            continue
        # clip.exe reads UTF-16. Output must not be a pipe: xclip's child would keep it open.
        encoding = "utf-16" if command == "clip.exe" else "utf-8"
        none = subprocess.DEVNULL
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                [program_path(name) or "", *arguments],
                input=text.encode(encoding, "replace"),
                stdout=none,
                stderr=none,
                check=True,
                timeout=_SECONDS,
            )
            return True
    return False


# It writes the same sequences as LinuxDriver at its end. A shell may own the terminal by then: the
# modes are reset only if they are still the app's, recognized by -isig.
_WATCH = r"""trap '' HUP INT QUIT TERM TTIN TTOU
exec 3<&1
read -r word && exit
printf '\033[?2026l\033[?2004l\033[?7h\033[?2048l\033[?1000l\033[?1003l\033[?1015l\033[?1006l'
printf '\033[<u\033[?1049l\033[?25h\033[?1004l'
case $("$2" -a <&3) in *-isig*) "$2" "$1" <&3 ;; esac
"""


_MOMENT, _LOOK = 1.0, 0.1  # seconds; how often a waiting thread looks whether it must hurry


class Writer(WriterThread):
    """Once the terminal is gone, it drops what is written: nobody waits in a full queue. So too if
    the terminal does not read, from a moment after ``hurry``.
    """

    _until = math.inf

    def hurry(self) -> None:
        """The app has to end: wait only a moment longer for the terminal."""
        self._until = time.monotonic() + _MOMENT

    def write(self, text: str | None) -> None:
        while (left := self._until - time.monotonic()) > 0:
            with suppress(Full):
                return self._queue.put(text, timeout=min(left, _LOOK))
        return None

    def stop(self) -> None:
        self.write(None)
        left = self._until - time.monotonic()
        self.join(None if math.isinf(left) else max(left, 0.0))

    def run(self) -> None:
        """Without the stream: Python cannot end while a thread is in it."""
        with suppress(OSError, ValueError):
            while (text := self._queue.get()) is not None:
                data = text.encode(cast("TextIO", self._file).encoding, "backslashreplace")
                while data:
                    data = data[os.write(self._file.fileno(), data) :]
            return
        while self._queue.get() is not None:
            pass


setattr(linux_driver, "XTermParser", PasteParser)  # noqa: B010 - what the driver makes
setattr(linux_driver, "WriterThread", Writer)  # noqa: B010


class RestoringDriver(LinuxDriver):
    """Textual's driver; the script above runs while the app uses the terminal."""

    _watcher: subprocess.Popen[bytes] | None = None

    def start_application_mode(self) -> None:
        """Without ``sh`` or ``stty`` there is no watcher."""
        file, pipe, none = self._file, subprocess.PIPE, subprocess.DEVNULL
        with suppress(OSError, subprocess.CalledProcessError):
            stty = program_path("stty") or ""
            modes = subprocess.check_output([stty, "-g"], stdin=file, stderr=none, text=True)
            command = ["/bin/sh", "-c", _WATCH, "sh", modes.strip(), stty]
            self._watcher = self._watcher or subprocess.Popen(
                command, stdin=pipe, stdout=file, stderr=none, process_group=0
            )
        if self._key_thread is None and os.isatty(self.fileno):
            with system.typed_ahead(self.fileno) as typed:
                early = os.read(self.fileno, 1 << 16) if typed else b""
            # The terminal has turned Enter into a line feed.
            text = early.decode(errors="replace").replace("\n", "\r")
            parser = PasteParser()
            for event in (*parser.feed(text), *parser.typed()) if text else ():
                self.process_message(event)
        super().start_application_mode()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        super().close()
        if self._writer_thread is not None and self._writer_thread.is_alive():
            return  # the watcher restores the terminal once it reads again
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.communicate(b"done\n")

    def hurry(self) -> None:
        """Wait only a moment longer for the terminal, whose writer runs."""
        if isinstance(self._writer_thread, Writer):
            self._writer_thread.hurry()


def write_report(error: BaseException, folder: Path | None) -> str:
    """Write a report of where ``error`` came from; returns the line for the user."""
    cause: BaseException | None = getattr(error, "error", error)  # a worker's error wraps another
    line = (
        f"the app ended because of an error in it ({type(cause).__name__}); localrt chat -c opens "
        "the conversation again, with the message that was being written"
    )
    text = f"localrt {__version__}, Python {platform.python_version()}, {platform.platform()}\n"
    while cause is not None:
        text += f"\n{''.join(traceback.format_tb(cause.__traceback__))}{type(cause).__name__}\n"
        cause = cause.__cause__ or cause.__context__
    if folder is not None:
        with suppress(StorageError):
            write_text(folder / CRASH_REPORT, text, private=True, folder=True)
            line += f". To report it, send {folder / CRASH_REPORT}"
    return line
