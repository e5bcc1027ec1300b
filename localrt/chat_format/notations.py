"""The notations of tool calls and of their arguments: parsers of what a model writes.

A call is a JSON object, Python code, or a ``Framed`` name and its arguments: JSON, pairs in tags,
Python's keywords, or an object with special quotes. Parsing returns None for text that is not a
call: it stays text. A notation does not know how it was found, or where in an answer the calls are.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from localrt.chat_format.json_schemas import (
    ABSENT,
    DECODER,
    Accepted,
    Types,
    accepted,
    literal,
    parameters_of,
)
from localrt.common.formatting import paired


class Arguments(Protocol):
    """A notation of arguments."""

    def read(self, text: str, at: int, types: Types) -> tuple[dict[str, object], int]:
        """Return the arguments at ``at``, and the position after them.

        Raises:
            ValueError: there are none of this kind.
        """

    def is_open(self, text: str, *, inside: bool = False) -> bool: ...


def pattern(literal: str) -> str:
    """A regular expression for ``literal`` that allows any whitespace where it has some."""
    return r"\s*".join(map(re.escape, re.split(r"\s+", literal)))


def end_of(expression: re.Pattern[str], text: str, at: int) -> int:
    """The end of the match at ``at``; ``at`` itself if there is none."""
    found = expression.match(text, at)
    return at if found is None else found.end()


def _space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    if at == len(text):
        raise ValueError("no end")
    return at


# -- JSON ----------------------------------------------------------------------------------------

_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?P<end>"?)', re.DOTALL)


def ends_in_string(text: str, *, inside: bool = False) -> bool:
    """Whether the JSON ``text`` ends within a string. ``inside``: it also begins within one."""
    found = list(_STRING.finditer('"' * inside + text))
    return bool(found) and not found[-1]["end"]


@dataclass(frozen=True, slots=True)
class JsonArguments:
    """One JSON object."""

    def read(self, text: str, at: int, types: Types) -> tuple[dict[str, object], int]:
        value, end = DECODER.raw_decode(text, _space(text, at))
        if isinstance(value, str):  # the object as JSON text
            value = DECODER.decode(value) if value.strip() else {}
        value = {} if value in (None, []) else value
        if not isinstance(value, dict):
            raise ValueError("no object")
        return value, end

    def is_open(self, text: str, *, inside: bool = False) -> bool:
        return ends_in_string(text, inside=inside)


# -- pairs in tags ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mid:
    """The marks between a key and its value, and after the value.

    ``string``: the marks say that the value is a string, that it is not, or nothing (None).
    """

    before: str
    after: str
    string: bool | None = None


@dataclass(frozen=True, slots=True)
class TaggedArguments:
    """``opening key before value after``, repeated: values are plain text.

    The tool's schema says whether text is a string; without one, text that is JSON is a value.
    ``forgotten``: the model may leave out the mark after a value.
    """

    opening: str
    mids: tuple[Mid, ...]
    closing: str
    gap: str = ""  # between pairs
    forgotten: bool = False

    def read(self, text: str, at: int, types: Types) -> tuple[dict[str, object], int]:
        found: dict[str, object] = {}
        opening = re.compile(rf"\s*{pattern(self.opening.strip())}")
        while (head := opening.match(text, at)) is not None:
            mid, before = self._mid(text, head.end())
            key = text[head.end() : before.start()].strip()
            value, at = self._value(text, before.end(), mid)
            found[key] = self._typed(value, mid.string, types.get(key, Accepted()))
        return {key: value for key, value in found.items() if value is not ABSENT}, at

    def is_open(self, text: str, *, inside: bool = False) -> bool:
        text = self.opening * inside + text
        last = text.rfind(self.opening.strip())
        return last >= 0 and not any(mid.after.strip() in text[last:] for mid in self.mids)

    def _mid(self, text: str, at: int) -> tuple[Mid, re.Match[str]]:
        """The first marks after the key at ``at``, of several the longest."""
        places = [
            (mid, re.compile(pattern(mid.before.strip())).search(text, at)) for mid in self.mids
        ]
        found = [(mid, before) for mid, before in places if before is not None]
        if not found:
            raise ValueError("a key without a value")
        return min(found, key=lambda each: (each[1].start(), -len(each[0].before)))

    def _value(self, text: str, at: int, mid: Mid) -> tuple[str, int]:
        """The value at ``at``, up to an end mark before another pair or the end of the call."""
        after = mid.after.lstrip()
        trail = mid.after[: len(mid.after) - len(after)]
        follows = re.compile(
            rf"\s*(?:{pattern(self.opening.strip())}|{pattern(self.closing.strip()) or '$'}|$)"
        )
        if self.forgotten:
            ends = re.compile(rf"{pattern(after)}|(?={self.opening}|{self.closing})")
            found = ends.search(text, at)
            end, after = (-1, "") if found is None else (found.start(), found[0])
        else:
            end = text.find(after, at)
            while end >= 0 and not follows.match(text, end + len(after)):
                end = text.find(after, end + 1)
        if end < 0:
            raise ValueError("a value without an end")
        lead = mid.before[len(mid.before.rstrip()) :]
        return text[at:end].removeprefix(lead).removesuffix(trail), end + len(after)

    def _typed(self, text: str, string: bool | None, accepted: Accepted) -> Any:
        if string:
            return text
        if string is not None:
            accepted = Accepted(accepted.kinds - {"string"})
        return accepted.read(text)


# -- keywords, as in Python ------------------------------------------------------------------------

_KEYWORD = re.compile(r"\s*(\w+)\s*=\s*")
_AFTER = re.compile(r"\s*(,\s*\w+\s*=|\)\s*(?:,|\]|$))")


@dataclass(frozen=True, slots=True)
class KeywordArguments:
    """``key='value', key=2)``. ``escaped``: quotes within a string are escaped."""

    escaped: bool

    def read(self, text: str, at: int, types: Types) -> tuple[dict[str, object], int]:
        """See ``Arguments``; stops before the closing bracket."""
        found: dict[str, object] = {}
        while (head := _KEYWORD.match(text, at)) is not None:
            end = self._end(text, head.end())
            found[head[1]] = self._value(text[head.end() : end])
            at = end + 1 if text[end : end + 1] == "," else end
        return found, at

    def is_open(self, text: str, *, inside: bool = False) -> bool:
        return not text.rstrip().endswith(("]", ")"))

    def _value(self, text: str) -> Any:
        text = text.strip()
        if not self.escaped and len(text) > 1 and text[0] == text[-1] == "'":
            return text[1:-1]
        return literal(text)

    def _end(self, text: str, at: int) -> int:
        """The end of the value at ``at``: a comma or a closing bracket."""
        if not self.escaped and text.startswith("'", at):
            end = at
            while (end := text.find("'", end + 1)) >= 0:
                if _AFTER.match(text, end + 1):
                    return end + 1
            raise ValueError("a string without an end")
        depth = 0
        while at < len(text):
            char = text[at]
            if char in "\"'":
                at = _string_end(text, at)
                continue
            if depth == 0 and char in ",)":
                return at
            depth += (char in "([{") - (char in ")]}")
            at += 1
        raise ValueError("a value without an end")


def _string_end(text: str, at: int) -> int:
    quote, at = text[at], at + 1
    while text[at] != quote:
        at += 2 if text[at] == "\\" else 1
    return at + 1


# -- an object with special quotes -----------------------------------------------------------------

_BARE = re.compile(r"[^,{}\[\]]*")


@dataclass(frozen=True, slots=True)
class QuotedArguments:
    """``{key:"value",key:[1,{}]}`` with bare keys and ``quote`` as the quotation mark."""

    quote: str

    def read(self, text: str, at: int, types: Types) -> tuple[dict[str, object], int]:
        value, at = self._value(text, at)
        if not isinstance(value, dict):
            raise ValueError("no object")
        return value, at

    def is_open(self, text: str, *, inside: bool = False) -> bool:
        return (text.count(self.quote) + inside) % 2 == 1

    def _value(self, text: str, at: int) -> tuple[Any, int]:
        at = _space(text, at)
        if text.startswith(self.quote, at):
            return self._string(text, at)
        if text.startswith("{", at):
            return self._items(text, at, "}")
        if text.startswith("[", at):
            pairs, at = self._items(text, at, "]")
            return [*pairs.values()], at
        end = end_of(_BARE, text, at)
        try:
            return literal(text[at:end]), end
        except ValueError:
            return text[at:end].strip(), end

    def _items(self, text: str, at: int, closing: str) -> tuple[dict[Any, Any], int]:
        """The items within brackets; those of a list have numbers as keys."""
        found: dict[object, object] = {}
        at = _space(text, at + 1)
        while not text.startswith(closing, at):
            key: object = len(found)
            if closing == "}":
                key, at = self._key(text, at)
            found[key], at = self._value(text, at)
            at = _space(text, at)
            if text.startswith(",", at):
                at = _space(text, at + 1)
            elif not text.startswith(closing, at):
                raise ValueError("neither another item nor an end")
        return found, at + 1

    def _key(self, text: str, at: int) -> tuple[str, int]:
        if text.startswith(self.quote, at):
            key, end = self._string(text, at)
        else:
            end = text.index(":", at)
            key = text[at:end]
        return key, text.index(":", end) + 1

    def _string(self, text: str, at: int) -> tuple[str, int]:
        start = at + len(self.quote)
        end = text.index(self.quote, start)
        return text[start:end], end + len(self.quote)


Signatures: TypeAlias = Mapping[str, Types]
"""What each parameter of a function may be, by the function's name."""


