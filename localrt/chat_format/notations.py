"""The notations of tool calls: they parse text to names and arguments.

``JsonCalls`` are JSON objects and ``PythonCalls`` Python code; all others are a ``Framed`` name and
its arguments as JSON, as pairs in tags, as Python's keywords, or as an object with special quotes.
Parsing returns None for text that is not a call: it stays text. A notation does not know how it was
found, or where in an answer the calls are.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from localrt.chat_format.argument_notations import Arguments, end_of, ends_in_string
from localrt.chat_format.argument_types import DECODER, Types, accepted, parameters_of
from localrt.common.formatting import paired

Signatures: TypeAlias = Mapping[str, Types]
"""What each parameter of a function may be, by the function's name."""


@dataclass(frozen=True, slots=True)
class Call:
    """A tool's name, and its arguments as JSON text."""

    name: str
    arguments: str
    id: str | None = None


def as_json(arguments: Mapping[str, object]) -> str:
    """Return arguments as JSON text."""
    return paired(json.dumps(arguments, ensure_ascii=False))


def signatures(tools: Sequence[Mapping[str, object]]) -> dict[str, Types]:
    """The parameters of each tool in a list of the form of OpenAI or Hugging Face."""
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


ID = "zidzid"
"""The placeholder of a call's id in a literal."""
NUMBERED = "znznzn"
"""The placeholder of a call's number in a literal."""
NAMED = "znmznm"
"""The placeholder of a call's name where it is written twice, in a ``Spelling`` before calls."""
_NAME = r"""[^\s<>{}()\[\]"',=]+"""


class Notation(Protocol):
    """Parses the text between the marks that open and close calls."""

    def parse(self, text: str, tools: Signatures) -> list[Call] | None:
        """The calls that ``text`` consists of; None if it is anything else."""

    def is_open(self, text: str, *, inside: bool = False) -> bool:
        """Whether ``text`` ends within a string: a closing mark after it is part of the string.

        ``inside``: ``text`` is not the beginning of calls, but what follows such an end.
        """


# -- JSON ----------------------------------------------------------------------------------------


def json_values(text: str) -> list[object] | None:
    """The JSON values that ``text`` consists of, separated by spaces, commas or semicolons."""
    values: list[object] = []
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


def call_of(name: object, arguments: object, call_id: object = None) -> Call | None:
    """A call with ``arguments``, an object or its JSON text; None if they are neither.

    None, an empty text and an empty list mean no arguments.
    """
    if isinstance(arguments, str):
        values = json_values(arguments)
        if values is None or len(values) > 1:
            return None
        arguments = values[0] if values else {}
    if arguments in (None, "", []):
        arguments = {}
    if not isinstance(name, str) or not name or not isinstance(arguments, Mapping):
        return None
    call_id = paired(call_id) if isinstance(call_id, str) and call_id else None
    return Call(paired(name), as_json(arguments), call_id)


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """JSON objects, in a list or in a row, with a name and arguments at these keys.

    ``path`` leads to the object with both; without it they may be in a ``function``. If ``name`` is
    None, the tool's name is the key of its arguments. ``lead`` may come before the objects.
    """

    path: tuple[str, ...] = ()
    name: str | None = "name"
    arguments: tuple[str, ...] = ("arguments", "parameters")
    id: str = "id"
    lead: str = ""

    def parse(self, text: str, tools: Signatures) -> list[Call] | None:
        values = json_values(text.strip().removeprefix(self.lead))
        items = (value if isinstance(value, list) else [value] for value in values or ())
        calls = [self._call(item) for group in items for item in group]
        known = [call for call in calls if call is not None]
        return known if known and len(known) == len(calls) else None

    def is_open(self, text: str, *, inside: bool = False) -> bool:
        if inside:
            return ends_in_string(text, inside=True)
        text = text.strip().removeprefix(self.lead).lstrip()
        return text[:1] in ("{", "[") and ends_in_string(text)

    def _call(self, value: object) -> Call | None:
        for key in self.path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if not isinstance(value, Mapping):
            return None
        if self.name is None:
            return call_of(*next(iter(value.items()))) if len(value) == 1 else None
        if not isinstance(value.get(self.name), str) and "function" in value:
            return self._call(value["function"]) if not self.path else None
        given = next((value[key] for key in self.arguments if key in value), None)
        return call_of(value.get(self.name), given, value.get(self.id))


