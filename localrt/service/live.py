"""A running batch of a model's answers, for servers and apps with many clients: ``Model.live``.

It turns prompts into requests as ``Model.stream`` does, and chunks into iterators for threads and
for asyncio. ``localrt.engine.batch.live`` handles passes, memory and turns.
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
from typing import TYPE_CHECKING, TypeVar, Unpack

from localrt.common.closing import Closing
from localrt.common.errors import CancelledError, LocalrtError, OptionError
from localrt.engine.batch.chunked_prefill import PassTurns
from localrt.engine.batch.live import Live, LiveAnswer, LiveLimits, LiveStats
from localrt.engine.options import LiveOptions, PromptOptions
from localrt.engine.pool import kv_room
from localrt.engine.protocol import EngineSession
from localrt.engine.saved_caches import Tier
from localrt.engine.types import Answer, Chunk, Message
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
)  # options that are read together with a prompt
_LONG_PROMPT = 1 << 15  # characters, tools included
_SWITCH_S = 1e-4


class LiveModel(Closing):
    """A batch made by ``Model.live``. Thread-safe; close it, or use it as a context manager."""

    def __init__(
        self,
        core: Core,
        limits: LiveLimits,
        *,
        reserve_ram: int = 0,
        turns: PassTurns | None = None,
    ) -> None:
        self._core = core
        self._reserved = 0
        # Without any room, it takes a few megabytes more than the budget.
        with suppress(LocalrtError):
            core.engine.take_ram(reserve_ram)
            self._reserved = reserve_ram
        self._live = Live(
            core.engine,
            core.parts.tokenizer,
            limits,
            room=partial(kv_room, core.engine),
            save=self._save,
            turns=turns,
        )
        # Long prompts take turns, and do not delay short ones.
        self._long_prompts = ThreadPoolExecutor(1, thread_name_prefix="localrt-prompt")

    def __repr__(self) -> str:
        """Name its model and its state."""
        stats = self._live.stats()
        state = f"{stats.running} running, {stats.waiting} waiting"
        return f"<localrt.LiveModel of {self._core.name!r}: {'closed' if self.closed else state}>"

    def submit(
        self,
        prompt: str | Sequence[Message] | None = None,
        *,
        client: Hashable = None,
        request_class: str = "interactive",
        notify: Callable[[], None] | None = None,
        **options: Unpack[PromptOptions],
    ) -> LiveAnswer:
        """Queue a prompt with the options of ``Model.stream``; iterate over the result.

        The KV cache of a ``private`` prompt is never saved.
        Clients take turns: ``client`` identifies who sends the request. ``request_class`` is what
        it is for: ``"interactive"`` (somebody waits for the next token) or ``"background"``.
        Another thread calls ``notify`` when there is something to take; it must not block.

        Raises:
            LocalrtError: the prompt or an option cannot be used, or the batch is closed.
        """
        request = self._core.requests.make(prompt, **options)
        if request.on_progress is not None:
            raise OptionError("a live batch reports no progress: leave on_progress out")
        request = replace(request, restore=self._core.saver.restorer)
        return self._live.submit(request, client=client, request_class=request_class, notify=notify)

    def stream(
        self, prompt: str | Sequence[Message] | None = None, **options: Unpack[LiveOptions]
    ) -> Iterator[Chunk]:
        """Like ``Model.stream``, in a shared batch; closing the iterator cancels."""
        return _until_closed(self.submit(prompt, **options))

    def generate(
        self, prompt: str | Sequence[Message] | None = None, **options: Unpack[LiveOptions]
    ) -> Answer:
        """Like ``Model.generate``, in a shared batch."""
        return joined(self.stream(prompt, **options), options.get("json_schema"))

    async def asubmit(
        self, prompt: str | Sequence[Message] | None = None, **options: Unpack[LiveOptions]
    ) -> AsyncAnswer:
        """Like ``submit``, for asyncio: a thread tokenizes the prompt, waiting needs no thread."""
        import asyncio  # imported late: it takes six megabytes

        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        options["cancel"] = cancel = options.get("cancel") or threading.Event()
        self._core.check({})  # an error in a forked child, which has none of the threads

        def notify() -> None:
            loop.call_soon_threadsafe(ready.set)

        def submit() -> LiveAnswer:
            return self.submit(prompt, notify=notify, **options)

        try:
            if _characters(prompt, *map({**options}.get, _READ)) > _LONG_PROMPT:
                answer = await run_to_end(partial(_giving_way, submit), self._long_prompts)
            else:
                answer = await run_to_end(submit)
            return AsyncAnswer(answer, ready)
        except asyncio.CancelledError:
            cancel.set()  # the thread has queued it
            raise

    async def astream(
        self, prompt: str | Sequence[Message] | None = None, **options: Unpack[LiveOptions]
    ) -> AsyncIterator[Chunk]:
        """Like ``stream``, for asyncio; leaving the loop cancels."""
        answer = await self.asubmit(prompt, **options)
        try:
            async for chunk in answer:
                yield chunk
        finally:
            answer.cancel()

    async def agenerate(
        self, prompt: str | Sequence[Message] | None = None, **options: Unpack[LiveOptions]
    ) -> Answer:
        """Like ``generate``, for asyncio."""
        chunks = [chunk async for chunk in self.astream(prompt, **options)]
        return joined(chunks, options.get("json_schema"))

    def stats(self) -> LiveStats:
        """Return how many answers run and wait, and the counts so far."""
        return replace(self._live.stats(), parked_bytes=self._core.saver.ram_nbytes)

    def cancel_all(self) -> None:
        """End every answer with its text so far."""
        self._live.cancel_all()

    def park(self, to: Tier = "disk") -> None:
        """Save the unused caches to the disk, or to ``"ram"`` those of a GPU that fit there."""
        self._live.park()
        if to == "disk":
            self._save(None, to)

    @property
    def closed(self) -> bool:
        """Whether the batch accepts no more requests."""
        return self._live.closed

    def close(self) -> None:
        """End every answer as cancelled, and free the caches; the model stays loaded."""
        if not self._core.is_here:
            return
        self._live.close()
        self._save(None, "disk")  # what is in RAM, for the next time
        reserved, self._reserved = self._reserved, 0
        if reserved:
            with suppress(LocalrtError):  # the model may be closed already
                self._core.engine.take_ram(-reserved)

    def _save(self, session: EngineSession | None, *tiers: Tier) -> None:
        with suppress(LocalrtError):  # a full disk: the caches are computed again
            self._core.saver.save(session, *(tiers or ("ram", "disk")))


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
    def left_out(self) -> tuple[str, ...]:
        """The schema keywords that are not enforced."""
        return self._answer.left_out

    def cancel(self) -> None:
        """Stop; the last chunk has finish reason ``"cancelled"``."""
        self._answer.cancel()


async def run_to_end(work: Callable[[], T], threads: ThreadPoolExecutor | None = None) -> T:
    """Return the result of ``work``, computed in a thread. If that is cancelled, it ends once the
    thread has: until then, the memory that ``work`` takes is in use.
    """
    import asyncio

    gone = threading.Event()

    def unless_gone() -> T:
        if gone.is_set():  # it was cancelled before its turn
            raise CancelledError("the request was cancelled")
        return work()

    running = asyncio.get_running_loop().run_in_executor(threads, unless_gone)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        gone.set()
        running.add_done_callback(lambda one: one.exception())  # that nobody asks for any more
        await asyncio.wait([running])
        raise


def _giving_way(work: Callable[[], T]) -> T:
    """Return the result of ``work``, a long computation in Python.

    A pass waits for Python's lock at each of its steps; with 5 ms each time it would take several
    times as long, so the switch interval is shorter meanwhile.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        return work()
    finally:
        sys.setswitchinterval(interval)


def _characters(*values: object) -> int:
    """Count the characters of texts and the bytes of pictures, at any depth."""
    count, left = 0, list(values)
    while left:
        value = left.pop()
        if isinstance(value, str | bytes):
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
