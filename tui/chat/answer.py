"""One answer of the model on screen: Markdown that may still grow, and the thinking before it.

Thinking is folded to a line that says how long it took; while it goes on its last lines are shown.
Knows layout, nothing about generation.
"""

from __future__ import annotations

from rich.text import Text
from textual.strip import Strip

from localrt import Thinking, split_thinking
from localrt.common.formatting import format_seconds
from localrt.tui.chat.blocks import Block, estimated, wrapped
from localrt.tui.chat.markdown import MarkdownLines, code_blocks
from localrt.tui.chat.styles import Styles
from localrt.tui.text import clean

_TAIL = 3  # lines of thinking that are shown while it goes on


class Answer(Block):
    """``write`` pieces, then ``finish``; or a whole text from the start.

    One that ``calls`` tools and says nothing takes no line: the calls are blocks of their own.
    """

    role = "assistant"

    def __init__(self, source: str = "", *, thinking_s: float | None = None) -> None:
        super().__init__()
        self._pieces = [clean(source)] if source else []
        self._finished = bool(source)
        self._unfolded = False
        self._markdown: MarkdownLines | None = None
        self._drawn = 0  # characters of the answer that are in ``_markdown``
        self.thinking_s = thinking_s
        self.calls = False

    @property
    def source(self) -> str:
        """The Markdown so far, thinking included."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    @property
    def spoken(self) -> str:
        """The answer without its thinking."""
        return split_thinking(self.source).answer

    @property
    def readable(self) -> str:
        """With its thinking where that is unfolded."""
        return self.source if self._unfolded else self.spoken

    @property
    def thinking(self) -> bool:
        """Whether the thinking still goes on."""
        return split_thinking(self.source).open

    @property
    def code(self) -> list[tuple[str, str]]:
        """Language and text of the code blocks, first to last."""
        return code_blocks(self.spoken)

    @property
    def foldable(self) -> bool:
        """Whether there is thinking to show."""
        return _thinks(split_thinking(self.source))

    def toggle(self) -> None:
        """Show the thinking, or hide it."""
        self._unfolded = not self._unfolded
        self.changed()

    def write(self, text: str) -> None:
        """Add a piece."""
        if text:
            self._pieces.append(clean(text))
            self.grown()

    def grown(self) -> None:
        """Take new lines into account at the next look; what is laid out already stays."""
        self._lines = None

    def finish(self) -> None:
        """No more pieces will come: the whole text is laid out as one document."""
        self._finished = True
        self.changed()

    def changed(self) -> None:
        """Lay out from the start at the next look."""
        super().changed()
        self._markdown = None
        self.gap, self.role = (0, "") if self._is_nothing else (1, "assistant")

    @property
    def _is_nothing(self) -> bool:
        return self.calls and self._finished and not self.note and not self.source.strip()

    def forget(self) -> None:
        """Give the lines back, unless more are about to come."""
        if self._finished:
            super().forget()
            self._markdown = None

    def height(self, width: int) -> tuple[int, bool]:
        """As of any block; a growing answer is counted anew when it has grown."""
        if self._lines is None and not self._finished:
            return max(self._height or 1, 1), False
        return super().height(width)

    def estimate(self, width: int) -> int:
        """From the text; folded thinking is one line."""
        thought = split_thinking(self.source)
        return estimated(thought.answer, width) + 2 * _thinks(thought) + bool(self.note)

    def lay_out(self, width: int, styles: Styles) -> list[Strip]:
        """Thinking, Markdown, the small line below."""
        if self._is_nothing:
            return []
        thought = split_thinking(self.source)
        lines: list[Strip] = []
        if _thinks(thought):
            lines += self._thinking_lines(thought.thinking, width, styles, open=thought.open)
            if thought.answer:
                lines.append(Strip([]))
        if thought.answer or not (lines or self.note):
            lines += self._markdown_lines(thought.answer, width, styles)
        return [*lines, *self.note_lines(width, styles)] or [Strip([])]

    def _thinking_lines(
        self, thinking: str, width: int, styles: Styles, *, open: bool
    ) -> list[Strip]:
        took = "" if self.thinking_s is None else f" {format_seconds(self.thinking_s)}"
        if open:
            head = f"▾ Thinking ...{took}"
        else:
            took = f" for{took}" if took else ""
            head = f"{'▾' if self._unfolded else '▸'} Thought{took}"
        lines = wrapped(Text(thinking, styles.thinking), width - 2, styles) if thinking else []
        if not self._unfolded:
            lines = lines[-_TAIL:] if open else []
        indent = Strip(Text("  ").render(styles.console))
        return [
            *wrapped(Text(head, styles.mark), width, styles),
            *(Strip.join([indent, line]) for line in lines),
        ]

    def _markdown_lines(self, text: str, width: int, styles: Styles) -> list[Strip]:
        kept = self._markdown
        shrunk = len(text) < self._drawn  # it turned out to be thinking
        if kept is None or shrunk or kept.width != width or kept.styles is not styles.markdown:
            self._markdown, self._drawn = MarkdownLines(styles.markdown, width), 0
        assert self._markdown is not None
        if len(text) > self._drawn:
            self._markdown.append(text[self._drawn :])
            self._drawn = len(text)
        if self._finished:
            self._markdown.finish()
        return self._markdown.lines


def _thinks(thought: Thinking) -> bool:
    return thought.open or bool(thought.thinking)
