"""Restores a Unix terminal however the app ends, even if it is killed or crashes in native code.

A shell script, a child of the app, reads a pipe from it. If the pipe closes without a message, the
script resets the terminal.
"""

from __future__ import annotations

import math
import os
import subprocess
import time
from contextlib import suppress
from queue import Full
from typing import TextIO, cast

from textual.drivers import linux_driver
from textual.drivers._writer_thread import WriterThread
from textual.drivers.linux_driver import LinuxDriver

from localrt import system
from localrt.tui.pastes import PasteParser

# It writes the same sequences as LinuxDriver at its end. A shell may own the terminal by then: the
# modes are reset only if they are still the app's, recognized by -isig.
_WATCH = r"""trap '' HUP INT QUIT TERM TTIN TTOU
exec 3<&1
read -r word && exit
printf '\033[?2026l\033[?2004l\033[?7h\033[?2048l\033[?1000l\033[?1003l\033[?1015l\033[?1006l'
printf '\033[<u\033[?1049l\033[?25h\033[?1004l'
case $(stty -a <&3) in *-isig*) stty "$1" <&3 ;; esac
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
            modes = subprocess.check_output(["stty", "-g"], stdin=file, stderr=none, text=True)
            command = ["sh", "-c", _WATCH, "sh", modes.strip()]
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
