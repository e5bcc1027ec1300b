"""Other programs' load on the machine: compiler, video, memory, disk. Each is a child process.

A child ends when its stdin closes, so it cannot outlive the benchmark. It leaves nothing behind,
since its files are unnamed. Work is done in calls that release the GIL, so that threads use as many
cores as intended.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import shutil
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from localrt.bench.mix.mix import Neighbour, percentiles
from localrt.bench.process import ChildError, ChildProcess, serve
from localrt.common.closing import Closing
from localrt.common.errors import reason_of
from localrt.common.processes import helper_command

_BLOCK = 1 << 20
_TOUCH_S = 1.0


class RunningNeighbour(Closing):
    """A neighbour's process; it waits until ``start``."""

    def __init__(self, neighbour: Neighbour) -> None:
        self.neighbour = neighbour
        self._child = ChildProcess(helper_command(__name__))
        self.pid = self._child.pid
        self._child.ask("ready")  # its start must not disturb the measurement

    def start(self) -> None:
        """Begin the work."""
        each = self.neighbour
        self._child.ask("start", kind=each.kind, for_s=each.for_s, work=dict(each.work))

    def stop(self) -> dict[str, object]:
        """End the work; return its results for the report."""
        found = {"name": self.neighbour.name, "kind": self.neighbour.kind}
        try:
            return {**found, "frames": None, "frame_ms": None, **self._child.ask("stop")}
        except ChildError as error:
            return {**found, "frames": None, "frame_ms": None, "error": str(error)}

    def close(self) -> None:
        """End the process."""
        self._child.close()


# -- in the child ----------------------------------------------------------------------------------


class NeighbourHandlers:
    """Request handlers of the child, one method per request."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._result: dict[str, object] = {}

    def ready(self) -> bool:
        """Return at once."""
        return True

    def start(self, kind: str, for_s: float | None, work: Mapping[str, Any]) -> None:
        """Begin the work of a kind, for some seconds or until ``stop``."""
        if for_s is not None:
            timer = threading.Timer(for_s, self._over.set)
            timer.daemon = True
            timer.start()
        for _ in range(int(work.get("cores", 1))):
            self._threads.append(threading.Thread(target=self._run, args=(kind, work)))
            self._threads[-1].start()

    def stop(self) -> dict[str, object]:
        """End the work and return its result."""
        self._over.set()
        for thread in self._threads:
            thread.join()
        return self._result

    def _run(self, kind: str, work: Mapping[str, object]) -> None:
        try:
            result = _WORK[kind](self._over, **work)
        except (OSError, MemoryError) as error:  # a full disk, no memory
            result = {"error": reason_of(error)}
        self._result.update(result)


def _compiler(over: threading.Event, cores: int, busy_s: float, idle_s: float) -> dict[str, object]:
    """Keep one core busy in bursts; the bursts of all cores are the same."""
    text = os.urandom(_BLOCK // 4)
    while not over.is_set():
        until = time.monotonic() + busy_s
        while time.monotonic() < until and not over.is_set():
            zlib.compress(text)
        over.wait(idle_s)
    return {}


def _video(over: threading.Event, frame_ms: float, work_mb: float) -> dict[str, object]:
    """Do a frame's work when it is due; a frame's time is measured from then.

    A frame that ends late makes later ones be skipped.
    """
    period, picture = frame_ms / 1000, bytes(int(work_mb * _BLOCK))
    took: list[float] = []
    dropped, due = 0, time.perf_counter()
    while not over.wait(max(0.0, due - time.perf_counter())):
        hashlib.blake2b(picture)
        seconds = time.perf_counter() - due
        took.append(seconds * 1000)
        dropped += int(seconds / period)
        due += period * (int(seconds / period) + 1)
    return {"frames": len(took), "dropped": dropped, "frame_ms": percentiles(took)}


def _memory(over: threading.Event, bytes: int) -> dict[str, object]:
    """Take memory and keep touching all of it."""
    taken = np.zeros(bytes // mmap.PAGESIZE * mmap.PAGESIZE, np.uint8)
    while not over.is_set():
        taken[:: mmap.PAGESIZE] += 1
        over.wait(_TOUCH_S)
    return {}


def _disk(over: threading.Event, bytes: int) -> dict[str, object]:
    """Copy a file to the disk repeatedly."""
    copies = 0
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as target:
        for _ in range(max(1, bytes // _BLOCK)):
            source.write(os.urandom(_BLOCK))
        while not over.is_set():
            source.seek(0)
            target.seek(0)
            shutil.copyfileobj(source, target, _BLOCK)
            os.fsync(target.fileno())
            copies += 1
    return {"copies": copies}


_WORK: Mapping[str, Callable[..., dict[str, object]]] = {
    "compiler": _compiler,
    "video": _video,
    "memory": _memory,
    "disk": _disk,
}


def main() -> None:
    """Serve the benchmark as a neighbour."""
    serve(NeighbourHandlers())
