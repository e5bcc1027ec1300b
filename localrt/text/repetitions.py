"""A grammar's rules with every repetition in one place.

``("a"{1,9}){1,9}`` can be read in many ways and ``"a"{1,81}`` in one, although they allow the same
texts; so can optional rules in a row, and rules that double one another. A parser looks at all
ways, for seconds. It knows no notation but that of its result (llguidance's Lark).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["EMPTY", "Sequences", "Symbol", "choice", "repeated", "rules_to_lark"]

_MOST = 1 << 30  # repetitions that are multiplied
_COPIED = 40  # characters of a terminal that stands wherever its rule did


@dataclass(frozen=True, slots=True)
class Symbol:
    """``low`` to ``high`` (None: any number) times a terminal, a rule by its name, or one of
    several sequences.
    """

    what: str | Sequences
    low: int = 1
    high: int | None = 1
    is_rule: bool = False


Sequences: TypeAlias = tuple[tuple[Symbol, ...], ...]

_NOTHING = '""'
EMPTY = Symbol(_NOTHING)


def repeated(symbol: Symbol, low: int, high: int | None) -> Symbol:
    """``low`` to ``high`` times ``symbol``; as one repetition where that allows the same."""
    least, most = symbol.low, symbol.high
    if low == high:
        gapless = True
    elif most is None:
        gapless = low > 0 or least <= 1
    else:  # what one more brings must begin where so many end
        gapless = (low + 1) * least <= low * most + 1
    if most == 0 or high == 0:
        product: int | None = 0
    else:
        product = None if most is None or high is None else most * high
    if not gapless or max(low * least, product or 0) > _MOST:
        return Symbol(((symbol,),), low, high)
    return Symbol(symbol.what, low * least, product, symbol.is_rule)


def joined(symbols: Iterable[Symbol]) -> tuple[Symbol, ...]:
    """A sequence in which neighbours that are the same count as one."""
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
    """One of ``sequences``. Where one is empty, the others are optional."""
    every = list(map(joined, sequences))
    if all(isinstance(symbol.what, str) for one in every for symbol in one):
        every = list(dict.fromkeys(every))
    filled = tuple(one for one in every if one)
    if not filled:
        return EMPTY
    only = filled[0][0] if len(filled) == len(filled[0]) == 1 else Symbol(filled)
    return only if () not in every else repeated(only, 0, 1)


def rules_to_lark(rules: Mapping[str, Symbol], first: str) -> list[str]:
    """The lines of a grammar that begins with the rule ``first``; ``rules`` has all that occur."""
    return _Rules(rules).lines(first)


class _Rules:
    """A rule that is one symbol, repeated, is replaced by it; how often stands where it is used."""

    def __init__(self, rules: Mapping[str, Symbol]) -> None:
        self._rules = rules
        self._names = {name: f"r{number}" for number, name in enumerate(rules)}
        self._uses: dict[str, Symbol] = {}

    def lines(self, first: str) -> list[str]:
        """See ``rules_to_lark``."""
        start = self._text(Symbol(first, is_rule=True))
        every = {name: self._use(name).what for name in self._rules}
        kept = [name for name, what in every.items() if what == self._names[name]]
        return [f"start: {start}", *(f"{self._names[name]}: {self._body(name)}" for name in kept)]

    def _body(self, name: str) -> str:
        body = self._rules[name]
        return self._text(Symbol(body.what, is_rule=body.is_rule))

    def _use(self, name: str) -> Symbol:
        """What stands for the rule where it is used."""
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
            else:  # it leads to itself
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
