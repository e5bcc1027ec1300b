"""Markdown in parts: rendered one by one they are the whole text, however it is cut and grows."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from localrt.common.markdown_parts import Part, cut, definitions
from localrt.server.markdown import markdown_parser as page_parser
from localrt.tui.chat.markdown import markdown_parser as terminal_parser

_PIECES = [
    *("\n", "\n\n", "\n\n\n", "\n \n", "    ", "  ", "   ", "\t", "- ", "* ", "1. ", "2. "),
    *("```", "```py\n", "\n```\n", "~~~", "---", "===", "# ", "**", "|", "a", "b c"),
    *("text here\n\n", "2", "> "),
    *("| a | b |\n|---|---|\n", "\\[", "\\]", "$$", "[x]: /u\n", "[x]"),
    *("\n\n```\ncode\n\nmore\n```\n\n", "- a\n  ```\n  x\n\ny\n\n"),
]  # fmt: skip
_TEXTS = st.lists(st.sampled_from(_PIECES), max_size=30).map("".join)
_PARSERS = {"page": page_parser, "terminal": terminal_parser}
_ALL = 10**9


def rendered(parts: list[Part], parser: MarkdownIt) -> str:
    links = definitions(parts, parser)
    return "".join(parser.render(part.source, dict(links)) for part in parts)


@pytest.mark.parametrize("name", _PARSERS)
@settings(max_examples=300, deadline=None)
@given(text=_TEXTS)
def test_parts_are_the_whole(name: str, text: str) -> None:
    parser = _PARSERS[name]()
    parts = cut(Part(text), parser, least=1, most=_ALL)
    assert "".join(part.text for part in parts) == text
    assert rendered(parts, parser) == parser.render(text)


@settings(max_examples=200, deadline=None)
@given(text=_TEXTS, step=st.integers(1, 9), most=st.sampled_from([_ALL, 12]))
def test_growing(text: str, step: int, most: int) -> None:
    """Parts but the last stay; none is too long."""
    parser, parts, last = page_parser(), list[Part](), Part("")
    for begin in range(0, len(text), step):
        last = last._replace(text=last.text + text[begin : begin + step])
        *closed, last = cut(last, parser, least=1, most=most, grows=True)
        parts += closed
    parts += cut(last, parser, least=1, most=most)
    assert "".join(part.text for part in parts) == text
    if most == _ALL:
        assert parts == cut(Part(text), parser, least=1, most=most)
    assert all(len(part.text) <= 2 * most for part in parts)


@pytest.mark.parametrize(
    ("line", "begin", "found"),
    [
        ("x_{} = 1\n", "```text\n", r"x_\d+ = 1"),
        ("| r{} | b |\n", "| h | i |\n|---|---|\n", r"<td>r\d+</td>"),
        ("- item {}\n", "", r"<li>item \d+</li>"),
        ("{0}. item {0}\n", "", r"<li>item \d+</li>"),
        ("word{} ", "", r"word\d+"),
        ("line{}\n", "", r"line\d+"),
        ("> said{}\n", "", r"said\d+"),
        ("x{}", "", r"x\d+"),
        ("  - deep{}\n", "- top\n", r"deep\d+"),
    ],
)
def test_one_block_too_long(line: str, begin: str, found: str) -> None:
    parser = page_parser()
    text = begin + "".join(line.format(number) for number in range(1000))
    parts = cut(Part(text), parser, least=10, most=300)
    assert "".join(part.text for part in parts) == text
    assert max(len(part.text) for part in parts) <= 600
    assert all(part.goes_on for part in parts[1:])
    html = rendered(parts, parser)
    if line != "x{}":  # without a place to cut it
        assert re.findall(found, html) == re.findall(found, parser.render(text))
    if "deep" not in line:
        assert {parser.render(part.source)[:3] for part in parts} == {html[:3]}
