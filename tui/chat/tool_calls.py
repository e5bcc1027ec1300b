"""The calls of an answer in the app: shown, asked about one after another, run, shown with results.

``look`` goes on as far as it can whenever it is called; nothing here waits. Knows the view's blocks
and the calls' turns, not the window that asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from localrt.tools.toolbox import Call
from localrt.tui.chat.blocks import Block
from localrt.tui.chat.call_block import CallBlock
from localrt.tui.chat.view import ConversationView
from localrt.tui.conversation.tool_calls import CallTurn, Decision

__all__ = ["AnswerCalls", "AskAboutCall", "ended_call"]

AskAboutCall = Callable[[Call, Callable[[Decision], None]], bool]
"""Asks about a call; the decision comes later. False where nobody can be asked just now."""

_WITHOUT_RESULT = {"refused": "not allowed", "stopped": "stopped"}


def ended_call(ending: str, text: str) -> tuple[str, str]:
    """What to say below a call that has ended, and the result to show."""
    if ending in _WITHOUT_RESULT:
        return _WITHOUT_RESULT[ending], ""
    return "failed" if ending == "failed" else "", text


class AnswerCalls:
    """The calls of ``answer``, shown below it; ``ctx`` is how many tokens the context holds."""

    def __init__(
        self,
        turns: Sequence[CallTurn],
        view: ConversationView,
        answer: Block,
        ask: AskAboutCall,
        *,
        ctx: int,
    ) -> None:
        self._turns, self._view = turns, view
        self._ask, self._ctx = ask, ctx
        self._blocks = [CallBlock(turn.kept.line) for turn in turns]
        self._place = 0  # of the call that is on
        self._asked = self._begun = False
        for turn, block in zip(turns, self._blocks, strict=True):
            block.turn, block.mark = turn.turn, "waits"
        view.add(*self._blocks, after=answer)

    @property
    def last_turn(self) -> int:
        """The turn that the model's next words follow."""
        return self._turns[-1].turn

    def look(self) -> bool:
        """Go on; whether all calls have ended."""
        while self._place < len(self._turns):
            turn, block = self._turns[self._place], self._blocks[self._place]
            if not self._begun and turn.result is None:
                self._begin(turn, block)
            if not turn.has_ended():
                return False
            self._show_end(turn, block)
            self._place += 1
            self._asked = self._begun = False
        return True

    def stop(self) -> None:
        """Stop the call that is on; the model is told."""
        if self._place < len(self._turns):
            self._turns[self._place].stop()

    def close(self) -> None:
        """The app ends: no call goes on."""
        for turn in self._turns:
            turn.stop()

    # -- parts -----------------------------------------------------------------------------------

    def _begin(self, turn: CallTurn, block: CallBlock) -> None:
        """Run the call, once the user allows it."""
        if self._asked:
            return
        if turn.asks():
            self._asked = self._ask(turn.call, lambda decision: self._decide(turn, decision))
            self._stands(block, "waits for you to allow it")
        else:
            self._run(turn, block)

    def _decide(self, turn: CallTurn, decision: Decision) -> None:
        if turn.has_ended():
            return  # stopped while the question was open
        if decision == "refuse":
            turn.refuse()
            return
        if decision == "always":
            turn.always()
        self._run(turn, self._blocks[self._place])

    def _run(self, turn: CallTurn, block: CallBlock) -> None:
        self._begun = True
        turn.run(self._ctx)
        self._stands(block, "runs; Esc stops it")

    def _show_end(self, turn: CallTurn, block: CallBlock) -> None:
        assert turn.result is not None, "the call has ended"
        self._stands(block, *ended_call(turn.result.ending, turn.result.text))

    def _stands(self, block: CallBlock, mark: str, result: str = "") -> None:
        if (block.mark, block.result) != (mark, result):
            block.stands(mark, result)
            self._view.changed(block)
