"""Converts chunks to OpenAI's response: items of reasoning, text and calls, whole or as events.

Finished responses are stored for a while.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localrt.chat_format.messages import arguments_of
from localrt.chat_format.thinking import ThoughtStream
from localrt.engine.types import Chunk, Metrics, ToolCall
from localrt.server.dialect import (
    Endpoint,
    GenerationRequest,
    Payload,
    ResponseWriter,
    TokenBytes,
    event,
)
from localrt.server.errors import ApiError, JsonResponse, in_words, invalid
from localrt.server.generating import answer, prompt_tokens
from localrt.server.messages import Known, text_argument
from localrt.server.responses.calls import INPUT_TOKENS, RESPONSES, Item, items_of, responses_call
from localrt.server.service import ResponseStore, read_request

# Request fields that are repeated in the response.
_SHOWN: Mapping[str, object] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "store": True,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
}
# The fields of a response in events without news.
_BRIEF: Mapping[str, object] = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
_HEAD = ("id", "object", "created_at", "status", "error", "incomplete_details", "model")
_WRITTEN = {
    "arguments": "response.function_call_arguments",
    "input": "response.custom_tool_call_input",
}
_EVENTS = {"reasoning": "response.reasoning_text", "message": "response.output_text"}


class ResponsesWriter(ResponseWriter):
    """A response. ``fields`` are the request's. ``keep`` is called with the finished response."""

    def __init__(
        self,
        call: GenerationRequest,
        model: str,
        tokenizer: TokenBytes,
        *,
        fields: Mapping[str, object],
        keep: Callable[[Payload], None],
    ) -> None:
        super().__init__(call, model, tokenizer)
        self._keep = keep
        given = {name: fields[name] for name in _SHOWN if fields.get(name) is not None}
        self._response: Payload = {
            "id": _new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": model,
            "output": [],
            "usage": None,
            **_SHOWN,
            **given,
        }
        self._thoughts = ThoughtStream()
        self._item: Payload | None = None  # the item in progress
        self._sent = 0  # number of events sent

    def whole(self, chunks: Sequence[Chunk]) -> Payload:
        (chunk,) = chunks
        for _ in self.delta(0, chunk):
            pass
        for _ in self.end():
            pass
        return self._response

    def begin(self) -> Iterator[bytes]:
        yield self._event("response.created", response=self._response)
        yield self.alive()

    def alive(self) -> bytes:
        """Return a short event as keep-alive, since coding agents ignore comments."""
        head = {name: self._response[name] for name in _HEAD}
        return self._event("response.in_progress", response={**head, **_BRIEF, "output": []})

    def delta(self, index: int, chunk: Chunk) -> Iterator[bytes]:
        ends = chunk.finish_reason is not None
        thinking, text = self._thoughts.push(chunk.text, last=ends)
        if thinking:
            yield from self._grow("reasoning", thinking)
        if text:
            shown = self.logprobs(chunk) if self.call.logprobs else []
            yield from self._grow("message", text, shown)
        if not ends:
            return
        cut = chunk.finish_reason == "length"
        yield from self._close("incomplete" if cut else "completed")
        for call in chunk.tool_calls:
            yield from self._called(call)
        self._response |= {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": _usage(chunk.metrics),
        }

    def end(self) -> Iterator[bytes]:
        """Return the whole response, which is also stored."""
        self._keep(self._response)
        yield self._event(f"response.{self._response['status']}", response=self._response)

    def failed(self, error: ApiError) -> Iterator[bytes]:
        """Return the response so far, and the error."""
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        if error.overflow is not None:
            code = str(error.code)
        self._response |= {"status": "failed", "error": {"code": code, "message": in_words(error)}}
        yield self._event("response.failed", response=self._response)

    # -- items ---------------------------------------------------------------------------------

    def _grow(self, kind: str, text: str, logprobs: Sequence[Payload] = ()) -> Iterator[bytes]:
        """Add ``text`` to the open item, which has this kind."""
        if self._item is not None and self._item["type"] != kind:
            yield from self._close("completed")
        if self._item is None:
            yield from self._open(kind)
        assert self._item is not None
        part = self._item["content"][0]
        part["text"] += text
        more: Payload = {}
        if kind == "message":
            part["logprobs"] += logprobs
            more = {"logprobs": list(logprobs)}
        yield self._event(f"{_EVENTS[kind]}.delta", **self._place(), delta=text, **more)

    def _open(self, kind: str) -> Iterator[bytes]:
        item: Payload = {"id": _new_id("rs" if kind == "reasoning" else "msg"), "type": kind}
        if kind == "reasoning":
            item |= {"summary": [], "status": "in_progress", "content": []}
            part: Payload = {"type": "reasoning_text", "text": ""}
        else:
            item |= {"role": "assistant", "status": "in_progress", "content": []}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._item = item
        yield self._event("response.output_item.added", output_index=self._at, item=item)
        yield self._event("response.content_part.added", **self._place(), part=part)
        item["content"].append(part)

    def _close(self, status: str) -> Iterator[bytes]:
        """End the open item, if there is one."""
        item = self._item
        if item is None:
            return
        kind, part, place = item["type"], item["content"][0], self._place()
        more = {"logprobs": part["logprobs"]} if kind == "message" else {}
        yield self._event(f"{_EVENTS[kind]}.done", **place, text=part["text"], **more)
        yield self._event("response.content_part.done", **place, part=part)
        item["status"] = status
        yield self._event("response.output_item.done", output_index=self._at, item=item)
        self._response["output"].append(item)
        self._item = None

    def _called(self, call: ToolCall) -> Iterator[bytes]:
        """Return events of a call, as an item of the type that the client knows."""
        known = self.call.known.get(call.name, Known("function", call.name))
        field = text = ""  # the part in progress
        item: Payload = {"call_id": call.id, "status": "in_progress"}
        if known.type == "tool_search":
            item |= {"id": _new_id("tsc"), "type": "tool_search_call", "execution": "client"}
            item["arguments"] = arguments_of(call)
        elif known.type == "custom":
            field, text = "input", text_argument(call.arguments)
            item |= {"id": _new_id("ctc"), "type": "custom_tool_call"}
        else:
            field, text = "arguments", call.arguments
            item |= {"id": _new_id("fc"), "type": "function_call"}
        if field:
            space = {} if known.namespace is None else {"namespace": known.namespace}
            item |= {"name": known.name, **space, field: ""}
        yield self._event("response.output_item.added", output_index=self._at, item=item)
        if field:
            place = {"item_id": item["id"], "output_index": self._at}
            yield self._event(f"{_WRITTEN[field]}.delta", **place, delta=text)
            written = {"name": known.name, field: text}
            yield self._event(f"{_WRITTEN[field]}.done", **place, **written)
            item[field] = text
        item["status"] = "completed"
        yield self._event("response.output_item.done", output_index=self._at, item=item)
        self._response["output"].append(item)

    @property
    def _at(self) -> int:
        """Return the index of the item in progress."""
        return len(self._response["output"])

    def _place(self) -> Payload:
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": self._at, "content_index": 0}

    def _event(self, name: str, /, **fields: object) -> bytes:
        self._sent += 1
        return event({"type": name, "sequence_number": self._sent - 1, **fields}, name)


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _usage(metrics: Metrics) -> Payload:
    read, written = metrics.prompt_tokens, metrics.completion_tokens
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": metrics.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": metrics.thinking_tokens},
        "total_tokens": read + written,
    }


