"""Markdown laid out as terminal lines, a part of a text at a time.

Formulas stay as they were written, and pictures are never fetched. Rich breaks lines only at
spaces: between Chinese or Japanese characters, a mark that Rich reads as a space is inserted where
a line may end, and later removed. Knows Rich and markdown-it, no widget.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar, cast

from markdown_it import MarkdownIt
from markdown_it.ruler import RuleOptionsType
from markdown_it.rules_block import StateBlock
from markdown_it.rules_core import StateCore
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Heading, HorizontalRule, Markdown, TableElement
from rich.padding import Padding
from rich.rule import Rule
from rich.segment import Segment
from rich.style import Style
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text
from rich.theme import Theme
from textual.strip import Strip

from localrt.common.markdown_parts import LINKS, Part, code_tokens

_MARK = "\x1f"  # no text for the terminal contains it
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
    """The text with a mark at each possible line break."""
    return text if text.isascii() else _LINE_BREAK.sub(_MARK, text)


def pieces(text: str) -> list[str]:
    """The text cut at each possible line break."""
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
    """A line's segments without the marks, for the terminal."""
    return [
        segment._replace(text=segment.text.replace(_MARK, "")) if _MARK in segment.text else segment
        for segment in segments
    ]


_CLOSING = {"\\[": "\\]", "$$": "$$"}  # delimiters of formulas on their own lines
_FORMULA = re.compile(
    r"\\\[.{1,1000}?\\\]|\\\(.{1,1000}?\\\)|\$\$.{1,1000}?\$\$"
    r"|\$(?![\s\d])[^$\n]{1,1000}?(?<!\s)\$(?!\w)",  # two prices in a sentence are not a formula
    re.DOTALL,
)
_BREAK = re.compile(r"<br\s*/?>", re.IGNORECASE)


@cache
def markdown_parser() -> MarkdownIt:
    """The parser for answers; HTML is text, and single newlines are kept."""
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
    """A formula on its own lines; if its end is missing, it ends at a blank line."""
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
    """Keep single newlines, as in verses; show pictures by name, since they are never fetched."""
    for token in state.tokens:
        if token.children:
            token.children = [part for child in token.children for part in _parts(child)]


def _parts(child: Token) -> list[Token]:
    if child.type == "softbreak":
        child.type = "hardbreak"
    elif child.type == "image":
        child.type, child.tag, child.children = "text", "", None
        child.content = f"[image: {child.content or child.attrs.get('src', '')}]"
    elif child.type == "link_open" and not str(child.attrs.get("href")).lower().startswith(LINKS):
        child.attrs["href"] = ""  # a terminal may start any program for it
    if child.type != "text":
        return [child]
    parts: list[Token] = []
    for place, text in enumerate(_BREAK.split(child.content)):
        if place:
            parts.append(Token("hardbreak", "br", 0))
        parts.append(child.copy(content=breakable(text)))
    return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkdownStyles:
    """The styles of Markdown's parts, and whether code is coloured for a dark background."""

    dark: bool
    heading: Style
    code: Style
    code_block: Style
    quote: Style
    link: Style
    muted: Style

    def console(self) -> Console:
        """A console that renders with these styles and touches no terminal."""
        bold = Style(bold=True)
        styles = {
            "markdown.h1": self.heading + Style(bold=True, underline=True),
            "markdown.h2": self.heading + bold,
            "markdown.h3": self.heading + bold,
            "markdown.h4": self.heading + Style(italic=True),
            "markdown.h5": self.heading + Style(italic=True),
            "markdown.h6": self.heading,
            "markdown.code": self.code,
            "markdown.code_block": self.code_block,
            "markdown.block_quote": self.quote,
            "markdown.link": self.link,
            "markdown.link_url": self.link,
            "markdown.hr": self.muted,
            "markdown.item.bullet": self.muted,
            "markdown.item.number": self.muted,
            "markdown.table.border": self.muted,
            "markdown.table.header": bold,
        }
        return Console(
            file=io.StringIO(),
            color_system="truecolor",
            force_terminal=True,
            legacy_windows=False,
            no_color=False,
            highlight=False,
            theme=Theme(styles),
            _environ={},
        )


def lines_of(
    part: Part,
    links: dict[str, Any],
    width: int,
    styles: MarkdownStyles,
    console: Console,
    widths: Sequence[int] = (),
) -> list[Strip]:
    """The lines of a part; ``widths`` are those of the columns of the table that it goes on with,
    ``links`` are the ``definitions`` in the whole text.
    """
    options = console.options.update(width=max(width, 8))
    lines: list[Strip] = []
    for block in _blocks(markdown_parser().parse(part.source, dict(links))):
        if lines:
            lines.append(Strip([]))
        drawn = _Block(block, styles, () if lines else widths)
        rows = _trimmed(console.render_lines(drawn, options, pad=False))
        lines.extend(Strip(without_marks(segments)) for segments in rows)
    return lines


