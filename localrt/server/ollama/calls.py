"""Converts Ollama's chat and generate requests to calls, without starting anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from localrt.common.errors import OptionError
from localrt.common.formatting import parse_duration
from localrt.server.dialect import Generation, effort
from localrt.server.errors import invalid
from localrt.server.messages import (
    Fields,
    Note,
    PromptMessage,
    content_of,
    made_call,
    offered,
    text_of,
    thought,
    unnoted,
)
from localrt.server.request_schema import (
    ARGUMENTS,
    CONTENT,
    FILLED,
    FLAG,
    STRING,
    TEXT,
    Field,
    RequestSchema,
    Table,
    integer,
    list_of,
    nullable,
    object_of,
    object_schema,
    options_of,
    required,
    shared,
)

# -- fields ----------------------------------------------------------------------------------------

KEEP: Table = {
    "model": required(FILLED),
    "keep_alive": Field(
        {
            "description": 'seconds, or a time such as "5m"; below zero: for ever',
            "type": ["number", "string", "null"],
        }
    ),
}
_IMAGES = nullable(list_of(STRING))  # in base64
_OPTIONS: Table = {
    **shared("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "stop"),
    **shared("repeat_penalty", "presence_penalty", "frequency_penalty"),
    "num_predict": Field(
        integer(-2), "max_tokens", lambda given: int(given) if given > 0 else None
    ),
    "num_ctx": Field(
        integer(-1), "context_tokens", lambda given: int(given) if given > 0 else None
    ),
}
_ASK: Table = {
    **KEEP,
    **shared("stream", "top_logprobs", "format"),
    "options": Field(nullable(object_schema(_OPTIONS))),
    "think": Field({"type": ["boolean", "string", "null"]}),
    "logprobs": Field(FLAG),
}
_CALL = object_of("function", id=TEXT, function=object_of("name", name=FILLED, arguments=ARGUMENTS))
_MESSAGE = object_of(
    "role",
    role={"enum": ["system", "developer", "user", "assistant", "tool"]},
    content=CONTENT,
    thinking=TEXT,
    images=_IMAGES,
    tool_calls=nullable(list_of(_CALL)),
    tool_name=TEXT,
    tool_call_id=TEXT,
)
CHAT = RequestSchema(
    {
        **_ASK,
        **shared("tools"),
        "messages": Field(nullable(list_of(_MESSAGE))),
        "truncate": Field(FLAG),
    }
)
GENERATE = RequestSchema(
    {
        **_ASK,
        **dict.fromkeys(("prompt", "suffix", "system", "template"), Field(TEXT)),
        "context": Field(nullable(list_of({}))),
        "images": Field(_IMAGES),
        "raw": Field(FLAG),
    }
)

# -- calls -----------------------------------------------------------------------------------------


def chat_call(fields: Fields, note: Note = unnoted) -> Generation | None:
    """Return the call for a chat; None without messages: such a request only loads the model.

    A final assistant message is the beginning of the answer. If a conversation outgrows the
    context, or ``num_ctx``, the oldest turns are left out, unless ``truncate`` is false.

    Raises:
        ApiError: 400, fields that are not supported.
    """
    if not fields.get("messages"):
        return None
    options = _options(fields)
    if fields.get("truncate") is not False:
        options["overflow"] = "drop_oldest"
    messages = _messages(fields["messages"], note)
    last = messages[-1]
    if last["role"] == "assistant" and not last.get("tool_calls"):
        last["prefix"] = True
    tools = offered(fields.get("tools"), note)
    return _call(fields, {"prompt": messages, "tools": tools.functions or None}, options)


def generate_call(fields: Fields, note: Note = unnoted) -> Generation | None:
    """Return the call for a prompt; None without one: such a request only loads the model.

    Raises:
        ApiError: 400, fields that are not supported.
    """
    for name, instead in (
        ("template", "start the server with --chat-template"),
        ("context", "send the conversation to /api/chat"),
    ):
        if fields.get(name):
            raise invalid(f"{name} is not supported: {instead}", name)
    prompt = content_of([*_images(fields), fields.get("prompt") or ""], note)
    system = fields.get("system")
    if fields.get("suffix"):
        given: dict[str, object] = {"prompt": prompt, "suffix": fields["suffix"]}
    elif not prompt:
        return None
    elif fields.get("raw"):
        given = {"prompt": prompt, "raw": True}
    else:
        turns = [{"role": "system", "content": system}] if system else []
        given = {"prompt": [*turns, {"role": "user", "content": prompt}]}
    return _call(fields, given, _options(fields))


def keep_alive_s(duration: float | str | None) -> float | None:
    """Return the seconds to keep a model loaded; negative: forever; None: unset.

    Raises:
        ApiError: 400, it is not a duration.
    """
    if not isinstance(duration, str):
        return duration
    try:
        return parse_duration(duration)
    except OptionError as error:
        raise invalid(f"keep_alive: {error}", "keep_alive") from error


def _call(fields: Fields, prompt: dict[str, object], options: dict[str, object]) -> Generation:
    return Generation(
        prompts=[prompt],
        options=options,
        stream=fields.get("stream") is not False,
        logprobs=bool(fields.get("logprobs")),
    )


def _options(fields: Fields) -> dict[str, Any]:
    options = options_of(_OPTIONS, fields.get("options") or {})
    if fields.get("format"):
        wanted = fields["format"]
        options["json_schema"] = {"type": "object"} if wanted == "json" else wanted
    think = fields.get("think")
    if think not in (None, ""):
        options["thinking"] = effort(think) if isinstance(think, str) else think
    if fields.get("logprobs"):
        options["logprobs"] = fields.get("top_logprobs") or 0
    return options


# -- messages --------------------------------------------------------------------------------------


def _messages(sent: Sequence[Fields], note: Note) -> list[PromptMessage]:
    """Return messages in the form of chat templates: calls get ids, to which results refer."""
    messages: list[PromptMessage] = []
    waiting: list[tuple[str, str]] = []  # (id, name) of calls without a result so far
    for number, message in enumerate(sent, 1):
        role, content = message["role"], message.get("content")
        parts = content if isinstance(content, list) else [content or ""]
        read = content_of if role in ("user", "tool") else text_of
        shown: PromptMessage = {"role": role, "content": read([*_images(message), *parts], note)}
        if message.get("thinking"):
            shown |= thought(message["thinking"])
        if message.get("tool_calls"):
            calls = []
            for at, call in enumerate(message["tool_calls"]):
                name = call["function"]["name"]
                call_id = call.get("id") or f"call_{number}_{at}"
                waiting.append((call_id, name))
                calls.append(made_call(call_id, name, call["function"].get("arguments")))
            shown["tool_calls"] = calls
        if role == "tool":
            shown |= _result(message.get("tool_name"), message.get("tool_call_id"), waiting)
        messages.append(shown)
    return messages


def _result(name: str | None, call_id: str | None, waiting: list[tuple[str, str]]) -> PromptMessage:
    """Return a result's message. Its call is the one with its id, else the first unanswered one
    with its name, else the first unanswered one.
    """
    fitting = (
        next((one for one in waiting if one[at] == given), None)
        for at, given in ((0, call_id), (1, name))
    )
    call = next(filter(None, fitting), None) or next(iter(waiting), None)
    if call is None:
        return {"name": name} if name else {}
    waiting.remove(call)
    return {"tool_call_id": call[0], "name": name or call[1]}


def _images(message: Fields) -> list[Fields]:
    """Return the pictures, which come before the text."""
    return [{"type": "image", "data": data} for data in message.get("images") or ()]
