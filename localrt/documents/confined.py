"""Reads documents in confined processes, one for each kind, so that a hostile file can hurt nothing
but the documents of its kind that are read with it. Nothing but JSON comes back.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Timer
from typing import Any

from localrt import system
from localrt.common.closing import Closing
from localrt.common.errors import LocalrtError, OptionError, StorageError
from localrt.common.processes import confined_process, has_helpers, helper_command
from localrt.documents.kinds import Page, reader_of

_ANSWER_NBYTES = 256 << 20  # of a page, as JSON
_NBYTES, _SECONDS = 500 << 20, 10  # seconds of processor time: of a file, or a page if it has pages


class DocumentReader(Closing):
    """Reads documents at or below ``place``, or bytes. Closing it ends its processes."""

    def __init__(self, place: Path | None = None) -> None:
        self._place = place
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def close(self) -> None:
        for kind in [*self._processes]:
            self._end(kind)

    def pages(self, kind: str, source: Path | bytes, name: str, pictures: int) -> Iterator[Page]:
        """Yield the pages of a document: see ``reader_of``, which also lists what is raised."""
        if not has_helpers():
            yield from reader_of(kind)(source, name, pictures)
            return
        process = self._running(kind)
        data = b"" if isinstance(source, Path) else source
        path = str(source.absolute()) if isinstance(source, Path) else ""
        asked = {"path": path, "nbytes": len(data), "name": name, "pictures": pictures}
        done = any_page = False
        try:
            with suppress(OSError):  # it has failed: the answer tells
                assert process.stdin is not None, "it is a pipe"
                process.stdin.write(json.dumps(asked).encode() + b"\n" + data)
                process.stdin.flush()
            while isinstance(told := self._told(process), Page):
                any_page = True
                yield told
            done = told is not None
        finally:
            if not done:
                self._end(kind)
        if told is None or not (told or any_page):
            limits = f"{_NBYTES >> 20} MB and {_SECONDS} s"
            raise OptionError(
                f"{name} cannot be read: it is damaged, or needs more than {limits}: "
                "attach a part of it, or save it as PDF"
            )
        if why := told.get("storage"):
            raise StorageError(why)
        if why := told.get("refused"):
            raise OptionError(why)

    def _told(self, process: subprocess.Popen[bytes]) -> Page | dict[str, str] | None:
        """The next line of an answer: a page, or how it ended. None if the process has failed, or
        writes what ours does not, as one might that a document has taken over.
        """
        assert process.stdout is not None, "it is a pipe"
        patience = Timer(6 * _SECONDS, process.kill)  # where it cannot limit itself
        patience.start()
        try:
            told = json.loads(process.stdout.readline(_ANSWER_NBYTES))
            if not isinstance(told, dict):
                return None
            if "text" not in told:
                return {key: str(told[key]) for key in ("refused", "storage") if key in told}
            return Page(
                str(told["text"]),
                int(told["number"]),
                base64.b64decode(told["picture"]),
                str(told["encoding"]),
                int(told["of"]),
                Counter({str(what): int(count) for what, count in told["left_out"].items()}),
            )
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError, OverflowError):
            return None
        finally:
            patience.cancel()

    def _running(self, kind: str) -> subprocess.Popen[bytes]:
        if kind not in self._processes:
            readable = [str(self._place.resolve())] if self._place else []
            self._processes[kind] = confined_process(helper_command(__name__, kind, *readable))
            system.limit_helper(self._processes[kind], 2 * _NBYTES)
        return self._processes[kind]

    def _end(self, kind: str) -> None:
        if process := self._processes.pop(kind, None):
            process.kill()
            with suppress(OSError):  # what was not written
                process.communicate()


def main() -> None:
    """Read documents of the kind of the first argument, at or below the second one."""
    from localrt.system.confined import confine, limiter

    kind, *readable = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # libraries may print
    limit = limiter()
    try:
        read = reader_of(kind)
    except OptionError as error:
        print(json.dumps({"refused": str(error)}), file=answers)
        return
    confine([*readable, *sys.path])
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        data = sys.stdin.buffer.read(asked["nbytes"])
        source = Path(asked["path"]) if asked["path"] else data
        limit(_NBYTES, _SECONDS)
        told: dict[str, Any] = {}
        try:
            for page in read(source, asked["name"], asked["pictures"]):
                parts = {key: getattr(page, key) for key in Page.__slots__}
                parts["picture"] = base64.b64encode(page.picture).decode()
                print(json.dumps(parts), file=answers, flush=True)
                if hasattr(signal, "setitimer"):
                    signal.setitimer(signal.ITIMER_PROF, _SECONDS)
        except (OptionError, OSError, LocalrtError) as error:
            told = {"refused" if isinstance(error, OptionError) else "storage": str(error)}
        print(json.dumps(told), file=answers, flush=True)