def widths_of(
    part: Part, links: dict[str, Any], width: int, styles: MarkdownStyles, console: Console
) -> Sequence[int]:
    """The widths of the columns of the table that a part ends in."""
    options = console.options.update(width=max(width, 8))
    blocks = _blocks(markdown_parser().parse(part.source, dict(links)))
    drawn = _Block(blocks[-1] if blocks else [], styles, ())
    next((True for _ in console.render(drawn, options) if drawn.widths), None)  # before its lines
    return drawn.widths


def code_blocks(source: str) -> list[tuple[str, str]]:
    """Language and text of the code blocks in Markdown, those inside lists and quotes included."""
    tokens: list[Token] = []
    markdown_parser().block.parse(source, markdown_parser(), {}, tokens)
    return [
        (token.info.split()[0] if token.info.split() else "", token.content)
        for token in tokens
        if token.type in ("fence", "code_block")
    ]


def _blocks(tokens: Sequence[Token]) -> list[list[Token]]:
    """The tokens grouped by top-level block."""
    blocks: list[list[Token]] = []
    depth = 0
    for token in tokens:
        if depth == 0:
            blocks.append([])
        blocks[-1].append(token)
        depth += token.nesting
    return blocks


def _trimmed(rows: list[list[Segment]]) -> list[list[Segment]]:
    """Rows without blank ones at either end, unless these carry a background."""

    def blank(row: list[Segment]) -> bool:
        return all(not s.text.strip() and not (s.style and s.style.bgcolor) for s in row)

    first, last = 0, len(rows)
    while first < last and blank(rows[first]):
        first += 1
    while last > first and blank(rows[last - 1]):
        last -= 1
    return rows[first:last]


class _LeftHeading(Heading):
    """A left-aligned heading: centred titles look odd in a conversation."""

    LEVEL_ALIGN: ClassVar = {}


class _Code(CodeBlock):
    """A code block with a background, wrapped so that no character is cut off."""

    @classmethod
    def create(cls, markdown: Markdown, token: Token) -> _Code:
        return cls((token.info.split() or ["text"])[0], markdown.code_theme)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        color = console.get_style("markdown.code_block").bgcolor
        background = color.name if color else "default"
        how: dict[str, Any] = {"theme": self.theme, "background_color": background}
        syntax = Syntax("", self.lexer_name, **how)
        if (lexer := syntax.lexer) is not None:
            bounded = copy(lexer)
            bounded.get_tokens = partial(code_tokens, lexer)
            syntax = Syntax("", bounded, **how)
        code = syntax.highlight(str(self.text))
        code.rstrip()
        code.no_wrap, code.tab_size = False, 4
        yield Padding(code, (0, 1), style="markdown.code_block")


class _Line(HorizontalRule):
    """A thin rule."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Rule(style="markdown.hr", characters="─")


class _Table(TableElement):
    """A table whose cells wrap instead of being cut off. A later slice has no heading."""

    block: _Block

    @classmethod
    def create(cls, markdown: Markdown, token: Token) -> _Table:
        table = cls()
        table.block = cast(_Block, markdown)
        return table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for table in super().__rich_console__(console, options):
            assert isinstance(table, Table), "that is what it yields"
            block = self.block
            table.show_header = not block.fixed_widths
            room = options.update_width(options.max_width - table._extra_width)
            block.widths = block.fixed_widths or table._calculate_column_widths(console, room)
            for place, column in enumerate(table.columns):
                column.overflow = "fold"
                column.width = block.widths[place] - table._get_padding_width(place)
            yield table


class _Block(Markdown):
    """Rich's Markdown renderer over tokens that are parsed already."""

    elements: ClassVar = {
        **Markdown.elements,
        "heading_open": _LeftHeading,
        "fence": _Code,
        "code_block": _Code,
        "hr": _Line,
        "table_open": _Table,
    }

    def __init__(
        self, tokens: Sequence[Token], styles: MarkdownStyles, widths: Sequence[int]
    ) -> None:
        self.fixed_widths = self.widths = widths  # column widths of a table
        # Skips super().__init__: its parser costs more than drawing a paragraph.
        self.markup = ""
        self.parsed = list(tokens)
        self.code_theme = "ansi_dark" if styles.dark else "ansi_light"
        self.justify, self.style, self.hyperlinks = None, "none", True
        self.inline_code_lexer, self.inline_code_theme = None, self.code_theme
        self.styles = styles
