"""One answer of the model on screen: a widget that draws finished lines of Markdown.

A conversation holds one widget per turn, however long the turn is, because Textual visits every
widget whenever one of them grows. Knows layout and mouse selection, nothing about generation.
"""

from __future__ import annotations

from typing import ClassVar

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region, Size
from textual.selection import Selection
from textual.strip import Strip
from textual.widget import Widget

from localrt.tui.markdown import Look, MarkdownLines
from localrt.tui.text import clean

__all__ = ["Answer"]


class Answer(Widget):
    """Markdown text that may still grow: ``write`` pieces, then ``finish``."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "answer--heading",
        "answer--code",
        "answer--code-block",
        "answer--quote",
        "answer--link",
        "answer--muted",
    }

    def __init__(self, source: str = "", *, classes: str | None = None) -> None:
        super().__init__(classes=classes)
        self._pieces = [clean(source)] if source else []
        self._finished = bool(source)
        self._lines: MarkdownLines | None = None

    @property
    def source(self) -> str:
        """The Markdown so far."""
        return "".join(self._pieces)

    @property
    def plain(self) -> str:
        """The lines as they are drawn, without their styles."""
        lines = self._lines.lines if self._lines else []
        return "\n".join(line.text.rstrip() for line in lines)

    def write(self, text: str) -> None:
        """Add a piece; draws what changed, at a cost that does not grow with the answer."""
        if not text:
            return
        text = clean(text)
        self._pieces.append(text)
        if self._lines is None:
            return  # not laid out yet: the first layout takes every piece
        height = len(self._lines.lines)
        first = self._lines.append(text)
        if len(self._lines.lines) != height:
            self.refresh(layout=True)
        else:
            self.refresh(Region(0, first, self.outer_size.width, height - first))

    def finish(self) -> None:
        """No more pieces will come: draw the whole text as one document."""
        self._finished = True
        if self._lines is not None:
            self._lines.finish()
            self.refresh(layout=True)

    # -- drawing ---------------------------------------------------------------------------------

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """Lines at this width; an answer without text yet keeps one line."""
        return max(len(self._laid_out(width).lines), 1)

    def render_line(self, y: int) -> Strip:
        """The line ``y`` in the widget's own colours, with the mouse's selection on it."""
        width = self.size.width
        style = self.visual_style.rich_style
        lines = self._laid_out(width).lines
        if y >= len(lines):
            return Strip.blank(width, style)
        strip = lines[y]
        selection = self.text_selection
        if selection is not None and (span := selection.get_span(y)) is not None:
            strip = _selected(
                strip, span, self.screen.get_component_rich_style("screen--selection")
            )
        return strip.apply_style(style).adjust_cell_length(width, style).apply_offsets(0, y)

    def notify_style_update(self) -> None:
        """Lay out again when the theme changes."""
        super().notify_style_update()
        if self._lines is not None:
            self._lines = None
            self.refresh(layout=True)

    def _laid_out(self, width: int) -> MarkdownLines:
        if self._lines is None or self._lines.width != width:
            self._lines = MarkdownLines(self._look(), width)
            self._lines.append(self.source)
            if self._finished:
                self._lines.finish()
        return self._lines

    def _look(self) -> Look:
        def blended(part: str) -> Style:
            return self.get_component_rich_style(f"answer--{part}")

        def without_background(part: str) -> Style:
            style = blended(part)
            return Style(
                color=style.color,
                bold=style.bold,
                italic=style.italic,
                underline=style.underline,
                dim=style.dim,
            )

        return Look(
            dark=self.app.current_theme.dark,
            heading=without_background("heading"),
            code=without_background("code"),
            code_block=Style(bgcolor=blended("code-block").bgcolor),
            quote=without_background("quote"),
            link=without_background("link"),
            muted=without_background("muted"),
        )

    # -- selection -------------------------------------------------------------------------------

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """The selected text, for the clipboard."""
        return selection.extract(self.plain), "\n"


def _selected(strip: Strip, span: tuple[int, int], style: Style) -> Strip:
    """The strip with characters ``span`` highlighted; an end of -1 is the line's end."""
    text = strip.text
    start, end = span
    left = cell_len(text[:start])
    right = strip.cell_length if end < 0 else cell_len(text[:end])
    before, inside, after = strip.crop(0, left), strip.crop(left, right), strip.crop(right)
    marked = [Segment(part.text, (part.style or Style.null()) + style) for part in inside]
    return Strip.join([before, Strip(marked), after])
