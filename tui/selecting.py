"""What the mouse selects: characters of lines that are drawn, gutter excluded.

Pure functions on strips and Textual's ``Selection``.
"""

from __future__ import annotations

from collections.abc import Callable

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.selection import Selection
from textual.strip import Strip

from localrt.tui.blocks import GUTTER

__all__ = ["highlighted", "selected_text"]


def highlighted(strip: Strip, span: tuple[int, int], style: Style) -> Strip:
    """The strip with characters ``span`` in ``style``; an end of -1 is the line's end."""
    text = strip.text
    start, end = max(span[0], GUTTER), span[1]
    left = cell_len(text[:start])
    right = strip.cell_length if end < 0 else cell_len(text[:end])
    if right <= left:
        return strip
    before, inside, after = strip.crop(0, left), strip.crop(left, right), strip.crop(right)
    marked = [Segment(part.text, (part.style or Style.null()) + style) for part in inside]
    return Strip.join([before, Strip(marked), after])


def selected_text(selection: Selection, lines: int, text_of: Callable[[int], str]) -> str:
    """The characters of a selection among ``lines`` lines; only the lines in it are asked for."""
    first = 0 if selection.start is None else max(selection.start.y, 0)
    last = lines - 1 if selection.end is None else min(selection.end.y, lines - 1)
    parts = []
    for y in range(first, last + 1):
        span = selection.get_span(y)
        if span is None:
            continue
        start, end = span
        text = text_of(y)
        parts.append(text[max(start, GUTTER) :] if end < 0 else text[max(start, GUTTER) : end])
    return "\n".join(part.rstrip() for part in parts)
