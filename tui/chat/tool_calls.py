"""The tool calls of an answer in the app: shown, confirmed one after another, and run.

Each call is a block: name and arguments, state, and the folded result. Nothing here blocks. Knows
the view's blocks and the calls' turns, not the window that asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.style import Style
from rich.text import Text
from textual.strip import Strip

from localrt.history.messages import CallTurn, Decision
from localrt.mcp.toolbox import PendingCall
from localrt.tui.chat.blocks import Styles, TurnBlock, estimated, wrapped
from localrt.tui.chat.view import ConversationView
from localrt.tui.text import clean

_SHOWN = 3  # lines of a folded result


class CallBlock(TurnBlock):
    """``call`` is the line to show, ``result`` is empty at first, ``mark`` shows its state."""

    role = "tool"

    def __init__(self, call: str) -> None:
        super().__init__()
        self.call = clean(call)
        self.result = ""
        self._cut = False  # whether the last layout left something out

    @property
    def source(self) -> str:
        return f"{self.call}\n\n{self.result}".rstrip()

    @property
    def readable(self) -> str:
        lines = self.result.split("\n")
        return "\n".join([self.call, *(lines if self._unfolded else lines[: _SHOWN + 1])])

    @property
    def foldable(self) -> bool:
        return self._unfolded or self._cut

    def set_state(self, mark: str, result: str = "") -> None:
        """Set the call's state and its result."""
        self.mark, self.result = mark, clean(result)
        self.changed()

    def estimate(self, width: int) -> int:
        result = estimated(self.result, width - 2) if self.result else 0
        return 1 + (result if self._unfolded else min(result, _SHOWN + 1)) + bool(self.note)

    def lay_out(self, width: int, styles: Styles) -> list[Strip]:
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


AskAboutCall = Callable[[PendingCall, Callable[[Decision], None]], bool]
"""Asks about a call; the decision comes later. False if the user cannot be asked now."""
_WITHOUT_RESULT = {"refused": "not allowed", "stopped": "stopped"}


def ended_call(ending: str, text: str) -> tuple[str, str]:
    """The note below a finished call, and the result to show."""
    if ending in _WITHOUT_RESULT:
        return _WITHOUT_RESULT[ending], ""
    return "failed" if ending == "failed" else "", text


class AnswerCalls:
    """The calls of ``answer``, shown below it and run; ``ctx`` is the context length in tokens."""

    def __init__(
        self,
        turns: Sequence[CallTurn],
        view: ConversationView,
        answer: TurnBlock,
        ask: AskAboutCall,
        *,
        ctx: int,
    ) -> None:
        self._view, self._ask, self._ctx = view, ask, ctx
        self._calls = [(turn, CallBlock(turn.line)) for turn in turns]
        self._in_question: CallTurn | None = None
        for turn, block in self._calls:
            block.turn, block.mark = turn.turn, "waits"
        view.add(*(block for _, block in self._calls), after=answer)

    def look(self) -> bool:
        """Advance the calls as far as possible; returns whether all have ended."""
        while self._calls:
            turn, block = self._calls[0]
            if not turn.started and turn is not self._in_question:
                self._begin(turn, block)
            if not turn.has_ended():
                return False
            assert turn.result is not None, "the call has ended"
            self._stands(block, *ended_call(turn.result.ending, turn.result.text))
            del self._calls[0]
        return True

    def _begin(self, turn: CallTurn, block: CallBlock) -> None:
        """Run the call, once the user allows it."""

        def decide(decision: Decision) -> None:
            if not turn.has_ended():  # otherwise it was stopped while the question was open
                turn.decide(decision, self._ctx)
                if decision != "refuse":
                    self._stands(block, "runs; Esc stops it")

        if not turn.asks():
            decide("once")
            return
        if self._ask(turn.call, decide):
            self._in_question = turn
        self._stands(block, "waits for you to allow it")

    def _stands(self, block: CallBlock, mark: str, result: str = "") -> None:
        if (block.mark, block.result) != (mark, result):
            block.set_state(mark, result)
            self._view.changed(block)
