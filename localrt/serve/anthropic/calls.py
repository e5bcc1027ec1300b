"""What a request of Anthropic's Messages asks for, in the library's words.

It reads fields that have been checked against ``schemas``, and starts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from localrt.serve.calls import Call, effort, stops
from localrt.serve.contents import (
    Fields,
    Message,
    Note,
    messages_of,
    text_of,
    unnoted,
    without_billing,
)
from localrt.serve.errors import invalid
from localrt.serve.functions import chosen, offered

__all__ = ["messages_call"]

_SAME_NAMES = ("max_tokens", "temperature", "top_p")


def messages_call(fields: Fields, note: Note = unnoted) -> Call:
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
    return Call(
        prompts=[{"prompt": messages, "tools": functions or None}],
        options=options,
        stream=bool(fields.get("stream")),
        model=fields["model"],
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
