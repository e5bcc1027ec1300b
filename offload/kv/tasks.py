"""One thread that moves keys and values, task after task, while others compute.

A task is an event that whoever needs it waits for: there is no barrier. Tasks run in the order in
which they were given, so that a buffer's save ends before its next load begins.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from localrt.errors import StorageError

__all__ = ["IoTask", "IoThread"]


class IoTask:
    """Something that the thread does once."""

    __slots__ = ("_do", "_done", "error")

    def __init__(self, do: Callable[[], None]) -> None:
        self._do: Callable[[], None] | None = do
        self._done = threading.Event()
        self.error: Exception | None = None

    def run(self) -> None:
        """Do it and say so. An error is kept for whoever waits."""
        try:
            if self._do is not None:
                self._do()
        except Exception as error:  # noqa: BLE001
            self.error = error
        finally:
            self._do = None  # holds buffers
            self._done.set()

    def refuse(self) -> None:
        """Fail instead: the model is closed."""
        self._do = _refuse
        self.run()

    def wait(self) -> float:
        """Until it is done; returns the seconds that took. ``error`` is set if it failed."""
        if self._done.is_set():
            return 0.0
        start = time.perf_counter()
        self._done.wait()
        return time.perf_counter() - start


class IoThread:
    """Starts with the first task. ``start`` may be called from anywhere, finalizers included."""

    def __init__(self, name: str = "localrt-kv") -> None:
        # A SimpleQueue's put can be interrupted by a finalizer that puts as well.
        self._queue: SimpleQueue[IoTask | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._started = False
        self._closed = threading.Event()

    def start(self, do: Callable[[], None]) -> IoTask:
        """Queue a task."""
        if self._closed.is_set():
            return _refused()
        task = IoTask(do)
        self._queue.put(task)
        if not self._started:
            self._started = True
            self._thread.start()
        if self._closed.is_set():  # meanwhile, by another thread
            self._queue.put(None)
            if not self._thread.is_alive():
                self._refuse_rest()
        return task

    def close(self) -> None:
        """Finish what is queued, then end the thread."""
        self._closed.set()
        if self._started:
            self._queue.put(None)
            self._thread.join()
        self._refuse_rest()

    def _refuse_rest(self) -> None:
        """Nobody waits for ever for what came too late."""
        while True:
            try:
                task = self._queue.get_nowait()
            except Empty:
                return
            if task is not None:
                task.refuse()

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            task.run()
            del task


def _refused() -> IoTask:
    task = IoTask(_refuse)
    task.run()
    return task


def _refuse() -> None:
    raise StorageError("the model is closed: load it again")
