"""The app's two themes, the themes to offer, and filters of drawn lines.

Themes only have colours: all styles use a theme's variables. With ``NO_COLOR`` the colours are
removed.
"""

from __future__ import annotations

from rich.segment import Segment
from textual.app import App
from textual.color import Color
from textual.filter import LineFilter
from textual.theme import Theme

from localrt.common.formatting import CONTROL

FAINT = "$foreground 60%"  # less important text

DARK = Theme(
    name="localrt-dark",
    primary="#7aa2c9",
    secondary="#9d86c0",
    accent="#d9a05b",
    success="#85b27a",
    warning="#d9b45b",
    error="#d9726b",
    foreground="#d8dbe0",
    background="#14171c",
    surface="#1c2027",
    panel="#2a303a",
    dark=True,
)
LIGHT = Theme(
    name="localrt-light",
    primary="#2f5d8a",
    secondary="#6a4f94",
    accent="#96590f",
    success="#3d7032",
    warning="#8a6410",
    error="#a8362f",
    foreground="#24282e",
    background="#faf9f6",
    surface="#f0eee8",
    panel="#dedad0",
    dark=False,
)
_FIRST = (DARK.name, LIGHT.name, "textual-dark", "textual-light", "ansi-dark", "ansi-light")


class WithoutColor(LineFilter):
    """Removes colours; keeps bold, reverse and so on. For ``NO_COLOR``, Textual itself would use
    shades of grey.
    """

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [
            Segment(text, style.without_color if style is not None else None, control)
            for text, style, control in segments
        ]


class WithoutControls(LineFilter):
    """Removes any remaining control characters from drawn lines."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [
            each
            if each.control or each.text.isprintable()
            else each._replace(text=CONTROL.sub("", each.text).translate(dict.fromkeys(b"\n\t")))
            for each in segments
        ]


def register(app: App[None]) -> None:
    """Register both themes with the app."""
    app.register_theme(DARK)
    app.register_theme(LIGHT)


def offered(app: App[None]) -> list[str]:
    """Names of themes to offer, ours first; a terminal with 16 colours keeps its own palette."""
    names = list(app.available_themes)
    if app.console.color_system == "standard":
        names = [name for name in names if app.available_themes[name].ansi]
    first = [name for name in _FIRST if name in names]
    return first + sorted(name for name in names if name not in first and name != "textual-ansi")
