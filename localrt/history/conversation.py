"""One conversation: a tree of turns, of which one branch is shown.

Editing or regenerating never loses anything: a turn added after an earlier one begins a branch
there. Each turn stores which of its successors was shown last. A turn is text, pictures and, in
``info``, further data of its writer.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from localrt.chat_format.thinking import CLOSE, OPEN, parted
from localrt.common.errors import OptionError, StorageError
from localrt.common.processes import is_alive, own_name
from localrt.engine.types import Message
from localrt.history.database import AnswerWriter, Database, erase, insert, keep_aside, settle_cut
from localrt.history.pictures import (
    KeptPicture,
    joined_content,
    keep_pictures,
    split_content,
    split_info,
    stored_info,
)

_ROW = "SELECT * FROM conversation LEFT JOIN aside ON conversation = id WHERE id = ?"
_ROLES = ("user", "assistant", "tool")
_TITLE_LENGTH = 60


@dataclass(frozen=True, slots=True)
class Turn:
    """A message. It is alternative ``branch`` of ``branches`` (from 1) in its place.

    ``content`` is its text without its ``pictures``. ``state`` is ``"done"``, ``"cancelled"``,
    ``"failed"``, ``"writing"`` (by an app that is still running), or ``"cut"``: the app that wrote
    it ended in the middle. ``created`` is in seconds since the epoch.
    """

    id: int
    role: str
    content: str
    created: float
    state: str
    branch: int
    branches: int
    info: Mapping[str, Any] = field(default_factory=dict)
    pictures: tuple[KeptPicture, ...] = ()

    @property
    def message(self) -> Message:
        """The turn as a chat template takes it; with pictures, its content is parts.

        ``tool_calls``, ``tool_call_id`` and ``name`` come from ``info``.
        """
        content = joined_content(self.content, self.pictures)
        message: Message = {"role": self.role, "content": content}
        for name in ("tool_calls", "tool_call_id", "name"):
            if name in self.info:
                message[name] = self.info[name]
        return message


class Conversation:
    """From ``History.new`` or ``History.open``. Safe for several threads and several apps."""

    def __init__(self, database: Database, id: str) -> None:
        self._database = database
        self.id = id
        self._row()

    # -- title, model, options ---------------------------------------------------------------------

    @property
    def title(self) -> str:
        """The title given to ``set``, otherwise the first turn's first line; empty before that."""
        return str(self._row()["title"])

    @property
    def model(self) -> str:
        """The model that answers."""
        return str(self._row()["model"])

    @property
    def created(self) -> float:
        """When it began, in seconds since the epoch."""
        return float(self._row()["created"])

    @property
    def updated(self) -> float:
        """When a turn last began or ended, in seconds since the epoch."""
        return float(self._row()["updated"])

    @property
    def system(self) -> str | None:
        """The system prompt."""
        text = self._row()["system"]
        return None if text is None else str(text)

    @property
    def options(self) -> dict[str, Any]:
        """Generation options by name."""
        options: dict[str, Any] = json.loads(self._row()["options"])
        return options

    @property
    def pinned(self) -> bool:
        """Whether it is listed before others."""
        return self._row()["pinned"] is not None

    @property
    def draft(self) -> str:
        """The message that the user has not sent yet."""
        return str(self._row()["draft"] or "")

    def keep_draft(self, text: str) -> None:
        """Keep a message that is not sent yet, ``""`` for none, so that it outlives this process.

        For each pause in typing: it neither waits for the disk nor fails.
        """
        writer = own_name() if text else None
        with suppress(StorageError), self._database.transaction(sync=False) as connection:
            keep_aside(connection, self.id, draft=text, writer=writer)

    def set(self, **changes: Any) -> None:
        """Change ``title``, ``model``, ``system``, ``options`` or ``pinned``."""
        unknown = set(changes) - {"title", "model", "system", "options", "pinned"}
        if unknown:
            raise OptionError(f"a conversation has no {', '.join(sorted(unknown))}")
        if "options" in changes:
            changes["options"] = json.dumps(changes["options"])
        with self._database.transaction() as connection:
            if "pinned" in changes:
                pinned = time.time() if changes.pop("pinned") else None
                keep_aside(connection, self.id, pinned=pinned)
            if not changes:
                return
            names = ", ".join(f"{name} = ?" for name in changes)
            connection.execute(
                f"UPDATE conversation SET {names} WHERE id = ?",  # names are those above
                (*changes.values(), self.id),
            )

    # -- turns -----------------------------------------------------------------------------------

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The shown branch, oldest first."""
        rows, siblings = self._tree()
        shown = _path(self._row()["first"], rows)
        return tuple(self._turn(row, siblings[row["parent"]]) for row in shown)

    def branch(self, number: int) -> tuple[Turn, ...]:
        """The branch through turn ``number``, continued by the turns shown last.

        Unlike ``turns``, it does not change when another app shows another branch.
        """
        rows, siblings = self._tree()
        if number not in rows:
            raise StorageError(f"the conversation has no turn {number}")
        shown, parent = _path(number, rows), rows[number]["parent"]
        while parent is not None:
            shown.insert(0, rows[parent])
            parent = rows[parent]["parent"]
        return tuple(self._turn(row, siblings[row["parent"]]) for row in shown)

    @property
    def version(self) -> int:
        """A number that changes when another app writes to the file."""
        return int(self._database.rows("PRAGMA data_version")[0][0])

    @property
    def messages(self) -> list[Message]:
        """The shown branch as a chat template takes it, system prompt first."""
        system = self.system
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        return messages + [turn.message for turn in self.turns]

    def add(
        self,
        role: str,
        content: str | Sequence[Mapping[str, Any]],
        *,
        after: int | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> Turn:
        """Add a turn after turn ``after``, by default the last one shown, and show it.

        ``after=0`` adds an alternative first turn. ``content`` is text, or content parts:
        ``{"type": "text", "text": ...}``, and ``{"type": "image", "image": ...}`` with a path,
        bytes or a PIL image, and a ``"name"`` if there is one.

        Raises:
            OptionError: a part is no text and no picture, or a picture is larger than 32 MB.
        """
        text, pictures = split_content(content)
        with self._database.transaction() as connection:
            number = self._insert(connection, role, text, after, "done", info or {}, pictures)
        return self.turn(number)

    def answer(
        self,
        *,
        after: int | None = None,
        role: str = "assistant",
        info: Mapping[str, Any] | None = None,
    ) -> AnswerWriter:
        """Begin a turn of the assistant, or the result of a ``"tool"``, that is written
        incrementally; use it as a context manager. ``info`` is the turn's initial ``info``.
        """
        with self._database.transaction() as connection:
            number = self._insert(connection, role, "", after, "writing", info or {})
        return AnswerWriter(self._database, self.id, number)

    def edit_answer(self, number: int, text: str) -> Turn:
        """Add an answer with this text beside answer ``number``, whose thoughts it keeps.

        Raises:
            OptionError: it is no answer, or it calls tools.
        """
        old = self._answered(number, "edited")
        thought = parted(old.content).thinking
        content = f"{OPEN}{thought}{CLOSE}\n\n{text}" if thought else text
        parent = self._tree("id, parent")[0][number]["parent"]
        return self.add("assistant", content, after=parent or 0, info={"edited": True})

    def reopen(self, number: int) -> AnswerWriter:
        """Continue the last answer of a branch. What is written then replaces its text.

        The text stays until then: the model repeats it (``ChatSession.continue_answer``).

        Raises:
            OptionError: it is no answer, calls tools, is empty, being written or finished, or turns
            follow.
        """
        with self._database.transaction() as connection:
            settle_cut(connection)
            old = self._answered(number, "continued")
            followed = "SELECT 1 FROM turn WHERE parent = ?"
            if old.state == "writing" or connection.execute(followed, (number,)).fetchone():
                raise OptionError("only the last answer of a branch can be continued")
            if not old.content:
                raise OptionError("nothing of this answer was kept: answer the question again")
            ended = old.state == "done" and old.info.get("finish_reason") == "stop"
            if ended and not old.info.get("edited") and "stop" not in self.options:
                raise OptionError("the answer is finished: edit it, or answer the question again")
            change = "UPDATE turn SET state = 'writing', writer = ? WHERE id = ?"
            connection.execute(change, (own_name(), number))
            self._touch(connection)
        return AnswerWriter(self._database, self.id, number, before=old.state)

    def remove(self, number: int) -> None:
        """Remove a turn and what follows it, with their words in the search index and saved KV
        caches. The latest of its alternatives is shown instead.
        """
        rows, _ = self._tree()
        if number not in rows:
            raise StorageError(f"the conversation has no turn {number}")
        removed = {number}
        for row in rows.values():  # a turn's number is higher than its parent's
            removed |= {row["id"]} if row["parent"] in removed else set()
        kept = {row["content"] for row in rows.values() if row["id"] not in removed}
        said = [dict(rows[each]) for each in removed if rows[each]["content"] not in kept]
        above = rows.get(rows[number]["parent"])
        if rows[number]["role"] != "user" and above is not None:
            said.append(dict(above))  # the caches that hold an answer are found by its question
        if self.title == title_of(rows[number]["content"]):
            starts = [row for row in rows.values() if row["parent"] is None]
            left = ["", *(row["content"] for row in starts if row["id"] not in removed)]
            self.set(title=title_of(left[-1]))
        erase(self._database, lambda _: withdraw(self, number), said, rows[number]["created"])

    def turn(self, number: int) -> Turn:
        """One turn, shown or not."""
        query = "SELECT * FROM turn WHERE conversation = ? AND id = ?"
        rows = self._database.rows(query, (self.id, number))
        if not rows:
            raise StorageError(f"the conversation has no turn {number}")
        return self._turn(rows[0], self.siblings(number))

    def siblings(self, number: int) -> tuple[int, ...]:
        """The alternatives to turn ``number``, including itself, oldest first."""
        query = """
            SELECT each.id FROM turn JOIN turn each
            ON each.conversation = turn.conversation AND each.parent IS turn.parent
            WHERE turn.conversation = ? AND turn.id = ? ORDER BY each.id
        """
        return tuple(row["id"] for row in self._database.rows(query, (self.id, number)))

    def show(self, number: int) -> None:
        """Show the branch through turn ``number``, continued by the turns shown last."""
        with self._database.transaction() as connection:
            self._show(connection, number)

    # -- parts -----------------------------------------------------------------------------------

    def _row(self) -> sqlite3.Row:
        rows = self._database.rows(_ROW, (self.id,))
        if not rows:
            raise StorageError("this conversation was deleted")
        return rows[0]

    def _tree(
        self, columns: str = "*"
    ) -> tuple[dict[int, sqlite3.Row], dict[int | None, list[int]]]:
        """All turns by number, and by parent the numbers of its alternatives, oldest first."""
        rows = self._database.rows(
            f"SELECT {columns} FROM turn WHERE conversation = ? ORDER BY id", (self.id,)
        )
        siblings: dict[int | None, list[int]] = {}
        for row in rows:
            siblings.setdefault(row["parent"], []).append(row["id"])
        return {row["id"]: row for row in rows}, siblings

    def _turn(self, row: sqlite3.Row, siblings: Sequence[int]) -> Turn:
        content, state = row["content"], row["state"]
        if state == "writing":
            state = "writing" if is_alive(row["writer"]) else "cut"
            saved = "SELECT text FROM piece WHERE turn = ? ORDER BY id"
            pieces = self._database.rows(saved, (row["id"],))
            content = "".join(piece["text"] for piece in pieces) or content
        info, pictures = split_info(row["info"], len(content), self._picture)
        branch, branches = 1 + siblings.index(row["id"]), len(siblings)
        facts = row["id"], row["role"], content, row["created"], state, branch, branches
        return Turn(*facts, info, pictures)

    def _answered(self, number: int, done: str) -> Turn:
        """Answer ``number``, which can be ``done``."""
        turn = self.turn(number)
        if turn.role != "assistant" or turn.info.get("tool_calls"):
            raise OptionError(f"only an answer that calls no tools can be {done}")
        return turn

    def _touch(self, connection: sqlite3.Connection) -> None:
        query = "UPDATE conversation SET updated = ? WHERE id = ?"
        connection.execute(query, (time.time(), self.id))

    def _picture(self, digest: str) -> bytes:
        rows = self._database.rows("SELECT data FROM picture WHERE digest = ?", (digest,))
        if not rows:
            raise StorageError("this picture is not in the history any more")
        return bytes(rows[0]["data"])

    def _insert(
        self,
        connection: sqlite3.Connection,
        role: str,
        content: str,
        after: int | None,
        state: str,
        info: Mapping[str, Any],
        pictures: Sequence[KeptPicture] = (),
    ) -> int:
        if role not in _ROLES:
            raise OptionError(f"a turn is of {', '.join(_ROLES)}, not {role!r}")
        settle_cut(connection)
        row = self._row()
        rows, _ = self._tree("id, parent, next")
        parent: int | None = after or None
        if after is None:
            parent = next((last["id"] for last in reversed(_path(row["first"], rows))), None)
        elif parent is not None and parent not in rows:
            raise StorageError(f"the conversation has no turn {parent}")
        now = time.time()
        place = {"conversation": self.id, "parent": parent, "created": now}
        writer = own_name() if state == "writing" else None
        values = {"state": state, "writer": writer, "info": stored_info(info, pictures)}
        number = insert(connection, "turn", **place, role=role, content=content, **values)
        keep_pictures(connection, number, pictures)
        parents = {each["id"]: each["parent"] for each in rows.values()}
        self._show(connection, number, parents | {number: parent})
        title = row["title"] or title_of(content) or "".join(each.name for each in pictures[:1])
        connection.execute(
            "UPDATE conversation SET updated = ?, title = ? WHERE id = ?", (now, title, self.id)
        )
        return number

    def _show(
        self,
        connection: sqlite3.Connection,
        number: int,
        parents: Mapping[int, int | None] | None = None,
    ) -> None:
        """Make every ancestor of turn ``number`` point towards it. ``parents``: of all turns."""
        if parents is None:
            parents = {row["id"]: row["parent"] for row in self._tree("id, parent")[0].values()}
        if number not in parents:
            raise StorageError(f"the conversation has no turn {number}")
        while (parent := parents[number]) is not None:
            connection.execute("UPDATE turn SET next = ? WHERE id = ?", (number, parent))
            number = parent
        connection.execute("UPDATE conversation SET first = ? WHERE id = ?", (number, self.id))


def withdraw(conversation: Conversation, number: int) -> None:
    """Remove a turn and what follows it; the latest of its alternatives is shown instead."""
    turn = conversation.turn(number)
    others = [each for each in conversation.siblings(number) if each != number]
    latest = others[-1] if others else None
    with conversation._database.transaction() as connection:
        for table, column in (("turn", "next"), ("conversation", "first")):
            change = f"UPDATE {table} SET {column} = ? WHERE {column} = ?"
            connection.execute(change, (latest, number))
        connection.execute("DELETE FROM turn WHERE id = ?", (number,))
        conversation._touch(connection)
        if conversation._row()["first"] is None and conversation.title == title_of(turn.content):
            conversation.set(title="")


def _path(first: int | None, rows: Mapping[int, sqlite3.Row]) -> list[sqlite3.Row]:
    """The shown branch from turn ``first`` on."""
    path, number, seen = [], first, set[int]()
    while number is not None and number in rows and number not in seen:
        seen.add(number)
        path.append(rows[number])
        number = rows[number]["next"]
    return path


def title_of(content: str) -> str:
    """A title for a conversation that begins with ``content``."""
    line = next((line.strip() for line in content.splitlines() if line.strip()), "")
    return line if len(line) <= _TITLE_LENGTH else line[: _TITLE_LENGTH - 1].rstrip() + "…"
