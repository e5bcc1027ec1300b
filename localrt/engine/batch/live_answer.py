"""The reading end of a request in a running batch: chunks that one thread makes and another takes.

It holds what is not read yet, and says when that is too much. It knows no passes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator

from localrt.engine.batch.sequence import Chunks
from localrt.engine.request import Request
from localrt.engine.types import Chunk

__all__ = ["LiveAnswer"]


class LiveAnswer(Iterator[Chunk]):
    """The chunks of one request, as ``Model.stream`` would yield them; one thread reads them.

    Iterate over it, or ``take`` what is there. Reading raises what went wrong with the request.
    """

    def __init__(
        self,
        request: Request,
        limit: int,
        *,
        wake: Callable[[], None],
        notify: Callable[[], None] | None = None,
    ) -> None:
        self.started = False  # the computing thread's
        self._request = request
        self._limit = limit
        self._wake = wake
        self._notify = notify
        self._changed = threading.Condition()
        self._unread: deque[Chunk] = deque()
        self._over = False
        self._full = False

    @property
    def left_out(self) -> tuple[str, ...]:
        """See ``Request``."""
        return self._request.left_out

    # -- reading ---------------------------------------------------------------------------------

    def __next__(self) -> Chunk:
        with self._changed:
            while not self._unread and not self._over:
                self._changed.wait()
            if not self._unread:
                raise StopIteration
            chunk = self._unread.popleft()
        self._taken()
        if chunk.error is not None:
            raise chunk.error
        return chunk

    def take(self) -> list[Chunk]:
        """All chunks that are there, at once.

        Raises:
            LocalrtError: what went wrong, when all chunks before it have been taken.
        """
        with self._changed:
            chunks = list(self._unread)
            if len(chunks) > 1 and chunks[-1].error is not None:
                chunks.pop()
            for _ in chunks:
                self._unread.popleft()
        self._taken()
        if chunks and chunks[-1].error is not None:
            raise chunks[-1].error
        return chunks

    @property
    def over(self) -> bool:
        """Whether all has been read."""
        with self._changed:
            return self._over and not self._unread

    def cancel(self) -> None:
        """Stop; the last chunk has finish reason ``"cancelled"``."""
        self._request.cancel.set()
        self._wake()

    def _taken(self) -> None:
        with self._changed:
            goes_on = self._full and 2 * len(self._unread) <= self._limit
            self._full = self._full and not goes_on
        if goes_on:
            self._wake()

    # -- the computing thread's ------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """Whether the reader is so far behind that nothing more should be computed for it."""
        return self._full

    def put(self, chunks: Chunks) -> bool:
        """Add what a pass has brought; False where the reader cannot be told."""
        with self._changed:
            if self._over:
                return True
            self._unread.extend(chunks)
            self._over = bool(chunks) and chunks[-1].finish_reason is not None
            self._full = not self._over and len(self._unread) >= self._limit
            self._changed.notify_all()
        if self._notify is None:
            return True
        try:
            self._notify()
        except RuntimeError:  # its event loop is closed
            return False
        return True