@dataclass(frozen=True, slots=True)
class ParsedCall:
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

    def parse(self, text: str, tools: Signatures) -> list[ParsedCall] | None:
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


def call_of(name: object, arguments: object, call_id: object = None) -> ParsedCall | None:
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
    return ParsedCall(paired(name), as_json(arguments), call_id)


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """JSON objects, in a list or in a row, with a name and arguments at these keys.

    Both may be in a ``function``. If ``name`` is None, the tool's name is the key of its arguments.
    """

    name: str | None = "name"
    arguments: tuple[str, ...] = ("arguments", "parameters")
    id: str = "id"

    def parse(self, text: str, tools: Signatures) -> list[ParsedCall] | None:
        values = json_values(text.strip())
        items = (value if isinstance(value, list) else [value] for value in values or ())
        calls = [self._call(item) for group in items for item in group]
        known = [call for call in calls if call is not None]
        return known if known and len(known) == len(calls) else None

    def is_open(self, text: str, *, inside: bool = False) -> bool:
        if inside:
            return ends_in_string(text, inside=True)
        text = text.strip()
        return text[:1] in ("{", "[") and ends_in_string(text)

    def _call(self, value: object) -> ParsedCall | None:
        if not isinstance(value, Mapping):
            return None
        if self.name is None:
            return call_of(*next(iter(value.items()))) if len(value) == 1 else None
        if not isinstance(value.get(self.name), str) and "function" in value:
            return self._call(value["function"])
        given = next((value[key] for key in self.arguments if key in value), None)
        return call_of(value.get(self.name), given, value.get(self.id))


# -- Python code -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """``name(key="value")``, one, several or a list; ``print(...)`` around one is ignored."""

    def parse(self, text: str, tools: Signatures) -> list[ParsedCall] | None:
        try:
            calls: list[ParsedCall] = []
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

    def _call(self, node: ast.expr, tools: Signatures) -> ParsedCall:
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
        return ParsedCall(name, as_json(arguments))


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

    def parse(self, text: str, tools: Signatures) -> list[ParsedCall] | None:
        try:
            return list(self._calls(f"{self.mark}{text}{self.end}", tools)) or None
        except (ValueError, RecursionError, IndexError):
            return None

    def is_open(self, text: str, *, inside: bool = False) -> bool:
        if inside:
            return self.arguments.is_open(text, inside=True)
        begins = re.match(rf"\s*(?:{self.section})?\s*{self.opening}", self.mark + text)
        return begins is not None and self.arguments.is_open(self.mark + text)

    def _calls(self, text: str, tools: Signatures) -> Iterator[ParsedCall]:
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
            yield ParsedCall(name, as_json(given), self._id(found))

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
