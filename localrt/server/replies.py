"""What every dialect's answer has to be able to say, as one object or as a stream of events.

It does not know where chunks come from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeAlias

from localrt.engine.types import Chunk
from localrt.server.errors import ApiError, to_json

Payload: TypeAlias = dict[str, Any]

EVENT_STREAM = "text/event-stream"


class TokenBytes(Protocol):
    """A tokenizer, as far as replies need one."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for."""


class Reply(Protocol):
    """One response to a call, with an answer for each of its prompts and choices."""

    @property
    def media_type(self) -> str:
        """Of a stream."""

    def whole(self, chunks: Sequence[Chunk]) -> Payload:
        """The body, when every answer has ended as one of ``chunks``."""

    def begin(self) -> Iterator[bytes]:
        """What a stream says before any answer."""

    def alive(self) -> bytes:
        """What a stream says when there has been nothing to say for long: clients and proxies give
        up on one that is silent.
        """

    def delta(self, index: int, chunk: Chunk) -> Iterator[bytes]:
        """What a stream says of a piece of the answer ``index``; the last has a finish reason."""

    def end(self) -> Iterator[bytes]:
        """What a stream says when every answer has ended."""

    def failed(self, error: ApiError) -> Iterator[bytes]:
        """What a stream says last where something went wrong."""


def event(payload: Payload, name: str | None = None) -> bytes:
    """An event of a ``text/event-stream``."""
    line = b"" if name is None else f"event: {name}\n".encode("ascii")
    return line + b"data: " + to_json(payload) + b"\n\n"
