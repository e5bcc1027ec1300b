"""The SQLite database behind the history: schema versions, damage, files that come and go.

Write-ahead logging lets several apps use one file. What is committed survives a killed process and
a power cut; sentences of an unfinished answer survive only the former. An unusable file is never
overwritten: a damaged one is renamed, and beside one of a newer version another file is begun.
Without a file the same tables are in memory.

``UnavailableError`` says that the file cannot be used now and may be later: the disk is full,
another app keeps it locked, it was removed. Foreign keys are not enforced: their cascades are a
level of SQLite's triggers for each turn, of which it allows a thousand, so deleting names all its
tables.
"""

from __future__ import annotations

import errno
import glob
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from localrt.common.errors import StorageError, reason_of
from localrt.common.files import keep_private, private_file, private_folder
from localrt.common.forks import finalize
from localrt.common.formatting import paired

_VERSION = 3  # 2 added pictures, 3 a draft for each window, and debts
# Without the word index, which the part of a history that waits to be saved does not need.
TABLES = """
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
        conversation TEXT NOT NULL REFERENCES conversation (id),
        parent INTEGER REFERENCES turn (id),
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
        turn INTEGER NOT NULL REFERENCES turn (id),
        text TEXT NOT NULL
    );
    CREATE INDEX IF NOT EXISTS piece_turn ON piece (turn);
    CREATE TABLE IF NOT EXISTS picture (
        digest TEXT PRIMARY KEY,
        data BLOB NOT NULL
    );
    CREATE TABLE IF NOT EXISTS turn_picture (
        turn INTEGER NOT NULL REFERENCES turn (id),
        picture TEXT NOT NULL REFERENCES picture (digest),
        PRIMARY KEY (turn, picture)
    ) WITHOUT ROWID;
    CREATE INDEX IF NOT EXISTS turn_picture_picture ON turn_picture (picture);
    CREATE TABLE IF NOT EXISTS aside (
        conversation TEXT PRIMARY KEY REFERENCES conversation (id),
        pinned REAL
    );
    CREATE TRIGGER IF NOT EXISTS turn_picture_gone AFTER DELETE ON turn_picture
        WHEN NOT EXISTS (SELECT 1 FROM turn_picture WHERE picture = old.picture)
    BEGIN
        DELETE FROM picture WHERE digest = old.picture;
    END;
"""
# Drafts by the names of the windows that wrote them. What has been deleted and must still leave
# the saved KV caches (``marks``, ``since``), or the word index: as ``gone`` turns, and by merging
# it (no marks, ``steps`` done). FTS5 has a mode that does so at once, in a form that SQLite before
# 3.42 cannot read, which other programs with this file may have.
_NEW_TABLES = """
    CREATE {temp} TABLE IF NOT EXISTS draft (
        conversation TEXT NOT NULL,
        writer TEXT NOT NULL,
        text TEXT NOT NULL,
        PRIMARY KEY (conversation, writer)
    ) WITHOUT ROWID;
    CREATE {temp} TABLE IF NOT EXISTS debt (
        id INTEGER PRIMARY KEY,
        marks TEXT,
        since REAL,
        steps INTEGER NOT NULL DEFAULT 0
    );
    CREATE {temp} TABLE IF NOT EXISTS gone (id INTEGER PRIMARY KEY, content TEXT NOT NULL);
"""
_WORDS = """
    CREATE VIRTUAL TABLE IF NOT EXISTS turn_text
        USING fts5 (content, content='turn', content_rowid='id');
    CREATE TRIGGER IF NOT EXISTS turn_added AFTER INSERT ON turn BEGIN
        INSERT INTO turn_text (rowid, content) VALUES (new.id, new.content);
    END;
    DROP TRIGGER IF EXISTS turn_gone;
    CREATE TRIGGER turn_gone AFTER DELETE ON turn BEGIN
        INSERT OR REPLACE INTO gone (id, content) VALUES (old.id, old.content);
    END;
    CREATE TRIGGER IF NOT EXISTS turn_written AFTER UPDATE OF content ON turn BEGIN
        INSERT INTO turn_text (turn_text, rowid, content) VALUES ('delete', old.id, old.content);
        INSERT INTO turn_text (rowid, content) VALUES (new.id, new.content);
    END;
"""
_SCHEMA = f"{TABLES} {_NEW_TABLES.format(temp='')} {_WORDS} PRAGMA user_version = {_VERSION};"
# Of earlier versions, which wrote conversations before they had anything, and drafts beside them.
_TIDIED = """
    INSERT OR IGNORE INTO draft SELECT conversation, coalesce(writer, ''), draft
        FROM aside WHERE draft != '';
    UPDATE aside SET draft = '';
    DELETE FROM conversation WHERE first IS NULL AND title = ''
        AND id NOT IN (SELECT conversation FROM turn UNION SELECT conversation FROM draft
            UNION SELECT conversation FROM aside WHERE pinned IS NOT NULL);
"""
_BUSY_SECONDS = 0.025  # the longest wait for another app's transaction: a screen waits for it, too
LONG_BUSY_SECONDS = 5.0  # for work in threads
_OPENED_BUSY_SECONDS = 0.5  # at the start
_GONE_SECONDS = 60.0  # a file that was moved away may come back; then another one is begun
_CANNOT_WRITE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT)
_PIECE = 1 << 20
_CHECKED_WHOLE = 32 << 20  # bytes; larger files are not checked at opening


