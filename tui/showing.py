"""Turns of the history as blocks on screen, and what is said of how an answer ended.

Knows both sides, does neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from localrt.tui.answer import Answer
from localrt.tui.blocks import Block, Notice, UserTurn, read_folds
from localrt.tui.chips import Draft

if TYPE_CHECKING:
    from localrt.history import Turn

__all__ = ["block_of", "draft_of", "ending"]

_ENDINGS = {
    "cut": "cut off: the app ended here",
    "cancelled": "stopped",
    "failed": "failed",
    "writing": "being written by another window",
}


def ending(state: str, finish_reason: str | None = None, *, full: bool = False) -> str:
    """What to say below an answer; empty for one that simply ended. ``full``: so is the context."""
    if state in _ENDINGS:
        return _ENDINGS[state]
    if finish_reason == "length":
        if full:
            return "cut off: the context is full; /new begins anew"
        return "cut off at max_tokens; /set max_tokens changes it"
    return ""


def block_of(turn: Turn) -> Block:
    """The block that shows a turn."""
    block: Block
    if turn.role == "user":
        draft = draft_of(turn)
        block = UserTurn(draft.text, folds=draft.folds)
    elif turn.role == "assistant":
        seconds = turn.info.get("thinking_s")
        block = Answer(turn.content, thinking_s=seconds if isinstance(seconds, float) else None)
        block.mark = ending(turn.state, turn.info.get("finish_reason"))
        if not turn.content:
            block.mark = block.mark or "no answer"
            block.finish()
    else:
        block = Notice(f"{turn.role}: {turn.content}")
    block.turn, block.branch, block.branches = turn.id, turn.branch, turn.branches
    return block


def draft_of(turn: Turn) -> Draft:
    """A user's turn as it was written."""
    return Draft(turn.content, read_folds(turn.info.get("folds"), len(turn.content)))
