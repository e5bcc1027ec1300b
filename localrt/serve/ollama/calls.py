"""What a request of Ollama's ``/api`` asks for, in the library's words.

It reads fields that have been checked against ``schemas``, and starts nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from localrt.errors import OptionError
from localrt.formatting import parse_duration
from localrt.serve.calls import ANY_SEED, SEEDS, Call, thought
from localrt.serve.errors import invalid

__all__ = ["chat_call", "generate_call", "keep_alive_s"]

Fields = Mapping[str, Any]
Message = dict[str, Any]

_SAME_NAMES = (
    *("temperature", "top_p", "min_p", "typical_p", "stop"),
    *("presence_penalty", "frequency_penalty"),
)


def chat_call(fields: Fields) -> Call | None:
    """The call of a chat; None without messages: the model is only to be loaded.

    A last message of the assistant is the beginning of the answer. Where a conversation outgrows
    the context, the oldest turns are left out, unless ``truncate`` is false.

    Raises:
        ApiError: 400, fields that are not supported.
    """
    if not fields.get("messages"):
        return None
    options = _options(fields)
    if fields.get("truncate") is not False:
        options["overflow"] = "drop_oldest"
    messages = _messages(fields["messages"])
    last = messages[-1]
    if last["role"] == "assistant" and not last.get("tool_calls"):
        last["prefix"] = True
    tools = [
        {"type": "function", "function": tool["function"]} for tool in fields.get("tools") or ()
    ]
    return _call(fields, {"prompt": messages, "tools": tools or None}, options)


def generate_call(fields: Fields) -> Call | None:
    """The call of a prompt; None without one: the model is only to be loaded.

    Raises:
        ApiError: 400, fields that are not supported.
    """
    for name, instead in (
        ("template", "start the server with --chat-template"),
        ("context", "send the conversation to /api/chat"),
    ):
        if fields.get(name):
            raise invalid(f"{name} is not supported: {instead}", name)
    _check_images(1, fields)
    prompt, system = fields.get("prompt") or "", fields.get("system")
    if fields.get("suffix"):
        given: dict[str, Any] = {"prompt": prompt, "suffix": fields["suffix"]}
    elif not prompt:
        return None
    elif fields.get("raw"):
        given = {"prompt": prompt, "raw": True}
    else:
        turns = [{"role": "system", "content": system}] if system else []
        given = {"prompt": [*turns, {"role": "user", "content": prompt}]}
    return _call(fields, given, _options(fields))


def keep_alive_s(given: float | str | None) -> float | None:
    """Seconds that a model is to stay loaded; below zero: for ever. None says nothing.

    Raises:
        ApiError: 400, it is no time.
    """
    if not isinstance(given, str):
        return given
    try:
        return parse_duration(given)
    except OptionError as error:
        raise invalid(f"keep_alive: {error}", "keep_alive") from error


def _call(fields: Fields, prompt: dict[str, Any], options: dict[str, Any]) -> Call:
    return Call(
        prompts=[prompt],
        options=options,
        model=fields["model"],
        stream=fields.get("stream") is not False,
        logprobs=bool(fields.get("logprobs")),
    )


def _options(fields: Fields) -> dict[str, Any]:
    given = fields.get("options") or {}
    options = {name: given[name] for name in _SAME_NAMES if given.get(name) is not None}
    if given.get("seed") not in (None, ANY_SEED):
        options["seed"] = int(given["seed"]) % SEEDS
    if given.get("top_k") is not None:
        options["top_k"] = max(0, int(given["top_k"]))
    if given.get("repeat_penalty") is not None:
        options["repetition_penalty"] = given["repeat_penalty"]
    if (given.get("num_predict") or -1) > 0:  # below zero: as many as it takes
        options["max_tokens"] = int(given["num_predict"])
    if fields.get("format"):
        wanted = fields["format"]
        options["json_schema"] = {"type": "object"} if wanted == "json" else wanted
    if fields.get("think") is not None:
        options["thinking"] = fields["think"]
    if fields.get("logprobs"):
        options["logprobs"] = fields.get("top_logprobs") or 0
    return options


# -- messages --------------------------------------------------------------------------------------


def _messages(given: Sequence[Fields]) -> list[Message]:
    """Messages as chat templates take them: calls get ids, by which results name them."""
    messages: list[Message] = []
    waiting: list[tuple[str, str]] = []  # ids and names of calls that have no result yet
    for number, message in enumerate(given, 1):
        _check_images(number, message)
        shown: Message = {"role": message["role"], "content": message.get("content") or ""}
        if message.get("thinking"):
            shown |= thought(message["thinking"])
        if message.get("tool_calls"):
            calls = [call["function"] for call in message["tool_calls"]]
            named = [(f"call_{number}_{at}", call) for at, call in enumerate(calls)]
            waiting += [(name, call["name"]) for name, call in named]
            shown["tool_calls"] = [
                {
                    "id": name,
                    "type": "function",
                    "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
                }
                for name, call in named
            ]
        if message["role"] == "tool":
            shown |= _result(message.get("tool_name"), waiting)
        messages.append(shown)
    return messages


def _result(name: str | None, waiting: list[tuple[str, str]]) -> Message:
    """Which call a result is of: the first of that name that waits for one, or simply the first."""
    named = (one for one in waiting if one[1] == name)
    call = next(named, None) or next(iter(waiting), None)
    if call is None:
        return {"name": name} if name else {}
    waiting.remove(call)
    return {"tool_call_id": call[0], "name": name or call[1]}


def _check_images(number: int, message: Fields) -> None:
    if message.get("images"):
        raise invalid(
            f"message {number} has a picture, and the model reads text only: leave it out", "images"
        )
