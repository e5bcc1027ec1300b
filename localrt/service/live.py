"""A running batch of a model's answers, for servers and apps with many askers: ``Model.live``.

It turns prompts into requests as ``Model.stream`` does, and chunks into iterators for threads and
for asyncio. Passes, memory and turns are the business of ``localrt.engine.batch.live``.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from localrt.common.closing import Closing
from localrt.common.errors import LocalrtError
from localrt.engine.batch.batch import kv_room
from localrt.engine.batch.live import Live, LiveAnswer, LiveLimits, LiveStats
from localrt.engine.protocol import EngineSession
from localrt.engine.types import Chunk, Message
from localrt.service.arguments import joined
from localrt.service.core import Core

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")

_READ = (
    "tools",
    "json_schema",
    "regex",
    "grammar",
    "suffix",
    "files",
)  # options that are read with a prompt
_LONG_PROMPT = 1 << 15  # characters, with theirs
_SWITCH_S = 1e-4


class LiveModel(Closing):
    """Made by ``Model.live``. Thread-safe; close it, or use it as a context manager."""

    def __init__(self, core: Core, limits: LiveLimits, *, reserve_ram: int = 0) -> None:
        self._core = core
        self._reserved = 0
        # Where there is no room at all, a few megabytes more than the budget are taken.
        with suppress(LocalrtError):
            core.engine.take_ram(reserve_ram)
            self._reserved = reserve_ram
        self._live = Live(
            core.engine,
            core.parts.tokenizer,
            limits,
            room=partial(kv_room, core.engine),
            save=self._save,
        )
        # Long prompts take turns, and keep no short one waiting.
        self._long_prompts = ThreadPoolExecutor(1, thread_name_prefix="localrt-prompt")

    def __repr__(self) -> str:
        """Whose it is, and what it does."""
        stats = self._live.stats()
        state = f"{stats.running} running, {stats.waiting} waiting"
        return f"<localrt.LiveModel of {self._core.name!r}: {'closed' if self.closed else state}>"

    def submit(
        self,
        prompt: str | Sequence[Message] | None = None,
        *,
        client: Hashable = None,
        notify: Callable[[], None] | None = None,
        **options: Any,
    ) -> LiveAnswer:
        """Queue what ``Model.stream`` takes, prompt and options; iterate over what comes back.

        Clients take turns: ``client`` says whose request it is. ``notify`` is called from another
        thread when there is something to take, and must not block.

        Raises:
            LocalrtError: the prompt or an option cannot be used, or the batch is closed.
        """
        request = self._core.requests.make(prompt, **options)
        request = replace(request, restore=self._core.saver.restore)
        return self._live.submit(request, client=client, notify=notify)

    def stream(
        self, prompt: str | Sequence[Message] | None = None, **options: Any
    ) -> Iterator[Chunk]:
        """Like ``Model.stream``, beside all others; closing the iterator cancels."""
        return _until_closed(self.submit(prompt, **options))

    def generate(self, prompt: str | Sequence[Message] | None = None, **options: Any) -> Chunk:
        """Like ``Model.generate``, beside all others."""
        return joined(self.stream(prompt, **options))

    async def asubmit(
        self, prompt: str | Sequence[Message] | None = None, **options: Any
    ) -> AsyncAnswer:
        """Like ``submit``, for asyncio: the prompt is tokenized in a thread, waiting takes none."""
        import asyncio  # six megabytes, for those who use it

        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        cancel = options.pop("cancel", None) or threading.Event()

        def notify() -> None:
            loop.call_soon_threadsafe(ready.set)

        def submit() -> LiveAnswer:
            return self.submit(prompt, cancel=cancel, notify=notify, **options)

        try:
            if _characters(prompt, *map(options.get, _READ)) > _LONG_PROMPT:
                answer = await loop.run_in_executor(self._long_prompts, _giving_way, submit)
            else:
                answer = await asyncio.to_thread(submit)
            return AsyncAnswer(answer, ready)
        except asyncio.CancelledError:
            cancel.set()  # the thread may be about to queue it
            raise

    async def astream(
        self, prompt: str | Sequence[Message] | None = None, **options: Any
    ) -> AsyncIterator[Chunk]:
        """Like ``stream``, for asyncio; leaving the loop cancels."""
        answer = await self.asubmit(prompt, **options)
        try:
            async for chunk in answer:
                yield chunk
        finally:
            answer.cancel()

    async def agenerate(
        self, prompt: str | Sequence[Message] | None = None, **options: Any
    ) -> Chunk:
        """Like ``generate``, for asyncio."""
        return joined([chunk async for chunk in self.astream(prompt, **options)])

    def stats(self) -> LiveStats:
        """How many run and wait, and what has been done so far."""
        return self._live.stats()

    def cancel_all(self) -> None:
        """Every answer ends, with what it has said."""
        self._live.cancel_all()

    def park(self) -> None:
        """Move the caches that nobody uses now to the disk, from which they come back."""
        self._live.park()

    @property
    def closed(self) -> bool:
        """Whether nothing can be asked of it any more."""
        return self._live.closed

    def close(self) -> None:
        """End every answer as cancelled, and free the caches; the model stays loaded."""
        self._live.close()
        reserved, self._reserved = self._reserved, 0
        if reserved:
            with suppress(LocalrtError):  # the model may be closed already
                self._core.engine.take_ram(-reserved)

    def _save(self, session: EngineSession) -> None:
        with suppress(LocalrtError):  # a full disk: what it holds is computed again
            self._core.saver.save(session, "disk")


class AsyncAnswer(AsyncIterator[Chunk]):
    """The chunks of one request, for one task of one event loop; ``cancel`` ends it."""

    def __init__(self, answer: LiveAnswer, ready: asyncio.Event) -> None:
        self._answer = answer
        self._ready = ready
        self._chunks: deque[Chunk] = deque()

    async def __anext__(self) -> Chunk:
        while not self._chunks:
            self._ready.clear()
            self._chunks.extend(self._answer.take())
            if self._chunks:
                break
            if self._answer.over:
                raise StopAsyncIteration
            await self._ready.wait()
        return self._chunks.popleft()

    @property
    def over(self) -> bool:
        """Whether all has been read."""
        return self._answer.over and not self._chunks

    @property
    def left_out(self) -> tuple[str, ...]:
        """The keywords of its schema that the answer is not bound by."""
        return self._answer.left_out

    def cancel(self) -> None:
        """Stop; the last chunk has finish reason ``"cancelled"``."""
        self._answer.cancel()


def _giving_way(work: Callable[[], T]) -> T:
    """The result of ``work``, which computes in Python for long.

    A pass gives way to other threads at each of its steps, and after Python's 5 ms every time it
    would take several times as long.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        return work()
    finally:
        sys.setswitchinterval(interval)


def _characters(*values: object) -> int:
    """Of texts, at whatever depth they are."""
    count, left = 0, list(values)
    while left:
        value = left.pop()
        if isinstance(value, str):
            count += len(value)
        elif isinstance(value, Mapping):
            left += (*value, *value.values())
        elif isinstance(value, list | tuple):
            left += value
    return count


def _until_closed(answer: LiveAnswer) -> Iterator[Chunk]:
    try:
        yield from answer
    finally:
        answer.cancel()
