"""Grammars (llguidance's Lark) that constrain an answer to calls, in the syntax of the template.

Tools' schemas constrain the arguments: as JSON if the model writes JSON, value by value if it
writes tags, keywords or objects in its own notation. It knows tokens only by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from localrt.chat_format.json_schemas import BOUNDS, accepted, bounds, parameters_of, resolved
from localrt.chat_format.notations import (
    ID,
    NAMED,
    NUMBERED,
    KeywordArguments,
    QuotedArguments,
    Spelling,
    TaggedArguments,
)

Terminal = Callable[[str], str]
"""Converts text to terminals: some of its marks are control tokens."""

_ANY = {ID: "/[a-zA-Z0-9]{9}/", NUMBERED: "/[0-9]{1,2}/"}
_MOST = 16  # calls in an answer
_TEXT = "/(?s:.*)/"
_NOTHING = {"type": "object", "additionalProperties": False}
_PLAIN = frozenset(["integer", "number", "boolean", "null"])  # JSON in every notation
_WORDS = ("title", "description", "$schema")


def call_grammar(
    spelling: Spelling,
    tools: Sequence[Mapping[str, object]],
    terminal: Terminal,
    *,
    spaces: str = "",
    several: bool = False,
    answer: tuple[str, object] | None = None,
) -> tuple[str, set[str]]:
    """A grammar for a call of one of ``tools``, which are functions with a name and parameters, and
    the schemas' keywords that it does not enforce: only JSON obeys all.

    ``spaces`` is a regular expression for the whitespace in JSON. With ``several`` more calls may
    follow, if the template can write them. ``answer`` is allowed instead of calls: its opening mark
    and its JSON schema.
    """
    rules = _Rules(spelling, terminal, spaces)
    several = several and bool(spelling.joint)
    if answer is not None and spelling.before.startswith("{"):
        start = rules.json_calls(tools, several=several)
    else:
        start = rules.calls(tools, several=several)
    if answer is not None:
        start += f" | {rules.answer(*answer)}"
    return "\n".join([f"start: {start}", *rules.lines]), rules.left_out


class _Rules:
    """Collects the rules of a grammar; methods return the name or the body of a rule."""

    def __init__(self, spelling: Spelling, terminal: Terminal, spaces: str) -> None:
        self.lines: list[str] = []
        self.left_out: set[str] = set()
        self._spelling = spelling
        self._terminal = terminal
        self._spaces = spaces
        self._root: Mapping[str, object] = {}

    def calls(self, tools: Sequence[Mapping[str, Any]], *, several: bool) -> str:
        """The rule for a call of one of ``tools``, or for ``several`` calls."""
        spelling = self._spelling
        given = [(tool["name"], self._arguments(tool.get("parameters"))) for tool in tools]
        first = (self._call(spelling.before, spelling.middle, *each) for each in given)
        calls = f"({' | '.join(first)})"
        if several:
            more = (self._call(spelling.joint, spelling.later, *each) for each in given)
            calls += f" ({' | '.join(more)}){{0,{_MOST - 1}}}"
        return self._rule(f"{calls} {self._literal(spelling.after)}")

    def json_calls(self, tools: Sequence[Mapping[str, object]], *, several: bool) -> str:
        """The rule for ``calls`` as JSON objects, using the terminals of other JSON."""
        calls = self._rule(" | ".join(self._rule(self._json_call(tool)) for tool in tools))
        more = f" ({self._terminal(chr(10))} {calls}){{0,{_MOST - 1}}}" if several else ""
        return self._rule(calls + more)

    def _json_call(self, tool: Mapping[str, object]) -> str:
        spelling = self._spelling
        parameters = _closed(tool.get("parameters"))
        shape = json.loads(f"{spelling.before}n{spelling.middle}{{}}{spelling.after}")
        properties = {
            key: {"const": tool["name"]} if value == "n" else parameters
            for key, value in shape.items()
        }
        self._root = parameters
        return self._json(
            {
                "type": "object",
                "properties": properties,
                "required": [*properties],
                "additionalProperties": False,
            }
        )

    def answer(self, mark: str, schema: object) -> str:
        """The rule for an answer that follows ``schema``."""
        return self._rule(f"{self._literal(mark)} {self._json(schema)}")

    def _call(self, before: str, middle: str, name: str, arguments: str) -> str:
        if not arguments and self._spelling.after[:1].isspace():
            middle = middle.rstrip()
        opening = f"{before}{name}{middle}".replace(NAMED, name)
        return self._rule(f"{self._literal(opening)} {arguments}")

    def _rule(self, body: str) -> str:
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name

    def _literal(self, text: str) -> str:
        parts = re.split(f"({ID}|{NUMBERED})", text)
        return " ".join(_ANY.get(part) or self._terminal(part) for part in parts if part)

    def _arguments(self, schema: object) -> str:
        schema = self._root = _closed(schema)
        match self._spelling.arguments:
            case TaggedArguments() as tags:
                return self._sequence(
                    schema, lambda key, value: self._pair(tags, key, value), separator=tags.gap
                )
            case KeywordArguments():
                return self._sequence(schema, self._keyword, separator=", ")
            case QuotedArguments() as quoted:
                return self._rule(self._object(schema, quoted))
        return self._rule(self._json(schema))

    def _json(self, schema: object) -> str:
        """The rule's body for ``schema``, which may refer to definitions in the tool's schema."""
        given = dict(schema) if isinstance(schema, Mapping) else {}
        given |= {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        if self._spaces:
            given["x-guidance"] = {"whitespace_pattern": self._spaces}
        return f"%json {json.dumps(given)}"

    def _sequence(
        self, schema: Mapping[str, object], item: Callable[[str, object], str], separator: str = ""
    ) -> str:
        """The rule for all properties of ``schema`` in order; optional ones may be left out."""
        self._leave_out(schema, "object", "choice")
        properties, required = parameters_of(schema, self._root)
        rest, first = "", ""
        # Built from the last one: a property needs a separator only if another came before it.
        for key, value in reversed([*properties.items()]):
            one = self._rule(item(key, value))
            mark = self._terminal(separator) if separator else ""
            later = f"{mark} {one} {rest}".strip()
            alone = f"{one} {rest}".strip()
            optional = key not in required
            rest, first = (
                self._rule(f"{later} | {rest}" if optional and rest else later)
                if not optional or rest
                else self._rule(f"({later})?"),
                self._rule(f"{alone} | {first}" if optional and first else alone)
                if not optional or first
                else self._rule(f"({alone})?"),
            )
        return first

    # -- values ------------------------------------------------------------------------------------

    def _pair(self, tags: TaggedArguments, key: str, schema: object) -> str:
        known = accepted(schema, self._root)
        is_text = not known.kinds or "string" in known.kinds
        if is_text and len(known.kinds) > 1 and any(mid.string is False for mid in tags.mids):
            ways = (self._pair_as(tags, key, schema, text) for text in (True, False))
            return " | ".join(map(self._rule, ways))
        return self._pair_as(tags, key, schema, is_text)

    def _pair_as(self, tags: TaggedArguments, key: str, schema: object, is_text: bool) -> str:
        known = accepted(schema, self._root)
        mid = next((each for each in tags.mids if each.string in (None, is_text)), tags.mids[0])
        opening = self._literal(f"{tags.opening}{key}{mid.before}")
        closing = self._literal(mid.after)
        if not is_text:
            return f"{opening} {self._value(schema)} {closing}"
        only_text = known.is_text or bool(mid.string)
        self._leave_out_of_text(schema, known.choices, only_text=only_text)
        if known.choices and only_text:
            return f"{opening} ({self._either(known.choices)}) {closing}"
        text = f"t{len(self.lines)}"
        self.lines.append(f"{text}[suffix={json.dumps(mid.after, ensure_ascii=False)}]: {_TEXT}")
        return f"{opening} {text}"

    def _keyword(self, key: str, schema: object) -> str:
        known = accepted(schema, self._root)
        if known.kinds and not known.is_text:
            return f"{self._literal(key + '=')} {self._value(schema)}"
        self._leave_out(schema, "string")
        text = f"({self._either(known.choices)})" if known.choices else r"/[^'\\]*/"
        quote = self._terminal("'")
        return f"{self._literal(key + '=')} {quote} {text} {quote}"

    def _value(self, schema: object) -> str:
        return self._rule(self._json(schema))

    def _either(self, choices: Iterable[str]) -> str:
        return " | ".join(self._terminal(word) for word in choices)

    def _object(self, schema: Any, quoted: QuotedArguments) -> str:
        inside = self._sequence(
            schema, lambda key, value: self._quoted(quoted, key, value), separator=","
        )
        return f"{self._terminal('{')} {inside} {self._terminal('}')}"

    def _quoted(self, quoted: QuotedArguments, key: str, schema: object) -> str:
        return f"{self._literal(key + ':')} {self._quoted_value(quoted, schema)}"

    def _quoted_value(self, quoted: QuotedArguments, schema: Any) -> str:
        schema, known = resolved(schema, self._root), accepted(schema, self._root)
        if known.kinds == {"object"} and parameters_of(schema, self._root)[0]:
            return self._rule(self._object(schema, quoted))
        if known.kinds == {"array"}:
            self._leave_out(schema, "array", "choice")
            item = self._rule(self._quoted_value(quoted, schema.get("items")))
            return self._rule(f'"[" ({item} ("," {item})*)? "]"')
        if known.kinds and known.kinds <= _PLAIN:
            return self._value(schema)
        self._leave_out_of_text(schema, known.choices, only_text=known.is_text)
        if known.choices and known.is_text:
            quote = self._terminal(quoted.quote)
            return f"{quote} ({self._either(known.choices)}) {quote}"
        return self._anything(quoted, known.kinds or {"string"})

    def _quoted_text(self, quoted: QuotedArguments) -> str:
        quote = self._terminal(quoted.quote)
        if quote.startswith("<["):
            return f"{quote} {_TEXT} {quote}"
        text = f"t{len(self.lines)}"
        self.lines.append(f"{text}[suffix={json.dumps(quoted.quote)}]: {_TEXT}")
        return f"{quote} {text}"

    def _anything(self, quoted: QuotedArguments, kinds: AbstractSet[str]) -> str:
        """A value of any of ``kinds``; those within it may be of all."""
        if kinds == {"string"}:
            return self._quoted_text(quoted)
        text = self._rule(self._quoted_text(quoted))
        plain = self._rule('%json {"type": ["number", "boolean", "null"]}')
        any_value = f"r{len(self.lines)}"
        pair = f'/[a-zA-Z_][a-zA-Z0-9_]*/ ":" {any_value}'
        ways = {
            "string": text,
            "array": f'"[" ({any_value} ("," {any_value})*)? "]"',
            "object": f'"{{" ({pair} ("," {pair})*)? "}}"',
        }
        self._rule(" | ".join([plain, *ways.values()]))
        given = [way for kind, way in ways.items() if kind in kinds]
        if kinds & _PLAIN:
            given.append(self._value({"type": sorted(kinds & _PLAIN)}))
        return self._rule(" | ".join(given or [any_value]))

    # -- what is not enforced ----------------------------------------------------------------------

    def _leave_out(self, schema: object, *groups: str) -> None:
        self.left_out |= bounds(schema, self._root, groups)

    def _leave_out_of_text(
        self, schema: object, choices: Sequence[str] | None, *, only_text: bool
    ) -> None:
        """Record what is not enforced for text; unless ``only_text``, it may be any value."""
        followed = {"choice", "words"} if choices is None else {"choice"}
        self._leave_out(schema, *(["string"] if only_text else BOUNDS.keys() - followed))


def _closed(parameters: object) -> Mapping[str, object]:
    """Return ``parameters``; if they name no property, they allow none."""
    given = parameters if isinstance(parameters, Mapping) else {}
    named = given.get("properties") or given.keys() - {"type", "properties", *_WORDS}
    return given if named else {**_NOTHING, **given}