_Identity = tuple[int, int]  # device and number


class UnavailableError(StorageError):
    """The file cannot be used now. ``locked``: because another app uses it."""

    def __init__(self, message: str, *, locked: bool = False) -> None:
        super().__init__(message)
        self.locked = locked


class GoneError(StorageError):
    """What is to be read or changed was deleted."""


class Database:
    """A file of tables, for any thread; ``path`` None keeps all in memory.

    ``notes`` are lines that the user should see. ``patient``: a file that cannot be opened now is
    tried again by ``open``. ``busy`` is the longest wait for other apps' transactions, in seconds.

    Raises:
        UnavailableError: it cannot be opened now, and the caller is not ``patient``.
        StorageError: it never can.
    """

    def __init__(
        self, path: Path | None, *, patient: bool = False, busy: float = _BUSY_SECONDS
    ) -> None:
        self.path = path
        self.notes: tuple[str, ...] = ()
        self.lock = threading.RLock()
        self._busy = busy
        self._depth = self._opened = 0
        self._connections: list[sqlite3.Connection] = []  # the open one, if any
        self._file: _Identity | None = None  # of the file that was opened, and of its log
        self._log: _Identity | None = None
        self._gone: float | None = None  # since when there is none at ``path``
        self._why: UnavailableError | None = None  # why nothing can be written, if so
        self._closed = False
        finalize(self, _close, self._connections)  # for callers who do not
        if path is None:
            self._connections.append(_in_memory())
            return
        try:
            self.open()
        except UnavailableError:
            if not patient:
                raise

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    @property
    def is_open(self) -> bool:
        """Whether the file can be written, as far as is known."""
        return bool(self._connections) and self._why is None

    @property
    def problem(self) -> str:
        """Why nothing can be written, in one line; "" if it can, as far as is known."""
        return "" if self.is_open or self._closed else f"nothing can be saved: {self._why}"

    def open(self, *, anew: bool = False) -> None:
        """Open the file, if it is not open and writable. ``anew``: a file that was moved away has
        been lost; the next one begins empty.

        Raises:
            UnavailableError: it cannot be opened now.
        """
        with self.lock:
            if self.path is None or self._closed or (self.is_open and not self._was_moved()):
                return
            # First, as SQLite lends what it has open to the next connection.
            self._close_connection()
            lost = self._gone is not None and time.monotonic() - self._gone > _GONE_SECONDS
            if self._file is not None and not (anew or lost or _identity(self.path)):
                self._gone = self._gone or time.monotonic()
                self._why = UnavailableError(f"{self.path} {_why_none(self.path)}")
                raise self._why
            connection, why = self._connected(self.path)
            self._why = why
            if connection is None:
                assert why is not None, "there is a connection, or a reason"
                raise why
            self._connections.append(connection)
            self._opened, self._gone = self._opened + 1, None
            connection.execute(f"PRAGMA busy_timeout = {round(self._busy * 1000)}")
            self._file, self._log = _identity(self.path), None

    def _connected(self, path: Path) -> tuple[sqlite3.Connection | None, UnavailableError | None]:
        """A connection, if there can be one, and why the file cannot be written, if so."""
        first = self._opened == 0
        try:
            private_folder(path.parent)
            if not _size(path) and _size(_log_of(path)):
                kept = f"{_put_aside(path).name}-wal"
                self.notes += (f"{path} is missing, beside its log: that is kept as {kept}",)
            return _opened_twice(path, check=first), None
        except _NewerError as newer:
            self.path = path.with_name(f"{path.stem}.v{_VERSION}{path.suffix}")
            self.notes += (
                f"{path} is of a newer localrt (version {newer}): left as it is, "
                f"conversations go to {self.path.name}",
            )
            return _opened_instead(self.path)
        except (OSError, sqlite3.OperationalError) as error:
            place = f"open {path}" if _identity(path) else f"keep conversations in {path.parent}"
            why = f"cannot {place}: {_reason(error, path.parent)}"
            unavailable = UnavailableError(why, locked="locked" in str(error))
            if not isinstance(error, OSError) or error.errno in _CANNOT_WRITE:
                with suppress(OSError, sqlite3.Error):
                    return _opened_to_read(path), unavailable
            return None, unavailable
        except sqlite3.DatabaseError as error:
            try:
                aside = _put_aside(path)
            except OSError as failed:
                why = f"{path} is damaged, and cannot be put aside: {reason_of(failed)}"
                return None, UnavailableError(why)
            note = f"{path} is damaged ({error}): kept as {aside.name}, a new one is begun"
            self.notes += (note,)
            return _opened_instead(path)

    def _was_moved(self) -> bool:
        """Whether another file or log, or none, is where the open one was, or it has come back."""
        if self.path is None or self._file is None:
            return False
        log = _identity(_log_of(self.path))
        self._log = self._log or log  # it is made with the first change
        return not self._connections or (_identity(self.path), log) != (self._file, self._log)

    def _ready(self, *, write: bool) -> sqlite3.Connection:
        """The connection. It is opened again where that takes no time."""
        if self._closed:
            raise StorageError("the history is closed")
        if self._depth == 0 and self._was_moved():
            self.open()
        if not self._connections or (write and self._why is not None):
            raise self._why or UnavailableError(f"{self.path} is not open")
        return self._connections[0]

    @contextmanager
    def transaction(self, *, sync: bool = True) -> Iterator[sqlite3.Connection]:
        """Commit all changes in the block at its end, or none. May be nested.

        Without ``sync`` nobody waits for the disk, and a power cut may undo it.

        Raises:
            UnavailableError: the disk is full, the file damaged or removed, or another app keeps it
                locked.
        """
        with self.lock, self._in_words():
            connection = self._ready(write=True)
            if self._depth:
                yield connection
                return
            connection.execute(f"PRAGMA synchronous = {'FULL' if sync else 'NORMAL'}")
            connection.execute("BEGIN IMMEDIATE")
            self._depth += 1
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            finally:
                self._depth -= 1

    @contextmanager
    def beside(self) -> Iterator[Database]:
        """The same file by another connection, for work that takes longer than a screen may wait:
        who uses this one can read meanwhile, and does not wait to write.
        """
        if self.path is None:
            yield self
            return
        with self.lock:
            self._ready(write=True)
        other = Database(self.path, busy=LONG_BUSY_SECONDS)
        try:
            yield other
        finally:
            other.close()

    def rows(self, query: str, values: Sequence[object] = ()) -> list[sqlite3.Row]:
        """The result of ``query``. Raises as ``transaction``."""
        with self.lock, self._in_words():
            return self._ready(write=False).execute(query, values).fetchall()

    @property
    def version(self) -> int:
        """A number that changes when another app writes to the file. Raises as ``transaction``."""
        found = int(self.rows("PRAGMA data_version")[0][0])
        return (self._opened << 32) + found

    def close(self) -> None:
        """Close the file; safe to repeat."""
        with self.lock:
            self._closed = True
            self._close_connection()

    def _close_connection(self) -> None:
        with suppress(sqlite3.Error):
            if self._connections and self._was_moved():
                # What is in the log goes to the file, wherever that is: the log may stay behind.
                self._connections[0].execute("PRAGMA wal_checkpoint(TRUNCATE)")
        with suppress(sqlite3.Error):
            _close(self._connections)

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.ProgrammingError, sqlite3.InterfaceError):
            raise
        except sqlite3.IntegrityError as error:
            raise StorageError(f"cannot use {self.path}: {error}") from error
        except sqlite3.Error as error:
            why = f"cannot use {self.path}: {_reason(error)}"
            unavailable = UnavailableError(why, locked="locked" in str(error))
            if "readonly" in str(error):  # SQLite never writes by this connection
                self._why = unavailable
            raise unavailable from error


