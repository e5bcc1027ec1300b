"""The part of Go's text/template that chat templates of Ollama are written in, as a tree.

Text and actions (``{{ if eq .Role "user" }}``) become nodes; pipelines become expressions. What
such templates do not use (``define``, ``template``, ``block``, methods) is refused. Knows neither
Jinja2 nor messages. Reference: https://pkg.go.dev/text/template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from localrt.common.errors import TemplateError

_ACTION = re.compile(
    r"""\{\{(?P<left>-(?=\s))?\s*(?:
        (?P<comment>/\*.*?\*/\s*)
      | (?P<body>(?:"(?:[^"\\]|\\.)*"|`[^`]*`|[^"`}]|\}(?!\}))*)
    )(?P<right>(?<=\s)-)?\}\}""",
    re.DOTALL | re.VERBOSE,
)
_TOKEN = re.compile(
    r"""\s*(?:
        (?P<string>"(?:[^"\\]|\\.)*"|`[^`]*`)
      | (?P<number>-?\d+)
      | (?P<set>:=|=)
      | (?P<mark>[|(),])
      | (?P<path>(?:\$\w*)?(?:\.\w+)+|\$\w*|\.)
      | (?P<word>\w+)
    )""",
    re.VERBOSE,
)
_DEEPEST = 64


@dataclass(frozen=True, slots=True)
class Literal:
    """A text, a number, true, false or nil."""

    value: str | int | bool | None


@dataclass(frozen=True, slots=True)
class Field:
    """``.A.B`` of the dot (``root`` is ``""``), of a variable (``"$x"``), or of all (``"$"``)."""

    root: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """A function and its arguments; a pipe's value is the last one."""

    name: str
    arguments: tuple[Expression, ...]


Expression: TypeAlias = Literal | Field | Call


@dataclass(frozen=True, slots=True)
class Text:
    """What stands between actions."""

    text: str


@dataclass(frozen=True, slots=True)
class Show:
    """An expression whose value is shown."""

    what: Expression


@dataclass(frozen=True, slots=True)
class Set:
    """``$name := value`` or ``$name = value``."""

    name: str
    value: Expression


@dataclass(frozen=True, slots=True)
class Step:
    """``continue`` or ``break``."""

    word: str


@dataclass(frozen=True, slots=True)
class If:
    """``if``; an ``else if`` is an If alone in ``other``."""

    test: Expression
    body: list[Node] = field(default_factory=list)
    other: list[Node] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class With:
    """``with``: the dot is the value in ``body``, which is left out where that is empty."""

    value: Expression
    body: list[Node] = field(default_factory=list)
    other: list[Node] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Range:
    """``range``: the dot is each element; ``names`` are the variables of place and element."""

    over: Expression
    names: tuple[str, ...] = ()
    body: list[Node] = field(default_factory=list)
    other: list[Node] = field(default_factory=list)


Node: TypeAlias = Text | Show | Set | Step | If | With | Range


def parse(source: str) -> list[Node]:
    """The template's nodes.

    Raises:
        TemplateError: it is not such a template, or uses what is not known here.
    """
    root: list[Node] = []
    places: list[list[Node]] = [root]  # where nodes go, of each block that is open
    blocks: list[tuple[str, int]] = []  # what opened it, and how many blocks its end closes
    text, last, trim = "", 0, False

    def flush(until: str, *, right: bool) -> None:
        if "{{" in until:
            raise TemplateError("an action does not end")
        shown = until.lstrip() if trim else until
        shown = shown.rstrip() if right else shown
        if shown:
            places[-1].append(Text(shown))

    for action in _ACTION.finditer(source):
        text = source[last : action.start()]
        flush(text, right=action["left"] is not None)
        body = action["body"] or ""
        trims = body.endswith((" -", "\t-", "\n-"))
        last, trim = action.end(), trims or action["right"] is not None
        if action["comment"]:
            continue
        body = body.removesuffix("-").strip() if trims else body.strip()
        _take(_tokens(body), places, blocks)
        if len(places) > _DEEPEST:
            raise TemplateError("its blocks are nested too deeply")
    if blocks:
        raise TemplateError(f"a block of {blocks[-1][0]} has no end")
    flush(source[last:], right=False)
    return root


def _take(
    tokens: list[tuple[str, str]], places: list[list[Node]], blocks: list[tuple[str, int]]
) -> None:
    """One action."""
    word = tokens[0][1] if tokens and tokens[0][0] == "word" else ""
    rest = tokens[1:]
    if word in ("if", "with", "range"):
        _open(word, rest, places)
        blocks.append((word, 1))
    elif word == "else":
        if not blocks:
            raise TemplateError("an else outside of a block")
        kind, ends = blocks.pop()
        places.pop()
        opened = places[-1][-1]
        assert isinstance(opened, If | With | Range), "what opens a block is its last node"
        places.append(opened.other)
        if rest:  # else if, else with: one more block, which the same end closes
            _open(rest[0][1], rest[1:], places)
            ends += 1
        blocks.append((kind, ends))
    elif word == "end":
        if not blocks:
            raise TemplateError("an end without a block")
        _, ends = blocks.pop()
        del places[len(places) - ends :]
    elif word in ("break", "continue"):
        places[-1].append(Step(word))
    elif word in ("define", "template", "block"):
        raise TemplateError(f"{word} is not known here")
    elif len(tokens) > 1 and tokens[0][1].startswith("$") and tokens[1][0] == "set":
        places[-1].append(Set(tokens[0][1], _pipeline(tokens[2:])))
    elif tokens:
        places[-1].append(Show(_pipeline(tokens)))


def _open(word: str, rest: list[tuple[str, str]], places: list[list[Node]]) -> None:
    names: tuple[str, ...] = ()
    at = next((i for i, (kind, _) in enumerate(rest) if kind == "set"), None)
    if word == "range" and at is not None:
        names = tuple(text for kind, text in rest[:at] if kind in ("path", "word"))
        rest = rest[at + 1 :]
    value = _pipeline(rest)
    opened: If | With | Range
    match word:
        case "if":
            opened = If(value)
        case "with":
            opened = With(value)
        case "range":
            opened = Range(value, names)
        case _:
            raise TemplateError(f"else {word} is not known here")
    places[-1].append(opened)
    places.append(opened.body)


def _tokens(body: str) -> list[tuple[str, str]]:
    found, place = [], 0
    while place < len(body):
        match = _TOKEN.match(body, place)
        if match is None:
            raise TemplateError(f"{body[place : place + 40]!r} is not understood")
        kind = match.lastgroup or ""
        found.append((kind, match[kind]))
        place = match.end()
    return found


def _pipeline(tokens: Sequence[tuple[str, str]]) -> Expression:
    """``a b | c``: what comes before a bar is the last argument of what follows it."""
    commands: list[list[tuple[str, str]]] = [[]]
    depth = 0
    for kind, text in tokens:
        depth += (text == "(") - (text == ")") if kind == "mark" else 0
        if (kind, text) == ("mark", "|") and not depth:
            commands.append([])
        else:
            commands[-1].append((kind, text))
    value = _command(commands[0])
    for command in commands[1:]:
        call = _command(command)
        if not isinstance(call, Call):
            raise TemplateError("a pipe leads to no function")
        value = Call(call.name, (*call.arguments, value))
    return value


def _command(tokens: list[tuple[str, str]]) -> Expression:
    operands: list[Expression] = []
    place, name = 0, ""
    if tokens and tokens[0][0] == "word" and tokens[0][1] not in ("true", "false", "nil"):
        name, place = tokens[0][1], 1
    while place < len(tokens):
        kind, text = tokens[place]
        if (kind, text) == ("mark", "("):
            end = _closing(tokens, place)
            inner = _pipeline(tokens[place + 1 : end])
            operands.append(inner)
            place = end
        else:
            operands.append(_operand(kind, text))
        place += 1
    if name:
        return Call(name, tuple(operands))
    if len(operands) != 1:
        raise TemplateError("an action says nothing, or too much")
    return operands[0]


def _closing(tokens: Sequence[tuple[str, str]], place: int) -> int:
    depth = 0
    for at in range(place, len(tokens)):
        depth += (tokens[at] == ("mark", "(")) - (tokens[at] == ("mark", ")"))
        if depth == 0:
            return at
    raise TemplateError("a bracket is not closed")


def _operand(kind: str, text: str) -> Expression:
    match kind:
        case "string":
            try:
                return Literal(text[1:-1] if text[0] == "`" else json.loads(text, strict=False))
            except ValueError:
                raise TemplateError(f"the text {text:.40} is not understood") from None
        case "number":
            return Literal(int(text))
        case "word" if text in ("true", "false", "nil"):
            return Literal({"true": True, "false": False, "nil": None}[text])
        case "word":
            return Call(text, ())
        case "path":
            root, *names = text.split(".") if text != "." else [""]
            return Field(root, tuple(names))
    raise TemplateError(f"{text:.40} is out of place")
