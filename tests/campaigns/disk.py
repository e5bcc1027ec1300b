"""Disks that fail at one call, from one call on, or slowly; and flipped bits in what is kept.

A try is a process that works on a fresh folder (``workloads.py``) while call number N on its files
misbehaves (``file_calls.cpp``), and then once more on what that left. N goes through all calls, or
through random ones of many.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from localrt.common.errors import LocalrtError
from tests.campaigns import workloads
from tests.campaigns.campaign import Run, campaign
from tests.campaigns.workloads import Workload, answer_of, attempt, preloaded, prepare

READ, WRITE, OPEN, CHANGE, SYNC, LOOK, ALL = *(1 << n for n in range(6)), (1 << 6) - 1
SHORT, SLOW = -1, -2  # effects on a call, beside errors by their numbers
ALWAYS, _SLOW_US, _FLIPS = 1 << 62, 10_000_000, 100.0  # flips for each try of a fault
_OTHER_WORDS = ("full", "disk I/O error", "unable to open database file", "readonly", "malformed")
FAULTS = {  # which calls misbehave, how, how many of them, and the share of tries
    "read fails": (READ, errno.EIO, 1, 1.0),
    "short read": (READ, SHORT, 1, 1.0),
    "slow read": (READ, SLOW, 1, 0.01),
    "open fails": (OPEN | LOOK, errno.EIO, 1, 1.0),
    "write fails": (WRITE, errno.EIO, 1, 1.0),
    "short write": (WRITE, SHORT, 1, 1.0),
    "sync fails": (SYNC, errno.EIO, 1, 1.0),
    "full": (WRITE | CHANGE, errno.ENOSPC, ALWAYS, 1.0),
    "over quota": (WRITE, errno.EDQUOT, ALWAYS, 1.0),
    "read-only": (CHANGE, errno.EROFS, ALWAYS, 1.0),
    "vanished": (ALL, errno.ENODEV, ALWAYS, 1.0),
    "stale": (ALL, errno.ESTALE, ALWAYS, 1.0),
}


def preload() -> None:
    """Begin this process again with the library, which is compiled first."""
    if "LOCALRT_FILES" not in os.environ:
        root = Path(tempfile.mkdtemp(prefix="localrt-disk-"))
        control = root / "control"
        control.write_bytes(bytes(48))
        environ = preloaded(root / "folder", root / "file_calls.so", control=control)
        os.execve(sys.executable, sys.orig_argv, environ)


class FaultyDisk:
    """A folder whose files misbehave, for processes that this one forks."""

    def __init__(self) -> None:
        self.folder = Path(os.environ["LOCALRT_FILES"])
        self.root = self.folder.parent
        for name in ("DATA", "CONFIG"):
            os.environ[f"XDG_{name}_HOME"] = str(self.folder / name.lower())
        os.environ["LOCALRT_CACHE"] = str(self.folder / "cache")
        with (self.root / "control").open("r+b") as file:
            self._control = mmap.mmap(file.fileno(), 48)
        # In a process of its own, since this one forks.
        made = attempt(lambda _at, _said: prepare(self.root), self.folder)
        if made.status != 0:
            raise RuntimeError(made.err)

    def fault(self, kinds: int = 0, effect: int = 0, first: int = 0, last: int = 0) -> None:
        """Calls ``first`` to ``last`` from now on misbehave; none by default."""
        self._control[:] = struct.pack("6q", 0, first, last, kinds, effect, _SLOW_US)

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
        self._said = list[Any]()
        shutil.rmtree(self.folder, ignore_errors=True)
        for name in ("model", "store", "texts"):
            shutil.copytree(self.root / name, self.folder / name)
        (self.folder / "kv").mkdir()

    def close(self) -> None:
        """Remove it."""
        shutil.rmtree(self.root, ignore_errors=True)

    def wrong(self, workload: Workload, wanted: str, effect: int = 0) -> str:
        """What is wrong with an attempt, on what the one before left; "" if nothing is."""
        status, out, err, self._said = attempt(workload, self.folder, self._said)
        last = err.strip().rpartition("\n")[2]
        words = (os.strerror(effect), *_OTHER_WORDS) if effect > 0 else ()
        if status not in (0, 1) or "Traceback" in err:
            return f"status {status}: {err[-3000:]}"
        if status == 0 and out != wanted and "left out" not in out:
            return f"another answer: {out[-500:]} {err[-500:]}"
        clear = str(self.folder) in last and any(word in last for word in words)
        return f"unclear: {last or out}" if status == 1 and not clear else ""


def faults(run: Run, disk: FaultyDisk) -> None:
    """Try every workload with every fault."""
    for name, workload in workloads.DISK.items():
        disk.renew()
        wanted = attempt(workload, disk.folder).out
        for fault, (kinds, effect, most, share) in FAULTS.items():
            case = f"{name}, {fault}"
            if not run.goes_on(case, share):
                continue
            disk.renew()
            disk.fault(kinds)
            if problem := disk.wrong(workload, wanted):
                run.found(case, f"without a fault: {problem}")
            calls = disk.calls
            while run.goes_on(case, share) and run.done(case) < calls:
                every = calls <= run.count * share
                first = run.done(case) + 1 if every else run.random(case).randint(1, calls)
                disk.renew()
                disk.fault(kinds, effect, first, first + most - 1)
                if problem := disk.wrong(workload, wanted, effect):
                    run.found(case, f"call {first} of {calls}: {problem}")
                disk.fault()
                if problem := disk.wrong(workload, wanted):
                    run.found(case, f"after call {first} of {calls}: {problem}")
                run.tried(case)


def _flips(run: Run, case: str, folder: Path, check: Callable[[], object]) -> None:
    """Flip bits of the files in ``folder``, one at a time: each is noticed, or changes nothing."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    while run.goes_on(case, _FLIPS):
        choice = run.random(case)
        (path,) = choice.choices(files, [path.stat().st_size for path in files])
        data = bytearray(path.read_bytes())
        whole, bit = bytes(data), choice.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        try:
            with suppress(LocalrtError):
                check()
        except AssertionError:
            run.found(case, f"another answer: bit {bit} of {path.relative_to(folder)}")
        path.write_bytes(whole)
        run.tried(case)


def flips(run: Run, folder: Path) -> None:
    """Flip bits of a packed model, and of a saved KV cache."""
    store, cache = folder / "store", folder / "cache"
    wanted = answer_of(store)

    def check_store() -> None:
        assert answer_of(store) == wanted

    _flips(run, "bits of a store", store, check_store)
    list(workloads.saving_kv_caches(cache, ()))
    _flips(run, "bits of a KV cache", cache, lambda: workloads.check_kv_cache(cache))


def disk(run: Run) -> None:
    """Make disks fail at every kind of call, and flip bits of what is kept."""
    faulty = FaultyDisk()
    workloads.end_faults = faulty.recover
    try:
        faults(run, faulty)
        flips(run, faulty.root)
    finally:
        faulty.close()


if __name__ == "__main__":
    preload()
    campaign("disk", disk, count=100)
