"""The outbox: changes of conversations that wait until the history's file can be written.

A change is applied at once if that takes no time, otherwise it waits in the order of its
conversation, and is tried again by a thread. A conversation of which something waits is read from
memory: what the file had, with the waiting changes on top. The file gets these changes alone, so
that nothing which other apps do meanwhile is undone. A conversation that is new and empty is kept
in memory, too, until there is something to keep.
"""

from __future__ import annotations

import json
import random
import sqlite3
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from localrt.common.errors import StorageError
from localrt.common.processes import own_name
from localrt.common.settings import Settings
from localrt.history.database import TABLES, Database, GoneError, UnavailableError, in_memory
from localrt.history.operations import Begin, Delete, Operation, Remove, Set, forget

_PAUSE_SECONDS = 0.25  # between tries while another app keeps the file locked
_LONG_PAUSE_SECONDS = 2.0  # while it cannot be written for another reason
_TOLD_SECONDS = 1.0  # locks that last less are not worth a line
_MOST_EMPTY = 1000  # new conversations without a word
_BLOCK = 1 << 40  # numbers of turns that wait begin up to so many above the file's
_READ = {  # of a conversation
    "conversation": "SELECT * FROM conversation WHERE id = ?",
    "aside": "SELECT conversation, pinned FROM aside WHERE conversation = ?",
    "draft": "SELECT * FROM draft WHERE conversation = ?",
    "turn": "SELECT * FROM turn WHERE conversation = ?",
    "piece": "SELECT turn, text FROM piece JOIN turn ON turn.id = turn"
    " WHERE conversation = ? ORDER BY piece.id",
}
_INDEX_TURNS, _MERGED_PAGES = 100, 50  # of the word index, in one transaction
_INDEX_SECONDS = 0.03  # at a time

Rows = dict[str, Sequence[sqlite3.Row]]


