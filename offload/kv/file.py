"""Asynchronous I/O of keys and values: a temporary file, and the thread that reads and writes it.

The file has no name in its folder while it is used, so it goes away however the process ends. It
uses direct I/O if the file system allows it; otherwise pages are dropped once read or written, so
that they do not exceed a memory budget. The thread runs tasks in the order given: a buffer's save
ends before its next load begins. A caller waits only for the task it needs.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeAlias

from localrt import system
from localrt.common.errors import StorageError, reason_of
from localrt.common.files import PAGE
from localrt.quant.formats.packed import Bytes

IoTask: TypeAlias = "Future[None]"


class IoThread:
    """A thread that starts with its first task. Even finalizers may call ``start``.

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
        if self._closed.is_set():  # started meanwhile by another thread
            self._queue.put(None)
            if not self._thread.is_alive():
                self._refuse_rest()
        return task

    def close(self) -> None:
        """Finish the queued tasks, then end the thread."""
        self._closed.set()
        if self._started:
            self._queue.put(None)
            self._thread.join()
        self._refuse_rest()

    def _refuse_rest(self) -> None:
        """Fail tasks queued after ``close``, so that nobody waits for them forever."""
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
            del job, task, do  # the tasks hold buffers


def _refuse(task: IoTask) -> None:
    task.set_exception(StorageError("the model is closed: load it again"))


_REQUEST = 8 << 20


class KvFile:
    """A file made in ``folder``, which must exist. Several threads may use it at once.

    Raises:
        StorageError: no file can be made there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._descriptor = self._direct = -1
        self.read_bytes = 0
        try:
            self._descriptor, self._direct = system.open_temporary(folder, ".localrt-kv-")
        except OSError as error:
            self.close()
            raise StorageError(
                f"keys and values cannot be kept in {folder}: {reason_of(error)}"
            ) from error

    def reserve(self, offset: int, nbytes: int) -> None:
        """Reserve room on the disk now, where possible, rather than fail in a pass.

        Raises:
            StorageError: the disk is full.
        """
        try:
            if nbytes > 0:
                system.allocate(self._descriptor, offset, nbytes)
        except OSError as error:
            raise self._failure("written", error) from error

    def read_into(self, offset: int, out: Bytes) -> None:
        """Fill ``out`` from byte ``offset``.

        Raises:
            StorageError: the disk fails, or those bytes were never written.
        """
        for start in range(0, len(out), _REQUEST):
            self._all("read", offset + start, out[start : start + _REQUEST])
        self.read_bytes += len(out)

    def write(self, offset: int, data: Bytes) -> None:
        """Write ``data`` from byte ``offset`` on.

        Raises:
            StorageError: the disk fails or is full.
        """
        for start in range(0, len(data), _REQUEST):
            self._all("written", offset + start, data[start : start + _REQUEST])

    def close(self) -> None:
        """Close the file and free its room."""
        for descriptor in (self._descriptor, self._direct):
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptor = self._direct = -1

    def _all(self, what: str, offset: int, data: Bytes) -> None:
        transfer = system.read_at if what == "read" else system.write_at
        done = 0
        while done < len(data):
            direct = self._direct >= 0 and done % PAGE == 0
            descriptor = self._direct if direct else self._descriptor
            try:
                count = transfer(descriptor, data[done:].data, offset + done)
            except OSError as error:
                if direct and error.errno == errno.EINVAL:
                    with self._lock:  # refused after all
                        stale, self._direct = self._direct, -1
                        if stale >= 0:
                            os.close(stale)
                    continue
                raise self._failure(what, error) from error
            if count == 0:
                raise self._failure(what, OSError(errno.EIO, "it is shorter than it should be"))
            done += count
        if self._direct < 0:
            written = what == "written"
            system.drop_cached(self._descriptor, offset, len(data), written=written)

    def _failure(self, what: str, error: OSError) -> StorageError:
        return StorageError(
            f"keys and values in {self._folder} cannot be {what}: {reason_of(error)}; free some "
            "room there, or keep them in RAM"
        )
