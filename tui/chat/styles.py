"""The styles that a conversation is drawn with, taken once per theme from the app's stylesheet.

Knows the names of the component classes in ``app.tcss`` and Rich's styles; draws nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.style import Style

from localrt.tui.chat.markdown import MarkdownStyles

if TYPE_CHECKING:
    from textual.widget import Widget

_PLAIN = ("notice", "error", "mark", "thinking", "attachment", "bar", "waiting-bar", "marked-bar")
_MARKDOWN = ("heading", "code", "quote", "link", "muted")
_FULL = ("user", "waiting", "found", "found-now")  # with their background
COMPONENTS = frozenset(
    f"conversation--{part}" for part in (*_PLAIN, *_MARKDOWN, *_FULL, "code-block")
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Styles:
    """Styles by what they are for. ``user`` and ``waiting`` carry a background, and so do matches
    of a search, ``found`` and ``found_now``; the rest do not.
    """

    console: Console
    markdown: MarkdownStyles
    base: Style
    user: Style
    waiting: Style
    found: Style
    found_now: Style
    bar: Style
    waiting_bar: Style
    marked_bar: Style
    notice: Style
    error: Style
    mark: Style
    thinking: Style
    attachment: Style


def styles_of(widget: Widget) -> Styles:
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

    markdown = MarkdownStyles(
        dark=widget.app.current_theme.dark,
        code_block=Style(bgcolor=full("code-block").bgcolor),
        **{name: ink(name) for name in _MARKDOWN},
    )
    return Styles(
        console=markdown.console(),
        markdown=markdown,
        base=widget.visual_style.rich_style,
        **{name.replace("-", "_"): full(name) for name in _FULL},
        **{name.replace("-", "_"): ink(name) for name in _PLAIN},
    )