@dataclass(slots=True)
class _Waiting:
    """What waits of a conversation. ``seen``: its rows when they were last read; ``version`` is the
    file's that is shown below the operations, if they are ``shown``.
    """

    seen: Rows | None = None
    operations: list[Operation] = field(default_factory=list)
    version: int | None = None
    shown: bool = False
    since: float = field(default_factory=time.monotonic)

    @property
    def is_new(self) -> bool:
        """Whether nothing of the conversation is in the file."""
        return bool(self.operations) and isinstance(self.operations[0], Begin)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to keep yet."""
        return self.is_new and not any(each.words for each in self.operations)


class Outbox:
    """Applies the changes of all conversations of ``database``. Thread-safe."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.window = own_name() or ""  # drafts and running answers are this process's
        self._lock = database.lock
        self._waiting: dict[str, _Waiting] = {}
        self._memory: sqlite3.Connection | None = None
        self._next = 0  # the number of the next turn that waits
        self._reason: UnavailableError | None = None  # of the last try
        self._tried = -_PAUSE_SECONDS
        self._owing = ""  # why deleted words are still in saved caches
        self._deleted = set[str | int]()  # conversations and turns, by this process
        self._flushing = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self.watch()

    # -- reading ---------------------------------------------------------------------------------

    def rows(
        self, id: str, query: str, values: Sequence[object] = (), seen: Rows | None = None
    ) -> list[sqlite3.Row]:
        """Rows of conversation ``id``, with what waits of it. ``seen``: its rows by table when they
        were last read, for when the file cannot be.

        Raises:
            UnavailableError: the file cannot be read now, and was not before.
        """
        with self._lock:
            if (waiting := self._waiting.get(id)) is None:
                try:
                    return self.database.rows(query, values)
                except UnavailableError as error:
                    if not seen:
                        raise
                    self._reason = error
                    waiting = self._waiting[id] = _Waiting(seen)
                    self.watch()
            waiting.seen = seen or waiting.seen
            return self._shown(id, waiting).execute(query, values).fetchall()

    def rows_of_waiting(self, query: str) -> list[sqlite3.Row]:
        """Rows of the conversations of which something waits; each is read as a whole."""
        with self._lock:
            for id, waiting in self._waiting.items():
                with suppress(UnavailableError):
                    self._shown(id, waiting)
            return [] if self._memory is None else self._memory.execute(query).fetchall()

    @property
    def waiting(self) -> list[str]:
        """The conversations of which something waits, new and empty ones too."""
        with self._lock:
            return [*self._waiting]

    def waits(self, id: str) -> bool:
        """Whether something of a conversation waits."""
        return id in self._waiting

    def is_kept(self, id: str) -> bool:
        """Whether all of a conversation is in the file."""
        with self._lock, suppress(UnavailableError):
            if self.database.path is not None and id not in self._waiting:
                return bool(self.database.rows(_READ["conversation"], (id,)))
        return False

    def _shown(self, id: str, waiting: _Waiting) -> sqlite3.Connection:
        """The database in memory, with the conversation as it will be in the file."""
        version = None
        with suppress(UnavailableError):
            version = self.database.version
        if self._memory is None:
            self._memory = in_memory(TABLES)
        if waiting.shown and version in (None, waiting.version):
            return self._memory
        base: Rows = {}
        if not waiting.is_new:
            try:
                base = {name: self.database.rows(query, (id,)) for name, query in _READ.items()}
            except UnavailableError:
                if waiting.seen is None or "conversation" not in waiting.seen:
                    raise
            if not base.get("conversation"):
                base = waiting.seen or {}
        forget(self._memory, id)
        for table, rows in base.items():
            for row in rows[:1]:
                names, places = ", ".join(row.keys()), ", ".join("?" * len(row))
                into = f"INSERT OR REPLACE INTO {table} ({names}) VALUES ({places})"
                self._memory.executemany(into, map(tuple, rows))
        for operation in waiting.operations:
            with suppress(GoneError):
                _apply(operation, self._memory)
        waiting.shown, waiting.version = True, version
        return self._memory

    # -- changes ---------------------------------------------------------------------------------

    def submit(self, operation: Operation, seen: Rows | None = None) -> None:
        """Make a change, in the file or, if that cannot be written now, in memory until then.

        Raises:
            GoneError: what it changes was deleted; it was not made.
            UnavailableError: nor can the file be read, and nothing was ``seen``; it was not made.
        """
        id = operation.conversation
        with self._lock:
            waiting = self._waiting.get(id)
            if isinstance(operation, Delete):
                self._delete(operation, waiting)
                return
            if waiting is not None and waiting.is_empty and operation.words:
                self._flush(id, begin=True)
                waiting = self._waiting.get(id)
            empty = isinstance(operation, Begin) and not operation.words
            if waiting is None and not empty and self._made(operation):
                return
            operation.reserve(self._number)
            waiting = waiting or _Waiting(seen)
            self._waiting[id] = waiting
            try:
                if empty or isinstance(operation, Begin):
                    waiting.operations.append(operation)
                    self._shown(id, waiting)
                else:
                    _apply(operation, self._shown(id, waiting))
                    self._queue(operation, waiting)
            finally:
                if not waiting.operations:
                    self._dropped(id)
            self._note_deleted(operation)
            if empty:
                self._limit_empty()
        self.watch()

    def keep(self, operation: Operation, seen: Rows | None = None) -> None:
        """Make a change that nobody can repeat: ``submit``, but what it changes may have been
        deleted by others, and then it waits. What this process has deleted is not missed.

        Raises:
            StorageError: the history is closed.
        """
        with self._lock:
            try:
                self.submit(operation, seen)
            except StorageError as error:
                if self.database.is_closed:
                    raise
                if {operation.conversation, getattr(operation, "turn", None)} & self._deleted:
                    return
                operation.problem = str(error) if isinstance(error, GoneError) else ""
                waiting = self._waiting.setdefault(operation.conversation, _Waiting(seen))
                self._queue(operation, waiting)
        self.watch()

    def _queue(self, operation: Operation, waiting: _Waiting) -> None:
        while waiting.operations and operation.replaces(waiting.operations[-1]):
            waiting.operations.pop()
        waiting.operations.append(operation)

    def _made(self, operation: Operation) -> bool:
        """Whether the change could be made in the file at once."""
        if self._reason is not None and time.monotonic() - self._tried < _PAUSE_SECONDS:
            return False
        if not self._written(operation):
            return False
        self._note_deleted(operation)
        return True

    def _written(self, operation: Operation) -> bool:
        """Make the change in the file; False if it cannot be written now."""
        try:
            with self.database.transaction(sync=operation.sync) as connection:
                operation.apply(connection)
        except UnavailableError as error:
            self._reason, self._tried = error, time.monotonic()
            return False
        self._reason = None
        return True

    def _note_deleted(self, operation: Operation) -> None:
        if isinstance(operation, Remove):
            self._deleted |= operation.gone

    def _delete(self, operation: Delete, waiting: _Waiting | None) -> None:
        """Delete a conversation, of which nothing else has to be done then."""
        id = operation.conversation
        self._deleted.add(id)
        if waiting is not None:
            self._dropped(id)
        if (waiting is None or not waiting.is_new) and not self._made(operation):
            self._waiting[id] = _Waiting(operations=[operation])
            self.watch()

    def _dropped(self, id: str) -> None:
        del self._waiting[id]
        if self._memory is not None:
            forget(self._memory, id)

    def _limit_empty(self) -> None:
        empty = [id for id, waiting in self._waiting.items() if waiting.is_empty]
        for id in empty[:-_MOST_EMPTY]:
            self._dropped(id)

    def _number(self) -> int:
        """A number for a turn that waits, which no other process takes."""
        if not self._next:
            with suppress(UnavailableError):
                last = self.database.rows("SELECT max(seq) AS last FROM sqlite_sequence")
                self._next = last[0]["last"] or 0
            self._next += random.SystemRandom().randrange(1, _BLOCK)
        self._next += 1
        return self._next

    # -- waiting ---------------------------------------------------------------------------------

    def flush(self, *, anew: bool = False) -> bool:
        """Try to make the changes that wait; whether none waits now. ``anew``: where the file was
        removed, another one is begun.
        """
        with self._flushing:
            try:
                self.database.open(anew=anew)
                if all(self._flush(id) for id in self.waiting):
                    self._pay()
            except StorageError as error:
                if isinstance(error, UnavailableError):
                    self._reason = error
            return not self.count

    def _flush(self, id: str, *, begin: bool = False) -> bool:
        """Try what waits of a conversation; False if the file cannot be written. ``begin``: also if
        it is empty.
        """
        at = 0
        while True:
            with self._lock:
                waiting = self._waiting.get(id)
                if waiting is None or (waiting.is_empty and not begin):
                    return True
                if at >= len(waiting.operations):
                    if not waiting.operations:
                        self._dropped(id)
                    return True
                operation = waiting.operations[at]
                try:
                    if not self._written(operation):
                        return False
                except StorageError as error:
                    if _counts(operation):
                        operation.problem, at = str(error), at + 1
                    else:  # nobody misses it
                        waiting.operations.pop(at)
                else:
                    self._next = 0
                    waiting.operations.pop(at)

    @property
    def count(self) -> int:
        """How many changes are neither in the file nor written elsewhere."""
        return len(self._unsaved())

    def _unsaved(self) -> list[Operation]:
        with self._lock:
            found = [each for each in self._waiting.values() if not each.is_empty]
            operations = [operation for each in found for operation in each.operations]
        return [each for each in operations if _counts(each) and not each.elsewhere]

    def unsaved_of(self, id: str) -> list[Operation]:
        """The changes of a conversation that ``count`` counts."""
        return [operation for operation in self._unsaved() if operation.conversation == id]

    @property
    def problem(self) -> str:
        """How many changes wait, and why, in one line; "" if all is in the file."""
        with self._lock:
            unsaved, reason = self._unsaved(), self._reason
            began = min(
                (each.since for each in self._waiting.values() if not each.is_empty), default=0
            )
        if not unsaved:
            return self.database.problem or self._owing
        changes = "1 change is" if len(unsaved) == 1 else f"{len(unsaved)} changes are"
        stuck = [operation.problem for operation in unsaved if operation.problem]
        if stuck and (reason is None or len(stuck) == len(unsaved)):
            return f"{changes} not saved: {stuck[0]}"
        if reason is None or (reason.locked and time.monotonic() - began < _TOLD_SECONDS):
            return ""
        return f"{changes} not on disk yet: {reason}"

    def watch(self) -> None:
        """Try again, in a thread, what waits or is owed, and a file that is not open."""
        with self._lock:
            if self._thread is None and not self._stop.is_set() and self._has_work():
                self._thread = threading.Thread(
                    target=self._retry, daemon=True, name="localrt-outbox"
                )
                self._thread.start()

    def _has_work(self) -> bool:
        waits = any(not each.is_empty for each in self._waiting.values())
        return waits or not self.database.is_open or self._owes()

    def _retry(self) -> None:
        while True:
            reason = self._reason
            soon = reason.locked if reason is not None else not (self.count or self._owing)
            if self._stop.wait(_PAUSE_SECONDS if soon else _LONG_PAUSE_SECONDS):
                return
            self.flush()
            with self._lock:
                if self._stop.is_set() or not self._has_work():
                    self._thread = None
                    return

    def close(self) -> None:
        """Stop trying, after the last try. What waits stays in this process."""
        self._stop.set()
        if self.database.path is not None:
            self.flush(anew=self.count > 0)

    # -- what deleting owes ----------------------------------------------------------------------

    def _owes(self) -> bool:
        with suppress(StorageError):
            owed = "SELECT 1 WHERE EXISTS (SELECT * FROM debt) OR EXISTS (SELECT * FROM gone)"
            return self.database.path is not None and bool(self.database.rows(owed))
        return False

    def pay(self) -> None:
        """Remove deleted words from the saved KV caches and, if it is small, from the word index; a
        large one follows in a thread.
        """
        if self._flushing.acquire(blocking=False):
            try:
                with suppress(StorageError):
                    self._pay()
            finally:
                self._flushing.release()
        self.watch()

    def _pay(self) -> None:
        if self.database.path is None:
            return
        until = time.monotonic() + _INDEX_SECONDS
        for debt in self.database.rows("SELECT * FROM debt ORDER BY marks IS NULL, id"):
            if debt["marks"] is not None:
                self._forget_caches(frozenset(json.loads(debt["marks"])), debt["since"])
            elif not self._left_index(until) or not self._merged(debt["id"], debt["steps"], until):
                continue
            with self.database.transaction(sync=False) as connection:
                connection.execute("DELETE FROM debt WHERE id = ?", (debt["id"],))
        if self.database.rows("SELECT 1 FROM gone LIMIT 1"):
            self._left_index(until)
        self._owing = ""

    def _forget_caches(self, marks: frozenset[str], since: float) -> None:
        from localrt.engine.saved_caches import forget as forget_caches  # brings numpy

        try:
            forget_caches(Settings.from_environment().cache_dir / "kv", marks, since)
        except StorageError as error:
            self._owing = f"deleted words are still in saved KV caches: {error}"
            raise

    def _left_index(self, until: float) -> bool:
        """Take deleted turns out of the word index; whether none is left. It then holds their words
        until it is merged.
        """
        while time.monotonic() < until:
            with self.database.transaction(sync=False) as connection:
                some = "SELECT * FROM gone LIMIT ?"
                rows = connection.execute(some, (_INDEX_TURNS,)).fetchall()
                if not rows:
                    return True
                take = "INSERT INTO turn_text (turn_text, rowid, content) VALUES ('delete', ?, ?)"
                connection.executemany(take, map(tuple, rows))
                gone = [(row["id"],) for row in rows]
                connection.executemany("DELETE FROM gone WHERE id = ?", gone)
        return False

    def _merged(self, debt: int, steps: int, until: float) -> bool:
        """Merge a part of the word index; return whether all of it is merged."""
        done = False
        while not done and time.monotonic() < until:
            pages = _MERGED_PAGES if steps else -_MERGED_PAGES  # the first step marks all
            steps += 1
            with self.database.transaction(sync=False) as connection:
                before = connection.total_changes
                merge = "INSERT INTO turn_text (turn_text, rank) VALUES ('merge', ?)"
                connection.execute(merge, (pages,))
                done = connection.total_changes - before < 2
                change = "UPDATE debt SET steps = ? WHERE id = ?"
                connection.execute(change, (steps, debt))
        if done:  # so that nothing is left in the log either
            self.database.rows("PRAGMA wal_checkpoint(TRUNCATE)")
        return done


def _counts(operation: Operation) -> bool:
    """Whether somebody would miss the change."""
    return operation.words or isinstance(operation, Set)


def _apply(operation: Operation, memory: sqlite3.Connection) -> None:
    """Make a change in memory, or nothing of it."""
    memory.execute("BEGIN")
    try:
        operation.apply(memory)
    except BaseException:
        memory.execute("ROLLBACK")
        raise
    memory.execute("COMMIT")
