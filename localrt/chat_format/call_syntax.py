"""How models spell a call of a tool: JSON, Python, XML. Text to names and arguments.

A parser gives None for what is no call in its spelling: such text stays text. It knows neither
streams nor templates.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

from localrt.chat_format.argument_types import (
    ABSENT,
    DECODER,
    Accepted,
    Types,
    accepted,
    parameters_of,
)

Signatures: TypeAlias = Mapping[str, Types]
"""What each parameter of a function may be, by the function's name."""


@dataclass(frozen=True, slots=True)
class Call:
    """A tool's name, and its arguments as JSON text."""

    name: str
    arguments: str
    id: str | None = None


Parser: TypeAlias = Callable[[str, Signatures], "list[Call] | None"]


def signatures(tools: Sequence[Mapping[str, Any]]) -> dict[str, Types]:
    """The parameters of each tool, given as OpenAI's and Hugging Face's lists have them."""
    found: dict[str, Types] = {}
    for tool in tools:
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            continue
        schema = function.get("parameters")
        properties, _ = parameters_of(schema)
        found[function["name"]] = {
            key: accepted(value, schema) for key, value in properties.items()
        }
    return found


# -- JSON ----------------------------------------------------------------------------------------


def parse_json(text: str, tools: Signatures) -> list[Call] | None:
    """``{"name": ..., "arguments": {...}}``, several of them, or a list.

    ``parameters`` stands for ``arguments`` in Llama's.
    """
    values = json_values(text)
    items = (value if isinstance(value, list) else [value] for value in values or ())
    return all_calls(map(_from_object, chain.from_iterable(items)))


def all_calls(found: Iterable[Call | None]) -> list[Call] | None:
    """The calls; None where there are none, or one of them is none."""
    calls = list(found)
    known = [call for call in calls if call is not None]
    return known if known and len(known) == len(calls) else None


def json_values(text: str) -> list[Any] | None:
    """The values that ``text`` consists of, with commas or semicolons between them at most."""
    values: list[Any] = []
    at = 0
    while True:
        while at < len(text) and (text[at].isspace() or text[at] in ",;"):
            at += 1
        if at == len(text):
            return values
        try:
            value, at = DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            return None
        values.append(value)


_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?P<end>"?)', re.DOTALL)


def ends_in_string(text: str) -> bool:
    """Whether JSON that goes on behind ``text`` is within a string there."""
    found = list(_STRING.finditer(text))
    return bool(found) and not found[-1]["end"]


def _from_object(value: Any) -> Call | None:
    if not isinstance(value, Mapping):
        return None
    value = value.get("function", value) if not isinstance(value.get("name"), str) else value
    if not isinstance(value, Mapping):
        return None
    name = value.get("name")
    given = value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) or not name:
        return None
    call_id = value.get("id")
    return call_of(name, given, call_id if isinstance(call_id, str) and call_id else None)


def call_of(name: str, given: Any, call_id: str | None = None) -> Call | None:
    """A call with the arguments ``given``, an object or its text; None where they are neither.

    Nothing, an empty text and an empty list are no arguments.
    """
    if isinstance(given, str):
        values = json_values(given)
        if values is None or len(values) > 1:
            return None
        given = values[0] if values else {}
    if given in (None, "", []):
        given = {}
    if not isinstance(given, Mapping):
        return None
    return Call(name, json.dumps(given, ensure_ascii=False), call_id)


# -- in tags -------------------------------------------------------------------------------------

