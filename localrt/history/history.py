"""The history: conversations that can be listed, searched and continued.

A conversation continues in memory while its file cannot be written, and is copied back later. Turns
keep their numbers in the file; turns added to the copy have numbers that no file uses.
"""

from __future__ import annotations

import json
import re
import sqlite3
import time
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localrt.common.closing import Closing
from localrt.common.errors import OptionError, StorageError
from localrt.common.files import keep_private, user_path
from localrt.common.processes import is_alive, own_name
from localrt.common.settings import Settings
from localrt.history.conversation import Conversation, Turn
from localrt.history.database import (
    MEMORY_FIRST,
    Database,
    erase,
    insert,
    keep_aside,
    settle,
    settle_cut,
)
from localrt.history.importing import LoadedFile, load_file
from localrt.history.pictures import keep_pictures, split_info, stored_info

_COPY = " (copy)"  # ends the title of one
_FILE = "history.db"
_MEMORY = ":memory:"
_LIST = """
    SELECT c.id, c.title, c.model, c.created, c.updated, a.pinned IS NOT NULL AS pinned,
        (SELECT count(*) FROM turn t WHERE t.conversation = c.id) AS turns, '' AS snippet
    FROM conversation c LEFT JOIN aside a ON a.conversation = c.id
    WHERE c.first IS NOT NULL OR c.title != ''
    ORDER BY a.pinned IS NULL, c.updated DESC, c.created DESC LIMIT ? OFFSET ?
"""
_SEARCH = """
    WITH hit AS (
        SELECT t.conversation AS id, min(turn_text.rowid) AS turn
        FROM turn_text JOIN turn t ON t.id = turn_text.rowid
        WHERE turn_text MATCH ? GROUP BY t.conversation
    )
    SELECT c.id, c.title, c.model, c.created, c.updated, a.pinned IS NOT NULL AS pinned,
        (SELECT count(*) FROM turn t WHERE t.conversation = c.id) AS turns,
        coalesce((SELECT content FROM turn WHERE id = hit.turn), '') AS snippet
    FROM conversation c LEFT JOIN hit ON hit.id = c.id LEFT JOIN aside a ON a.conversation = c.id
    WHERE hit.id IS NOT NULL OR c.title LIKE ? ESCAPE '\\'
    ORDER BY a.pinned IS NULL, c.updated DESC, c.created DESC LIMIT ? OFFSET ?
"""
_DELETE_EMPTY = """
    DELETE FROM conversation WHERE first IS NULL AND title = '' AND created < ?
    AND id NOT IN (SELECT conversation FROM aside WHERE draft != '')
"""
_UNSENT = """
    SELECT id, writer FROM conversation JOIN aside ON conversation = id
    WHERE first IS NULL AND draft != '' ORDER BY created DESC
"""
_EMPTY_KEPT = 86_400.0  # seconds: another app may be about to write to it
_SNIPPET = 80  # characters around a match


@dataclass(frozen=True, slots=True)
class ConversationInfo:
    """An entry of the list. Times are in seconds since the epoch; ``turns`` counts all branches.

    ``snippet`` is the text around a search's match; empty without a search or if the title matched.
    """

    id: str
    title: str
    model: str
    created: float
    updated: float
    turns: int
    snippet: str
    pinned: bool = False


