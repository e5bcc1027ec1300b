"""Converts requests of OpenAI's Responses API to calls: items become messages and options.

Nothing is started.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from localrt.chat_format.thinking import THOUGHT_FIELDS
from localrt.server.dialect import GenerationRequest, effort, schema_of, tier_of
from localrt.server.errors import invalid
from localrt.server.messages import (
    Fields,
    Note,
    PromptMessage,
    chosen,
    messages_of,
    offered,
    thought,
    unnoted,
)
from localrt.server.request_schema import (
    CONTENT,
    FLAG,
    FORMAT,
    OBJECT,
    STRING,
    TEXT,
    TOOL_CHOICE,
    Field,
    RequestSchema,
    Table,
    integer,
    list_of,
    nullable,
    object_of,
    shared,
)

Item = dict[str, Any]

_PROMPT: Table = {
    **shared("tools"),
    "model": Field(TEXT),
    "service_tier": Field(TEXT),
    "input": Field(
        {
            "description": "a text or a list of items with the fields of their types",
            "anyOf": [
                STRING,
                list_of(object_of(type=TEXT, id=TEXT, role=TEXT, content=CONTENT)),
                {"type": "null"},
            ],
        }
    ),
    "instructions": Field(TEXT),
    "previous_response_id": Field(TEXT),
    "tool_choice": Field(TOOL_CHOICE),
    "parallel_tool_calls": Field(FLAG),
    "reasoning": Field(nullable(object_of(effort=TEXT))),
    "text": Field(nullable(object_of(format=FORMAT))),
    "truncation": Field({"enum": ["auto", "disabled", None]}),
}
INPUT_TOKENS = RequestSchema(_PROMPT)
RESPONSES = RequestSchema(
    {
        **_PROMPT,
        **shared("temperature", "top_p", "top_logprobs", "stream"),
        "max_output_tokens": Field(integer(1), "max_tokens"),
        "include": Field(nullable(list_of(STRING))),
        "metadata": Field(nullable(OBJECT)),
        "store": Field(FLAG),
        "background": Field(FLAG),
    }
)

_PREFIXES = {"message": "msg", "function_call": "fc", "reasoning": "rs"}  # prefixes of ids
_THOUGHT = THOUGHT_FIELDS[0]
_LOGPROBS = "message.output_text.logprobs"  # a value of ``include``
_NOT_HERE = {
    "conversation": "send its items as input, or use previous_response_id",
    "prompt": "send instructions and input",
}


def responses_call(
    fields: Fields, items: Sequence[Fields], note: Note = unnoted
) -> GenerationRequest:
    """Return the call that answers ``items``, oldest first.

    ``note`` is called for content that cannot be shown to a model.

    Raises:
        ApiError: 400, fields that do not go together or are not supported.
    """
    for name, instead in _NOT_HERE.items():
        if fields.get(name):
            raise invalid(f"{name} is not supported: {instead}", name)
    options = RESPONSES.options(fields)
    shows = _LOGPROBS in (fields.get("include") or ()) or bool(fields.get("top_logprobs"))
    if shows:
        options["logprobs"] = fields.get("top_logprobs") or 0
    if (wanted := (fields.get("reasoning") or {}).get("effort")) is not None:
        options["thinking"] = effort(wanted)
    form = (fields.get("text") or {}).get("format") or {}
    if (schema := schema_of(form, "text.format")) is not None:
        options["json_schema"] = schema
    if fields.get("truncation") == "auto":
        options["overflow"] = "drop_oldest"
    tools = offered([*(fields.get("tools") or ()), *tools_in(items)], note)
    choice, functions = chosen(fields.get("tool_choice"), tools)
    if choice != "auto":
        options["tool_choice"] = choice
    instructions = fields.get("instructions")
    system = [{"role": "system", "content": instructions}] if instructions else []
    return GenerationRequest(
        prompts=[{"prompt": [*system, *conversation(items, note)], "tools": functions or None}],
        options=options,
        stream=bool(fields.get("stream")),
        logprobs=shows,
        parallel_tools=fields.get("parallel_tool_calls") is not False,
        overflow_in_stream=True,  # as OpenAI does: coding agents rely on it
        known=tools.known,
        request_class=tier_of(fields),
    )


# -- items -----------------------------------------------------------------------------------------


def items_of(value: str | Sequence[Fields] | None) -> list[Item]:
    """Return the items of an ``input``, each with an id and a type."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}] if value else []
    found: list[Item] = []
    for item in value or ():
        said = "role" in item or "content" in item
        kind = item.get("type") or ("message" if said else "item_reference")
        name = item.get("id") or f"{_PREFIXES.get(kind, kind[:20])}_{uuid4().hex}"
        made = {**item, "type": kind, "id": name}
        if kind == "message" and isinstance(made.get("content"), str):
            part = "output_text" if made.get("role") == "assistant" else "input_text"
            made["content"] = [{"type": part, "text": made["content"]}]
        found.append(made)
    return found


def conversation(items: Sequence[Fields], note: Note = unnoted) -> list[PromptMessage]:
    """Return ``items`` as messages: thoughts and calls become part of the assistant's message."""
    messages: list[PromptMessage] = []
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
    """Return the tools that a conversation's items add to the request's."""
    return [
        tool
        for item in items
        if item.get("type") in ("additional_tools", "tool_search_output")
        and isinstance(item.get("tools"), list)
        for tool in item["tools"]
        if isinstance(tool, Mapping)
    ]


def _joined(last: PromptMessage, message: PromptMessage) -> bool:
    """Merge a message into ``last`` if both belong to one assistant turn; True if merged."""
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
