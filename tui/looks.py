"""The styles that a conversation is drawn with, taken once per theme from the app's stylesheet.

Knows the names of the component classes in ``app.tcss`` and Rich's styles; draws nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.style import Style

from localrt.tui.markdown import Look

if TYPE_CHECKING:
    from textual.widget import Widget

__all__ = ["COMPONENTS", "Looks", "looks_of"]

_PLAIN = ("notice", "error", "mark", "thinking", "chip", "bar", "waiting-bar", "marked-bar")
_MARKDOWN = ("heading", "code", "quote", "link", "muted")
COMPONENTS = frozenset(
    f"conversation--{part}" for part in (*_PLAIN, *_MARKDOWN, "user", "waiting", "code-block")
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Looks:
    """Styles by what they are for. ``user`` and ``waiting`` carry a background, the rest do not."""

    console: Console
    markdown: Look
    base: Style
    user: Style
    waiting: Style
    bar: Style
    waiting_bar: Style
    marked_bar: Style
    notice: Style
    error: Style
    mark: Style
    thinking: Style
    chip: Style


def looks_of(widget: Widget) -> Looks:
    """The styles of ``widget``'s component classes in the present theme."""

    def full(part: str) -> Style:
        return widget.get_component_rich_style(f"conversation--{part}")

    def ink(part: str) -> Style:
        style = full(part)
        return Style(
            color=style.color,
            bold=style.bold,
            italic=style.italic,
            underline=style.underline,
            dim=style.dim,
        )

    markdown = Look(
        dark=widget.app.current_theme.dark,
        code_block=Style(bgcolor=full("code-block").bgcolor),
        **{name: ink(name) for name in _MARKDOWN},
    )
    return Looks(
        console=markdown.console(),
        markdown=markdown,
        base=widget.visual_style.rich_style,
        user=full("user"),
        waiting=full("waiting"),
        **{name.replace("-", "_"): ink(name) for name in _PLAIN},
    )
