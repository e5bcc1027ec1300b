"""Restores a Unix terminal however the app ends, even if it is killed or crashes in native code.

A shell script, a child of the app, reads a pipe from it. If the pipe closes without a message, the
script resets the terminal.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress

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


class Writer(WriterThread):
    """Once the terminal is gone, it drops what is written: nobody waits in a full queue."""

    def run(self) -> None:
        """See Textual's, which fails then."""
        with suppress(OSError, ValueError):
            super().run()
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
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.communicate(b"done\n")
