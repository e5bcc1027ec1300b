"""A folder whose files misbehave, for processes that this one forks; see ``faulty_disk.cpp``."""

from __future__ import annotations

import mmap
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path

from localrt import LocalrtError
from tests.campaigns.disk_works import Work, prepare

READ, WRITE, OPEN, CHANGE, SYNC, LOOK = (1 << n for n in range(6))
"""Kinds of calls."""
SHORT, SLOW = -1, -2
"""Effects on a call, beside errors by their numbers."""
_OTHER_WORDS = ("full", "disk I/O error", "unable to open database file", "readonly", "malformed")


def preload() -> None:
    """Begin this process again with the library, which is compiled first."""
    if "LOCALRT_FAULT_FOLDER" in os.environ:
        return
    root = Path(tempfile.mkdtemp(prefix="localrt-disk-"))
    source, library = Path(__file__).with_suffix(".cpp"), root / "faults.so"
    flags = ("-std=c++17", "-O2", "-Wall", "-shared", "-fPIC")
    subprocess.run(["g++", *flags, source, "-o", library, "-ldl"], check=True)
    (root / "control").write_bytes(bytes(48))
    faults = {f"LOCALRT_FAULT_{name.upper()}": str(root / name) for name in ("folder", "control")}
    own = {**faults, "LD_PRELOAD": str(library)}
    os.execve(sys.executable, sys.orig_argv, {**os.environ, **own})


class FaultyDisk:
    """The folder whose files misbehave, and processes that work on it: ``slow_s`` is how long a
    slow call takes, ``most_s`` how long a process may.
    """

    slow_s, most_s = 10.0, 120.0

    def __init__(self) -> None:
        self.folder = Path(os.environ["LOCALRT_FAULT_FOLDER"])
        self.root = self.folder.parent
        for name in ("DATA", "CONFIG"):
            os.environ[f"XDG_{name}_HOME"] = str(self.folder / name.lower())
        os.environ["LOCALRT_CACHE"] = str(self.folder / "cache")
        with (self.root / "control").open("r+b") as file:
            self._control = mmap.mmap(file.fileno(), 48)
        # In a process of its own, since this one forks.
        if problem := self.wrong(lambda _: prepare(self.root), ""):
            raise RuntimeError(problem)

    def fault(self, kinds: int = 0, effect: int = 0, first: int = 0, last: int = 0) -> None:
        """Calls ``first`` to ``last`` from now on misbehave; none by default."""
        self._control[:] = struct.pack("6q", 0, first, last, kinds, effect, int(self.slow_s * 1e6))

    def recover(self) -> None:
        """Let no more calls misbehave; those of the kinds are counted on."""
        self._control[8:24] = bytes(16)

    @property
    def calls(self) -> int:
        """Calls of the kinds since ``fault``."""
        return int(struct.unpack("6q", self._control)[0])

    def renew(self) -> None:
        """Have the folder as it was prepared."""
        self.fault()
        (self.root / "acknowledged").unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        for name in ("model", "store", "texts"):
            shutil.copytree(self.root / name, self.folder / name)
        (self.folder / "kv").mkdir()

    def close(self) -> None:
        """Remove it."""
        shutil.rmtree(self.root, ignore_errors=True)

    def attempt(self, work: Work) -> tuple[int | None, str, str]:
        """Run ``work``: its status, None if it hangs, and what it printed."""
        sys.stdout.flush()
        if not (process := os.fork()):
            os.setsid()
            for number, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(self.root / name, os.O_CREAT | os.O_TRUNC | os.O_RDWR), number)
            os._exit(_status(work, self.folder))
        ends = os.pidfd_open(process)
        ended = bool(select.select([ends], [], [], self.most_s)[0])
        os.close(ends)
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        out, err = ((self.root / name).read_text("utf-8", "replace") for name in ("out", "err"))
        return status if ended else None, out, err

    def wrong(self, work: Work, wanted: str, effect: int = 0) -> str:
        """What is wrong with an attempt; "" if nothing is."""
        status, out, err = self.attempt(work)
        last = err.strip().rpartition("\n")[2]
        words = (os.strerror(effect), *_OTHER_WORDS) if effect > 0 else ()
        if status not in (0, 1) or "Traceback" in err:
            return f"status {status}: {err[-3000:]}"
        if status == 0 and out != wanted and "left out" not in out:
            return f"another answer: {out[-500:]} {err[-500:]}"
        clear = str(self.folder) in last and any(word in last for word in words)
        return f"unclear: {last or out}" if status == 1 and not clear else ""


def _status(work: Work, folder: Path) -> int:
    """Work, and return an exit status, as a command does."""
    try:
        status = work(folder) or 0
        sys.stdout.flush()
    except LocalrtError as error:
        print(f"localrt: {error}", file=sys.stderr)
        status = 1
    except BaseException:  # noqa: BLE001 - it is told
        traceback.print_exc()
        status = 3
    sys.stderr.flush()
    return status
