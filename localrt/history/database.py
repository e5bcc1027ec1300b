"""The SQLite database behind the history: schema versions, damage, and answers as they grow.

Write-ahead logging lets several apps use one file. What is committed survives a killed process and
a power cut; sentences of an unfinished answer survive only the former. An unusable file is never
overwritten: a damaged one is renamed, and beside one of a newer version another file is begun.
Without a file the same tables are in memory.

An answer is saved sentence by sentence, one row each until it ends, so that a killed app loses at
most a sentence. Its turn names the writing process, which tells a running answer from a cut one.
"""

from __future__ import annotations

import glob
import json
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from localrt.common.errors import CancelledError, OptionError, StorageError, reason_of
from localrt.common.files import keep_private, private_file, private_folder
from localrt.common.forks import finalize
from localrt.common.formatting import paired
from localrt.common.processes import is_alive
from localrt.common.settings import Settings

MEMORY_FIRST = 1 << 40  # first turn number of a database in memory: no file has such numbers
_VERSION = 2  # 2 added pictures; ``aside``, which earlier releases ignore, has no version
# In one transaction: another app may be making the same file.
_SCHEMA = f"""
    BEGIN IMMEDIATE;
    CREATE TABLE IF NOT EXISTS conversation (
        id TEXT PRIMARY KEY,
        title TEXT NOT NULL,
        model TEXT NOT NULL,
        system TEXT,
        options TEXT NOT NULL,
        created REAL NOT NULL,
        updated REAL NOT NULL,
        first INTEGER
    );
    CREATE INDEX IF NOT EXISTS conversation_updated ON conversation (updated);
    CREATE TABLE IF NOT EXISTS turn (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        conversation TEXT NOT NULL REFERENCES conversation (id) ON DELETE CASCADE,
        parent INTEGER REFERENCES turn (id) ON DELETE CASCADE,
        next INTEGER,
        role TEXT NOT NULL,
        content TEXT NOT NULL,
        state TEXT NOT NULL,
        writer TEXT,
        info TEXT NOT NULL,
        created REAL NOT NULL
    );
    CREATE INDEX IF NOT EXISTS turn_parent ON turn (conversation, parent);
    CREATE INDEX IF NOT EXISTS turn_writing ON turn (state) WHERE state = 'writing';
    CREATE TABLE IF NOT EXISTS piece (
        id INTEGER PRIMARY KEY,
        turn INTEGER NOT NULL REFERENCES turn (id) ON DELETE CASCADE,
        text TEXT NOT NULL
    );
    CREATE INDEX IF NOT EXISTS piece_turn ON piece (turn);
    CREATE TABLE IF NOT EXISTS picture (
        digest TEXT PRIMARY KEY,
        data BLOB NOT NULL
    );
    CREATE TABLE IF NOT EXISTS turn_picture (
        turn INTEGER NOT NULL REFERENCES turn (id) ON DELETE CASCADE,
        picture TEXT NOT NULL REFERENCES picture (digest),
        PRIMARY KEY (turn, picture)
    ) WITHOUT ROWID;
    CREATE INDEX IF NOT EXISTS turn_picture_picture ON turn_picture (picture);
    CREATE TABLE IF NOT EXISTS aside (
        conversation TEXT PRIMARY KEY REFERENCES conversation (id) ON DELETE CASCADE,
        pinned REAL,
        draft TEXT NOT NULL DEFAULT '',
        writer TEXT
    );
    CREATE TRIGGER IF NOT EXISTS turn_picture_gone AFTER DELETE ON turn_picture
        WHEN NOT EXISTS (SELECT 1 FROM turn_picture WHERE picture = old.picture)
    BEGIN
        DELETE FROM picture WHERE digest = old.picture;
    END;
    CREATE VIRTUAL TABLE IF NOT EXISTS turn_text
        USING fts5 (content, content='turn', content_rowid='id');
    CREATE TRIGGER IF NOT EXISTS turn_added AFTER INSERT ON turn BEGIN
        INSERT INTO turn_text (rowid, content) VALUES (new.id, new.content);
    END;
    CREATE TRIGGER IF NOT EXISTS turn_gone AFTER DELETE ON turn BEGIN
        INSERT INTO turn_text (turn_text, rowid, content) VALUES ('delete', old.id, old.content);
    END;
    CREATE TRIGGER IF NOT EXISTS turn_written AFTER UPDATE OF content ON turn BEGIN
        INSERT INTO turn_text (turn_text, rowid, content) VALUES ('delete', old.id, old.content);
        INSERT INTO turn_text (rowid, content) VALUES (new.id, new.content);
    END;
    PRAGMA user_version = {_VERSION};
    COMMIT;
"""
_BUSY_SECONDS = 5.0  # the longest wait for another app's transaction
_PIECE = 1 << 20
_CHECKED_WHOLE = 32 << 20  # bytes; larger files are not checked at opening


