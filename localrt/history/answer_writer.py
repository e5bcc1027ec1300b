"""Answers as they are written to the history.

An answer is saved sentence by sentence, one row each until it ends, so that a killed app loses at
most a sentence. Its turn names the writing process, which tells a running answer from a cut one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from localrt.common.errors import CancelledError, OptionError
from localrt.history.operations import Finish, Operation, Piece

_ENDS = ("done", "cancelled", "failed")
_SENTENCE_END = re.compile(r"[.!?…。！？][\"')\]]*\s|\n")
_SAVE_SECONDS = 2.0  # tables and lists of numbers have no sentences


class AnswerWriter:
    """Writes an answer, from ``Conversation.answer`` or ``reopen``. Leaving the ``with`` block
    ends it: as ``"done"``, or after an exception as ``"failed"`` (``"cancelled"`` for
    ``CancelledError``).

    Nothing of it fails: what cannot be saved now waits (``History.problem``). ``keep`` makes its
    changes, of the conversation and the turn of ``place``, as the process ``writer``. ``before`` is
    the state of an answer that was reopened: without a ``write`` it stays as it was.
    """

    def __init__(
        self,
        keep: Callable[[Operation], None],
        place: Mapping[str, Any],
        writer: str,
        before: str | None = None,
    ) -> None:
        self._keep, self._place, self._writer, self._before = keep, place, writer, before
        self.turn: int = place["turn"]
        self._saved = ""
        self._open = ""
        self._saved_at = time.monotonic()
        self._finished = False

    @property
    def text(self) -> str:
        """All text so far, saved or not."""
        return self._saved + self._open

    def write(self, text: str) -> None:
        """Append; whole sentences are saved at once."""
        self._open += text
        waited = time.monotonic() - self._saved_at
        if _SENTENCE_END.search(self._open) or (self._open and waited >= _SAVE_SECONDS):
            self._saved_at = time.monotonic()
            start, self._saved, self._open = len(self._saved), self.text, ""
            self._keep(Piece(**self._place, writer=self._writer, start=start, text=self._saved))

    def finish(self, state: str = "done", *, info: Mapping[str, Any] | None = None) -> None:
        """End the answer; ``state`` is ``"done"``, ``"cancelled"`` or ``"failed"``."""
        if state not in _ENDS:
            raise OptionError(f"an answer ends as {', '.join(_ENDS)}, not as {state!r}")
        if self._finished:
            return
        if self._before is not None and not self.text:
            state, info = self._before, None
        self._keep(Finish(**self._place, state=state, text=self.text, info=info))
        self._finished = True

    def __enter__(self) -> AnswerWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (CancelledError, GeneratorExit)):
            self.finish("cancelled")
        else:
            self.finish("done" if error is None else "failed")
