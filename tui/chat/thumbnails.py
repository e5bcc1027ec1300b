"""Pictures in the conversation: drawn by kitty's protocol or as sixels, else in half blocks.

``textual-image`` does the drawing. It queries the terminal when it is imported, and once Textual
runs, Textual reads all answers: so ``find_graphics`` must be called before.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from localrt.common.errors import LocalrtError
from localrt.history.pictures import small_image

if TYPE_CHECKING:
    from localrt import KeptPicture

Graphics = Literal["", "kitty", "sixel"]
"""How the terminal draws pictures; empty if it cannot."""

_COLUMNS, _ROWS = 40, 12  # largest thumbnail
_DRAWING = ("kitty", "ghostty", "foot", "mlterm", "wezterm", "iterm", "contour", "vscode")
_CELL = (10, 20)  # pixels that kitty scales to a cell


def find_graphics() -> Graphics:
    """How this terminal draws pictures. Only terminals that may support it are queried: that takes
    a moment.
    """
    named = [os.environ.get(name, "") for name in ("TERM", "TERM_PROGRAM", "LC_TERMINAL")]
    known = any(name in " ".join(named).lower() for name in _DRAWING)
    if "TMUX" in os.environ or not (known or os.environ.get("WT_SESSION")):
        return ""
    from textual_image._terminal import get_cell_size
    from textual_image.renderable import Image, SixelImage, TGPImage

    get_cell_size()  # queried now, then cached
    if Image is SixelImage:
        return "sixel"
    return "kitty" if Image is TGPImage else ""


def cells(picture: KeptPicture, width: int) -> tuple[int, int]:
    """Columns and rows of a picture's thumbnail in ``width`` columns; a row is two columns high."""
    columns = max(min(_COLUMNS, width, picture.width), 1)
    rows = columns * picture.height / max(picture.width, 1) / 2
    if rows > _ROWS:
        columns = max(round(columns * _ROWS / rows), 1)
    return columns, min(max(round(rows), 1), _ROWS)


class Thumbnail:
    """One picture as lines. ``escapes`` are sequences that draw sixels over each line."""

    def __init__(self, picture: KeptPicture) -> None:
        self.picture = picture
        self.escapes: Sequence[str] = ()
        self._drawing: tuple[tuple[object, ...], list[Strip]] | None = None

    def lines(self, width: int, graphics: Graphics) -> list[Strip]:
        """The thumbnail in at most ``width`` columns; none if the picture cannot be read."""
        size = cells(self.picture, width)
        if self._drawing is None or self._drawing[0] != (size, graphics):
            try:
                self._drawing = (size, graphics), self._draw(*size, graphics)
            except LocalrtError:
                self._drawing = (size, graphics), []
        return self._drawing[1]

    def _draw(self, columns: int, rows: int, graphics: Graphics) -> list[Strip]:
        if graphics == "sixel":
            self.escapes = _sixels(self.picture, columns, rows)
            return [Strip([Segment(" " * columns)])] * rows
        if graphics == "kitty":
            from textual_image.renderable import TGPImage

            image = small_image(self.picture, columns * _CELL[0], rows * _CELL[1])
            console = Console(
                width=columns, height=rows, color_system="truecolor", legacy_windows=False
            )
            drawn = console.render_lines(TGPImage(image, columns, rows), pad=False)
            return [Strip(line) for line in drawn]
        return half_blocks(self.picture, columns, rows)


def half_blocks(picture: KeptPicture, columns: int, rows: int) -> list[Strip]:
    """Two pixels in each cell: the upper half block in one color on the other."""
    image = small_image(picture, columns, 2 * rows)
    data, line = image.tobytes(), 3 * columns

    def color(x: int, y: int) -> str:
        return "#" + data[y * line + 3 * x : y * line + 3 * x + 3].hex()

    def cell(x: int, y: int) -> Segment:
        return Segment("▀", Style(color=color(x, 2 * y), bgcolor=color(x, 2 * y + 1)))

    return [Strip([cell(x, y) for x in range(columns)]) for y in range(rows)]


def _sixels(picture: KeptPicture, columns: int, rows: int) -> list[str]:
    """Sixels of each row of cells, so that any part of a picture can be shown."""
    from textual_image._terminal import get_cell_size
    from textual_image.renderable import SixelImage

    size = get_cell_size()
    image = small_image(picture, columns * size.width, rows * size.height)
    console, found = Console(width=columns, height=1), []
    for row in range(rows):
        part = image.crop((0, row * size.height, image.width, (row + 1) * size.height))
        drawn = console.render(SixelImage(part, columns, 1))
        found += [segment.text for segment in drawn if segment.text.startswith("\x1bP")]
    return found