def insert(connection: sqlite3.Connection, table: str, **values: object) -> int:
    """Add a row with these columns; returns its number."""
    names, places = ", ".join(values), ", ".join("?" * len(values))
    query = f"INSERT INTO {table} ({names}) VALUES ({places})"  # names come from code
    number = connection.execute(query, [*values.values()]).lastrowid
    assert number is not None, "an insert has a row"
    return number


class _NewerError(Exception):
    """The file's schema has a later version number."""


class _Connection(sqlite3.Connection):
    """SQLite refuses lone surrogates, which JSON may hold: each is U+FFFD here."""

    def execute(self, query: str, values: Any = ()) -> sqlite3.Cursor:
        try:
            return super().execute(query, values)
        except UnicodeEncodeError:
            return super().execute(query, [paired(v) if isinstance(v, str) else v for v in values])


def _connected(
    path: Path | str, *, uri: bool = False, busy: float = _OPENED_BUSY_SECONDS
) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path,
        timeout=busy,
        isolation_level=None,
        check_same_thread=False,
        factory=_Connection,
        uri=uri,
    )
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA foreign_keys = OFF")  # not every build's default
    connection.execute("PRAGMA secure_delete = ON")  # nor is this
    return connection


def _close(connections: list[sqlite3.Connection]) -> None:
    while connections:
        connections.pop().close()


