"""Anthropic's Messages API: requests become calls, chunks become a message, whole or as events."""

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
from localrt.server.dialect import (
    Endpoint,
    GenerationRequest,
    Payload,
    ResponseWriter,
    TokenBytes,
    effort,
    event,
)
from localrt.server.errors import ApiError, JsonResponse, anthropic_error, invalid
from localrt.server.generating import answer, prompt_tokens
from localrt.server.messages import (
    Fields,
    Note,
    PromptMessage,
    chosen,
    joined,
    messages_of,
    offered,
    text_of,
    unnoted,
    without_billing,
)
from localrt.server.models import ModelEntry
from localrt.server.request_schema import (
    CONTENT,
    FILLED,
    FLAG,
    MOST_ID,
    OBJECT,
    STOPS,
    STRING,
    TEXT,
    Field,
    RequestSchema,
    Schema,
    Table,
    integer,
    list_of,
    nullable,
    object_of,
    required,
    shared,
    stop_strings,
)
from localrt.server.service import Service, read_request, service_of

# -- fields ----------------------------------------------------------------------------------------


def _where(field: str, value: str, then: Schema) -> Schema:
    """Apply ``then`` to an object whose ``field`` has this ``value``."""
    return {"if": {"properties": {field: {"const": value}}, "required": [field]}, "then": then}


_FORMAT = nullable(object_of("type", "schema", type={"enum": ["json_schema"]}, schema=OBJECT))
_MESSAGE = object_of(
    "role",
    role={"enum": ["user", "assistant", "system"]},
    content=CONTENT,
    output_config=nullable(object_of(effort=TEXT)),
)
_PROMPT: Table = {
    **shared("tools"),
    "model": required(FILLED),
    "messages": required(list_of(_MESSAGE, minItems=1)),
    "system": Field(CONTENT),
    "tool_choice": Field(
        {
            **nullable(object_of("type", type=STRING, name=STRING, disable_parallel_tool_use=FLAG)),
            **_where("type", "tool", {"required": ["name"]}),
        }
    ),
    "thinking": Field(
        {
            **nullable(object_of("type", type=STRING, budget_tokens=integer(0))),
            **_where("type", "enabled", {"required": ["budget_tokens"]}),
        }
    ),
    "output_config": Field(nullable(object_of(effort=TEXT, format=_FORMAT))),
    "output_format": Field(_FORMAT),  # its name in the beta
}
COUNT_TOKENS = RequestSchema(_PROMPT)
MESSAGES = RequestSchema(
    {
        **_PROMPT,
        **shared("temperature", "top_p", "top_k", "stream"),
        "max_tokens": required({"type": "integer", "minimum": 1, "maximum": MOST_ID}, "max_tokens"),
        "stop_sequences": Field(STOPS, "stop", stop_strings),
    }
)

# -- calls -----------------------------------------------------------------------------------------


def messages_call(fields: Fields, note: Note = unnoted) -> GenerationRequest:
    """Return the call for a message. A final assistant message is the beginning of the answer.

    ``note`` is called for content that cannot be shown to a model.

    Raises:
        ApiError: 400, fields that cannot be combined or are not supported.
    """
    options = MESSAGES.options(fields)
    output = fields.get("output_config") or {}
    systems = [each for each in fields["messages"] if each["role"] == "system"]
    told = (each.get("output_config") or {} for each in reversed(systems))  # the last one counts
    efforts = (each["effort"] for each in (*told, output) if each.get("effort"))
    options |= _thinking(fields.get("thinking") or {}, next(efforts, None))
    if form := output.get("format") or fields.get("output_format"):
        options["json_schema"] = form["schema"]
    tools = offered(fields.get("tools"), note)
    given = fields.get("tool_choice") or {}
    choice, functions = chosen(given or None, tools)
    if choice != "auto":
        options["tool_choice"] = choice
    system = without_billing(text_of(fields.get("system"), note))
    messages: list[PromptMessage] = [{"role": "system", "content": system}] if system else []
    for message in fields["messages"]:
        found = messages_of(message["role"], message.get("content"), note)
        messages += [each for each in found if each["role"] != "system" or each["content"]]
    messages = _merged(messages)
    if not messages:
        raise invalid("the messages have no content", "messages")
    last = messages[-1]
    if last["role"] == "assistant" and not last.get("tool_calls"):
        messages[-1] = {**last, "prefix": True}
    return GenerationRequest(
        prompts=[{"prompt": messages, "tools": functions or None}],
        options=options,
        stream=bool(fields.get("stream")),
        parallel_tools=not given.get("disable_parallel_tool_use"),
    )