class Database:
    """One connection, for any thread; ``path`` None keeps all in memory.

    ``notes`` are lines that the user should see.

    Raises:
        StorageError: the folder cannot be written to.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.notes: tuple[str, ...] = ()
        self._lock = threading.RLock()
        self._depth = 0
        if path is None:
            self._connection = _in_memory()
        else:
            self._open(path)
        finalize(self, self._connection.close)  # for callers who do not

    def _open(self, path: Path) -> None:
        try:
            private_folder(path.parent)
        except OSError as error:
            raise StorageError(
                f"cannot keep conversations in {path.parent}: {reason_of(error)}"
            ) from error
        try:
            self._connection = _opened_twice(path)
        except _NewerError as newer:
            self.path = path.with_name(f"{path.stem}.v{_VERSION}{path.suffix}")
            self.notes = (
                f"{path} is of a newer localrt (version {newer}): left as it is, "
                f"conversations go to {self.path.name}",
            )
            self._connection = _opened_or_fail(self.path)
        except (OSError, sqlite3.OperationalError) as error:
            raise StorageError(f"cannot open {path}: {reason_of(error)}") from error
        except sqlite3.DatabaseError as error:
            aside = _put_aside(path)
            self.notes = (f"{path} is damaged ({error}): kept as {aside.name}, a new one is begun",)
            self._connection = _opened_or_fail(path)

    @contextmanager
    def transaction(self, *, sync: bool = True) -> Iterator[sqlite3.Connection]:
        """Commit all changes in the block at its end, or none. May be nested.

        Without ``sync`` nobody waits for the disk, and a power cut may undo it.

        Raises:
            StorageError: the disk is full, the file damaged, or another app keeps it locked.
        """
        with self._lock, self._in_words():
            if self._depth:
                yield self._connection
                return
            self._connection.execute(f"PRAGMA synchronous = {'FULL' if sync else 'NORMAL'}")
            self._connection.execute("BEGIN IMMEDIATE")
            self._depth += 1
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
            finally:
                self._depth -= 1

    def rows(self, query: str, values: Sequence[object] = ()) -> list[sqlite3.Row]:
        """The result of ``query``. Raises as ``transaction``."""
        with self._lock, self._in_words():
            return self._connection.execute(query, values).fetchall()

    def close(self) -> None:
        """Close the file; safe to repeat."""
        with self._lock:
            self._connection.close()

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.ProgrammingError as error:
            if "closed" not in str(error):
                raise
            raise StorageError("the history is closed") from error
        except sqlite3.Error as error:
            raise StorageError(f"cannot use {self.path}: {_reason(error)}") from error


def insert(connection: sqlite3.Connection, table: str, **values: object) -> int:
    """Add a row with these columns; returns its number."""
    names, places = ", ".join(values), ", ".join("?" * len(values))
    query = f"INSERT INTO {table} ({names}) VALUES ({places})"  # names come from code
    number = connection.execute(query, [*values.values()]).lastrowid
    assert number is not None, "an insert has a row"
    return number


def keep_aside(connection: sqlite3.Connection, conversation: str, **values: object) -> None:
    """Change ``pinned``, or ``draft`` and its ``writer``, of a conversation."""
    names, places = ", ".join(values), ", ".join("?" * len(values))
    changes = ", ".join(f"{name} = excluded.{name}" for name in values)
    query = f"INSERT INTO aside (conversation, {names}) VALUES (?, {places})"  # as above
    query += f" ON CONFLICT (conversation) DO UPDATE SET {changes}"
    connection.execute(query, (conversation, *values.values()))


def erase(
    database: Database,
    delete: Callable[[sqlite3.Connection], None],
    said: Iterable[Mapping[str, Any]],
    since: float,
) -> None:
    """Delete turns by ``delete``, their words in the search index, and the saved KV caches of
    messages ``said``; of caches that name no messages, those used ``since``.
    """
    with database.transaction() as connection:
        delete(connection)
        # Without it, deleted words stay in the index until it is merged some day.
        connection.execute("INSERT INTO turn_text (turn_text) VALUES ('optimize')")
    if database.path is None:
        return
    database.rows("PRAGMA wal_checkpoint(TRUNCATE)")
    from localrt.engine.saved_caches import forget, marks_of  # brings numpy

    forget(Settings.from_environment().cache_dir / "kv", marks_of(said), since)


class _NewerError(Exception):
    """The file's schema has a later version number."""


