"""Calls of tools in the plain chat: printed, asked about by a line, run, printed with results.

Ctrl+C stops a call that runs; the end of the input refuses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TextIO

from localrt.tui.conversation.tool_calls import CallTurn, Decision
from localrt.tui.text import clean

__all__ = ["PlainCalls", "beginning"]

_DECISIONS: dict[str, Decision] = {
    "y": "once",
    "yes": "once",
    "a": "always",
    "always": "always",
    "n": "refuse",
    "no": "refuse",
}
_QUESTION = "Run it? [y]es, [a]lways in this conversation, [n]o: "
_LOOK_SECONDS = 0.05
_SHOWN = 3  # lines of a result
_LONGEST = 400  # characters of them


class PlainCalls:
    """Over two text files; ``interrupts`` hands Ctrl+C to a function for as long as it is open."""

    def __init__(
        self,
        source: TextIO,
        out: TextIO,
        interrupts: Callable[[Callable[[], object]], AbstractContextManager[None]],
    ) -> None:
        self._source, self._out = source, out
        self._interrupts = interrupts

    def run(self, turn: CallTurn, ctx: int) -> None:
        """Ask where the call asks, run it, print what it gave."""
        self._print(f"Call: {turn.kept.line}\n")
        decision: Decision = self._asked() if turn.asks() else "once"
        if decision == "always":
            turn.always()
        if decision == "refuse":
            turn.refuse()
        else:
            turn.run(ctx)
            self._wait(turn)
        assert turn.result is not None, "the call has ended"
        how = "" if turn.result.ending == "done" else f" ({turn.result.ending})"
        self._print(f"Result{how}: {beginning(turn.result.text)}\n")

    def _asked(self) -> Decision:
        while True:
            self._print(_QUESTION)
            try:
                line = self._source.readline()
            except KeyboardInterrupt:
                self._print("\n")
                return "refuse"
            except UnicodeDecodeError:
                continue
            if not line:
                self._print("\n")
                return "refuse"
            if (decision := _DECISIONS.get(line.strip().lower())) is not None:
                return decision

    def _wait(self, turn: CallTurn) -> None:
        stopped = threading.Event()
        with self._interrupts(stopped.set):
            while not turn.has_ended():
                if stopped.wait(_LOOK_SECONDS):
                    turn.stop()

    def _print(self, text: str) -> None:
        self._out.write(clean(text))
        self._out.flush()


def beginning(text: str) -> str:
    """The first lines of a result, and how many more there are."""
    lines = text.splitlines() or [""]
    shown = "\n".join(lines[:_SHOWN])
    if len(shown) > _LONGEST:
        return f"{shown[:_LONGEST]} ... ({len(text):,} characters)"
    return shown + (f"\n... {len(lines) - _SHOWN} more lines" if len(lines) > _SHOWN else "")