_FUNCTION = re.compile(r"<function=([^>\s]+)\s*>(.*?)(</function>|$)", re.DOTALL)
_PARAMETER = re.compile(
    r"<parameter=([^>\s]+)\s*>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|$)", re.DOTALL
)
_ENDED = "</parameter>"
_PAIR = re.compile(r"<arg_key>\s*(.*?)\s*</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def parse_tagged(text: str, tools: Signatures) -> list[Call] | None:
    """Within ``<tool_call>``: JSON (Hermes, Qwen), ``<function=...>`` (Qwen coder), or GLM's."""
    calls = parse_json(text, tools)
    if calls is not None:
        return calls
    found = _FUNCTION.findall(text)
    if found:
        if any(
            not closed and "<parameter=" in body.rpartition(_ENDED)[2] for _, body, closed in found
        ):
            return None  # it was cut off
        return [_from_text(name, _PARAMETER.findall(body), tools) for name, body, _ in found]
    name, _, rest = text.partition("<arg_key>")
    pairs = _PAIR.findall(text)
    if rest and _PAIR.sub("", f"<arg_key>{rest}").strip():
        return None
    name = name.strip()
    if name and (pairs or name in tools) and not re.search(r"[\s<{]", name):
        return [_from_text(name, pairs, tools)]
    return None


def _from_text(name: str, pairs: Sequence[tuple[str, str]], tools: Signatures) -> Call:
    """A call whose arguments are plain text: what the tool's schema calls a string stays one."""
    types = tools.get(name, {})
    read = {key: types.get(key, Accepted()).read(text) for key, text in pairs}
    arguments = {key: value for key, value in read.items() if value is not ABSENT}
    return Call(name, json.dumps(arguments, ensure_ascii=False))


# -- others --------------------------------------------------------------------------------------

_NAMED = re.compile(
    r"\s*([\w.\-/]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\])?\s*(\{.*)", re.DOTALL
)


def parse_mistral(text: str, tools: Signatures) -> list[Call] | None:
    """What follows ``[TOOL_CALLS]``: a list of calls, or ``name[ARGS]{...}`` once or more often."""
    if text.lstrip()[:1] in ("[", "{"):
        return parse_json(text, tools)
    found = map(_NAMED.fullmatch, text.split("[TOOL_CALLS]"))
    return all_calls(match and call_of(match[1], match[3], match[2]) for match in found)


_FENCE = re.compile(r"\s*(.+?)\n```(?:json)?\n(.*?)\n?```\s*", re.DOTALL)


def parse_deepseek(text: str, tools: Signatures) -> list[Call] | None:
    """What DeepSeek's models write between the marks that begin and end calls."""
    return all_calls(map(_deepseek_call, text.split("<｜tool▁call▁begin｜>")[1:]))


def _deepseek_call(text: str) -> Call | None:
    body, _, _ = text.partition("<｜tool▁call▁end｜>")
    first, _, rest = body.partition("<｜tool▁sep｜>")
    fenced = _FENCE.fullmatch(rest)
    name, given = fenced.groups() if fenced else (first.strip(), rest)
    if not fenced and not rest.strip():
        return None  # it was cut off
    call = call_of(name, given)
    return call if call is not None and call.name else None


def parse_python(text: str, tools: Signatures) -> list[Call] | None:
    """``name(key="value")``, several of them, or a list; ``print(...)`` around one is ignored."""
    try:
        tree = ast.parse(text.strip())
        calls: list[Call] = []
        for statement in tree.body:
            if not isinstance(statement, ast.Expr):
                return None
            value = statement.value
            items = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
            calls += [_from_python(item, tools) for item in items]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return calls or None


def _from_python(node: ast.expr, tools: Signatures) -> Call:
    if not isinstance(node, ast.Call):
        raise ValueError("not a call")
    name = ast.unparse(node.func)
    if name == "print" and len(node.args) == 1 and not node.keywords and "print" not in tools:
        return _from_python(node.args[0], tools)
    name = name.removesuffix(".call")  # of Llama's built-in tools
    positional = zip(tools.get(name, {}), node.args, strict=False)
    if len(node.args) > len(tools.get(name, {})):
        raise ValueError("more arguments than parameters")
    arguments = {key: ast.literal_eval(value) for key, value in positional}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("arguments that are not spelled out")
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    return Call(name, json.dumps(arguments, ensure_ascii=False))


def parse_python_or_json(text: str, tools: Signatures) -> list[Call] | None:
    """What follows Llama's ``<|python_tag|>``."""
    return parse_json(text, tools) or parse_python(text, tools)