def _in_memory() -> sqlite3.Connection:
    connection = _connected(":memory:")
    _renew(connection)
    return connection


def in_memory(tables: str) -> sqlite3.Connection:
    """A database in memory with only ``tables``, for one thread at a time."""
    connection = _connected(":memory:")
    connection.executescript(tables + _NEW_TABLES.format(temp=""))
    return connection


def _opened(path: Path, *, check: bool = True) -> sqlite3.Connection:
    private_file(path)  # SQLite's other files get the same permissions
    for beside in path.parent.glob(f"{glob.escape(path.name)}[-.]*"):  # -wal, .damaged-2026...
        keep_private(beside)
    connection = _connected(path, busy=_OPENED_BUSY_SECONDS if check else _BUSY_SECONDS)
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > _VERSION:
            raise _NewerError(version)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("SELECT count(*) FROM sqlite_master")
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise
            # As on some network drives, which share no memory: without it, for one connection.
            connection.close()
            connection = _connected(path, busy=_BUSY_SECONDS)
            for change in ("locking_mode = EXCLUSIVE", "journal_mode = DELETE", "user_version"):
                connection.execute(f"PRAGMA {change}").fetchall()
            connection.execute("PRAGMA locking_mode = NORMAL")
            connection.execute("SELECT count(*) FROM sqlite_master").fetchall()
        if check and path.stat().st_size <= _CHECKED_WHOLE:
            (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            if found != "ok":
                raise sqlite3.DatabaseError(str(found).splitlines()[-1])
        if version < _VERSION:
            _renew(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _renew(connection: sqlite3.Connection) -> None:
    """Make the tables, or those that an earlier version lacks."""
    columns = connection.execute("SELECT name FROM pragma_table_info('aside')").fetchall()
    moved = _TIDIED if ("draft",) in map(tuple, columns) else ""
    # In one transaction: another app may be making the same file.
    connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} {moved} COMMIT;")


def _log_of(path: Path) -> Path:
    """The file's write-ahead log."""
    return path.with_name(f"{path.name}-wal")


def _identity(path: Path) -> _Identity | None:
    """What tells a file from others; None if there is none, or it cannot be seen."""
    with suppress(OSError):
        found = path.stat()
        return found.st_dev, found.st_ino
    return None


def _why_none(path: Path) -> str:
    try:
        path.stat()
    except FileNotFoundError:
        return "was removed"
    except OSError as error:
        return f"cannot be seen: {reason_of(error)}"
    return "was removed, and is back"


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0


def _opened_to_read(path: Path) -> sqlite3.Connection:
    """A file that cannot be written, such as one on a disk that is full, or read-only."""
    place = f"file:{quote(str(path.absolute()))}?mode=ro"
    alone = "" if _size(_log_of(path)) else "&immutable=1"
    for end in ("", alone):
        connection = _connected(place + end, uri=True)
        try:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if not 0 < version <= _VERSION:
                raise OSError("it has no tables that can be read")
            if version < _VERSION:
                connection.executescript(_NEW_TABLES.format(temp="TEMP"))
            connection.execute("SELECT count(*) FROM conversation")
        except (OSError, sqlite3.Error):
            connection.close()
            if end == alone:
                raise
        else:
            return connection
    raise AssertionError("the last way returns or raises")


def _opened_twice(path: Path, *, check: bool) -> sqlite3.Connection:
    """Open a file. If SQLite calls it damaged, read it, which raises OSError if it is the disk that
    fails, and open it again.
    """
    try:
        return _opened(path, check=check)
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError:
        with path.open("rb") as file:
            while file.read(_PIECE):
                pass
    return _opened(path)


def _opened_instead(path: Path) -> tuple[sqlite3.Connection | None, UnavailableError | None]:
    try:
        return _opened(path), None
    except (OSError, sqlite3.Error, _NewerError) as error:
        return None, UnavailableError(f"cannot open {path}: {_reason(error)}")


def _put_aside(path: Path) -> Path:
    aside = path.with_name(f"{path.name}.damaged-{datetime.now():%Y%m%d-%H%M%S}")
    for end in ("", "-wal", "-shm"):
        with suppress(FileNotFoundError):
            path.with_name(path.name + end).rename(aside.with_name(aside.name + end))
    return aside


def _reason(error: BaseException, folder: Path | None = None) -> str:
    if not isinstance(error, sqlite3.Error):
        return reason_of(error)
    text = str(error)
    if folder is not None and text in ("unable to open database file", "disk I/O error"):
        with suppress(OSError):  # SQLite does not say why
            text = text if shutil.disk_usage(folder).free else "full"
            text = text if os.access(folder, os.W_OK) else "readonly"
    if "locked" in text:
        return "another app keeps it locked"
    if "full" in text:
        return "the disk is full: free some space"
    if "readonly" in text:
        return "it is read-only"
    if "malformed" in text or "not a database" in text:
        return "it is damaged, or the disk fails; the next start checks it"
    return text
