"""Pictures of a terminal: what is drawn once, what comes and goes, what lies behind what."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from rich.segment import Segment
from rich.style import Style
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from textual.strip import Strip

from docs.pictures.terminal_svg import Frame, svg

BLUE = Style(bgcolor="#000080")


def line(*parts: tuple[str, Style | None]) -> Strip:
    return Strip([Segment(text, style) for text, style in parts])


def drawn(*frames: Frame) -> str:
    text = svg(frames, "a & b", DEFAULT_TERMINAL_THEME)
    ElementTree.fromstring(text)
    return text


def test_one_frame_is_a_picture_without_motion() -> None:
    text = drawn(Frame([line(("  hi <there>", None), (" x ", BLUE))]))
    assert "a &amp; b" in text
    assert "hi &lt;there&gt;" in text
    assert text.index('fill="#000080"') < text.index(">x<"), "behind it"
    assert "animation:f" not in text


def test_what_stays_is_drawn_once_and_the_last_frame_is_what_a_still_shows() -> None:
    first = [line(("stays", None)), line(("one", None), ("  ", None))]
    second = [line(("stays", None)), line(("two", None), ("  ", BLUE))]
    text = drawn(Frame(first, 1.0), Frame(second, 3.0))
    assert text.count(">stays<") == 1
    groups = dict(re.findall(r'<g class="(f\d-\d)">(?!<rect)(.*?)</g>', text))
    assert ">one<" in groups["f0-1"]
    assert ">two<" in groups["f1-2"]
    assert ".f0-1{visibility:hidden" in text
    assert ".f1-2{visibility:visible" in text
    assert "25.00%{visibility:hidden}" in text  # after one of four seconds
    assert "prefers-reduced-motion" in text
