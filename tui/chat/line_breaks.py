"""Where a line may be broken besides at spaces: between the characters of Chinese and Japanese.

Rich breaks lines at spaces alone, and moves a run without any to the next line. A mark, which is a
space to Rich and takes no column, is put where a line may end, and is taken out of the lines that
come back. Characters that cannot begin or end a line stay with their neighbours.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from rich.segment import Segment
from rich.text import Text

__all__ = ["breakable", "breakable_text", "pieces", "without_marks"]

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
_BREAK = re.compile(
    rf"(?<=[^\s{_NEVER_LAST}])(?:(?<=[{_WIDE}])|(?=[{_WIDE}]))(?=[^\s{_NEVER_FIRST}])"
)


def breakable(text: str) -> str:
    """The text with a mark wherever a line may be broken."""
    return text if text.isascii() else _BREAK.sub(_MARK, text)


def pieces(text: str) -> list[str]:
    """The text cut wherever a line may be broken."""
    return breakable(text).split(_MARK)


def breakable_text(text: Text) -> Text:
    """As ``breakable``, with the text's styles."""
    places = [] if text.plain.isascii() else [m.start() for m in _BREAK.finditer(text.plain)]
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
