"""Markdown as HTML for the chat page: what a model writes is shown, and never runs.

HTML in it is text, links lead to the web or to a mail address alone, and a picture is a link.
Formulas are MathML and code has colours, in tags and attributes of a list, without any style.
"""

from __future__ import annotations

import json
import re
from functools import cache, lru_cache
from html import escape, unescape
from typing import TYPE_CHECKING, Any

from localrt.common.markdown_parts import LINKS, MarkdownCutter, code_tokens, definitions

if TYPE_CHECKING:
    from collections.abc import Sequence
    from xml.etree.ElementTree import Element

    from markdown_it import MarkdownIt
    from markdown_it.renderer import RendererHTML
    from markdown_it.rules_block import StateBlock
    from markdown_it.rules_core import StateCore
    from markdown_it.rules_inline import StateInline
    from markdown_it.token import Token

_INSIDE = r"(?:[^\\]|\\[^()[\]])+"
_FORMULA = re.compile(
    rf"\\\({_INSIDE}\\\)|\\\[{_INSIDE}\\\]|\$\$[^$]+\$\$"
    r"|(?<!\w)\$(?=[^\s$])(?!\d[^$\\]*[a-z]{2})[^$\n`]+(?<=\S)\$(?!\d)"  # but no prices
)
_DISPLAY = re.compile(
    r" {0,3}(?:\\\[(?:(?!\\\]).)+\\\]|\$\$[^$]+\$\$)[ \t]*[.,;]?[ \t]*$", re.DOTALL
)
_CLOSING = {"\\[": "\\]", "$$": "$$"}
_BREAK = re.compile(r"<br\s*/?>", re.IGNORECASE)
_TASK = re.compile(r"\[([ xX])\]\s")

# Characters of a part, and of the parts that are sent at once.
_LEAST, _MOST, _SHOWN = 4000, 1 << 15, 40_000
_LONGEST_FORMULA = 4000  # characters: 0.1 s
_LONGEST_CODE = 1 << 16
_MOST_LINKS = 300  # of a part: each takes time as the part is long
_ENVIRONMENT = re.compile(
    r"\\(begin|end)\{(?:(aligned|split|align|gathered|gather|eqnarray)|dcases)\*?\}"
)
_COLOURS = (  # Pygments' families, in the names of our classes
    *(("Keyword", "k"), ("Name.Tag", "k"), ("Literal.String", "s"), ("Generic.Inserted", "s")),
    *(("Comment", "c"), ("Literal.Number", "m"), ("Generic.Deleted", "d")),
    *(("Name.Function", "n"), ("Name.Class", "n"), ("Name.Attribute", "n")),
)
_TAGS = re.compile(
    "math|m(row|i|n|o|text|space|frac|sqrt|root|su[bp]|subsup|under|over|underover|table|tr|td|style"
    "|padded|phantom|enclose)"
)
_ATTRIBUTES = re.compile(
    "display(style)?|scriptlevel|stretchy|fence|form|mathvariant|columnalign|accent(under)?|width"
    "|[lr]space|(min|max)size|linethickness|notation"
)


def to_html(text: str, links: dict[str, Any] | None = None) -> str:
    """Return Markdown as HTML that can be put into a page; ``links`` are ``definitions``."""
    html = str(markdown_parser().render(text, dict(links or {})))  # with `"` in text as an entity
    return html.replace(' style="text-align:', ' class="align-')  # the policy allows no style


class HtmlParts:
    """An answer as HTML in parts, of which a page shows the last ones first. It may grow."""

    def __init__(self) -> None:
        self._cutter = MarkdownCutter(markdown_parser(), least=_LEAST, most=_MOST)
        self._all = False  # whether all that is new is sent

    def take(self, text: str, *, grows: bool = False, before: int | None = None) -> dict[str, Any]:
        """Return ``html``, of the parts that are new since the last call, and which part is the
        ``first`` of them. The first call returns the last parts, or those that precede ``before``.
        """
        text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "\ufffd")
        stay = self._cutter.take(text, grows=grows)
        parts = [part for part in (*self._cutter.parts, self._cutter.last) if part.text]
        links = "" if grows else json.dumps(definitions(parts, markdown_parser()))
        first = end = len(parts) if before is None else min(before, len(parts))
        size = 0
        while first > stay and (self._all or size < _SHOWN):
            first -= 1
            size += len(parts[first].text)
        self._all = True
        return {"first": first, "html": [_html(part.source, links) for part in parts[first:end]]}


@lru_cache(64)
def _html(source: str, links: str) -> str:
    """Return a part's HTML, which is asked for at every look at an answer."""
    return to_html(source, json.loads(links) if links else None)


@cache
def markdown_parser() -> MarkdownIt:
    """Return the parser of answers."""
    from markdown_it import MarkdownIt  # takes a megabyte, and not every server shows answers

    how = {"html": False, "breaks": True, "linkify": True}
    parser = MarkdownIt("commonmark", how)
    parser.enable(["strikethrough", "table", "linkify"]).disable("image")
    parser.block.ruler.before(
        "fence", "display", _display, {"alt": ["paragraph", "reference", "blockquote", "list"]}
    )
    parser.inline.ruler.before("escape", "formula", _formula)
    parser.inline.ruler.before("escape", "break", _break)
    parser.core.ruler.before("inline", "tasks", _tasks)
    from markdown_it import rules_core, rules_inline

    linkify, inline = rules_core.linkify, rules_inline.linkify
    rule = lambda state, silent: not state.env["many"] and inline(state, silent)  # noqa: E731
    parser.core.ruler.before("inline", "many", _count_links)
    parser.core.ruler.at("linkify", lambda state: None if state.env["many"] else linkify(state))
    parser.inline.ruler.at("linkify", rule)
    parser.add_render_rule("math", _math)
    parser.add_render_rule("fence", _fence)
    parser.validateLink = lambda url: url.lower().startswith(LINKS)  # type: ignore[method-assign]
    assert parser.linkify is not None
    parser.linkify.set({"fuzzy_link": False, "fuzzy_email": False})  # `foo.py` is no address
    return parser