class _Connection(sqlite3.Connection):
    """SQLite refuses lone surrogates, which JSON may hold: each is U+FFFD here."""

    def execute(self, query: str, values: Any = ()) -> sqlite3.Cursor:
        try:
            return super().execute(query, values)
        except UnicodeEncodeError:
            return super().execute(query, [paired(v) if isinstance(v, str) else v for v in values])


def _connected(path: Path | str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path,
        timeout=_BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
        factory=_Connection,
    )
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA secure_delete = ON")  # not every build's default
    return connection


def _in_memory() -> sqlite3.Connection:
    connection = _connected(":memory:")
    connection.executescript(_SCHEMA)
    connection.execute(
        "INSERT INTO sqlite_sequence (name, seq) VALUES ('turn', ?)", (MEMORY_FIRST - 1,)
    )
    return connection


def _opened(path: Path) -> sqlite3.Connection:
    private_file(path)  # SQLite's other files get the same permissions
    for beside in path.parent.glob(f"{glob.escape(path.name)}[-.]*"):  # -wal, .damaged-2026...
        keep_private(beside)
    connection = _connected(path)
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > _VERSION:
            raise _NewerError(version)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError:  # as on some network drives, which share no memory
            connection.execute("PRAGMA journal_mode = DELETE")
        if path.stat().st_size <= _CHECKED_WHOLE:
            (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            if found != "ok":
                raise sqlite3.DatabaseError(str(found).splitlines()[-1])
        known = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'aside'").fetchone()
        if version < _VERSION or known is None:
            connection.executescript(_SCHEMA)
    except BaseException:
        connection.close()
        raise
    return connection


def _opened_twice(path: Path) -> sqlite3.Connection:
    """Open a file. If SQLite calls it damaged, read it, which raises OSError if it is the disk that
    fails, and open it again.
    """
    try:
        return _opened(path)
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError:
        with path.open("rb") as file:
            while file.read(_PIECE):
                pass
    return _opened(path)


def _opened_or_fail(path: Path) -> sqlite3.Connection:
    try:
        return _opened(path)
    except (OSError, sqlite3.Error, _NewerError) as error:
        raise StorageError(f"cannot open {path}: {error}") from error


def _put_aside(path: Path) -> Path:
    aside = path.with_name(f"{path.name}.damaged-{datetime.now():%Y%m%d-%H%M%S}")
    for end in ("", "-wal", "-shm"):
        with suppress(FileNotFoundError):
            path.with_name(path.name + end).rename(aside.with_name(aside.name + end))
    return aside


def _reason(error: sqlite3.Error) -> str:
    text = str(error)
    if "locked" in text:
        return "another app keeps it locked; try again"
    if "full" in text:
        return "the disk is full; free some space and try again"
    if "malformed" in text or "not a database" in text:
        return "it is damaged, or the disk fails; the next start checks it"
    return text


_ENDS = ("done", "cancelled", "failed")
_SENTENCE_END = re.compile(r"[.!?…。！？][\"')\]]*\s|\n")
_SAVE_SECONDS = 2.0  # tables and lists of numbers have no sentences
_RETRY_SECONDS = 2.0


class AnswerWriter:
    """Writes an answer, from ``Conversation.answer`` or ``reopen``. Leaving the ``with`` block
    ends it: as ``"done"``, or after an exception as ``"failed"`` (``"cancelled"`` for
    ``CancelledError``).

    ``write`` never fails: unsaved text is kept and retried, ``problem`` says why. ``before`` is the
    state of an answer that was reopened: without a ``write`` it stays as it was.
    """

    def __init__(
        self, database: Database, conversation: str, turn: int, *, before: str | None = None
    ) -> None:
        self._database = database
        self._conversation = conversation
        self._before = before
        self.turn = turn
        self.problem: str | None = None
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
        if self.problem is not None and waited < _RETRY_SECONDS:
            return
        if _SENTENCE_END.search(self._open) or (self._open and waited >= _SAVE_SECONDS):
            self._save()

    def finish(self, state: str = "done", *, info: Mapping[str, Any] | None = None) -> None:
        """End the answer; ``state`` is ``"done"``, ``"cancelled"`` or ``"failed"``.

        Raises:
            StorageError: it could not be saved; call it again to retry.
        """
        if state not in _ENDS:
            raise OptionError(f"an answer ends as {', '.join(_ENDS)}, not as {state!r}")
        if self._finished:
            return
        if self._before is not None and not self.text:
            state, info = self._before, None
        with self._database.transaction() as connection:
            settle(connection, self.turn, state, self.text, info)
            connection.execute(
                "UPDATE conversation SET updated = ? WHERE id = ?",
                (time.time(), self._conversation),
            )
        self._finished, self.problem = True, None

    def __enter__(self) -> AnswerWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (CancelledError, GeneratorExit)):
            self.finish("cancelled")
        else:
            self.finish("done" if error is None else "failed")

    def _save(self) -> None:
        self._saved_at = time.monotonic()
        try:
            with self._database.transaction(sync=False) as connection:
                insert(connection, "piece", turn=self.turn, text=self._open)
        except StorageError as error:
            self.problem = str(error)
        else:
            self._saved, self._open, self.problem = self._saved + self._open, "", None


def settle_cut(connection: sqlite3.Connection) -> None:
    """End the answers whose writers have ended. Reading also tells so, but writes nothing."""
    writing = connection.execute("SELECT id, writer FROM turn WHERE state = 'writing'").fetchall()
    for row in writing:
        if not is_alive(row["writer"]):
            settle(connection, row["id"], "cut", None)


def settle(
    connection: sqlite3.Connection,
    turn: int,
    state: str,
    text: str | None,
    info: Mapping[str, object] | None = None,
) -> None:
    """End a turn: its content is ``text`` if given, otherwise the saved pieces, otherwise what it
    was before it was reopened.
    """
    if not text:
        pieces = connection.execute("SELECT text FROM piece WHERE turn = ? ORDER BY id", (turn,))
        text = "".join(row["text"] for row in pieces)
    connection.execute("DELETE FROM piece WHERE turn = ?", (turn,))
    connection.execute(
        "UPDATE turn SET content = coalesce(nullif(?, ''), content), state = ?, writer = NULL"
        " WHERE id = ? AND state = 'writing'",
        (text, state, turn),
    )
    if info is not None:
        connection.execute("UPDATE turn SET info = ? WHERE id = ?", (json.dumps(dict(info)), turn))