class History(Closing):
    """Conversations in one file, by default in the user's data folder. Thread-safe.

    Several apps may use one file at the same time. ``":memory:"`` keeps them without a file until
    ``close``. ``notes`` are lines that a user should see.

    Raises:
        StorageError: the file cannot be used; a damaged one is renamed, with a line in ``notes``.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        if not isinstance(path, str | Path | None):
            raise OptionError(f"path must be a path, is {path!r:.80}")
        if path is None:
            folder = Settings.from_environment().data_dir
            keep_private(folder)
            path = folder / _FILE
        self._database = Database(None if path == _MEMORY else user_path(path))
        with self._database.transaction() as connection:
            connection.execute(_DELETE_EMPTY, (time.time() - _EMPTY_KEPT,))
        with suppress(StorageError), self._database.transaction() as connection:
            settle_cut(connection)  # for the search; who has no room can read

    @property
    def path(self) -> Path | None:
        """The file; None in memory."""
        return self._database.path

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the user about opening the file."""
        return self._database.notes

    def list(
        self, search: str = "", *, limit: int = 100, offset: int = 0
    ) -> list[ConversationInfo]:
        """Conversations, pinned ones first, then by their latest use. ``search`` selects those with
        all its words in one turn, or with its text in the title. The last word may be a prefix.
        """
        search = search.replace("\0", " ")  # which would end a full-text query
        if not search.strip():
            rows = self._database.rows(_LIST, (limit, offset))
        else:
            title = "%" + re.sub(r"([\\%_])", r"\\\1", search.strip()) + "%"
            rows = self._database.rows(_SEARCH, (_match(search), title, limit, offset))
        found = [dict(row) for row in rows]
        for each in found:
            each["pinned"] = bool(each["pinned"])
            each["snippet"] = _snippet(each["snippet"], search)
        return [ConversationInfo(**each) for each in found]

    def new(
        self, *, model: str, system: str | None = None, options: Mapping[str, Any] | None = None
    ) -> Conversation:
        """An empty conversation; it is listed once it has a turn or a title."""
        number, now = uuid.uuid4().hex, time.time()
        with self._database.transaction() as connection:
            given = json.dumps(dict(options or {}))
            facts = {"title": "", "model": model, "system": system, "options": given}
            insert(connection, "conversation", id=number, **facts, created=now, updated=now)
        return Conversation(self._database, number)

    def open(self, id: str) -> Conversation:
        """Open a listed conversation."""
        try:
            return Conversation(self._database, id)
        except StorageError as error:
            raise StorageError(f"no conversation {id}: it may have been deleted") from error

    def delete(self, id: str) -> None:
        """Remove a conversation with all its branches, from the search index and the saved KV
        caches too; nothing happens where there is none.
        """
        began = self._database.rows("SELECT created FROM conversation WHERE id = ?", (id,))
        if not began:
            return
        turns = self._database.rows("SELECT role, content FROM turn WHERE conversation = ?", (id,))

        def delete(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM conversation WHERE id = ?", (id,))

        erase(self._database, delete, map(dict, turns), began[0]["created"])

    def fork(self, id: str, turn: int) -> Conversation:
        """Copy a conversation's branch up to ``turn`` as a new conversation.

        Raises:
            StorageError: there is no such conversation, or turn in it.
        """
        old = self.open(id)
        branch = old.branch(turn)
        end = [each.id for each in branch].index(turn) + 1
        with self._database.transaction() as connection:
            copy = self.new(model=old.model, system=old.system, options=old.options)
            copy.set(title=f"{old.title.removesuffix(_COPY)}{_COPY}")
            _copy_turns(connection, copy, branch[:end])
        return copy

    def unsent(self) -> Conversation | None:
        """The newest conversation with a draft and no turns, unless the app that wrote it still
        runs. From then on it is this process's.
        """
        with self._database.transaction() as connection:
            for row in connection.execute(_UNSENT).fetchall():
                if not is_alive(row["writer"]):
                    keep_aside(connection, row["id"], writer=own_name())
                    return Conversation(self._database, row["id"])
        return None

    def load_file(self, path: str | Path) -> LoadedFile:
        """Read conversations from a file, as new ones: from this program, ChatGPT, LM Studio,
        llama.cpp, Open WebUI, or messages in OpenAI's form; ZIP files of these too.

        Raises:
            StorageError: the file cannot be read, or is of no known kind.
        """
        return load_file(self.new, user_path(path))

    def close(self) -> None:
        """Close the file."""
        self._database.close()


def _match(search: str) -> str:
    """The words of ``search`` as a full-text query; no word is an operator."""
    words = ['"' + word.replace('"', '""') + '"' for word in search.split()]
    return " ".join(words) + "*"


def _snippet(text: str, search: str) -> str:
    """The part of ``text`` around the first word of ``search``, on one line."""
    line = " ".join(text.split())
    if len(line) <= _SNIPPET:
        return line
    words = search.split()
    found = line.lower().find(words[0].lower()) if words else -1
    start = max(0, min(found - _SNIPPET // 3, len(line) - _SNIPPET))
    cut = line[start : start + _SNIPPET]
    return ("…" if start else "") + cut + ("…" if start + _SNIPPET < len(line) else "")


_SAME = ("role", "content", "state", "created")
_TURN = (*_SAME, "info")
_FACTS = ("title", "model", "system", "options", "updated")


def copy_to_memory(
    memory: History, id: str, turns: Iterable[Turn], facts: Mapping[str, object]
) -> Conversation:
    """Copy a branch of a conversation to ``memory``, under the same id.

    ``facts`` are ``title``, ``model``, ``system`` and ``options``. The file is not read: it may be
    locked, damaged or missing.
    """
    now = time.time()
    kept = {name: facts[name] for name in ("title", "model", "system")}
    options = json.dumps(facts["options"])
    with memory._database.transaction() as connection:
        insert(connection, "conversation", id=id, **kept, options=options, created=now, updated=now)
        copy = Conversation(memory._database, id)
        _copy_turns(connection, copy, turns, numbered=True)
    return copy


def _copy_turns(
    connection: sqlite3.Connection,
    copy: Conversation,
    turns: Iterable[Turn],
    *,
    numbered: bool = False,
) -> None:
    """Write the turns of a branch to ``copy``. ``numbered``: under the same numbers, and with an
    answer that is still written.
    """
    parent = None
    for turn in turns:
        same = {name: getattr(turn, name) for name in _SAME}
        writer = own_name() if turn.state == "writing" else None
        if numbered:
            same["id"] = turn.id
        elif writer is not None:
            same["state"], writer = "cut", None
        info = stored_info(turn.info, turn.pictures)
        place = {"conversation": copy.id, "parent": parent}
        parent = insert(connection, "turn", **place, **same, writer=writer, info=info)
        keep_pictures(connection, parent, turn.pictures)
    if parent is not None:
        copy._show(connection, parent)


def end_answer(
    copy: Conversation, number: int, state: str, content: str, info: Mapping[str, object]
) -> None:
    """End an answer in the copy whose writer began it in the file."""
    with copy._database.transaction() as connection:
        settle(connection, number, state, content, info)


def merge(file: Conversation, copy: Conversation) -> dict[int, int]:
    """Write turns added to the copy, and answers that ended there, into the file.

    Returns:
        The file's numbers of the added turns, by their numbers in the copy.

    Raises:
        StorageError: an answer is still being written, or the file cannot be written; nothing is
        changed.
    """
    rows = copy._database.rows("SELECT * FROM turn WHERE conversation = ? ORDER BY id", (copy.id,))
    if any(row["state"] == "writing" and row["id"] >= MEMORY_FIRST for row in rows):
        raise StorageError("an answer is still being written")
    facts, shown = copy._row(), copy.turns
    numbers: dict[int, int] = {}
    with file._database.transaction() as connection:
        for row in rows:
            if row["id"] >= MEMORY_FIRST:
                values = {name: row[name] for name in _TURN}
                parent = numbers.get(row["parent"], row["parent"])
                number = insert(connection, "turn", conversation=file.id, parent=parent, **values)
                numbers[row["id"]] = number
                pictures = split_info(row["info"], len(row["content"]), copy._picture)[1]
                keep_pictures(connection, number, pictures)
            elif row["state"] != "writing" and file.turn(row["id"]).state == "writing":
                info = json.loads(row["info"])
                settle(connection, row["id"], row["state"], row["content"], info)
        connection.execute(
            f"UPDATE conversation SET {', '.join(f'{name} = ?' for name in _FACTS)} WHERE id = ?",
            (*(facts[name] for name in _FACTS), file.id),
        )
        if shown:
            file._show(connection, numbers.get(shown[-1].id, shown[-1].id))
    return numbers
