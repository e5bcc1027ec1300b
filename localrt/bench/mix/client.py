"""One request to a server, streamed and timed.

It runs in the thread of its session; another thread may end all requests with ``Client.cancel``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from localrt.bench.mix.mix import AppRequest
from localrt.client.answer import events, refusal
from localrt.client.http import Exchange
from localrt.client.servers import Address
from localrt.common.errors import LocalrtError
from localrt.common.formatting import one_line

CLASS_HEADER = "X-Localrt-Class"
_LONGEST_REFUSAL = 1 << 16


@dataclass(frozen=True, slots=True)
class Target:
    """The address for an application's requests, and the model's name there."""

    address: Address
    model: str


@dataclass(slots=True)
class TimedReply:
    """The result of a request; times are in seconds since it was sent.

    ``tokens`` is the server's count, or if it sends none, the number of pieces of the answer.
    ``cancelled``: given up as planned.
    """

    text: str = ""
    at: list[float] = field(default_factory=list)  # time of each piece of text
    end_s: float = 0.0
    tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int = 0  # of the prompt's: they were not read again
    cancelled: bool = False
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """The time to the first piece of text."""
        return self.at[0] if self.at else None

    @property
    def tpot_s(self) -> float | None:
        """The mean time per token after the first."""
        return (self.at[-1] - self.at[0]) / (self.tokens - 1) if self.tokens > 1 else None

    def stalls(self, longest_s: float) -> int:
        """Count gaps longer than ``longest_s``."""
        return sum(b - a > longest_s for a, b in pairwise(self.at))


class Client:
    """Sends requests, each on a separate connection."""

    def __init__(self) -> None:
        self._cancelled: str | None = None

    def cancel(self, why: str) -> None:
        """End all current and later requests, with ``why`` as their error."""
        self._cancelled = self._cancelled or why

    def send(self, place: Target, request: AppRequest, class_: str) -> TimedReply:
        """Send one request and read its answer; failures are in ``TimedReply.error``."""
        reply = TimedReply()
        started = time.perf_counter()

        def look() -> float | None:
            if self._cancelled:
                raise LocalrtError(self._cancelled)
            if request.give_up_s is None:
                return None
            left = started + request.give_up_s - time.perf_counter()
            if left <= 0:
                raise TimeoutError
            return left

        try:
            _exchange(place, request, class_, look, reply, started)
        except TimeoutError:
            reply.cancelled = True
        except LocalrtError as error:
            reply.error = one_line(error)
        except (ValueError, TypeError, AttributeError):
            reply.error = f"{place.address.origin} does not speak OpenAI's protocol"
        reply.end_s = time.perf_counter() - started
        return reply


def _exchange(
    place: Target,
    request: AppRequest,
    class_: str,
    look: Callable[[], float | None],
    reply: TimedReply,
    started: float,
) -> None:
    address, path = place.address, place.address.base + request.path
    body = json.dumps({"model": place.model, **request.body}).encode()
    headers = {CLASS_HEADER: class_}
    with Exchange(address, "POST", path, body, headers=headers, look=look) as exchange:
        head = exchange.head()
        if head.status_code != 200:
            raise refusal(address, head.status_code, head.headers, exchange.read(_LONGEST_REFUSAL))
        if not request.body.get("stream"):
            _take(json.loads(b"".join(exchange.pieces())), reply, started)
            return
        ended = False
        for event in events(exchange.pieces(), address):
            ended = event is None
            if event is not None:
                _take(event, reply, started)
        if not ended:
            raise LocalrtError("the connection broke off in the middle of the answer")


def _take(event: Mapping[str, Any], reply: TimedReply, started: float) -> None:
    """Add an event of a stream, or a whole answer without text."""
    if error := event.get("error"):
        message = error.get("message") if isinstance(error, dict) else error
        raise LocalrtError(one_line(message or "the server failed"))
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        parts = (delta.get("reasoning_content"), delta.get("content"), choice.get("text"))
        if text := "".join(part for part in parts if part):
            reply.at.append(time.perf_counter() - started)
            reply.text += text
            reply.tokens = max(reply.tokens, len(reply.at))
    if usage := event.get("usage"):
        reply.prompt_tokens = usage.get("prompt_tokens")
        cached = usage.get("prompt_tokens_details") or {}
        reply.cached_tokens = cached.get("cached_tokens") or 0
        reply.tokens = usage.get("completion_tokens") or reply.tokens
