"""What a request of OpenAI's Responses asks for, in the library's words.

It reads fields that have been checked against ``schemas``, and starts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from localrt.serve.calls import Call, chosen_tool, thought
from localrt.serve.errors import invalid
from localrt.serve.schemas import EFFORTS
from localrt.text.content import other_than_text

__all__ = ["conversation", "responses_call"]

Fields = Mapping[str, Any]
Message = dict[str, Any]

_LOGPROBS = "message.output_text.logprobs"  # of ``include``
_NOT_HERE = {
    "background": "ask for a stream, or wait for the answer",
    "conversation": "send its items as input, or use previous_response_id",
    "prompt": "send instructions and input",
}


def responses_call(fields: Fields, messages: Sequence[Message]) -> Call:
    """The call that answers ``messages``, those of ``conversation`` after the earlier ones.

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
    if (effort := (fields.get("reasoning") or {}).get("effort")) is not None:
        options["thinking"] = EFFORTS[effort]
    wanted = (fields.get("text") or {}).get("format") or {}
    if wanted.get("type") == "json_object":
        options["json_schema"] = {"type": "object"}
    elif wanted.get("type") == "json_schema":
        options["json_schema"] = wanted["schema"]
    if fields.get("truncation") == "auto":
        options["overflow"] = "drop_oldest"
    # Coding agents offer tools of other kinds as well, which the model then does not have.
    tools = [_tool(tool) for tool in fields.get("tools") or () if tool["type"] == "function"]
    given = fields.get("tool_choice") or "auto"
    named = None if isinstance(given, str) else given["name"]
    choice = chosen_tool(given if named is None else None, named, tools)
    if choice not in ("auto", "none") and "json_schema" in options:
        raise invalid("text.format and a tool that must be called exclude one another")
    if choice != "auto":
        options["tool_choice"] = choice
    instructions = fields.get("instructions")
    system = [{"role": "system", "content": instructions}] if instructions else []
    return Call(
        prompts=[{"prompt": [*system, *messages], "tools": tools or None}],
        options=options,
        model=fields.get("model"),
        stream=bool(fields.get("stream")),
        logprobs=shows,
        parallel_tools=fields.get("parallel_tool_calls") is not False,
        overflow_in_stream=True,  # as OpenAI does: coding agents look for no other sign
    )


def _tool(tool: Fields) -> dict[str, Any]:
    """A function in the form that templates take."""
    function = {name: tool[name] for name in ("name", "description") if tool.get(name)}
    return {
        "type": "function",
        "function": {**function, "parameters": tool.get("parameters") or {}},
    }


# -- items -----------------------------------------------------------------------------------------


def conversation(items: str | Sequence[Fields]) -> list[Message]:
    """The messages that ``items`` are: thoughts and calls go into the assistant's message.

    Raises:
        ApiError: 400, an item that is not supported.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[Message] = []
    turn: Message | None = None  # of the assistant, while its items follow one another

    def assistant(*, fresh: bool) -> Message:
        nonlocal turn
        if turn is None or fresh:
            turn = {"role": "assistant", "content": ""}
            messages.append(turn)
        return turn

    for number, item in enumerate(items):
        kind = "message" if item.get("type") is None else item["type"]
        said = bool(turn and (turn["content"] or turn.get("tool_calls")))
        if kind == "reasoning":
            text = _text(number, item.get("content") or item.get("summary") or [])
            if text:
                assistant(fresh=said).update(thought(text))
        elif kind == "message" and item["role"] == "assistant":
            assistant(fresh=said)["content"] = _text(number, item["content"])
        elif kind == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            assistant(fresh=False).setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            turn, text = None, _text(number, item["output"])
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": text})
        elif kind == "message":
            turn = None
            role = "system" if item["role"] == "developer" else item["role"]
            messages.append({"role": role, "content": _text(number, item["content"])})
        else:
            raise invalid(
                f"input[{number}] is of the type {kind[:60]!r}: messages, function_call, "
                "function_call_output and reasoning are supported",
                "input",
            )
    return messages


def _text(number: int, content: str | Sequence[Fields]) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        if part["type"] != "refusal" and (other := other_than_text(part)) is not None:
            raise invalid(
                f"input[{number}] has {other}, and the model reads text only: leave it out", "input"
            )
        texts.append(part["refusal"] if part["type"] == "refusal" else part["text"])
    return "\n".join(texts)
