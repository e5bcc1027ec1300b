"""OpenAI's Responses: a request in the library's words, and the endpoints.

Responses that have been answered are kept for a while.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from localrt.chat_format.thinking import THOUGHT_FIELDS
from localrt.server.errors import ApiError, JsonResponse, invalid
from localrt.server.functions import (
    Fields,
    Message,
    Note,
    chosen,
    messages_of,
    offered,
    thought,
    unnoted,
)
from localrt.server.generating import answer, prompt_tokens
from localrt.server.openai.calls import Generation, effort
from localrt.server.replies import Payload, Reply, TokenBytes
from localrt.server.responses.reply import ResponseReply
from localrt.server.service import ResponseStore, Stored, read_request, service_of

Item = dict[str, Any]

_PREFIXES = {"message": "msg", "function_call": "fc", "reasoning": "rs"}  # of ids
_THOUGHT = THOUGHT_FIELDS[0]
_LOGPROBS = "message.output_text.logprobs"  # of ``include``
_NOT_HERE = {
    "conversation": "send its items as input, or use previous_response_id",
    "prompt": "send instructions and input",
}


def responses_call(fields: Fields, items: Sequence[Fields], note: Note = unnoted) -> Generation:
    """The call that answers ``items``, the earlier ones first.

    ``note`` is told what a model cannot be shown.

    Raises:
        ApiError: 400, fields that do not go together or are not supported.
    """
    for name, instead in _NOT_HERE.items():
        if fields.get(name):
            raise invalid(f"{name} is not supported: {instead}", name)
    same = {"max_tokens": "max_output_tokens", "temperature": "temperature", "top_p": "top_p"}
    options: dict[str, Any] = {
        name: fields[theirs] for name, theirs in same.items() if fields.get(theirs) is not None
    }
    shows = _LOGPROBS in (fields.get("include") or ()) or bool(fields.get("top_logprobs"))
    if shows:
        options["logprobs"] = fields.get("top_logprobs") or 0
    if (wanted := (fields.get("reasoning") or {}).get("effort")) is not None:
        options["thinking"] = effort(wanted)
    form = (fields.get("text") or {}).get("format") or {}
    if form.get("type") == "json_object":
        options["json_schema"] = {"type": "object"}
    elif form.get("type") == "json_schema":
        options["json_schema"] = form["schema"]
    if fields.get("truncation") == "auto":
        options["overflow"] = "drop_oldest"
    tools = offered([*(fields.get("tools") or ()), *tools_in(items)], note)
    choice, functions = chosen(fields.get("tool_choice"), tools)
    if choice != "auto":
        options["tool_choice"] = choice
    instructions = fields.get("instructions")
    system = [{"role": "system", "content": instructions}] if instructions else []
    return Generation(
        prompts=[{"prompt": [*system, *conversation(items, note)], "tools": functions or None}],
        options=options,
        stream=bool(fields.get("stream")),
        logprobs=shows,
        parallel_tools=fields.get("parallel_tool_calls") is not False,
        overflow_in_stream=True,  # as OpenAI does: coding agents look for no other sign
        known=tools.known,
    )


# -- items -----------------------------------------------------------------------------------------


def items_of(given: str | Sequence[Fields] | None) -> list[Item]:
    """The items of an ``input``, each with an id and a type."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}] if given else []
    found: list[Item] = []
    for item in given or ():
        said = "role" in item or "content" in item
        kind = item.get("type") or ("message" if said else "item_reference")
        name = item.get("id") or f"{_PREFIXES.get(kind, kind[:20])}_{uuid4().hex}"
        made = {**item, "type": kind, "id": name}
        if kind == "message" and isinstance(made.get("content"), str):
            part = "output_text" if made.get("role") == "assistant" else "input_text"
            made["content"] = [{"type": part, "text": made["content"]}]
        found.append(made)
    return found


def conversation(items: Sequence[Fields], note: Note = unnoted) -> list[Message]:
    """The messages that ``items`` are: thoughts and calls go into the assistant's message."""
    messages: list[Message] = []
    for item in items:
        kind = item.get("type") or "message"
        if kind == "message":
            found = messages_of(
                str(item.get("role") or "user"), item.get("content"), note, between="\n"
            )
        elif kind == "additional_tools":
            continue
        elif kind == "tool_search_output":
            tools = offered(tools_in([item]), unnoted).functions
            names = ", ".join(tool["function"]["name"] for tool in tools)
            told = f"tools that can be called now: {names}" if tools else "no tool was found"
            found = messages_of("assistant", [{**item, "output": told}], note)
        else:
            found = messages_of("assistant", [item], note)
        for message in found:
            if not (messages and _joined(messages[-1], message)):
                messages.append(message)
    return messages


