"""Markdown cut into parts that are rendered one by one, so that a text of any size is soon shown.

A part has one or more whole blocks, which look alone as they do in the whole text. Only a block
too long for one part is cut within. A text that grows keeps all its parts but the last. Knows no
output: where lines do not tell whether code has ended, it asks the parser that reads the parts.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token
    from pygments.lexer import Lexer

LINKS = ("http://", "https://", "mailto:")
"""What addresses of links may begin with."""

# An empty line above one that begins a block for sure: it is not indented, and no item of a list.
_BLOCK = re.compile(r"\n[ \t]*\n(?=[^ \t\n])(?!(?:[-+*]|\d{1,9}[.)])(?:[ \t\n]|\Z)|\d{1,9}\Z)")
_SPECIAL = re.compile(r"^( {0,3})(?:(`{3,}(?=[^`\n]*$)|~{3,})|(\\\[|\$\$))", re.MULTILINE)
_FENCE = re.compile(r"^(?:`{3,}(?=[^`\n]*$)|~{3,})", re.MULTILINE)
_FORMULA = re.compile(r"^ {0,3}(\\\[|\$\$)", re.MULTILINE)
_FORMULA_ENDS = {"\\[": "\\]", "$$": "$$"}
_LONGEST_FORMULA = 4000
_LONGEST_OPENING = 200
_LEXER_SECONDS = 0.05
# Where a block that is too long is cut, the best place first.
_CODE_PLACES = (r"\S[ \t]*\n(?=[ \t]*\n\S)", r"\S[ \t]*\n")
_PLACES = (r"(?m:^)(?=[^\W\d_]|[|>]|(?:[-+*]|\d{1,9}[.)])[ \t])", r"\n", " ")
_COLUMN = r"[ \t]*:?-+:?[ \t]*"
_TABLE = re.compile(rf"\n {{0,3}}\|?{_COLUMN}(?:\|{_COLUMN})*\|?[ \t]*\n")
_EMPTY_LINE = re.compile(r"\n[ \t]*\n")


def code_tokens(lexer: Lexer, code: str) -> Iterator[tuple[Any, str]]:
    """Yield the kinds and texts of ``code``, as Pygments' lexer does; without kinds once it has
    taken ``_LEXER_SECONDS`` of the processor: some take seconds for a few thousand empty lines.
    """
    from pygments.token import Text

    until, done = time.thread_time() + _LEXER_SECONDS, 0
    for kind, text in lexer.get_tokens(code):
        yield kind, text
        done += len(text)
        if time.thread_time() > until:
            yield Text, code[done:]
            return


class Part(NamedTuple):
    """``text``, with what it needs ``before`` it to stand alone. It ``goes_on`` with the block that
    the part above it ends in.
    """

    text: str
    before: str = ""
    goes_on: bool = False

    @property
    def source(self) -> str:
        return self.before + self.text


def cut(
    whole: Part, parser: MarkdownIt, *, least: int, most: int, grows: bool = False
) -> list[Part]:
    """Cut a text into parts of at least ``least`` and at most twice ``most`` characters.

    If it ``grows``, later text changes the last part alone: cut that again, with the text added.
    """
    text, before, goes_on = whole.text, whole.before, whole.goes_on
    parts, start = list[Part](), 0
    while True:
        limit = start + 2 * most
        fence = _FENCE.match(before)
        if fence is not None:
            end = _code_end(text, fence[0], start, limit)
        else:
            end = _block_end(text, start, start + least, limit, parser, grows)
        if end is None and len(text) < (limit if grows else start + most):
            return [*parts, Part(text[start:], before, goes_on)]
        if end is not None and end <= start + most:
            parts.append(Part(text[start:end], before, goes_on))
            start, before, goes_on = end, "", False
            continue
        place, following = _place_within(text, before, start, most, end or limit)
        parts.append(Part(text[start:place], before, goes_on))
        start, before, goes_on = place, following, place != end


class MarkdownCutter:
    """Cuts a text while it grows: later text leaves ``parts`` as they are, and changes ``last``."""

    def __init__(self, parser: MarkdownIt, *, least: int, most: int) -> None:
        self._parser, self._least, self._most = parser, least, most
        self.restart()

    def restart(self) -> None:
        """Forget the text."""
        self.parts, self.last, self._taken = list[Part](), Part(""), 0

    def take(self, text: str, *, grows: bool) -> int:
        """Take all of the text so far, and return how many of the parts were there before."""
        if len(text) < self._taken:
            self.restart()
        stay, last = len(self.parts), self.last
        last = last._replace(text=last.text + text[self._taken :])
        *parts, self.last = cut(last, self._parser, least=self._least, most=self._most, grows=grows)
        self.parts += parts
        self._taken = len(text)
        return stay


def definitions(parts: Iterable[Part], parser: MarkdownIt) -> dict[str, Any]:
    """Return the environment for a parser in which links of one part find addresses in another."""
    found = dict[str, Any]()
    for part in parts:
        if "]:" in part.text:
            parser.block.parse(part.source, parser, found, [])
    return found


def _block_end(
    text: str, start: int, least: int, limit: int, parser: MarkdownIt, grows: bool
) -> int | None:
    """Where a block begins, from ``least`` on; None if that is unknown or beyond ``limit``."""
    known = start  # up to here, no fence is open
    while (found := _BLOCK.search(text, max(least, known - 1), limit)) is not None:
        place = found.end()
        special = _SPECIAL.search(text, known, place)
        if special is None:
            return place
        fence, opened = special[2], special.end()
        if special[1] or not fence:  # a fence may be in a list, or in a formula
            known_formulas = max(known, place - _LONGEST_FORMULA)
            for formula in _FORMULA.finditer(text, known_formulas, place):
                longest = formula.start() + _LONGEST_FORMULA
                end = text.find(_FORMULA_ENDS[formula[1]], formula.end(), longest)
                if end < 0 and grows and len(text) < longest:
                    return None
                least = max(least, end)
            if least >= place:
                continue
            inside = _block_around(text[start:place], parser)
            if inside is None:
                return place
            if inside.type != "fence":
                least = place
                continue
            fence, opened = inside.markup, place
        if (closed := _code_end(text, fence, opened, limit)) is None:
            return None
        known = closed
    return None


def _block_around(source: str, parser: MarkdownIt) -> Token | None:
    """The open block that a line of text below ``source`` would be in; None if it begins one."""
    tokens = list[Any]()
    parser.block.parse(f"{source}x", parser, {}, tokens)
    alone = tokens[-1].type == "paragraph_close" and tokens[-2].content == "x"
    return None if alone and not tokens[-1].level else tokens[-1]


def _code_end(text: str, fence: str, start: int, limit: int) -> int | None:
    """The end of the line that closes a fence, if it is before ``limit``."""
    closing = rf"^ {{0,3}}{fence[0]}{{{len(fence)},}}[ \t]*\n"
    found = re.compile(closing, re.MULTILINE).search(text, start, limit)
    return None if found is None else found.end()


def _place_within(text: str, before: str, start: int, most: int, limit: int) -> tuple[int, str]:
    """Where to cut a block that is too long, below ``limit``, and what the part below needs."""
    code = before if _FENCE.match(before) else ""
    fence = None if code else _FENCE.search(text, start, limit)
    if fence is not None and fence.start() == start:
        code = text[start : text.find("\n", start, start + _LONGEST_OPENING) + 1]
    elif fence is not None:
        limit = fence.start()  # a block begins there
    for pattern in _CODE_PLACES if code else _PLACES:
        if (found := re.compile(pattern).search(text, start + most, limit)) is not None:
            place = found.end()
            break
    else:
        place = limit if limit < start + 2 * most else start + most
    piece = before + text[start:place]
    for table in () if code else _TABLE.finditer(piece):
        heading = piece[piece.rfind("\n", 0, table.start()) + 1 : table.end()]
        if "|" in heading and _EMPTY_LINE.search(piece, table.end() - 1) is None:
            return place, heading
    return place, code
