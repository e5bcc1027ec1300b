"""The base of all dialects: the call for a request, the reply to it, endpoints.

A dialect turns a checked body into a ``GenerationRequest``, and its ``ResponseWriter`` turns the
chunks of the answers into bodies and events. Neither knows which model answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from localrt.engine.batch.chunked_prefill import RequestClass
from localrt.engine.types import Chunk
from localrt.server.errors import ApiError, error_body, invalid, to_json
from localrt.server.messages import Fields, Known
from localrt.server.request_schema import SEEDS

Payload: TypeAlias = dict[str, Any]

EVENT_STREAM = "text/event-stream"
# Reasoning efforts of OpenAI and others, as values of ``thinking``.
_EFFORTS: Mapping[str, bool | str] = {
    "none": False,
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}
# JSON has no infinity; this is about the log-probability of an impossible token.
LEAST_LOGPROB = -9999.0


Handler: TypeAlias = Callable[[Request], Awaitable[Response]]


class Endpoint(NamedTuple):
    """A path of the server, its HTTP method and its handler."""

    path: str
    method: str
    handler: Handler


# -- calls -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A checked request for generation.

    ``prompts`` has keyword arguments of ``LiveModel.submit`` for each prompt. Every prompt gets
    ``choices`` answers. ``logprobs`` shows log-probabilities, ``echo`` puts the prompt before its
    answers, ``only_reads`` asks for no answers. Without ``parallel_tools`` an answer has one call
    at most. ``overflow_in_stream`` reports a prompt that does not fit in the stream, if there is
    one. ``known`` has the tools that are not functions for the client, by the function names that
    the model sees; a ``legacy`` call is a message's ``function_call``. ``request_class`` is the
    class of the request if no header sets one.
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
    request_class: RequestClass = "interactive"

    def submissions(self) -> list[dict[str, Any]]:
        """Return the arguments of every answer; the choices of a prompt are adjacent."""
        seed = self.options.get("seed")
        one = {} if self.parallel_tools else {"parallel_tool_calls": False}
        found = []
        for prompt in self.prompts:
            for choice in range(self.choices):
                own = {} if seed is None else {"seed": (seed + choice) % SEEDS}
                found.append({**prompt, **self.options, **one, **own})
        return found


def tier_of(fields: Fields) -> RequestClass:
    """Return the request class for OpenAI's ``service_tier``."""
    return "background" if fields.get("service_tier") == "flex" else "interactive"


def effort(name: str) -> bool | str:
    """Return ``thinking`` for a reasoning effort; an unknown word means "high"."""
    return _EFFORTS.get(name, "high")


def schema_of(form: Fields, field: str) -> object:
    """Return the schema that ``FORMAT``'s ``form``, the value of ``field``, asks for, or None.

    Raises:
        ApiError: 400, it has none.
    """
    schema = (form.get("json_schema") or form).get("schema")
    if form.get("type") == "json_object":
        return schema or {"type": "object"}
    if form.get("type") == "json_schema" and schema is None:
        raise invalid(f"{field} must have json_schema with a schema, or schema", field)
    return schema if form.get("type") == "json_schema" else None


def prompts_of(prompt: Any) -> list[str | list[int]]:
    """Return the prompts, each as one text or its ids."""
    if isinstance(prompt, str) or not prompt:
        return [prompt] if isinstance(prompt, str) else []
    if isinstance(prompt[0], list):
        return [list(map(int, ids)) for ids in prompt]
    return list(prompt) if isinstance(prompt[0], str) else [list(map(int, prompt))]


# -- replies ---------------------------------------------------------------------------------------


class TokenBytes(Protocol):
    """The part of a tokenizer that replies need."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token."""


class ResponseWriter(ABC):
    """One response to a ``call``, with an answer for each of its prompts and choices.

    ``model`` is the model's name in the response. It does not know where chunks come from.
    """

    media_type = EVENT_STREAM

    def __init__(self, call: GenerationRequest, model: str, tokenizer: TokenBytes) -> None:
        self.call, self.model, self.tokenizer = call, model, tokenizer

    @abstractmethod
    def whole(self, chunks: Sequence[Chunk]) -> Payload:
        """Return the body, once every answer has ended; ``chunks`` has one per answer."""

    def begin(self) -> Iterator[bytes]:
        """Return what a stream sends before any answer."""
        yield from ()

    @abstractmethod
    def alive(self) -> bytes:
        """Return what a stream sends after a long silence, so that clients do not time out."""

    @abstractmethod
    def delta(self, index: int, chunk: Chunk) -> Iterator[bytes]:
        """Return what a stream sends for a chunk of answer ``index``; the last has the reason."""

    def end(self) -> Iterator[bytes]:
        """Return what a stream sends once every answer has ended."""
        yield from ()

    def failed(self, error: ApiError) -> Iterator[bytes]:
        """Return what a stream sends last after an error."""
        yield event(error_body(error))

    def logprobs(self, chunk: Chunk) -> list[Payload]:
        """Return the log-probability of each token of ``chunk``, with its alternatives."""

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
    """Return an event of a ``text/event-stream``."""
    line = b"" if name is None else f"event: {name}\n".encode("ascii")
    return line + b"data: " + to_json(payload) + b"\n\n"
