"""One thread that moves keys and values, task after task, while others compute.

Whoever needs a task waits for it alone: there is no barrier. Tasks run in the order in which they
were given, so that a buffer's save ends before its next load begins.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TypeAlias

from localrt.common.errors import StorageError

IoTask: TypeAlias = "Future[None]"


class IoThread:
    """Starts with the first task. ``start`` may be called from anywhere, finalizers included.

    An executor's ``submit`` takes a lock, in which a finalizer that submits as well would hang.
    """

    def __init__(self) -> None:
        # A SimpleQueue's put can be interrupted by a finalizer that puts as well.
        self._queue: SimpleQueue[tuple[IoTask, Callable[[], None]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="localrt-kv", daemon=True)
        self._started = False
        self._closed = threading.Event()

    def start(self, do: Callable[[], None]) -> IoTask:
        """Queue a task."""
        task: IoTask = Future()
        if self._closed.is_set():
            _refuse(task)
            return task
        self._queue.put((task, do))
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
                job = self._queue.get_nowait()
            except Empty:
                return
            if job is not None:
                _refuse(job[0])

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            task, do = job
            try:
                do()
            except Exception as error:  # noqa: BLE001 - it is whose that waits
                task.set_exception(error)
            else:
                task.set_result(None)
            del job, task, do  # they hold buffers


def _refuse(task: IoTask) -> None:
    task.set_exception(StorageError("the model is closed: load it again"))
