"""Check arguments and name a wrong one in one line, before any work begins.

Also streams of chunks: joined to one chunk, and run in threads for asyncio.
"""

from __future__ import annotations

import re
from collections.abc import (
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from localrt.common.errors import OptionError
from localrt.common.option_names import option
from localrt.engine.types import Answer, Chunk, TokenLogprob, ToolCall, Tools
from localrt.service.functions import tool_of

_TOOLS = "functions, Python's or in OpenAI's form, each a mapping with a name"
_ROLES = ("system", "developer", "user", "assistant", "tool")


def check_call(
    *, cancel: object = None, on_progress: object = None, name: str = "on_progress"
) -> None:
    """Raise ``OptionError`` unless these are an event or None, and a function or None."""
    if cancel is not None and not hasattr(cancel, "is_set"):
        raise OptionError(f"cancel must be a threading.Event, is {cancel!r:.80}")
    if on_progress is not None and not callable(on_progress):
        raise OptionError(f"{name} must be a function, is {on_progress!r:.80}")


def check_list(name: str, value: object, of: str) -> None:
    """Raise ``OptionError`` unless the value is a list of something; a string or mapping is not."""
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        raise OptionError(f"{name} must be a list of {of}, is {value!r:.80}")


def check_text(name: str, value: object) -> None:
    """Raise ``OptionError`` unless the value is a string."""
    if not isinstance(value, str):
        raise OptionError(f"{name} must be a string, is {value!r:.80}")


def check_flag(name: str, value: object) -> None:
    """Raise ``OptionError`` unless the value is True or False."""
    if not isinstance(value, bool):
        raise OptionError(f"{name} must be true or false, is {value!r:.80}")


def check_messages(prompt: object, template: str = "") -> None:
    """Raise ``OptionError`` unless the value is a list of messages, as in a conversation.

    Roles are the usual ones, and those named in the source of the chat ``template``.
    """
    if not isinstance(prompt, Sequence) or isinstance(prompt, str | bytes):
        raise OptionError(f"a prompt is a string or a list of messages, is {prompt!r:.80}")
    for message in prompt:
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str):
            raise OptionError(
                'a message is a mapping with a role, such as {"role": "user", "content": "Hi"}, is '
                f"{message!r:.80}"
            )
        if role not in _ROLES and not re.search(rf"""(["']){re.escape(role)}\1""", template):
            raise OptionError(
                f"a message's role must be one of {', '.join(_ROLES)}, is {role!r:.80}"
            )
        calls = message.get("tool_calls")
        if calls and not (isinstance(calls, list | tuple) and all(map(_is_call, calls))):
            raise OptionError(
                "a message's tool_calls must be a list of calls in OpenAI's form, each with the "
                f"function's name, is {calls!r:.80}"
            )


def _is_call(call: object) -> bool:
    if not isinstance(call, Mapping):
        return isinstance(call, ToolCall)
    function = call.get("function")
    named = isinstance(function, Mapping) and isinstance(function.get("name"), str)
    return named and isinstance(call.get("id"), str | int | None)


def check_tools(tools: Tools) -> list[Mapping[str, Any]]:
    """Return the tools in OpenAI's form.

    Raises:
        OptionError: they are no list of functions with names.
    """
    check_list("tools", tools, _TOOLS)
    described = [tool_of(tool) if callable(tool) else tool for tool in tools]
    for tool in described:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise OptionError(f"tools must be a list of {_TOOLS}, one is {tool!r:.80}")
    return described


def check_model(model: object, adapters: object = None) -> None:
    """Raise ``OptionError`` unless these are a model's name or path, and a mapping of adapters."""
    if not isinstance(model, str | Path):
        raise OptionError(f"a model is a name or a path, is {model!r:.80}")
    if adapters is not None and not isinstance(adapters, Mapping):
        raise OptionError(
            f"{option('adapters')} must be paths by names, such as "
            f'{{"name": "./lora"}}, is {adapters!r:.80}'
        )


def check_path(name: str, value: object) -> None:
    """Raise ``OptionError`` unless the value is a path or its text."""
    if not isinstance(value, str | Path):
        raise OptionError(f"{name} must be a path, is {value!r:.80}")


_Item = TypeVar("_Item")


def joined(chunks: Iterable[Chunk], kind: Any = None) -> Answer:
    """Join a whole stream into one answer: all text and tokens, the last metrics and reason.

    ``kind`` is the option ``json_schema`` as it was given.
    """
    texts: list[str] = []
    ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    last: Chunk | None = None
    for last in chunks:
        texts.append(last.text)
        ids.extend(last.token_ids)
        logprobs.extend(last.logprobs)
    assert last is not None, "a stream ends with a chunk that has a finish reason"
    told: dict[str, Any] = {each.name: getattr(last, each.name) for each in fields(Chunk)}
    told |= {"text": "".join(texts), "token_ids": tuple(ids), "logprobs": tuple(logprobs)}
    return Answer(**told, kind=kind)


async def in_thread(
    start: Callable[[], Iterator[_Item]], cancel: Callable[[], None]
) -> AsyncIterator[_Item]:
    """Run a stream in threads, one item at a time; leaving the loop cancels the work."""
    import asyncio  # imported late: it takes six megabytes

    stream = await asyncio.to_thread(start)
    try:
        while (item := await asyncio.to_thread(next, stream, None)) is not None:
            yield item
    finally:
        cancel()
        # A generator that runs in a thread cannot be closed: it ends at its next check.
        while not _closed(stream):
            await asyncio.sleep(0.005)


def _closed(stream: Iterator[object]) -> bool:
    try:
        getattr(stream, "close", lambda: None)()
    except ValueError:
        return False
    return True
