"""What answers contain beside CommonMark: formulas, ``<br>``, pictures that are never fetched.

A formula, in ``\\[ \\]``, ``\\( \\)`` or dollars, stays as it was written: nothing in it is a list,
emphasis or an escape. Knows markdown-it, not how its tokens are drawn.

Where a line may be broken besides at spaces: between the characters of Chinese and Japanese.

Rich breaks lines at spaces alone, and moves a run without any to the next line. A mark, which is a
space to Rich and takes no column, is put where a line may end, and is taken out of the lines that
come back. Characters that cannot begin or end a line stay with their neighbours.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from markdown_it import MarkdownIt
from markdown_it.ruler import RuleOptionsType
from markdown_it.rules_block import StateBlock
from markdown_it.rules_core import StateCore
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token
from rich.segment import Segment
from rich.text import Text

_MARK = "\x1f"  # no text on its way to the terminal has it
_WIDE = (
    r"\u2e80-\u2fdf\u3000-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff00-\uff60"
    r"\U00020000-\U0003ffff"
)
_NEVER_LAST = r"(\[{「『【〈《〔［｛（〖〘“‘"
_NEVER_FIRST = (
    r"、。，．・：；？！ー〜…‥）」』】〉》〕］｝〗〙々ぁぃぅぇぉっゃゅょァィゥェォッャュョ"
    r"”’,.!?:;)\]}%"
)
_LINE_BREAK = re.compile(
    rf"(?<=[^\s{_NEVER_LAST}])(?:(?<=[{_WIDE}])|(?=[{_WIDE}]))(?=[^\s{_NEVER_FIRST}])"
)


def breakable(text: str) -> str:
    """The text with a mark wherever a line may be broken."""
    return text if text.isascii() else _LINE_BREAK.sub(_MARK, text)


def pieces(text: str) -> list[str]:
    """The text cut wherever a line may be broken."""
    return breakable(text).split(_MARK)


def breakable_text(text: Text) -> Text:
    """As ``breakable``, with the text's styles."""
    places = [] if text.plain.isascii() else [m.start() for m in _LINE_BREAK.finditer(text.plain)]
    if not places:
        return text
    marked = Text(_MARK).join(text.divide(places))
    marked.style = text.style
    return marked


def without_marks(segments: Iterable[Segment]) -> list[Segment]:
    """A line's segments as they go to the terminal."""
    return [
        segment._replace(text=segment.text.replace(_MARK, "")) if _MARK in segment.text else segment
        for segment in segments
    ]


_CLOSING = {"\\[": "\\]", "$$": "$$"}  # of formulas that are lines of their own
_FORMULA = re.compile(
    r"\\\[.+?\\\]|\\\(.+?\\\)|\$\$.+?\$\$"
    r"|\$(?![\s\d])[^$\n]+?(?<!\s)\$(?!\w)",  # two prices in a sentence are none
    re.DOTALL,
)
_BREAK = re.compile(r"<br\s*/?>", re.IGNORECASE)


def markdown_parser() -> MarkdownIt:
    """The parser of answers; HTML is text, a single newline stays one."""
    parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
    interrupts: RuleOptionsType = {"alt": ["paragraph", "reference", "blockquote", "list"]}
    parser.block.ruler.before("fence", "formula", _formula_lines, interrupts)
    parser.inline.ruler.before("escape", "formula", _formula)
    parser.core.ruler.push("for_terminal", _for_terminal)
    return parser


def _formula(state: StateInline, silent: bool) -> bool:
    """A formula inside a line."""
    match = _FORMULA.match(state.src, state.pos, state.posMax)
    if match is None:
        return False
    if not silent:
        state.push("code_inline", "code", 0).content = match.group()
    state.pos = match.end()
    return True


def _formula_lines(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """A formula on lines of its own; without its end yet it goes on to a blank line."""
    first = state.bMarks[start] + state.tShift[start]
    closing = _CLOSING.get(state.src[first : first + 2])
    if closing is None or state.is_code_block(start):
        return False
    line = start
    while closing not in state.src[first + 2 : state.eMarks[line]]:
        if line + 1 >= end or state.isEmpty(line + 1) or state.sCount[line + 1] < state.blkIndent:
            break
        line += 1
    if silent:
        return True
    state.line = line + 1
    token = state.push("paragraph_open", "p", 1)
    token.map = [start, state.line]
    token = state.push("inline", "", 0)
    token.content = state.getLines(start, state.line, state.blkIndent, False).strip()
    token.map, token.children = [start, state.line], []
    state.push("paragraph_close", "p", -1)
    return True


def _for_terminal(state: StateCore) -> None:
    """Keep single newlines, since verses are written so; name pictures, which we never fetch."""
    for token in state.tokens:
        if token.children:
            token.children = [part for child in token.children for part in _parts(child)]


def _parts(child: Token) -> list[Token]:
    if child.type == "softbreak":
        child.type = "hardbreak"
    elif child.type == "image":
        child.type, child.tag, child.children = "text", "", None
        child.content = f"[image: {child.content or child.attrs.get('src', '')}]"
    if child.type != "text":
        return [child]
    parts: list[Token] = []
    for place, text in enumerate(_BREAK.split(child.content)):
        if place:
            parts.append(Token("hardbreak", "br", 0))
        parts.append(child.copy(content=breakable(text)))
    return parts
