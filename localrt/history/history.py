"""The history: conversations that can be listed, searched and continued."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localrt.common.closing import Closing
from localrt.common.errors import OptionError, StorageError
from localrt.common.files import keep_private, user_path, write_text
from localrt.common.processes import is_alive
from localrt.common.progress import ProgressCallback
from localrt.common.settings import Settings
from localrt.history.conversation import Conversation
from localrt.history.database import Database, GoneError, UnavailableError
from localrt.history.importing import load_file
from localrt.history.operations import Begin, Delete, TurnData, settle_cut
from localrt.history.outbox import Outbox

_COPY = " (copy)"  # ends the title of one
_FILE = "history.db"
_MEMORY = ":memory:"
_TEXTS = "SELECT content FROM turn WHERE conversation = ? ORDER BY id"
_LIST = """
    SELECT c.id, c.title, c.model, c.created, c.updated, a.pinned IS NOT NULL AS pinned,
        (SELECT count(*) FROM turn t WHERE t.conversation = c.id) AS turns, '' AS snippet
    FROM conversation c LEFT JOIN aside a ON a.conversation = c.id
    WHERE c.first IS NOT NULL OR c.title != ''
    ORDER BY a.pinned IS NULL, c.updated DESC, c.created DESC"""
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
    ORDER BY a.pinned IS NULL, c.updated DESC, c.created DESC"""
_UNSENT = """
    SELECT id, writer FROM conversation JOIN draft ON conversation = id
    WHERE first IS NULL AND title = '' ORDER BY created DESC
"""
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


@dataclass(frozen=True, slots=True)
class LoadedFile:
    """The ``conversations`` of a file, in its order, and lines about what was ``left_out``."""

    conversations: tuple[Conversation, ...]
    left_out: tuple[str, ...] = ()


