"""Translates Ollama's chat templates, written in Go's text/template, to Jinja2.

A model whose file has no template may have one in Ollama's store. It is translated once, action by
action (``{{ if eq .Role "user" }}``), and then used like any other. There are two kinds: those that
iterate over ``.Messages``, and older ones for a single exchange (``.System``, ``.Prompt``,
``.Response``), which are repeated. Features that such templates do not use (``define``,
``template``, ``block``, methods) are refused. Reference: https://pkg.go.dev/text/template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
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
      | (?P<number>-?\d{1,18})
      | (?P<set>:=|=)
      | (?P<mark>[|(),])
      | (?P<path>(?:\$\w*)?(?:\.\w+)+|\$\w*|\.)
      | (?P<word>\w+)
    )""",
    re.VERBOSE,
)
_Token: TypeAlias = tuple[str, str]  # its kind (a group's name above), and its text
_OPEN, _CLOSE = ("mark", "("), ("mark", ")")
_DEEPEST = 64
_CONSTANTS = {"true": "true", "false": "false", "nil": "none"}

# Ollama's names for parts of messages, calls and tools, and OpenAI's.
_KEYS = {
    "ToolCalls": "tool_calls",
    "Thinking": "reasoning_content",
    "ToolName": "name",
    "ToolCallID": "tool_call_id",
    "ID": "id",
}
_MAPPINGS = ('["properties"]', '["arguments"]')  # range iterates over their keys
_ROOT = {
    "Messages": "messages",
    "Tools": "(tools or [])",
    "System": "ns.system",
    "Prompt": "ns.prompt",
    "Response": "ns.response",
    "Suffix": '""',
    "Think": "(enable_thinking is defined and enable_thinking)",
    "ThinkLevel": '(reasoning_effort if reasoning_effort is defined else "")',
    "IsThinkSet": "(enable_thinking is defined)",
}
_COMPARISONS = {"ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}

# Values are shown as in Go: nothing for a missing value, JSON for structures.
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
# Repeats the template of a single exchange; the last one ends where the answer begins.
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
    """Translate to a Jinja2 template for ``messages``, ``tools`` and ``add_generation_prompt``.

    Raises:
        TemplateError: it is not such a template, or uses an unknown feature.
    """
    found = _Translation(source)
    if "Messages" in found.fields:
        return _SHOW + _BEGIN + _SYSTEM + found.text
    whole = found.text
    if "Response" not in found.fields:
        whole += "{{- show(ns.response) -}}"
    begun = _Translation(source, until_response=True).text
    macros = f"{{%- macro whole() -%}}{whole}{{%- endmacro -%}}"
    macros += f"{{%- macro begun() -%}}{begun}{{%- endmacro -%}}"
    return _SHOW + _BEGIN + macros + _EXCHANGES


@dataclass(slots=True)
class _Block:
    """An open ``if``, ``with`` or ``range``.

    ``has_dot``: its branch sets the dot. ``chained``: it is an ``else if``, and its end also closes
    the block around it. ``silent``: it comes after ``.Response``. ``met``: it contains that.
    """

    word: str
    has_dot: bool
    chained: bool
    silent: bool
    met: bool = False


class _Translation:
    """``text`` is ``source`` in Jinja2; ``fields`` are the names of the fields that it uses.

    With ``until_response`` the text ends at ``.Response``, if that is shown at the top level or in
    conditions, where only the branch ends.
    """

    def __init__(self, source: str, *, until_response: bool = False) -> None:
        self.fields: set[str] = set()
        self._until_response = until_response
        self._written: list[str] = []
        self._silent = False  # whether it is after ``.Response``
        self._blocks: list[_Block] = []
        self._dots: list[str] = []  # the expressions of the dot, the current one last
        last, trim = 0, False
        for action in _ACTION.finditer(source):
            self._plain(source[last : action.start()], trim, action["left"] is not None)
            body = action["body"] or ""
            trims = body.endswith((" -", "\t-", "\n-"))
            last, trim = action.end(), trims or action["right"] is not None
            if not action["comment"]:
                self._action(_tokens(body.removesuffix("-").strip() if trims else body.strip()))
            if len(self._blocks) >= _DEEPEST:
                raise TemplateError("its blocks are nested too deeply")
        if self._blocks:
            raise TemplateError(f"a block of {self._blocks[-1].word} has no end")
        self._plain(source[last:], trim, False)
        self.text = "".join(self._written)

    def _plain(self, text: str, left: bool, right: bool) -> None:
        """Write the text between actions, which may trim it on either side."""
        if "{{" in text:
            raise TemplateError("an action does not end")
        text = text.lstrip() if left else text
        text = text.rstrip() if right else text
        if text:
            self._write(f"{{{{- {_text(text)} -}}}}")

    def _write(self, text: str) -> None:
        if not self._silent:
            self._written.append(text)

    # -- actions ---------------------------------------------------------------------------------

    def _action(self, tokens: list[_Token]) -> None:
        word = tokens[0][1] if tokens and tokens[0][0] == "word" else ""
        if word in ("if", "with", "range"):
            self._open(word, tokens[1:])
        elif word == "else":
            if not self._blocks:
                raise TemplateError("an else outside of a block")
            self._leave(self._blocks[-1])
            self._write("{%- else -%}")
            if len(tokens) > 1:
                self._open(tokens[1][1], tokens[2:], chained=True)
        elif word == "end":
            self._end()
        elif word in ("break", "continue"):
            self._write(f"{{%- {word} -%}}")
        elif word in ("define", "template", "block"):
            raise TemplateError(f"{word:.40} is not known here")
        elif len(tokens) > 1 and tokens[0][1].startswith("$") and tokens[1][0] == "set":
            self._set(tokens[0][1], self._pipeline(tokens[2:]))
        elif tokens:
            value = self._pipeline(tokens)
            conditions = all(block.word == "if" for block in self._blocks)
            if self._until_response and conditions and _is_response(tokens):
                self._stop()
            else:
                self._write(f"{{{{- show({value}) -}}}}")

    def _open(self, word: str, tokens: list[_Token], *, chained: bool = False) -> None:
        if word not in ("if", "with", "range"):
            raise TemplateError(f"else {word:.40} is not known here")
        block = _Block(word, word != "if", chained, self._silent)
        if word == "range":
            self._range(tokens)
        else:
            value = self._pipeline(tokens)
            self._write(f"{{%- if {value} -%}}")
            if block.has_dot:
                self._dots.append(value)
        self._blocks.append(block)

    def _range(self, tokens: list[_Token]) -> None:
        names: list[str] = []  # the variables for the index or key, and for the element
        at = next((i for i, (kind, _) in enumerate(tokens) if kind == "set"), None)
        if at is not None:
            names = [text for kind, text in tokens[:at] if kind in ("path", "word")]
            tokens = tokens[at + 1 :]
        over, element = self._pipeline(tokens), f"each{len(self._dots)}"
        keyed = over.endswith(_MAPPINGS)
        if keyed:
            self._write(f"{{%- for key, {element} in (({over}) or {{}}).items() -%}}")
        else:
            self._write(f"{{%- for {element} in ({over}) or [] -%}}")
        values = ["key" if keyed else "loop.index0", element]
        for name, value in zip(names[::-1], values[::-1], strict=False):
            if name not in ("_", "$_"):
                self._set(name, value)
        self._dots.append(element)

    def _leave(self, block: _Block) -> None:
        """End a branch of ``block``."""
        if block.has_dot:
            self._dots.pop()
            block.has_dot = False
        self._silent = block.silent

    def _end(self) -> None:
        if not self._blocks:
            raise TemplateError("an end without a block")
        chained = True
        while chained:
            block = self._blocks.pop()
            self._leave(block)
            self._write("{%- endfor -%}" if block.word == "range" else "{%- endif -%}")
            chained = block.chained
            if block.met:
                self._stop()

    def _stop(self) -> None:
        """End the branch here, because ``.Response`` comes next."""
        self._silent = True
        if self._blocks:
            self._blocks[-1].met = True

    def _set(self, name: str, value: str) -> None:
        self._write(f"{{%- set {_variable(name)} = {value} -%}}")

    # -- expressions -----------------------------------------------------------------------------

    def _pipeline(self, tokens: Sequence[_Token]) -> str:
        """Translate ``a b | c``: the value before a bar is the last argument of the next part."""
        commands: list[list[_Token]] = [[]]
        depth = 0
        for token in tokens:
            depth += (token == _OPEN) - (token == _CLOSE)
            if token == ("mark", "|") and not depth:
                commands.append([])
            else:
                commands[-1].append(token)
        value: str | None = None
        for command in commands:
            value = self._command(command, value)
        assert value is not None, "there is one command at least"
        return value

    def _command(self, tokens: list[_Token], piped: str | None) -> str:
        name, place = "", 0
        if tokens and tokens[0][0] == "word" and tokens[0][1] not in _CONSTANTS:
            name, place = tokens[0][1], 1
        elif piped is not None:
            raise TemplateError("a pipe leads to no function")
        values: list[str] = []
        while place < len(tokens):
            if tokens[place] == _OPEN:
                end = _closing(tokens, place)
                values.append(self._pipeline(tokens[place + 1 : end]))
                place = end
            else:
                values.append(self._operand(*tokens[place]))
            place += 1
        if piped is not None:
            values.append(piped)
        if name:
            return _call(name, values, tokens[1:2])
        if len(values) != 1:
            raise TemplateError("an action says nothing, or too much")
        return values[0]

    def _operand(self, kind: str, text: str) -> str:
        match kind:
            case "string":
                return _text(_literal(text))
            case "number":
                return str(int(text))
            case "word":
                return _CONSTANTS.get(text) or _call(text, [], [])
            case "path":
                return self._field(*(text.split(".") if text != "." else [""]))
        raise TemplateError(f"{text:.40} is out of place")

    def _field(self, root: str, *names: str) -> str:
        """``.A.B`` of the dot (``root`` is empty), of a variable (``$x``) or of all (``$``)."""
        self.fields |= {*names}
        if root == "$" or (not root and not self._dots):
            if not names:
                raise TemplateError("the whole of the data cannot be shown")
            if names[0] not in _ROOT:
                raise TemplateError(f".{names[0]:.40} is not known here")
            found, names = _ROOT[names[0]], names[1:]
        else:
            found = _variable(root) if root else self._dots[-1]
        for place, name in enumerate(names):
            inner = f"({found} or {{}})" if place else found
            found = f'{inner}["{_KEYS.get(name, name.lower())}"]'
        return found


def _tokens(body: str) -> list[_Token]:
    found, place = [], 0
    while place < len(body):
        match = _TOKEN.match(body, place)
        if match is None:
            raise TemplateError(f"{body[place : place + 40]!r} is not understood")
        kind = match.lastgroup or ""
        found.append((kind, match[kind]))
        place = match.end()
    return found


def _is_response(tokens: Sequence[_Token]) -> bool:
    return [kind for kind, _ in tokens] == ["path"] and "Response" in tokens[0][1].split(".")


def _closing(tokens: Sequence[_Token], place: int) -> int:
    depth = 0
    for at in range(place, len(tokens)):
        depth += (tokens[at] == _OPEN) - (tokens[at] == _CLOSE)
        if depth == 0:
            return at
    raise TemplateError("a bracket is not closed")


def _call(name: str, values: Sequence[str], first: Sequence[_Token]) -> str:
    """Translate a function call; ``first`` is the token of its first argument."""
    match name, values:
        case (("and" | "or"), [_, *_]):
            return "(" + f" {name} ".join(values) + ")"
        case "not", [value]:
            return f"(not {value})"
        case "eq", [left, _, *_]:
            return "(" + " or ".join(f"{left} == {each}" for each in values[1:]) + ")"
        case (("ne" | "lt" | "le" | "gt" | "ge"), [left, right]):
            return f"({left} {_COMPARISONS[name]} {right})"
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
            return _printf(first, rest)
        case "currentDate", _:
            return 'strftime_now("%Y-%m-%d")'
    raise TemplateError(f"the function {name:.40} is not known here")


def _printf(layout: Sequence[_Token], values: Sequence[str]) -> str:
    if not layout or layout[0][0] != "string":
        raise TemplateError("the format of a printf is no text")
    pieces = _literal(layout[0][1]).replace("%v", "%s").replace("%d", "%s").split("%s")
    if any("%" in piece for piece in pieces):
        raise TemplateError("the format of a printf is not understood")
    if len(values) < len(pieces) - 1:
        raise TemplateError("a printf has too few values")
    shown = [f"show({value})" for value in values]
    parts = [part for pair in zip(map(_text, pieces), [*shown, ""], strict=False) for part in pair]
    return "(" + " ~ ".join(parts[: 2 * len(pieces) - 1]) + ")"


def _literal(text: str) -> str:
    """The text of a Go literal."""
    try:
        found: str = text[1:-1] if text[0] == "`" else json.loads(text, strict=False)
    except ValueError:
        raise TemplateError(f"the text {text!r:.60} is not understood") from None
    return found


def _text(text: str) -> str:
    """A Jinja2 literal of ``text``; characters that could end an action are escaped."""
    written = json.dumps(text, ensure_ascii=False)
    return written.replace("}", "\\x7d").replace("%", "\\x25").replace("{", "\\x7b")


def _variable(name: str) -> str:
    return f"ns.v_{name.removeprefix('$')}"
