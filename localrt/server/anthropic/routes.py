"""Anthropic's Messages: requests in the library's words, answers in Anthropic's, the endpoints."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localrt.chat_format.messages import arguments_of
from localrt.chat_format.thinking import ThoughtStream, parted
from localrt.engine.types import Chunk, Metrics, ToolCall
from localrt.server.errors import (
    ApiError,
    JsonResponse,
    anthropic_error,
    invalid,
)
from localrt.server.functions import (
    Fields,
    Message,
    Note,
    chosen,
    messages_of,
    offered,
    text_of,
    unnoted,
    without_billing,
)
from localrt.server.generating import answer, prompt_tokens
from localrt.server.models import Offered
from localrt.server.openai.calls import Generation, effort, stops
from localrt.server.replies import (
    EVENT_STREAM,
    Payload,
    Reply,
    TokenBytes,
    event,
)
from localrt.server.service import Service, read_request, service_of

_SAME_NAMES = ("max_tokens", "temperature", "top_p")


def messages_call(fields: Fields, note: Note = unnoted) -> Generation:
    """The call of a message. A last message of the assistant is the beginning of the answer.

    ``note`` is told what a model cannot be shown.

    Raises:
        ApiError: 400, fields that do not go together or are not supported.
    """
    options = {name: fields[name] for name in _SAME_NAMES if fields.get(name) is not None}
    if fields.get("top_k") is not None:
        options["top_k"] = max(0, fields["top_k"])
    options |= stops(fields.get("stop_sequences"))
    output = fields.get("output_config") or {}
    options |= _thinking(fields.get("thinking") or {}, output.get("effort"))
    if output.get("format"):
        options["json_schema"] = output["format"]["schema"]
    tools = offered(fields.get("tools"), note)
    given = fields.get("tool_choice") or {}
    choice, functions = chosen(given or None, tools)
    if choice != "auto":
        options["tool_choice"] = choice
    system = without_billing(text_of(fields.get("system"), note))
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for message in fields["messages"]:
        messages += messages_of(message["role"], message.get("content"), note)
    messages = _merged(messages)
    if not messages:
        raise invalid("the messages have no content", "messages")
    last = messages[-1]
    if last["role"] == "assistant" and not last.get("tool_calls"):
        messages[-1] = {**last, "prefix": True}
    return Generation(
        prompts=[{"prompt": messages, "tools": functions or None}],
        options=options,
        stream=bool(fields.get("stream")),
        parallel_tools=not given.get("disable_parallel_tool_use"),
    )


def _thinking(thinking: Fields, wanted: str | None) -> dict[str, Any]:
    """Whether and how much the model is to think: not, where nothing is said.

    A model that cannot think answers without.
    """
    kind = thinking.get("type", "disabled" if wanted is None else "adaptive")
    if kind == "disabled":
        return {"thinking": False}
    options: dict[str, Any] = {"thinking": effort(wanted or "high")}
    if kind == "enabled":
        options["thinking_tokens"] = thinking["budget_tokens"]
    return options


def _merged(messages: Sequence[Message]) -> list[Message]:
    """Neighbours of one role as one message, as templates want them; those of tools stay apart."""
    found: list[Message] = []
    for message in messages:
        last = found[-1] if found else None
        plain = message.keys() == {"role", "content"}
        if (
            last is not None
            and plain
            and last.keys() == message.keys()
            and last["role"] == message["role"]
        ):
            last["content"] = f"{last['content']}\n\n{message['content']}"
        else:
            found.append(message)
    return found


# -- answers ---------------------------------------------------------------------------------------


_SIGNATURE = "localrt"  # which clients send back with a thought, and nobody checks


class MessageReply:
    """The response to a ``call`` of the model that is called ``model``. See ``Reply``."""

    media_type = EVENT_STREAM

    def __init__(self, call: Generation, model: str) -> None:
        self._call = call
        self._head: Payload = {
            "id": f"msg_{uuid.uuid4().hex[:24]}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._thoughts = ThoughtStream()
        self._begun = False
        self._open = ""  # the type of the block that is being written
        self._index = -1  # of that block

    def whole(self, chunks: Sequence[Chunk]) -> Payload:
        """The message."""
        (chunk,) = chunks
        thinking, text = parted(chunk.text)
        content: list[Payload] = []
        if thinking:
            content.append({"type": "thinking", "thinking": thinking, "signature": _SIGNATURE})
        if text:
            content.append({"type": "text", "text": text})
        content += [_call_block(call, arguments_of(call)) for call in chunk.tool_calls]
        return {
            **self._head,
            "content": content,
            **self._stop(chunk),
            "usage": {**_read(chunk.metrics), **_written(chunk.metrics)},
        }

    def begin(self) -> Iterator[bytes]:
        """Nothing: the first event has the length of the prompt."""
        yield from ()

    def alive(self) -> bytes:
        """A ping."""
        return _event("ping")

    def delta(self, index: int, chunk: Chunk) -> Iterator[bytes]:
        """Events of blocks that begin, grow and end; the last chunk says why it was the last."""
        if not self._begun:
            self._begun = True
            message = {
                **self._head,
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": {**_read(chunk.metrics), "output_tokens": 0},
            }
            yield _event("message_start", message=message)
            yield _event("ping")
        ends = chunk.finish_reason is not None
        thinking, text = self._thoughts.push(chunk.text, last=ends)
        if thinking:
            empty = {"type": "thinking", "thinking": "", "signature": ""}
            yield from self._grow(empty, {"type": "thinking_delta", "thinking": thinking})
        if text:
            yield from self._grow(
                {"type": "text", "text": ""}, {"type": "text_delta", "text": text}
            )
        for call in chunk.tool_calls:
            yield from self._close()
            pieces = {"type": "input_json_delta", "partial_json": json.dumps(arguments_of(call))}
            yield from self._grow(_call_block(call, {}), pieces)
        if ends:
            yield from self._close()
            yield _event("message_delta", delta=self._stop(chunk), usage=_written(chunk.metrics))

    def end(self) -> Iterator[bytes]:
        """That it is over."""
        yield _event("message_stop")

    def failed(self, error: ApiError) -> Iterator[bytes]:
        """An error, after which nothing comes."""
        yield event(anthropic_error(error), "error")

    def _grow(self, empty: Payload, delta: Payload) -> Iterator[bytes]:
        """``delta`` of the open block, which is of the type of ``empty``."""
        if self._open != empty["type"]:
            yield from self._close()
            self._open, self._index = empty["type"], self._index + 1
            yield _event("content_block_start", index=self._index, content_block=empty)
        yield _event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> Iterator[bytes]:
        """The end of the open block, if there is one."""
        if self._open == "thinking":
            delta = {"type": "signature_delta", "signature": _SIGNATURE}
            yield _event("content_block_delta", index=self._index, delta=delta)
        if self._open:
            yield _event("content_block_stop", index=self._index)
        self._open = ""

    def _stop(self, chunk: Chunk) -> Payload:
        """Why the answer ended."""
        options, matched = self._call.options, chunk.stop_string
        if chunk.finish_reason == "tool_calls":
            reason, matched = "tool_use", None
        elif chunk.finish_reason == "length":
            room = chunk.metrics.completion_tokens < options["max_tokens"]
            reason = "model_context_window_exceeded" if room else "max_tokens"
        elif matched is not None and matched in options.get("stop", ()):
            reason = "stop_sequence"
        else:
            reason, matched = "end_turn", None
        return {"stop_reason": reason, "stop_sequence": matched}


def _event(name: str, **fields: Any) -> bytes:
    return event({"type": name, **fields}, name)


def _call_block(call: ToolCall, given: Any) -> Payload:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": given}


def _read(metrics: Metrics) -> Payload:
    cached = metrics.cached_tokens
    return {
        "input_tokens": metrics.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
    }


def _written(metrics: Metrics) -> Payload:
    details = {"thinking_tokens": metrics.thinking_tokens}
    return {"output_tokens": metrics.completion_tokens, "output_tokens_details": details}


# -- endpoints -------------------------------------------------------------------------------------


async def messages(request: Request) -> Response:
    """POST /v1/messages"""
    asked = await read_request(request, "MESSAGES")
    return await answer(asked, messages_call(asked.fields, asked.service.note_once), _reply)


async def count_tokens(request: Request) -> Response:
    """POST /v1/messages/count_tokens"""
    asked = await read_request(request, "COUNT_TOKENS")
    count = await prompt_tokens(asked, messages_call(asked.fields))
    return JsonResponse({"input_tokens": count})


async def models(request: Request) -> Response:
    """GET /v1/models, for a client that sends ``anthropic-version``"""
    service = service_of(request)
    data = [_model(service, offered) for offered in service.models.offered()]
    ids = [one["id"] for one in data] or [None]
    ends = {"first_id": ids[0], "last_id": ids[-1]}
    return JsonResponse({"data": data, "has_more": False, **ends})


async def model(request: Request) -> Response:
    """GET /v1/models/NAME, for a client that sends ``anthropic-version``"""
    service = service_of(request)
    found = service.models.find(request.path_params["name"], exact=True)
    return JsonResponse(_model(service, found))


def _model(service: Service, offered: Offered) -> Payload:
    since = datetime.fromtimestamp(service.started, UTC).isoformat()
    return {
        "type": "model",
        "id": offered.name,
        "display_name": offered.name,
        "created_at": since,
        "lifecycle": "active",
        "max_input_tokens": offered.ctx,
    }


def _reply(_: TokenBytes, call: Generation, name: str) -> Reply:
    return MessageReply(call, name)


ROUTES = (
    ("/v1/messages", "POST", messages),
    ("/v1/messages/count_tokens", "POST", count_tokens),
)