# -- formulas --------------------------------------------------------------------------------------


def _formula(state: StateInline, silent: bool) -> bool:
    """Read a formula, without Markdown in it."""
    if (found := _FORMULA.match(state.src, state.pos)) is None:
        return False
    if not silent:
        state.push("math", "", 0).content = found[0]
    state.pos = found.end()
    return True


def _display(state: StateBlock, first: int, end: int, silent: bool) -> bool:
    """Read a formula on lines of its own, which Markdown would read as lists or headings."""
    start = state.bMarks[first] + state.tShift[first]
    mark = _CLOSING.get(state.src[start : start + 2], "")
    close = state.src.find(mark, start + 2, start + _LONGEST_FORMULA) if mark else -1
    if close < 0 or state.is_code_block(first):
        return False
    last = first
    while last < end and state.eMarks[last] < close:
        last += 1
        if last == end or (state.sCount[last] < state.blkIndent and not state.isEmpty(last)):
            return False
    source = state.getLines(first, last + 1, state.blkIndent, False)
    if (found := _DISPLAY.match(source)) is None:
        return False
    if not silent:
        token = state.push("math", "", 0)
        token.content, token.block = found[0].strip(), True
        state.line = last + 1
    return True


def _math(_: RendererHTML, tokens: Sequence[Token], index: int, *__: Any) -> str:
    token = tokens[index]
    html = _mathml(token.content)
    return f"<p>{html}</p>\n" if token.block else html


@lru_cache(512)
def _mathml(source: str) -> str:
    """Return a formula as MathML; as it is written, if it is none or too long."""
    from latex2mathml.converter import convert_to_element

    display = source.startswith(("\\[", "$$"))
    latex = source[1:-1] if source[0] == "$" and not display else source[2:].rstrip(" \t.,;")[:-2]
    after = "" if source[-1] in "$)]" else source[-1]
    latex = _ENVIRONMENT.sub(lambda it: f"\\{it[1]}{{{'align*' if it[2] else 'cases'}}}", latex)
    latex = re.sub(r"\\label\{[^{}]*\}", "", latex)
    try:
        if len(source) > _LONGEST_FORMULA:
            raise ValueError("too long")
        return _shown(convert_to_element(latex, display="block" if display else "inline")) + after
    except Exception:  # noqa: BLE001 - what is no LaTeX ends in errors of many types
        return escape(source).replace("\n", "<br />\n")


def _shown(element: Element) -> str:
    """Return an element with known tags and attributes alone.

    Raises:
        ValueError: an unknown tag, or a command or an alignment that was not understood.
    """
    text = element.text or ""
    strange = element.tag == "mi" and re.match(r"\\|}|&(?!#)", text)
    if strange or not _TAGS.fullmatch(element.tag):
        raise ValueError(text)
    attributes = [pair for pair in element.items() if _ATTRIBUTES.fullmatch(pair[0])]
    given = "".join(f' {name}="{escape(value)}"' for name, value in attributes)
    inside = escape(unescape(text)) + "".join(map(_shown, element))
    return f"<{element.tag}{given}>{inside}</{element.tag}>"


# -- code, lists, lines ----------------------------------------------------------------------------


def _fence(_: RendererHTML, tokens: Sequence[Token], index: int, *__: Any) -> str:
    """Render code; with colours only once its end is there, not for each token of an answer."""
    token = tokens[index]
    assert token.map is not None
    language = next(iter(token.info.split()), "")
    named = f' class="language-{escape(language)}"' if language else ""
    whole = token.map[1] - token.map[0] == token.content.count("\n") + 2
    code = _coloured(token.content, language) if whole else escape(token.content)
    return f"<pre><code{named}>{code}</code></pre>\n"


@lru_cache(256)
def _coloured(code: str, language: str) -> str:
    """Return code as HTML, in colours if the language is known."""
    from pygments.lexers import get_lexer_by_name
    from pygments.util import ClassNotFound

    try:
        lexer = get_lexer_by_name(language, stripnl=False)
    except ClassNotFound:
        return escape(code)
    if len(code) > _LONGEST_CODE:
        return escape(code)
    parts = list[str]()
    for kind, text in code_tokens(lexer, code):
        names = (name for family, name in _COLOURS if str(kind).startswith(family, len("Token.")))
        name = next(names, "")
        parts.append(f'<span class="h-{name}">{escape(text)}</span>' if name else escape(text))
    return "".join(parts)


def _count_links(state: StateCore) -> None:
    """Note whether there are so many addresses that making links of them would take long."""
    links = sum(map(state.src.count, ("://", "@", "www.")))
    state.env["many"] = links > _MOST_LINKS


def _tasks(state: StateCore) -> None:
    """Show `[x]` at the beginning of a list's item as a box."""
    items = zip(state.tokens, state.tokens[1:], state.tokens[2:], strict=False)
    for item, _, inline in items:
        if item.type != "list_item_open" or (found := _TASK.match(inline.content)) is None:
            continue
        item.attrSet("class", "task")
        inline.content = ("☐ " if found[1] == " " else "☑ ") + inline.content[found.end() :]


def _break(state: StateInline, silent: bool) -> bool:
    """Read a ``<br>``, with which models write lines in the cells of tables."""
    if (found := _BREAK.match(state.src, state.pos)) is None:
        return False
    if not silent:
        state.push("hardbreak", "br", 0)
    state.pos = found.end()
    return True
