"""Streams of chunks: as one chunk, and in threads for asyncio."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from localrt.engine.types import Chunk, TokenLogprob

_Item = TypeVar("_Item")


def joined(chunks: Iterator[Chunk] | Sequence[Chunk]) -> Chunk:
    """One chunk from a whole stream: all text and tokens, the last one's metrics and reason."""
    texts: list[str] = []
    ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    last: Chunk | None = None
    for last in chunks:
        texts.append(last.text)
        ids.extend(last.token_ids)
        logprobs.extend(last.logprobs)
    assert last is not None, "a stream ends with a chunk that has a finish reason"
    return replace(last, text="".join(texts), token_ids=tuple(ids), logprobs=tuple(logprobs))


async def in_thread(
    start: Callable[[], Iterator[_Item]], cancel: Callable[[], None]
) -> AsyncIterator[_Item]:
    """Run a stream in threads, one item at a time; leaving the loop cancels the work."""
    import asyncio  # six megabytes, for those who use it

    stream = await asyncio.to_thread(start)
    try:
        while (item := await asyncio.to_thread(next, stream, None)) is not None:
            yield item
    finally:
        cancel()
        # A generator that still runs in its thread cannot be closed: it ends at its next check.
        while not _closed(stream):
            await asyncio.sleep(0.005)


def _closed(stream: Iterator[Any]) -> bool:
    if isinstance(stream, Generator):
        try:
            stream.close()
        except ValueError:
            return False
    return True
