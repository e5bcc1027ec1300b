"""A call of a tool on screen: what is called with what, how it stands, and what it gave, folded.

Knows layout, neither tools nor the history.
"""

from __future__ import annotations

from rich.style import Style
from rich.text import Text
from textual.strip import Strip

from localrt.tui.chat.blocks import Block, estimated, wrapped
from localrt.tui.chat.styles import Styles
from localrt.tui.text import clean

__all__ = ["CallBlock"]

_SHOWN = 3  # lines of a result while it is folded


class CallBlock(Block):
    """``call`` is its line, ``result`` is empty as long as there is none; ``mark`` says how it
    stands.
    """

    role = "tool"

    def __init__(self, call: str, result: str = "") -> None:
        super().__init__()
        self.call = clean(call)
        self.result = clean(result)
        self._unfolded = False
        self._cut = False  # by the last layout: there is more to show

    @property
    def source(self) -> str:
        """The call, and its result below."""
        return f"{self.call}\n\n{self.result}".rstrip()

    @property
    def readable(self) -> str:
        """The call, and as much of its result as is shown."""
        lines = self.result.split("\n")
        return "\n".join([self.call, *(lines if self._unfolded else lines[: _SHOWN + 1])])

    @property
    def foldable(self) -> bool:
        """Whether something is not shown."""
        return self._unfolded or self._cut

    def toggle(self) -> None:
        """Show all of call and result, or their beginnings."""
        self._unfolded = not self._unfolded
        self.changed()

    def stands(self, mark: str, result: str = "") -> None:
        """Say how the call stands now, and what it gave."""
        self.mark, self.result = mark, clean(result)
        self.changed()

    def estimate(self, width: int) -> int:
        """One line, and the beginning of the result."""
        result = estimated(self.result, width - 2) if self.result else 0
        return 1 + (result if self._unfolded else min(result, _SHOWN + 1)) + bool(self.note)

    def lay_out(self, width: int, styles: Styles) -> list[Strip]:
        """The call on one line, the first lines of its result, the small line."""
        call = wrapped(Text(self.call, styles.attachment), width - 2, styles)
        result = wrapped(Text(self.result, styles.thinking), width - 2, styles)
        result = result if self.result else []
        self._cut = len(call) > 1 or len(result) > _SHOWN + 1
        if self._cut and not self._unfolded:
            if len(call) > 1:
                call = [_shortened(self.call, width - 2, styles.attachment, styles)]
            if len(result) > _SHOWN + 1:
                more = f"... {len(result) - _SHOWN} more lines"
                result = [*result[:_SHOWN], *wrapped(Text(more, styles.mark), width - 2, styles)]
        head = f"{'▾' if self._unfolded else '▸'} "
        return [
            Strip.join([Strip(Text(head, styles.attachment).render(styles.console)), call[0]]),
            *(_indented(line, styles) for line in (*call[1:], *result)),
            *(_indented(line, styles) for line in self.note_lines(width - 2, styles)),
        ]


def _indented(line: Strip, styles: Styles) -> Strip:
    return Strip.join([Strip(Text("  ").render(styles.console)), line])


def _shortened(text: str, width: int, style: Style, styles: Styles) -> Strip:
    """The beginning of ``text`` on one line."""
    line = Text(" ".join(text.split()), style)
    line.truncate(width, overflow="ellipsis")
    return wrapped(line, width, styles)[0]
