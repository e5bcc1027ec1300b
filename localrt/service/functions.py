"""Python functions as a model's tools: described to it, and called with its arguments.

Types become a JSON schema, by pydantic; texts are those of the docstring. It knows no model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from localrt.common.errors import OptionError
from localrt.engine.types import Answer, Message, ToolCall, Tools

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

_Function = Callable[..., Any]
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)


def tool_of(function: _Function) -> dict[str, Any]:
    """Return a function's name, text and parameters as a tool in OpenAI's form.

    The docstring may be Google's, numpy's or reST's; its texts of arguments go along.

    Raises:
        OptionError: its arguments cannot be given by name, or a type has no JSON schema.
    """
    from docstring_parser import parse
    from pydantic import PydanticUserError, TypeAdapter

    name = getattr(function, "__name__", "")
    if not name.isidentifier():
        raise OptionError(f"a tool needs a name: give a function with one, not {function!r:.80}")
    by_name = inspect.signature(function).parameters.values()
    if unnamed := [str(each) for each in by_name if each.kind in _BY_POSITION]:
        raise OptionError(f"a tool's arguments are given by name: {name} has {unnamed[0]}")
    try:
        parameters = TypeAdapter(cast(Any, function)).json_schema()
    except (PydanticUserError, NameError, TypeError) as error:
        line = str(error).partition("\n")[0]
        raise OptionError(f"{name} cannot be a tool: {line}") from error
    told = parse(inspect.getdoc(function) or "")
    texts = {each.arg_name: each.description for each in told.params if each.description}
    for argument, schema in parameters["properties"].items():
        schema.pop("title", None)  # its name again
        schema.update({"description": texts[argument]} if argument in texts else {})
    text = "\n\n".join(filter(None, (told.short_description, told.long_description)))
    described = {"name": name, "description": text, "parameters": parameters}
    return {"type": "function", "function": described}


def run(
    answer: Answer, tools: Tools | None, loop: AbstractEventLoop | None = None
) -> list[Message]:
    """Call what an answer calls; return the results as messages, none if not all are functions.

    Arguments that do not fit are the result, for the model to read. Coroutines run in ``loop``,
    which must be another thread's.

    Raises:
        OptionError: a coroutine function is called without a loop.
        Exception: what a function raises.
    """
    known = {getattr(tool, "__name__", ""): tool for tool in tools or () if callable(tool)}
    if not all(call.name in known for call in answer.tool_calls):
        return []
    results = list[Message]()
    for call in answer.tool_calls:
        value = _called(call, known[call.name])
        if inspect.iscoroutine(value):
            if loop is None:
                value.close()
                raise OptionError(f"{call.name} is a coroutine function: use asend")
            import asyncio

            value = asyncio.run_coroutine_threadsafe(value, loop).result()
        results.append(_result(call, value))
    return results


def _called(call: ToolCall, function: _Function) -> Any:
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(cast(Any, function)).validate_json(call.arguments)
    except ValidationError as error:
        if not error.title.startswith("call["):  # the function's own
            raise
        wrong = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        return f"Wrong arguments: {'; '.join(wrong)}"


def _result(call: ToolCall, value: Any) -> Message:
    from pydantic import TypeAdapter

    any_json = TypeAdapter(Any).dump_json
    content = value if isinstance(value, str) else any_json(value, fallback=str).decode()
    return {"role": "tool", "tool_call_id": call.id, "content": content}