# -- endpoints -------------------------------------------------------------------------------------


async def create(request: Request) -> Response:
    """Answer items, or follow on an earlier response."""
    asked = await read_request(request, RESPONSES)
    fields, service = asked.fields, asked.service
    items = _items(fields, service.responses)
    call = responses_call(fields, items, service.note_once)

    def keep(response: Payload) -> None:
        if fields.get("store") is not False:
            service.responses.put(response, items)

    return await answer(asked, call, partial(ResponsesWriter, fields=fields, keep=keep))


async def input_tokens(request: Request) -> Response:
    """Count the tokens of items."""
    asked = await read_request(request, INPUT_TOKENS)
    fields, service = asked.fields, asked.service
    call = responses_call(fields, _items(fields, service.responses), service.note_once)
    count = await prompt_tokens(asked, call)
    return JsonResponse({"object": "response.input_tokens", "input_tokens": count})


def _items(fields: dict[str, Any], store: ResponseStore) -> list[Item]:
    """Return the items of a request, preceded by those of the previous response.

    Raises:
        ApiError: 400, there are no items, or that response is gone.
    """
    earlier: list[Item] = []
    if name := fields.get("previous_response_id"):
        stored = store.get(name)
        if stored is None:
            raise invalid(
                f"there is no response {name[:200]!r}: they are kept for an hour, while the server "
                "runs, unless store is false",
                "previous_response_id",
                "previous_response_not_found",
            )
        earlier = stored.conversation()
    given = items_of(fields.get("input"))
    # A reference has the id of an item in an earlier response or its input.
    named = {"item_reference"}
    items = [(item["type"] in named and store.item(str(item["id"]))) or item for item in given]
    if not earlier and not items:
        raise invalid("there is nothing to answer: send input, or previous_response_id", "input")
    return [*earlier, *items]


ROUTES = (
    Endpoint("/v1/responses", "POST", create),
    Endpoint("/v1/responses/input_tokens", "POST", input_tokens),
)