def _thinking(thinking: Fields, requested_effort: str | None) -> dict[str, Any]:
    """Whether and how much the model should think; not at all by default.

    A model that cannot think answers without thinking.
    """
    kind = thinking.get("type", "disabled" if requested_effort is None else "adaptive")
    if kind == "disabled":
        return {"thinking": False}
    options: dict[str, object] = {"thinking": effort(requested_effort or "high")}
    if kind == "enabled":
        options["thinking_tokens"] = thinking["budget_tokens"]
    return options


def _merged(messages: Sequence[PromptMessage]) -> list[PromptMessage]:
    """Join consecutive messages of one role, as templates require; tool messages stay separate."""
    found: list[PromptMessage] = []
    for message in messages:
        last = found[-1] if found else None
        plain = message.keys() == {"role", "content"}
        if (
            last is not None
            and plain
            and last.keys() == message.keys()
            and last["role"] == message["role"]
        ):
            last["content"] = joined([last["content"], message["content"]], "\n\n")
        else:
            found.append(message)
    return found


# -- replies ---------------------------------------------------------------------------------------

_SIGNATURE = "localrt"  # clients send it back with a thought; it is not checked


class MessageWriter(ResponseWriter):
    """A message."""

    def __init__(self, call: GenerationRequest, model: str, tokenizer: TokenBytes) -> None:
        super().__init__(call, model, tokenizer)
        self._head: Payload = {
            "id": f"msg_{uuid.uuid4().hex[:24]}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._thoughts = ThoughtStream()
        self._begun = False
        self._open = ""  # the type of the block in progress
        self._index = -1  # the index of that block

    def whole(self, chunks: Sequence[Chunk]) -> Payload:
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

    def alive(self) -> bytes:
        return _event("ping")

    def delta(self, index: int, chunk: Chunk) -> Iterator[bytes]:
        """Return events of blocks that begin, grow and end; the last chunk has the stop reason."""
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
        yield _event("message_stop")

    def failed(self, error: ApiError) -> Iterator[bytes]:
        yield event(anthropic_error(error), "error")

    def _grow(self, empty: Payload, delta: Payload) -> Iterator[bytes]:
        """Return a ``delta`` of the open block, which has the type of ``empty``."""
        if self._open != empty["type"]:
            yield from self._close()
            self._open, self._index = empty["type"], self._index + 1
            yield _event("content_block_start", index=self._index, content_block=empty)
        yield _event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> Iterator[bytes]:
        """End the open block, if there is one."""
        if self._open == "thinking":
            delta = {"type": "signature_delta", "signature": _SIGNATURE}
            yield _event("content_block_delta", index=self._index, delta=delta)
        if self._open:
            yield _event("content_block_stop", index=self._index)
        self._open = ""

    def _stop(self, chunk: Chunk) -> Payload:
        """Return why the answer ended."""
        options, matched = self.call.options, chunk.stop_string
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


def _event(name: str, **fields: object) -> bytes:
    return event({"type": name, **fields}, name)


def _call_block(call: ToolCall, arguments: object) -> Payload:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


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
    """Answer a conversation (Anthropic)."""
    asked = await read_request(request, MESSAGES)
    return await answer(asked, messages_call(asked.fields, asked.service.note_once), MessageWriter)


async def count_tokens(request: Request) -> Response:
    """Count the tokens of a conversation (Anthropic)."""
    asked = await read_request(request, COUNT_TOKENS)
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


def _model(service: Service, offered: ModelEntry) -> Payload:
    since = datetime.fromtimestamp(service.started, UTC).isoformat()
    return {
        "type": "model",
        "id": offered.name,
        "display_name": offered.name,
        "created_at": since,
        "lifecycle": "active",
        "max_input_tokens": offered.ctx,
    }


ROUTES = (
    Endpoint("/v1/messages", "POST", messages),
    Endpoint("/v1/messages/count_tokens", "POST", count_tokens),
)