# -- Python code -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """``name(key="value")``, one, several or a list; ``print(...)`` around one is ignored."""

    def parse(self, text: str, tools: Signatures) -> list[Call] | None:
        try:
            calls: list[Call] = []
            for statement in ast.parse(text.strip()).body:
                if not isinstance(statement, ast.Expr):
                    return None
                value = statement.value
                items = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
                calls += [self._call(item, tools) for item in items]
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return None
        return calls or None

    def is_open(self, text: str, *, inside: bool = False) -> bool:
        return False

    def _call(self, node: ast.expr, tools: Signatures) -> Call:
        if not isinstance(node, ast.Call):
            raise ValueError("not a call")
        name = ast.unparse(node.func)
        if name == "print" and len(node.args) == 1 and not node.keywords and "print" not in tools:
            return self._call(node.args[0], tools)
        name = name.removesuffix(".call")  # Llama's built-in tools have it
        if len(node.args) > len(tools.get(name, {})):
            raise ValueError("more arguments than parameters")
        given = dict(zip(tools.get(name, {}), node.args, strict=False))
        given |= {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
        if len(given) < len(node.args) + len(node.keywords):
            raise ValueError("arguments that are named twice, or not spelled out")
        arguments = {key: ast.literal_eval(value) for key, value in given.items()}
        return Call(name, as_json(arguments))


# -- a name in a frame -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Framed:
    """``opening name middle arguments closing``, once or more often.

    The parts are regular expressions; ``opening`` and ``middle`` may have groups ``id`` and
    ``index``. ``section`` comes before the first call; ``between`` may follow each. ``id_form``
    makes an id from name and index, for templates that write only ids. ``mark`` and ``end`` are the
    marks by which the text was found; ``parse`` gets it without them.
    """

    opening: str
    middle: str
    closing: str
    arguments: Arguments
    section: str = ""
    between: str = ""
    id_form: str = ""
    mark: str = ""
    end: str = ""

    def parse(self, text: str, tools: Signatures) -> list[Call] | None:
        try:
            return list(self._calls(f"{self.mark}{text}{self.end}", tools)) or None
        except (ValueError, RecursionError, IndexError):
            return None

    def is_open(self, text: str, *, inside: bool = False) -> bool:
        if inside:
            return self.arguments.is_open(text, inside=True)
        begins = re.match(rf"\s*(?:{self.section})?\s*{self.opening}", self.mark + text)
        return begins is not None and self.arguments.is_open(self.mark + text)

    def _calls(self, text: str, tools: Signatures) -> Iterator[Call]:
        name = _NAME if self.middle in ("", r"\s*") else f"{_NAME}?"
        head = re.compile(rf"\s*{self.opening}(?P<name>{name}){self.middle}")
        end = re.compile(rf"\s*(?:{self.closing})?\s*(?:{self.between})?\s*")
        at = end_of(re.compile(rf"\s*(?:{self.section})?"), text, 0)
        while at < len(text):
            found = head.match(text, at)
            if found is None:
                raise ValueError("no call")
            name = found["name"]
            given, at = self.arguments.read(text, found.end(), tools.get(name, {}))
            if not (given or self.opening or name in tools):
                raise ValueError("a word, and no call")
            at = end_of(end, text, at)
            yield Call(name, as_json(given), self._id(found))

    def _id(self, found: re.Match[str]) -> str | None:
        groups = found.groupdict()
        if self.id_form:
            return self.id_form.format(name=groups["name"], index=groups.get("index") or 0)
        return groups.get("id")


@dataclass(frozen=True, slots=True)
class Spelling:
    """How to write a call: ``before name middle arguments after``.

    Further calls follow the arguments as ``joint name later arguments``; without a ``joint`` only
    one call can be written.
    """

    before: str
    middle: str
    after: str
    arguments: Arguments
    joint: str = ""
    later: str = ""

    def call(self, name: object, arguments: str) -> str:
        """The text of one call."""
        return f"{self.before}{name}{self.middle}{arguments}{self.after}"