def tools_in(items: Sequence[Fields]) -> list[Fields]:
    """The tools that items of a conversation add to those of the request."""
    return [
        tool
        for item in items
        if item.get("type") in ("additional_tools", "tool_search_output")
        and isinstance(item.get("tools"), list)
        for tool in item["tools"]
        if isinstance(tool, Mapping)
    ]


def _joined(last: Message, message: Message) -> bool:
    """Whether both are of one turn of the assistant; ``last`` has it all then."""
    if not last["role"] == message["role"] == "assistant":
        return False
    calls, thinks = last.get("tool_calls"), _THOUGHT in message
    if (thinks and (last["content"] or calls)) or (message["content"] and calls):
        return False
    if thinks:
        last |= thought("\n\n".join(filter(None, (last.get(_THOUGHT), message[_THOUGHT]))))
    last["content"] = "\n\n".join(filter(None, (last["content"], message["content"])))
    if "tool_calls" in message:
        last["tool_calls"] = [*(calls or ()), *message["tool_calls"]]
    return True


# -- endpoints -------------------------------------------------------------------------------------


async def create(request: Request) -> Response:
    """POST /v1/responses"""
    asked = await read_request(request, "RESPONSES")
    fields, service = asked.fields, asked.service
    items = _items(fields, service.responses)
    call = responses_call(fields, items, service.note_once)

    def keep(response: Payload) -> None:
        if fields.get("store") is not False:
            service.responses.put(response, items)

    def reply(tokens: TokenBytes, call: Generation, name: str) -> Reply:
        return ResponseReply(call, name, tokens, fields, keep)

    return await answer(asked, call, reply)


async def stored(request: Request) -> Response:
    """GET or DELETE /v1/responses/ID, and POST /v1/responses/ID/cancel: it has ended before"""
    found = _found(request)
    if request.method == "DELETE":
        name = found.response["id"]
        service_of(request).responses.remove(name)
        return JsonResponse({"id": name, "object": "response", "deleted": True})
    return JsonResponse(found.response)


async def input_items(request: Request) -> Response:
    """GET /v1/responses/ID/input_items"""
    items, query = list(_found(request).items), request.query_params
    if query.get("order") != "asc":
        items.reverse()
    limit = query.get("limit", "20")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:4]) <= _MOST_ITEMS):
        raise invalid(f"limit must be from 1 to {_MOST_ITEMS}, is {limit[:20]!r}", "limit")
    ids = [item["id"] for item in items]
    start = ids.index(query["after"]) + 1 if query.get("after") in ids else 0
    end = start + int(limit)
    ends = ids[start:end] or [None]
    more = {"first_id": ends[0], "last_id": ends[-1], "has_more": end < len(items)}
    return JsonResponse({"object": "list", "data": items[start:end], **more})


async def input_tokens(request: Request) -> Response:
    """POST /v1/responses/input_tokens"""
    asked = await read_request(request, "INPUT_TOKENS")
    fields, service = asked.fields, asked.service
    call = responses_call(fields, _items(fields, service.responses), service.note_once)
    count = await prompt_tokens(asked, call)
    return JsonResponse({"object": "response.input_tokens", "input_tokens": count})


ROUTES = (
    ("/v1/responses", "POST", create),
    ("/v1/responses/input_tokens", "POST", input_tokens),
    ("/v1/responses/{id}", "GET DELETE", stored),
    ("/v1/responses/{id}/cancel", "POST", stored),
    ("/v1/responses/{id}/input_items", "GET", input_items),
)
_MOST_ITEMS = 100  # that a page has


def _items(fields: dict[str, Any], store: ResponseStore) -> list[Item]:
    """The items of a request, with those of the response that it follows on.

    Raises:
        ApiError: 400, there are none, or that response is gone.
    """
    earlier: list[Item] = []
    if name := fields.get("previous_response_id"):
        stored = store.get(name)
        if stored is None:
            raise _unknown(name, 400, "previous_response_id", "previous_response_not_found")
        earlier = stored.conversation()
    given = items_of(fields.get("input"))
    # A reference has the id of an item of an earlier response, or of its input.
    named = {"item_reference"}
    items = [(item["type"] in named and store.item(str(item["id"]))) or item for item in given]
    if not earlier and not items:
        raise invalid("there is nothing to answer: send input, or previous_response_id", "input")
    return [*earlier, *items]


def _found(request: Request) -> Stored:
    """The response of the path.

    Raises:
        ApiError: 404, it is not there.
    """
    name = request.path_params["id"]
    found = service_of(request).responses.get(name)
    if found is None:
        raise _unknown(name, 404)
    return found


def _unknown(name: str, status: int, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(
        status,
        f"there is no response {name[:200]!r}: they are kept for an hour, while the server runs, "
        "unless store is false",
        param=param,
        code=code,
    )
