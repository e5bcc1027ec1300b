"""What a request of Anthropic's Messages asks for, in the library's words.

It reads fields that have been checked against ``schemas``, and starts nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from localrt.serve.calls import Call, chosen_tool, thought
from localrt.serve.errors import invalid
from localrt.serve.schemas import EFFORTS
from localrt.text.content import other_than_text

__all__ = ["messages_call"]

Fields = Mapping[str, Any]
Message = dict[str, Any]

_SAME_NAMES = ("max_tokens", "temperature", "top_p")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def messages_call(fields: Fields) -> Call:
    """The call of a message. A last message of the assistant is the beginning of the answer.

    Raises:
        ApiError: 400, fields that do not go together or are not supported.
    """
    options = {name: fields[name] for name in _SAME_NAMES if fields.get(name) is not None}
    if fields.get("top_k") is not None:
        options["top_k"] = max(0, fields["top_k"])
    if fields.get("stop_sequences"):
        options["stop"] = fields["stop_sequences"]
    output = fields.get("output_config") or {}
    options |= _thinking(fields.get("thinking") or {}, output.get("effort"))
    if output.get("format"):
        options["json_schema"] = output["format"]["schema"]
    tools = [_tool(number, tool) for number, tool in enumerate(fields.get("tools") or ())]
    chosen = fields.get("tool_choice") or {"type": "auto"}
    choice = chosen_tool(_CHOICES.get(chosen["type"]), chosen.get("name"), tools)
    if choice != "auto":
        options["tool_choice"] = choice
    system = fields.get("system")
    messages: list[Message] = [{"role": "system", "content": _text(system)}] if system else []
    for number, message in enumerate(fields["messages"], 1):
        messages += _messages(number, message)
    messages = _merged(messages)
    if not messages:
        raise invalid("the messages have no content", "messages")
    last = messages[-1]
    if last["role"] == "assistant" and not last.get("tool_calls"):
        messages[-1] = {**last, "prefix": True}
    return Call(
        prompts=[{"prompt": messages, "tools": tools or None}],
        options=options,
        stream=bool(fields.get("stream")),
        model=fields["model"],
        parallel_tools=not chosen.get("disable_parallel_tool_use"),
    )


def _thinking(thinking: Fields, effort: str | None) -> dict[str, Any]:
    """Whether and how much the model is to think: not, where nothing is said.

    A model that cannot think answers without.
    """
    kind = thinking.get("type", "disabled" if effort is None else "adaptive")
    if kind == "disabled":
        return {"thinking": False}
    options: dict[str, Any] = {"thinking": EFFORTS[effort or "high"]}
    if kind == "enabled":
        options["thinking_tokens"] = thinking["budget_tokens"]
    return options


def _tool(number: int, tool: Fields) -> dict[str, Any]:
    """A tool in OpenAI's form, which templates take."""
    kind = tool.get("type") or "custom"
    if kind != "custom" or "input_schema" not in tool:
        raise invalid(
            f"tools[{number}] is of the type {kind[:60]!r} and has "
            f"{'an' if 'input_schema' in tool else 'no'} input_schema: only tools that the client "
            "runs, with an input_schema, are supported",
            "tools",
        )
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    if tool.get("description"):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


# -- messages --------------------------------------------------------------------------------------


def _messages(number: int, message: Fields) -> Iterator[Message]:
    """A message as chat templates take it; results of tools are messages of their own."""
    role, content = message["role"], message["content"]
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    if role == "assistant":
        yield _assistant(number, content)
        return
    texts: list[str] = []
    for block in content:
        if block["type"] == "tool_result":
            if texts:
                yield {"role": role, "content": "\n\n".join(texts)}
            texts = []
            result = block.get("content") or ""
            _check_text(number, result)
            yield {
                "role": "tool",
                "tool_call_id": block["tool_use_id"],
                "content": _text(result),
            }
        else:
            _check_text(number, [block])
            texts.append(block["text"])
    if texts:
        yield {"role": role, "content": "\n\n".join(texts)}


def _assistant(number: int, blocks: Sequence[Fields]) -> Message:
    """What the assistant has said, thought and called; hidden thoughts are left out."""
    known = {
        kind: [block for block in blocks if block["type"] == kind]
        for kind in ("text", "thinking", "tool_use", "redacted_thinking")
    }
    _check_text(number, [block for block in blocks if block["type"] not in known])
    message: Message = {"role": "assistant", "content": _text(known["text"])}
    if known["thinking"]:
        message |= thought("\n\n".join(block["thinking"] for block in known["thinking"]))
    if known["tool_use"]:
        message["tool_calls"] = [
            {
                "id": block["id"],
                "type": "function",
                "function": {"name": block["name"], "arguments": json.dumps(block["input"])},
            }
            for block in known["tool_use"]
        ]
    return message


def _check_text(number: int, content: Any) -> None:
    """Whether these blocks are text.

    Raises:
        ApiError: 400, one is a picture, a document, or something of another's tools.
    """
    for block in () if isinstance(content, str) else content:
        if block["type"] != "text":
            other = other_than_text(block) or f"a block of the type {block['type'][:60]!r}"
            raise invalid(f"message {number} has {other}, which is not supported here", "messages")


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "\n\n".join(block["text"] for block in content)


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