class History(Closing):
    """Conversations in one file, by default in the user's data folder. Thread-safe.

    Several apps may use one file at the same time. ``":memory:"`` keeps them without a file until
    ``close``. ``notes`` are lines that a user should see. ``patient``: a file that cannot be opened
    now is tried again; until then conversations are in memory, as ``problem`` says.

    Raises:
        StorageError: the file cannot be used; a damaged one is renamed, with a line in ``notes``.
    """

    def __init__(self, path: str | Path | None = None, *, patient: bool = False) -> None:
        if not isinstance(path, str | Path | None):
            raise OptionError(f"path must be a path, is {path!r:.80}")
        if path is None:
            folder = Settings.from_environment().data_dir
            keep_private(folder)
            path = folder / _FILE
        self._database = Database(None if path == _MEMORY else user_path(path), patient=patient)
        with suppress(StorageError), self._database.transaction() as connection:
            settle_cut(connection)  # for the search; who has no room can read
        self._outbox = Outbox(self._database)

    @property
    def path(self) -> Path | None:
        """The file; None in memory."""
        return self._database.path

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the user about opening the file."""
        return self._database.notes

    @property
    def problem(self) -> str:
        """How many changes are not in the file yet, and why, in one line; "" if all are.

        They are tried again until then. A lock of less than a second is not told.
        """
        return self._outbox.problem

    @property
    def unsaved(self) -> int:
        """How many changes are neither in the file nor written by ``write_unsaved``."""
        return self._outbox.count

    def save(self) -> bool:
        """Try again what is not in the file yet; whether all is now."""
        return self._outbox.flush()

    def write_unsaved(self, folder: str | Path) -> tuple[Path, ...]:
        """Write the conversations of which something is not in the file yet to files that
        ``load_file`` reads, with all their branches. They are still saved to the file, if it can be
        written in time.

        Raises:
            StorageError: the folder cannot be written to.
        """
        from localrt.history.export import as_branches

        written = list[Path]()
        for id in self._outbox.waiting:
            changes = self._outbox.unsaved_of(id)
            if all(isinstance(each, Delete) for each in changes):
                continue
            shown = None
            with suppress(StorageError):
                shown = Conversation(self._outbox, id)
            path = user_path(folder) / f"unsaved-{id[:12]}.json"
            text = as_branches(shown, [change.said for change in changes])
            write_text(path, text, private=True, folder=True)
            written.append(path)
            for change in changes:
                change.elsewhere = True
        return tuple(written)

    def list(
        self, search: str = "", *, limit: int = 100, offset: int = 0
    ) -> list[ConversationInfo]:
        """Conversations, pinned ones first, then by their latest use. ``search`` selects those with
        all its words in one turn, or with its text in the title. The last word may be a prefix.
        """
        search = search.replace("\0", " ")  # which would end a full-text query
        waiting = self._outbox.waiting
        values: tuple[object, ...] = (limit + len(waiting), offset)
        if not search.strip():
            query = _LIST
        else:
            title = "%" + re.sub(r"([\\%_])", r"\\\1", search.strip()) + "%"
            query, values = _SEARCH, (_match(search), title, *values)
        found: dict[str, dict[str, Any]] = {}
        try:
            for row in self._database.rows(f"{query} LIMIT ? OFFSET ?", values):
                found[row["id"]] = dict(row)
        except UnavailableError:
            if not waiting:
                raise
        if waiting:
            found = self._with_waiting(found, waiting, search, offset)
        for each in found.values():
            each["pinned"] = bool(each["pinned"])
            each["snippet"] = _snippet(each["snippet"], search)
        return [ConversationInfo(**each) for each in found.values()][:limit]

    def _with_waiting(
        self, found: dict[str, dict[str, Any]], waiting: Sequence[str], search: str, offset: int
    ) -> dict[str, dict[str, Any]]:
        """The list with the conversations of which something waits as they will be."""
        found = {id: row for id, row in found.items() if id not in waiting}
        for row in self._outbox.rows_of_waiting(_LIST) if not offset else ():
            words = search.lower().split()
            texts = self._outbox.rows(row["id"], _TEXTS, (row["id"],))
            hits = [t["content"] for t in texts if all(w in t["content"].lower() for w in words)]
            if hits or search.strip().lower() in row["title"].lower():
                found[row["id"]] = {**row, "snippet": hits[0] if words and hits else ""}
        rank = lambda row: (not row["pinned"], -row["updated"], -row["created"])  # noqa: E731
        return {row["id"]: row for row in sorted(found.values(), key=rank)}

    def new(
        self, *, model: str, system: str | None = None, options: Mapping[str, Any] | None = None
    ) -> Conversation:
        """An empty conversation; it is written once it has a turn, a title or a draft."""
        given = dict(options or {})
        json.dumps(given)  # what has no JSON is the caller's mistake
        id = uuid.uuid4().hex
        self._outbox.submit(Begin(conversation=id, model=model, system=system, options=given))
        return Conversation(self._outbox, id)

    def open(self, id: str) -> Conversation:
        """Open a listed conversation."""
        try:
            return Conversation(self._outbox, id)
        except GoneError as error:
            raise GoneError(f"no conversation {id}: it may have been deleted") from error

    def delete(self, id: str) -> None:
        """Remove a conversation with all its branches, from the search index and the saved KV
        caches too; nothing happens where there is none.
        """
        self._outbox.submit(Delete(conversation=id))
        self._outbox.pay()

    def fork(self, id: str, turn: int) -> Conversation:
        """Copy a conversation's branch up to ``turn`` as a new conversation.

        Raises:
            StorageError: there is no such conversation, or turn in it.
        """
        old = self.open(id)
        branch = old.branch(turn)
        end = [each.id for each in branch].index(turn) + 1
        names = ("role", "content", "created", "info", "pictures")
        turns = [
            TurnData(
                **{name: getattr(each, name) for name in names},
                state="cut" if each.state == "writing" else each.state,
            )
            for each in branch[:end]
        ]
        copy = Begin(
            conversation=uuid.uuid4().hex,
            model=old.model,
            system=old.system,
            options=old.options,
            title=f"{old.title.removesuffix(_COPY)}{_COPY}",
            turns=turns,
        )
        self._outbox.submit(copy)
        return Conversation(self._outbox, copy.conversation)

    def unsent(self) -> Conversation | None:
        """The newest conversation with a draft and no turns, unless the app that wrote it still
        runs. From then on it is this process's.
        """
        for row in self._database.rows(_UNSENT):
            if not is_alive(row["writer"]):
                found = Conversation(self._outbox, row["id"])
                found.take_draft()
                return found
        return None

    def load_file(
        self, path: str | Path, *, progress: ProgressCallback | None = None
    ) -> LoadedFile:
        """Read conversations from a file, as new ones: from this program, ChatGPT, LM Studio,
        llama.cpp, Open WebUI, or messages in OpenAI's form; ZIP files of these too. All of them are
        kept, or none.

        Raises:
            StorageError: the file cannot be read, is of no known kind, or the history cannot be
                written.
        """
        with self._database.beside() as database:
            ids, left_out = load_file(database, user_path(path), progress)
        return LoadedFile(tuple(Conversation(self._outbox, id) for id in ids), left_out)

    def close(self) -> None:
        """Close the file.

        Raises:
            StorageError: there are changes that are not in the file, and now never will be.
        """
        self._outbox.close()
        problem = self._outbox.problem if self._outbox.count else ""
        self._database.close()
        if problem:
            raise StorageError(f"{problem}; they are lost")


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
