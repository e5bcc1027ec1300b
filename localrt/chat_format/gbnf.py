"""Translates GBNF, llama.cpp's notation for grammars, to llguidance's (a kind of Lark).

Every character becomes a separate terminal. A terminal of several characters would match greedily:
in ``num ws "\\n"`` the white space would swallow the line's end, and nothing could follow. The
translation in llguidance has this fault, but takes a tenth of the time; this one is exact.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from localrt.common.errors import OptionError
from localrt.common.option_names import option

_MOST = 1 << 30  # nested repetitions are multiplied up to this number
_COPIED = 40  # characters of a terminal that is inlined where its rule is used


@dataclass(frozen=True, slots=True)
class Symbol:
    """A repetition, ``low`` to ``high`` times (None: any number), of a terminal, of a rule by its
    name, or of one of several sequences.
    """

    what: str | Sequences
    low: int = 1
    high: int | None = 1
    is_rule: bool = False


Sequences: TypeAlias = tuple[tuple[Symbol, ...], ...]

_NOTHING = '""'
EMPTY = Symbol(_NOTHING)


def repeated(symbol: Symbol, low: int, high: int | None) -> Symbol:
    """``low`` to ``high`` times ``symbol``, as one repetition if that allows the same texts."""
    least, most = symbol.low, symbol.high
    if low == high:
        gapless = True
    elif most is None:
        gapless = low > 0 or least <= 1
    else:  # the counts of n + 1 repetitions must follow those of n without a gap
        gapless = (low + 1) * least <= low * most + 1
    if most == 0 or high == 0:
        product: int | None = 0
    else:
        product = None if most is None or high is None else most * high
    if not gapless or max(low * least, product or 0) > _MOST:
        return Symbol(((symbol,),), low, high)
    return Symbol(symbol.what, low * least, product, symbol.is_rule)


def joined(symbols: Iterable[Symbol]) -> tuple[Symbol, ...]:
    """Return the sequence with equal neighbours joined to one repetition."""
    found: list[Symbol] = []
    for symbol in symbols:
        if symbol.what == _NOTHING or symbol.high == 0:
            continue
        last = found[-1] if found else None
        if last is None or (last.what, last.is_rule) != (symbol.what, symbol.is_rule):
            found.append(symbol)
            continue
        high = None if last.high is None or symbol.high is None else last.high + symbol.high
        found[-1] = Symbol(last.what, last.low + symbol.low, high, last.is_rule)
    return tuple(found)


def choice(sequences: Iterable[Sequence[Symbol]]) -> Symbol:
    """One of ``sequences``. If one is empty, the others are optional."""
    every = list(map(joined, sequences))
    if all(isinstance(symbol.what, str) for one in every for symbol in one):
        every = list(dict.fromkeys(every))
    filled = tuple(one for one in every if one)
    if not filled:
        return EMPTY
    only = filled[0][0] if len(filled) == len(filled[0]) == 1 else Symbol(filled)
    return only if () not in every else repeated(only, 0, 1)


class _LarkWriter:
    """Writes the ``lines`` of a grammar, which refers to no other rules than ``rules``.

    A rule that is a single short symbol is inlined; a rule's repetition moves to its uses.
    """

    def __init__(self, rules: Mapping[str, Symbol]) -> None:
        self._rules = rules
        self._names = {name: f"r{number}" for number, name in enumerate(rules)}
        self._uses: dict[str, Symbol] = {}

    def lines(self, first: str) -> list[str]:
        start = self._text(Symbol(first, is_rule=True))
        every = {name: self._use(name).what for name in self._rules}
        kept = [name for name, what in every.items() if what == self._names[name]]
        return [f"start: {start}", *(f"{self._names[name]}: {self._body(name)}" for name in kept)]

    def _body(self, name: str) -> str:
        body = self._rules[name]
        return self._text(Symbol(body.what, is_rule=body.is_rule))

    def _use(self, name: str) -> Symbol:
        """The symbol to write where the rule is used."""
        path: dict[str, None] = {}
        while name not in self._uses and name not in path:
            path[name] = None
            body = self._rules[name]
            if not body.is_rule:
                break
            name = str(body.what)
        for each in reversed(path):
            body = self._rules[each]
            if not body.is_rule:
                short = isinstance(body.what, str) and len(body.what) <= _COPIED
                what = body.what if short else self._names[each]
                self._uses[each] = Symbol(what, body.low, body.high)
            elif str(body.what) in self._uses:
                self._uses[each] = repeated(self._uses[str(body.what)], body.low, body.high)
            else:  # the rule leads to itself
                self._uses[each] = Symbol(self._names[each])
        return self._uses[next(iter(path), name)]

    def _resolved(self, symbol: Symbol) -> Symbol:
        if not symbol.is_rule:
            return symbol
        return repeated(self._use(str(symbol.what)), symbol.low, symbol.high)

    def _text(self, symbol: Symbol) -> str:
        symbol = self._resolved(symbol)
        if isinstance(symbol.what, str):
            what = symbol.what
        else:
            ways = (
                " ".join(map(self._text, joined(map(self._resolved, one)))) for one in symbol.what
            )
            what = " | ".join(way or _NOTHING for way in ways)
        if symbol.low == symbol.high == 1:
            return what if isinstance(symbol.what, str) else f"({what})"
        return f"({what}){{{symbol.low},{'' if symbol.high is None else symbol.high}}}"


_NAME = re.compile(r"[A-Za-z0-9_-]+")
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_OR = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*\|")  # also on a later line
_COUNTS = re.compile(r"\{\s*(\d+)\s*(?:(,)\s*(\d*)\s*)?\}")
_TOKEN = re.compile(r"(!?)<(?:\[(\d+)\]|([^<>\s]+))>")
_LINE_END = re.compile(r"\r\n|\r|\n|$")
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]"}
_SIGNS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_HEX = {"x": 2, "u": 4, "U": 8}
_ANY = r"/[\x{0}-\x{10FFFF}]/"
_MOST_REPEATS = 1_000_000
_DEEPEST = 200


def gbnf_to_lark(text: str, token_id: Callable[[str], int | None]) -> str:
    """Translate the grammar ``text`` for llguidance; ``token_id`` finds tokens that it names.

    Raises:
        OptionError: says what is wrong, and in which line and rule.
    """
    try:
        return _Translation(text, token_id).result()
    except ValueError as error:
        raise OptionError(f"{option('grammar')} cannot be used: {error}") from error


class _Translation:
    """Reads ``text`` from beginning to end; ``_at`` is the current position."""

    def __init__(self, text: str, token_id: Callable[[str], int | None]) -> None:
        self._text, self._at = text, 0
        self._token_id = token_id
        self._rule = ""
        self._depth = 0
        self._rules: dict[str, Symbol] = {}
        self._used: dict[str, str] = {}  # names, and the places where they occur first

    def result(self) -> str:
        """See ``gbnf_to_lark``, but raises ``ValueError``."""
        self._match(_SPACE_AND_LINES)
        while self._at < len(self._text):
            self._read_rule()
            self._match(_SPACE_AND_LINES)
        for name, place in self._used.items():
            if name not in self._rules:
                raise ValueError(f"{place}: there is no rule {name!r:.80}")
        if "root" not in self._rules:
            raise ValueError("there is no rule 'root', which every grammar begins with")
        return "\n".join(["%llguidance {}", *_LarkWriter(self._rules).lines("root")])

    # -- rules -----------------------------------------------------------------------------------

    def _read_rule(self) -> None:
        self._rule = ""
        name = self._match(_NAME)
        if name is None:
            raise self._error("a rule must begin with its name")
        self._rule = name[0]
        self._match(_SPACE)
        if not self._text.startswith("::=", self._at):
            raise self._error("'::=' must follow the rule's name")
        self._at += len("::=")
        self._match(_SPACE_AND_LINES)
        self._rules[name[0]] = self._alternatives(nested=False)
        if self._match(_LINE_END) is None:
            raise self._error(f"{self._text[self._at]!r} is not expected here")

    def _alternatives(self, *, nested: bool) -> Symbol:
        found = [self._sequence(nested)]
        while self._match(_OR) is not None:
            self._match(_SPACE_AND_LINES)
            found.append(self._sequence(nested))
        return choice(found)

    def _sequence(self, nested: bool) -> list[Symbol]:
        space = _SPACE_AND_LINES if nested else _SPACE
        found = []
        while (symbol := self._symbol()) is not None:
            self._match(space)
            while (counts := self._repeats()) is not None:
                symbol = repeated(symbol, *counts)
                self._match(space)
            found.append(symbol)
        return found

    def _symbol(self) -> Symbol | None:
        """Read a symbol without its repetition; None at the end of a sequence."""
        first = self._text[self._at : self._at + 1]
        if first == '"':
            return self._literal()
        if first == "[":
            return Symbol(self._class())
        if first == ".":
            self._at += 1
            return Symbol(_ANY)
        if first == "(":
            return self._group()
        if first in ("<", "!") and first:
            return Symbol(self._token())
        name = self._match(_NAME)
        if name is None:
            return None
        self._used.setdefault(name[0], self._place())
        return Symbol(name[0], is_rule=True)

    def _group(self) -> Symbol:
        opened = self._place()
        self._at += 1
        self._depth += 1
        if self._depth > _DEEPEST:
            raise self._error(f"more than {_DEEPEST} parentheses are open")
        self._match(_SPACE_AND_LINES)
        inside = self._alternatives(nested=True)
        if not self._text.startswith(")", self._at):
            raise ValueError(f"{opened}: the parenthesis is not closed")
        self._at += 1
        self._depth -= 1
        return inside

    def _repeats(self) -> tuple[int, int | None] | None:
        """Read a sign or counts in braces, if they come next: the least and most repetitions."""
        sign = self._text[self._at : self._at + 1]
        if sign in _SIGNS:
            self._at += 1
            return _SIGNS[sign]
        if sign != "{":
            return None
        counts = self._match(_COUNTS)
        if counts is None:
            raise self._error("a repetition must be {3}, {3,}, or {3,5}")
        low = int(counts[1])
        high = low if counts[2] is None else int(counts[3]) if counts[3] else None
        if max(low, high or 0) > _MOST_REPEATS:
            raise self._error(f"more than {_MOST_REPEATS} repetitions")
        if high is not None and high < low:
            raise self._error(f"from {low} to {high} repetitions are impossible")
        return low, high

    # -- terminals -------------------------------------------------------------------------------

    def _literal(self) -> Symbol:
        opened = self._place()
        self._at += 1
        found = []
        while not self._text.startswith('"', self._at):
            found.append(f"/{_escaped(self._character(opened))}/")
        self._at += 1
        return Symbol(" ".join(found)) if found else EMPTY

    def _class(self) -> str:
        opened = self._place()
        self._at += 1
        inverse = "^" if self._text.startswith("^", self._at) else ""
        self._at += len(inverse)
        found = []
        while not self._text.startswith("]", self._at):
            first = last = self._character(opened)
            if self._text[self._at : self._at + 1] == "-" and not self._text.startswith(
                "-]", self._at
            ):
                self._at += 1
                last = self._character(opened)
                if last < first:
                    raise ValueError(f"{opened}: the range {first!r} to {last!r} is empty")
            found.append(f"{_escaped(first)}-{_escaped(last)}")
        self._at += 1
        if not found:
            raise ValueError(f"{opened}: there is nothing between the brackets")
        return f"/[{inverse}{''.join(found)}]/"

    def _character(self, opened: str) -> str:
        """Read the next character of a literal or a class."""
        text, at = self._text, self._at
        if at >= len(text):
            raise ValueError(f"{opened}: what begins here is not closed")
        self._at += 1
        if text[at] != "\\":
            return text[at]
        kind = text[at + 1 : at + 2]
        self._at += 1
        if kind in _ESCAPES:
            return _ESCAPES[kind]
        if kind not in _HEX:
            raise self._error(f"a backslash must not be followed by {kind!r}")
        digits = text[self._at : self._at + _HEX[kind]]
        if not re.fullmatch(f"[0-9a-fA-F]{{{_HEX[kind]}}}", digits):
            raise self._error(f"\\{kind} needs {_HEX[kind]} hexadecimal digits")
        self._at += len(digits)
        code = int(digits, 16)
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            raise self._error(f"\\{kind}{digits} is no character")
        return chr(code)

    def _token(self) -> str:
        found = self._match(_TOKEN)
        if found is None:
            raise self._error("a token must be <[ID]> or <TEXT>")
        token = int(found[2]) if found[2] else self._token_id(f"<{found[3]}>")
        if token is None:
            raise self._error(f"the model has no token <{found[3]:.60}>")
        return f"<[^{token}]>" if found[1] else f"<[{token}]>"

    # -- the text --------------------------------------------------------------------------------

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self._text, self._at)
        if found is not None:
            self._at = found.end()
        return found

    def _place(self) -> str:
        line = self._text.count("\n", 0, self._at) + 1
        return f"line {line}" + (f", rule {self._rule!r:.80}" if self._rule else "")

    def _error(self, what: str) -> ValueError:
        return ValueError(f"{self._place()}: {what}")


def _escaped(character: str) -> str:
    return rf"\x{{{ord(character):X}}}"
