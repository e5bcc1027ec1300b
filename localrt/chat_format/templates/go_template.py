"""Ollama's chat templates, which are of Go's text/template, as Jinja2.

A model whose file brings no template of its own may have one in Ollama's store. It is translated
once and then used like any other. There are two kinds: those that go through ``.Messages``, and
older ones of a single exchange (``.System``, ``.Prompt``, ``.Response``), which are repeated.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from localrt.chat_format.templates.go_syntax import (
    Call,
    Expression,
    Field,
    If,
    Literal,
    Node,
    Range,
    Set,
    Show,
    Step,
    Text,
    With,
    parse,
)
from localrt.common.errors import TemplateError

# What Ollama calls a part of a message, a call or a tool, and OpenAI's form.
_KEYS = {
    "ToolCalls": "tool_calls",
    "Thinking": "reasoning_content",
    "ToolName": "name",
    "ToolCallID": "tool_call_id",
    "ID": "id",
}
_MAPPINGS = ("Properties", "Arguments")  # gone through by key
_THINKS = "(enable_thinking is defined and enable_thinking)"
_ROOT = {
    "Messages": "messages",
    "Tools": "(tools or [])",
    "System": "ns.system",
    "Prompt": "ns.prompt",
    "Response": "ns.response",
    "Suffix": '""',
    "Think": _THINKS,
    "ThinkLevel": '(reasoning_effort if reasoning_effort is defined else "")',
    "IsThinkSet": "(enable_thinking is defined)",
}
_COMPARISONS = {"ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}

# Values are shown as Go shows them: nothing for what is missing, JSON for structures.
_SHOW = (
    "{%- macro show(x) -%}{%- if x is undefined or x is none -%}"
    "{%- elif x is string or x is number -%}{{- x -}}{%- else -%}{{- x | tojson -}}{%- endif -%}"
    "{%- endmacro -%}"
)
_BEGIN = '{%- set ns = namespace(system="", prompt="", response="") -%}'
_SYSTEM = (
    '{%- for m in messages if m["role"] == "system" -%}'
    '{%- set ns.system = ns.system ~ ("\\n\\n" if ns.system else "") ~ (m["content"] or "") -%}'
    "{%- endfor -%}"
)
# A single exchange, written again and again: the last one ends where the answer begins.
_EXCHANGES = (
    "{%- for m in messages -%}"
    '{%- if (m["role"] == "system" and (ns.prompt or ns.response))'
    ' or (m["role"] == "user" and ns.response) -%}'
    "{{- whole() -}}"
    '{%- set ns.system = "" -%}{%- set ns.prompt = "" -%}{%- set ns.response = "" -%}'
    "{%- endif -%}"
    '{%- if m["role"] == "system" -%}{%- set ns.system = m["content"] or "" -%}'
    '{%- elif m["role"] == "user" -%}{%- set ns.prompt = m["content"] or "" -%}'
    '{%- elif m["role"] == "assistant" -%}{%- set ns.response = m["content"] or "" -%}'
    "{%- endif -%}{%- endfor -%}"
    "{%- if ns.response and not add_generation_prompt -%}{{- whole() -}}"
    "{%- elif ns.response -%}{{- whole() -}}"
    '{%- set ns.system = "" -%}{%- set ns.prompt = "" -%}{%- set ns.response = "" -%}'
    "{{- begun() -}}"
    "{%- else -%}{{- begun() -}}{%- endif -%}"
)


def to_jinja(source: str) -> str:
    """The same template in Jinja2, of ``messages``, ``tools`` and ``add_generation_prompt``.

    Raises:
        TemplateError: it uses something of Go's templates that is not known here.
    """
    nodes = parse(source)
    if _uses(nodes, "Messages"):
        return _SHOW + _BEGIN + _SYSTEM + "".join(_Writer().write(nodes))
    whole = "".join(_Writer().write(nodes))
    if not _uses(nodes, "Response"):
        whole += "{{- show(ns.response) -}}"
    begun = "".join(_Writer().write(_until_response(nodes)[0]))
    macros = f"{{%- macro whole() -%}}{whole}{{%- endmacro -%}}"
    macros += f"{{%- macro begun() -%}}{begun}{{%- endmacro -%}}"
    return _SHOW + _BEGIN + macros + _EXCHANGES


class _Writer:
    """Writes nodes as Jinja2. ``dots`` are the expressions that the dot has stood for."""

    def __init__(self) -> None:
        self._dots: list[str] = []

    def write(self, nodes: Sequence[Node]) -> Iterator[str]:
        for node in nodes:
            match node:
                case Text(text):
                    yield f"{{{{- {_text(text)} -}}}}"
                case Show(what):
                    yield f"{{{{- show({self.value(what)}) -}}}}"
                case Set(name, value):
                    yield self._set(name, self.value(value))
                case Step(word):
                    yield f"{{%- {word} -%}}"
                case If(test, body, other):
                    yield f"{{%- if {self.value(test)} -%}}"
                    yield from self.write(body)
                    yield "{%- else -%}"
                    yield from self.write(other)
                    yield "{%- endif -%}"
                case With(value, body, other):
                    shown = self.value(value)
                    yield f"{{%- if {shown} -%}}"
                    yield from self._inside(shown, body)
                    yield "{%- else -%}"
                    yield from self.write(other)
                    yield "{%- endif -%}"
                case Range():
                    yield from self._range(node)

    def _range(self, node: Range) -> Iterator[str]:
        over, element = self.value(node.over), f"each{len(self._dots)}"
        keyed = (
            isinstance(node.over, Field)
            and node.over.names[-1:]
            and (node.over.names[-1] in _MAPPINGS)
        )
        if keyed:
            yield f"{{%- for key, {element} in (({over}) or {{}}).items() -%}}"
        else:
            yield f"{{%- for {element} in ({over}) or [] -%}}"
        names = [name for name in node.names if name not in ("_", "$_")]
        if len(node.names) == 2 and node.names[0] in names:
            yield self._set(node.names[0], "key" if keyed else "loop.index0")
        if node.names and node.names[-1] in names:
            yield self._set(node.names[-1], element)
        yield from self._inside(element, node.body)
        if node.other:
            yield "{%- else -%}"
            yield from self.write(node.other)
        yield "{%- endfor -%}"

    def _inside(self, dot: str, body: Sequence[Node]) -> Iterator[str]:
        self._dots.append(dot)
        yield from self.write(body)
        self._dots.pop()

    @staticmethod
    def _set(name: str, value: str) -> str:
        return f"{{%- set {_variable(name)} = {value} -%}}"

    def value(self, expression: Expression) -> str:
        """An expression of Jinja2."""
        match expression:
            case Literal(None):
                return "none"
            case Literal(bool(flag)):
                return str(flag).lower()
            case Literal(int(number)):
                return str(number)
            case Literal(value):
                return _text(str(value))
            case Field(root, names):
                return self._field(root, names)
            case Call(name, arguments):
                return self._call(name, [self.value(each) for each in arguments], arguments)

    def _field(self, root: str, names: Sequence[str]) -> str:
        if root == "$" or (not root and not self._dots):
            if not names:
                raise TemplateError("the whole of the data cannot be shown")
            if names[0] not in _ROOT:
                raise TemplateError(f".{names[0]} is not known here")
            found, names = _ROOT[names[0]], names[1:]
        else:
            found = _variable(root) if root else self._dots[-1]
        for place, name in enumerate(names):
            inner = f"({found} or {{}})" if place else found
            found = f'{inner}["{_KEYS.get(name, name.lower())}"]'
        return found

    def _call(self, name: str, values: Sequence[str], arguments: Sequence[Expression]) -> str:
        match name, values:
            case (("and" | "or"), [_, *_]):
                return "(" + f" {name} ".join(values) + ")"
            case "not", [value]:
                return f"(not {value})"
            case "eq", [first, _, *_]:
                return "(" + " or ".join(f"{first} == {each}" for each in values[1:]) + ")"
            case (("ne" | "lt" | "le" | "gt" | "ge"), [first, second]):
                return f"({first} {_COMPARISONS[name]} {second})"
            case "len", [value]:
                return f"(({value}) or []) | length"
            case "slice", [value, *ends] if 1 <= len(ends) <= 2:
                return f"({value})[{ends[0]}:{ends[1] if len(ends) == 2 else ''}]"
            case "index", [value, *places]:
                return value + "".join(f"[{each}]" for each in places)
            case "json", [value]:
                return f"(({value}) | tojson)"
            case (("print" | "html" | "trim"), [_, *_]):
                return "(" + " ~ ".join(values) + ")"
            case "printf", [_, *rest]:
                return _printf(arguments[0], rest)
            case "currentDate", _:
                return 'strftime_now("%Y-%m-%d")'
        raise TemplateError(f"the function {name} is not known here")


def _printf(format: Expression, values: Sequence[str]) -> str:
    if not isinstance(format, Literal) or not isinstance(format.value, str):
        raise TemplateError("the format of a printf is no text")
    parts: list[str] = []
    left = list(values)
    pieces = format.value.replace("%v", "%s").replace("%d", "%s").split("%s")
    for place, piece in enumerate(pieces):
        if "%" in piece:
            raise TemplateError("the format of a printf is not understood")
        parts.append(_text(piece))
        if place < len(pieces) - 1:
            if not left:
                raise TemplateError("a printf has too few values")
            parts.append(f"show({left.pop(0)})")
    return "(" + " ~ ".join(parts) + ")"


def _text(text: str) -> str:
    """A literal; what could end an action of Jinja2 is written otherwise."""
    written = json.dumps(text, ensure_ascii=False)
    return written.replace("}", "\\x7d").replace("%", "\\x25").replace("{", "\\x7b")


def _variable(name: str) -> str:
    return f"ns.v_{name.removeprefix('$')}"


def _uses(nodes: Sequence[Node], name: str) -> bool:
    """Whether ``.NAME`` is in the template."""

    def inside(expression: Expression) -> bool:
        match expression:
            case Field(_, names):
                return name in names
            case Call(_, arguments):
                return any(map(inside, arguments))
        return False

    for node in nodes:
        match node:
            case Text() | Step():
                continue
            case Show(what):
                found = inside(what)
            case Set(_, value):
                found = inside(value)
            case If(value, body, other) | With(value, body, other) | Range(value, _, body, other):
                found = inside(value) or _uses(body, name) or _uses(other, name)
        if found:
            return True
    return False


def _until_response(nodes: Sequence[Node]) -> tuple[list[Node], bool]:
    """What comes before ``.Response``, also inside of a block; whether it was met."""
    kept: list[Node] = []
    for node in nodes:
        match node:
            case Show(Field(_, names)) if "Response" in names:
                return kept, True
            case If(test, body, other):
                first, met = _until_response(body)
                second, also = _until_response(other)
                kept.append(If(test, first, second))
                if met or also:
                    return kept, True
            case _:
                kept.append(node)
    return kept, False
