"""Messages with calls of tools, in the shape that chat templates take and programs read.

What messages may hold: text. Pictures, sounds and files are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from localrt.chat_format.argument_types import DECODER
from localrt.common.errors import OptionError
from localrt.common.option_names import option
from localrt.engine.types import ToolCall


def functions_to_call(choice: str, tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The functions of ``tools`` of which one must be called: any, or that of the name ``choice``.

    Raises:
        OptionError: there is none.
    """
    functions = [tool.get("function", tool) for tool in tools]
    named = [each for each in functions if isinstance(each, Mapping) and each.get("name")]
    if choice == "required":
        if not named:
            raise OptionError(f"{option('tool_choice')} is 'required', and there are no tools")
        return named
    found = [each for each in named if each["name"] == choice]
    if not found:
        raise OptionError(
            f"{option('tool_choice')} is {choice[:200]!r}, and there is no such tool in tools"
        )
    return found


def arguments_of(call: ToolCall) -> dict[str, Any]:
    """The arguments of ``call`` as values; where they are no object, one that holds their text."""
    return _as_object(call.arguments)


def for_template(messages: Sequence[Any], *, arguments_as_text: bool = False) -> list[Any]:
    """``messages`` in the shape that chat templates take.

    A call's arguments become a mapping, as most want them, or JSON text; the message of a tool gets
    the name of what was called. What has an unknown shape stays as it is.
    """
    names: dict[str, str] = {}
    shaped: list[Any] = []
    for message in messages:
        if not isinstance(message, Mapping):
            shaped.append(message)
            continue
        message = dict(message)
        calls = message.get("tool_calls")
        if isinstance(calls, list | tuple) and calls:
            message["tool_calls"] = [_shaped_call(call, arguments_as_text, names) for call in calls]
        elif message.get("role") == "assistant" and message.get("content") is None:
            message["content"] = ""
        if message.get("role") == "tool":
            message["content"] = _result(message.get("content"))
            name = names.get(str(message.get("tool_call_id")))
            if name is not None:
                message.setdefault("name", name)
        shaped.append(message)
    return shaped


def _shaped_call(call: Any, as_text: bool, names: dict[str, str]) -> Any:
    if isinstance(call, ToolCall):
        call = call.to_dict()
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    given = function.get("arguments")
    arguments: Any = _as_object(given)
    if as_text:
        is_object = isinstance(given, str) and _value(given) == arguments
        arguments = given if is_object else json.dumps(arguments, ensure_ascii=False)
    if isinstance(call.get("id"), str) and isinstance(function.get("name"), str):
        names[call["id"]] = function["name"]
    return {**call, "function": {**function, "arguments": arguments}}


def _as_object(arguments: Any) -> dict[str, Any]:
    """Arguments of a call, or their JSON text: an empty object for nothing, and for what is no
    object one with the text.
    """
    value = _value(arguments) if isinstance(arguments, str) else arguments
    if isinstance(value, Mapping):
        return dict(value)
    if value in (None, "", []):
        return {}
    text = arguments if isinstance(arguments, str) else json.dumps(value, default=str)
    return {"arguments": text}


def _value(text: str) -> Any:
    """What ``text`` is as JSON; the text itself where it is none, without space around."""
    try:
        return DECODER.decode(text.strip())
    except (ValueError, RecursionError):
        return text.strip()


def _result(content: Any) -> Any:
    """What a tool gave, as text: lists of parts and texts as they are, all else as JSON."""
    parts = isinstance(content, list) and all(
        isinstance(part, Mapping) and "type" in part for part in content
    )
    if isinstance(content, str) or parts:
        return content
    return json.dumps(content, ensure_ascii=False, default=str)


_OTHERS = {
    "image": "a picture",
    "screenshot": "a picture",
    "audio": "a sound",
    "video": "a video",
    "file": "a file",
    "document": "a file",
}
_THOUGHTS = ("thinking", "reasoning")  # parts that have a field of this name for their text


def check_text_only(messages: Sequence[Any]) -> None:
    """Whether all parts of all contents are text.

    Raises:
        OptionError: one is not.
    """
    for number, message in enumerate(messages, 1):
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list | tuple) else ():
            other = _other_than_text(part) if isinstance(part, Mapping) else None
            if other is not None:
                raise OptionError(
                    f"message {number} has {other}, and the model reads text only: leave it out"
                )


def kind_in_words(kind: str) -> str | None:
    """What a part of this type is: an image, a file; None if that is not known."""
    return next((word for word in _OTHERS if word in kind), None)


def _other_than_text(part: Mapping[str, Any]) -> str | None:
    """What a part of a content is, in words; None if it is text."""
    kind = str(part.get("type", ""))
    if kind in _THOUGHTS:
        return None
    word = kind_in_words(kind)
    if word is None and isinstance(part.get("text"), str):
        return None
    named = None if word is None else _OTHERS[word]
    return f"{named or 'a part without text'} ({kind:.40})" if kind else "a part without a type"
