"""How the arguments of a call are written: each notation reads them to a mapping.

JSON, pairs in tags, Python's keywords, or an object with special quotes. A notation does not know
the text around the arguments.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Protocol

from localrt.chat_format.argument_types import ABSENT, DECODER, Accepted, Types, literal


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
    ``kind`` is the JSON schema type of the value that first had these marks.
    """

    before: str
    after: str
    string: bool | None = None
    kind: str = "string"


@dataclass(frozen=True, slots=True)
class TaggedArguments:
    """``opening key before value after``, repeated: values are plain text, or JSON (``as_json``).

    The tool's schema says whether text is a string; without one, text that is JSON is a value.
    ``forgotten``: the model may leave out the mark after a value.
    """

    opening: str
    mids: tuple[Mid, ...]
    closing: str
    as_json: bool = False
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
        if self.as_json:
            accepted = Accepted()
        elif string is not None:
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
