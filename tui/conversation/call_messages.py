"""Calls of tools in a conversation's messages, as models want to see them.

Pure functions on messages: neither turns nor tools are known here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from localrt import Message

_CUT = "The app ended before this call did."
_NO_ANSWER = "(No answer.)"


def with_results(messages: Sequence[Message]) -> list[Message]:
    """``messages`` where every call has a result: one that was cut off says so."""
    whole: list[Message] = []
    missing: list[str] = []  # ids of calls whose results have not come yet
    for message in messages:
        if message["role"] == "tool":
            message = {**message, "content": message["content"] or _CUT}
            if message.get("tool_call_id") in missing:
                missing.remove(message["tool_call_id"])
        else:
            whole += map(_cut, missing)
            missing = [call.get("id", "") for call in message.get("tool_calls") or ()]
        whole.append(message)
    return [*whole, *map(_cut, missing)]


def with_answers(messages: Sequence[Message]) -> list[Message]:
    """``messages`` in which the assistant has said something before each but the first of the user.

    Some templates (Mistral's) refuse an empty answer, and a question right behind a call's result.
    """
    whole: list[Message] = []
    for message in messages:
        if message["role"] == "user" and whole and whole[-1]["role"] == "tool":
            whole.append({"role": "assistant", "content": _NO_ANSWER})
        if message["role"] == "assistant" and not (message["content"] or message.get("tool_calls")):
            message = {**message, "content": _NO_ANSWER}
        whole.append(message)
    return whole


def infos_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """What each message's turn has to keep in its ``info``: calls, and of which call it is."""
    infos: list[dict[str, Any]] = []
    called: dict[str, Mapping[str, Any]] = {}
    for message in messages:
        info: dict[str, Any] = {}
        if calls := message.get("tool_calls"):
            info["tool_calls"] = calls
            called |= {call["id"]: call["function"] for call in calls if _is_call(call)}
        if message["role"] == "tool":
            id = message.get("tool_call_id", "")
            function = called.get(id, {})
            info = {"tool_call_id": id, "title": function.get("name", "")}
            info["arguments"] = function.get("arguments", "")
        infos.append(info)
    return infos


def _is_call(call: Any) -> bool:
    return (
        isinstance(call, Mapping)
        and isinstance(call.get("id"), str)
        and isinstance(call.get("function"), Mapping)
    )


def _cut(id: str) -> Message:
    return {"role": "tool", "tool_call_id": id, "content": _CUT}
