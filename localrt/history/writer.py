"""An answer saved as it is written: sentence by sentence, so that a killed app loses no more.

Each sentence is a row of its own until the answer ends; appending costs the same however long it
is. A writer's turn names the process that writes it, so that others can tell a running answer from
one that was cut off.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import psutil

from localrt.common.errors import CancelledError, OptionError, StorageError
from localrt.history.database import Database, insert

_ENDS = ("done", "cancelled", "failed")
_SENTENCE_END = re.compile(r"[.!?…。！？][\"')\]]*\s|\n")
_SAVE_SECONDS = 2.0  # a table or a list of numbers has no sentences
_RETRY_SECONDS = 2.0


class AnswerWriter:
    """From ``Conversation.answer``. Leaving the ``with`` block without ``finish`` ends it: as
    ``"done"``, or as ``"failed"`` (``"cancelled"`` for ``CancelledError``) after an exception.

    ``write`` never fails: what cannot be saved is kept and tried again, ``problem`` says why.
    """

    def __init__(self, database: Database, conversation: str, turn: int) -> None:
        self._database = database
        self._conversation = conversation
        self.turn = turn
        self.problem: str | None = None
        self._saved = ""  # only the length matters to the file; the text is for whoever asks
        self._open = ""
        self._saved_at = time.monotonic()
        self._finished = False

    @property
    def text(self) -> str:
        """All that was written, saved or not."""
        return self._saved + self._open

    def write(self, text: str) -> None:
        """Append; whole sentences are saved at once."""
        self._open += text
        waited = time.monotonic() - self._saved_at
        if self.problem is not None and waited < _RETRY_SECONDS:
            return
        if _SENTENCE_END.search(self._open) or (self._open and waited >= _SAVE_SECONDS):
            self._save()

    def finish(self, state: str = "done", *, info: Mapping[str, Any] | None = None) -> None:
        """The answer is whole; ``state`` is ``"done"``, ``"cancelled"`` or ``"failed"``.

        Raises:
            StorageError: it could not be saved; it may be called again.
        """
        if state not in _ENDS:
            raise OptionError(f"an answer ends as {', '.join(_ENDS)}, not as {state!r}")
        if self._finished:
            return
        with self._database.transaction() as connection:
            settle(connection, self.turn, state, self.text, info)
            connection.execute(
                "UPDATE conversation SET updated = ? WHERE id = ?",
                (time.time(), self._conversation),
            )
        self._finished, self.problem = True, None

    def __enter__(self) -> AnswerWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, (CancelledError, GeneratorExit)):
            self.finish("cancelled")
        else:
            self.finish("done" if error is None else "failed")

    def _save(self) -> None:
        self._saved_at = time.monotonic()
        try:
            with self._database.transaction() as connection:
                insert(connection, "piece", turn=self.turn, text=self._open)
        except StorageError as error:
            self.problem = str(error)
        else:
            self._saved, self._open, self.problem = self._saved + self._open, "", None


def settle(
    connection: sqlite3.Connection,
    turn: int,
    state: str,
    text: str | None,
    info: Mapping[str, Any] | None = None,
) -> None:
    """Make a turn's pieces its content, or ``text`` where the writer has it, and end it."""
    if text is None:
        pieces = connection.execute("SELECT text FROM piece WHERE turn = ? ORDER BY id", (turn,))
        text = "".join(row["text"] for row in pieces)
    connection.execute("DELETE FROM piece WHERE turn = ?", (turn,))
    connection.execute(
        "UPDATE turn SET content = ?, state = ?, writer = NULL WHERE id = ? AND state = 'writing'",
        (text, state, turn),
    )
    if info is not None:
        connection.execute("UPDATE turn SET info = ? WHERE id = ?", (json.dumps(dict(info)), turn))


def own_name() -> str:
    """This process: its number, and when it began, since numbers come again."""
    return f"{os.getpid()}@{psutil.Process().create_time():.2f}"


def is_alive(name: str | None) -> bool:
    """Whether the process of ``own_name`` still runs."""
    try:
        number, began = (name or "").split("@")
        return abs(psutil.Process(int(number)).create_time() - float(began)) < 1.0
    except (ValueError, psutil.Error):
        return False
