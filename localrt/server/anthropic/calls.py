"""Turn requests of Anthropic's Messages into calls. It starts nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from localrt.server.dialect import Generation, effort, sampling
from localrt.server.errors import invalid
from localrt.server.messages import (
    Fields,
    Message,
    Note,
    chosen,
    joined,
    messages_of,
    offered,
    text_of,
    unnoted,
    without_billing,
)


def messages_call(fields: Fields, note: Note = unnoted) -> Generation:
    """Return the call for a message. A last assistant message is the beginning of the answer.

    ``note`` is told what cannot be shown to a model.

    Raises:
        ApiError: 400, fields that do not go together or are not supported.
    """
    options = sampling(fields, "max_tokens", "temperature", "top_p", "top_k", stop="stop_sequences")
    output = fields.get("output_config") or {}
    systems = [each for each in fields["messages"] if each["role"] == "system"]
    told = (each.get("output_config") or {} for each in reversed(systems))  # the last one counts
    efforts = (each["effort"] for each in (*told, output) if each.get("effort"))
    options |= _thinking(fields.get("thinking") or {}, next(efforts, None))
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
        found = messages_of(message["role"], message.get("content"), note)
        messages += [each for each in found if each["role"] != "system" or each["content"]]
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
    """Whether and how much the model should think; not at all by default.

    A model that cannot think answers without thinking.
    """
    kind = thinking.get("type", "disabled" if wanted is None else "adaptive")
    if kind == "disabled":
        return {"thinking": False}
    options: dict[str, object] = {"thinking": effort(wanted or "high")}
    if kind == "enabled":
        options["thinking_tokens"] = thinking["budget_tokens"]
    return options


def _merged(messages: Sequence[Message]) -> list[Message]:
    """Join neighbours with one role, as templates require; tool messages stay separate."""
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
            last["content"] = joined([last["content"], message["content"]], "\n\n")
        else:
            found.append(message)
    return found
