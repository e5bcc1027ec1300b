"""Conversations from files: those of this program.

A file is read whole before anything of it is written; what could not be taken is told in lines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from localrt.engine.types import Message
from localrt.history.conversation import Conversation
from localrt.history.presets import check_options


@dataclass(frozen=True, slots=True)
class LoadedFile:
    """The ``conversations`` of a file, in its order, and lines about what was ``left_out``."""

    conversations: tuple[Conversation, ...]
    left_out: tuple[str, ...] = ()


def load_file(new: Callable[..., Conversation], path: Path) -> LoadedFile:
    """Write the conversations of a file by ``new``: see ``History.load_file``."""
    from localrt.chat import read_saved  # brings models

    model, messages, options = read_saved(path)
    check_options(options)
    conversation = new(model=model, options=options)
    last = 0
    for message, info in zip(messages, _infos(messages), strict=True):
        role, content = message["role"], message["content"]
        content = content if isinstance(content, list) else str(content or "")
        if role == "system":
            conversation.set(system=str(content))
        else:
            last = conversation.add(role, content, after=last, info=info).id
    return LoadedFile((conversation,))


def _infos(messages: Sequence[Message]) -> list[dict[str, object]]:
    """The ``info`` of each message's turn: its calls, or the call that it is the result of."""
    infos: list[dict[str, object]] = []
    functions: dict[str, Mapping[str, object]] = {}
    for message in messages:
        info: dict[str, object] = {}
        if calls := message.get("tool_calls"):
            info["tool_calls"] = calls
            functions |= {call["id"]: call["function"] for call in calls if _is_call(call)}
        if message["role"] == "tool":
            id = message.get("tool_call_id", "")
            function = functions.get(id, {})
            info = {"tool_call_id": id, "title": function.get("name", "")}
            info["arguments"] = function.get("arguments", "")
        infos.append(info)
    return infos


def _is_call(call: object) -> bool:
    return (
        isinstance(call, Mapping)
        and isinstance(call.get("id"), str)
        and isinstance(call.get("function"), Mapping)
    )
