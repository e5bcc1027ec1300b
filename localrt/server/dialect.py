"""What all dialects have in common: a call that a body asks for, a reply to it, an endpoint.

A dialect reads a checked body into a ``Generation`` and puts the chunks of its answers into a
``Reply`` of its own. Neither knows who answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from localrt.engine.types import Chunk
from localrt.server.errors import ApiError, error_body, to_json
from localrt.server.messages import Fields, Known

Payload: TypeAlias = dict[str, Any]

JSON, EVENT_STREAM = "application/json", "text/event-stream"
SEEDS = 1 << 64
# Of OpenAI and others, and what they are here.
_EFFORTS: Mapping[str, bool | str] = {
    "none": False,
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}
# JSON knows no infinity; a token that cannot come has about this log-probability.
LEAST_LOGPROB = -9999.0


Handler: TypeAlias = Callable[[Request], Awaitable[Response]]


class Endpoint(NamedTuple):
    """A path with what answers it, whose docstring says so in ``/openapi.json``.

    ``body`` and ``answer`` name schemas; ``answer`` may be a media type instead, and "" keeps the
    path out of the description. ``stream`` is the media type of an answer that comes in pieces.
    """

    path: str
    method: str
    handler: Handler
    answer: str = ""
    body: str = ""
    stream: str = ""


# -- calls -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What a checked request wants to have written.

    ``prompts`` are keyword arguments of ``LiveModel.submit``, one each. Every prompt gets
    ``choices`` answers. ``logprobs`` says whether they are shown, ``echo`` whether the prompt
    stands before its answers, ``only_reads`` that none are wanted. Without ``parallel_tools`` an
    answer calls one at most. ``overflow_in_stream``: a prompt that does not fit is told in the
    stream, if there is one. ``known`` are the tools that are no functions for the client, by the
    names of the functions that they are for the model; a ``legacy`` call is a message's
    ``function_call``.
    """

    prompts: Sequence[Mapping[str, Any]]
    options: Mapping[str, Any]
    choices: int = 1
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    echo: bool = False
    only_reads: bool = False
    parallel_tools: bool = True
    overflow_in_stream: bool = False
    known: Mapping[str, Known] = field(default_factory=dict)
    legacy: bool = False

    def submissions(self) -> list[dict[str, Any]]:
        """The arguments of every answer, choices of a prompt side by side."""
        seed = self.options.get("seed")
        one = {} if self.parallel_tools else {"parallel_tool_calls": False}
        found = []
        for prompt in self.prompts:
            for choice in range(self.choices):
                own = {} if seed is None else {"seed": (seed + choice) % SEEDS}
                found.append({**prompt, **self.options, **one, **own})
        return found


def sampling(fields: Fields, *names: str, **others: str) -> dict[str, Any]:
    """The options of these names that ``fields`` give; of ``others`` by the dialect's names."""
    options = {}
    for name, theirs in {**dict(zip(names, names, strict=True)), **others}.items():
        value = fields.get(theirs)
        if value is not None and name in _MEANT:
            value = _MEANT[name](value)
        if value is not None:
            options[name] = value
    return options


def _stops(given: str | Sequence[str]) -> list[str] | None:
    """Strings that end an answer; an empty one ends none."""
    return [text for text in ([given] if isinstance(given, str) else given) if text] or None


# What values mean that are none of the library's; None: as if nothing were given.
_MEANT: Mapping[str, Callable[[Any], Any]] = {
    "stop": _stops,
    "top_k": lambda given: max(0, int(given)),  # elsewhere -1 switches it off
    "max_tokens": lambda given: None if given < 0 else int(given),
    "seed": lambda given: None if given == -1 else int(given) % SEEDS,  # another every time
}


def effort(given: str) -> bool | str:
    """How much a model is to think, in the library's words; much where a word is new."""
    return _EFFORTS.get(given, "high")


def prompts_of(given: Any) -> list[str | list[int]]:
    """One text, or its ids, for each prompt."""
    if isinstance(given, str) or not given:
        return [given] if isinstance(given, str) else []
    if isinstance(given[0], list):
        return [list(map(int, ids)) for ids in given]
    return list(given) if isinstance(given[0], str) else [list(map(int, given))]


# -- replies ---------------------------------------------------------------------------------------


class TokenBytes(Protocol):
    """A tokenizer, as far as replies need one."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for."""


class Reply(ABC):
    """One response to a ``call``, with an answer for each of its prompts and choices.

    ``model`` is what the response calls the model. It does not know where chunks come from.
    """

    media_type = EVENT_STREAM

    def __init__(self, call: Generation, model: str, tokenizer: TokenBytes) -> None:
        self.call, self.model, self.tokenizer = call, model, tokenizer

    @abstractmethod
    def whole(self, chunks: Sequence[Chunk]) -> Payload:
        """The body, when every answer has ended as one of ``chunks``."""

    def begin(self) -> Iterator[bytes]:
        """What a stream says before any answer."""
        yield from ()

    @abstractmethod
    def alive(self) -> bytes:
        """What a stream says when there has been nothing to say for long: clients and proxies give
        up on one that is silent.
        """

    @abstractmethod
    def delta(self, index: int, chunk: Chunk) -> Iterator[bytes]:
        """What a stream says of a piece of the answer ``index``; the last has a finish reason."""

    def end(self) -> Iterator[bytes]:
        """What a stream says when every answer has ended."""
        yield from ()

    def failed(self, error: ApiError) -> Iterator[bytes]:
        """What a stream says last where something went wrong."""
        yield event(error_body(error))

    def logprobs(self, chunk: Chunk) -> list[Payload]:
        """The log-probability of each token of ``chunk``, with its alternatives."""

        def one(token: int, logprob: float) -> Payload:
            spelled = self.tokenizer.token_bytes(token)
            return {
                "token": spelled.decode("utf-8", "replace"),
                "logprob": max(logprob, LEAST_LOGPROB),
                "bytes": list(spelled),
            }

        return [
            {
                **one(found.token_id, found.logprob),
                "top_logprobs": [one(token, logprob) for token, _, logprob in found.top],
            }
            for found in chunk.logprobs
        ]


def event(payload: Payload, name: str | None = None) -> bytes:
    """An event of a ``text/event-stream``."""
    line = b"" if name is None else f"event: {name}\n".encode("ascii")
    return line + b"data: " + to_json(payload) + b"\n\n"
