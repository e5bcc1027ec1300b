"""The changes of a conversation: each is one transaction that touches only what it changes.

An operation is data. It is applied to the history's file or, while that cannot be written, to what
is shown of the conversation meanwhile, by the same statements. The turns that it adds get their
numbers from the file, unless it has waited: then they have had ``reserve``'s since.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from localrt.common.processes import is_alive
from localrt.history.database import GoneError, insert
from localrt.history.pictures import KeptPicture, keep_pictures, stored_info

_TITLE_LENGTH = 60


@dataclass(kw_only=True)
class Operation:
    """A change of ``conversation``. ``problem`` is why it cannot be applied though the file can be
    written; ``elsewhere`` says that it has been written to another place.

    ``words``: it is worth keeping in a conversation that has nothing else. ``sync``: its
    transaction waits for the disk.
    """

    conversation: str
    problem: str = field(default="", init=False)
    elsewhere: bool = field(default=False, init=False)
    words: ClassVar[bool] = True
    sync: ClassVar[bool] = True

    @property
    def said(self) -> str:
        """What somebody wrote."""
        return ""

    def apply(self, connection: sqlite3.Connection) -> None:
        """Make the change, in a transaction of the caller.

        Raises:
            GoneError: what it changes was deleted.
        """
        raise NotImplementedError

    def reserve(self, number: Callable[[], int]) -> None:
        """Take numbers for the turns that it adds."""

    def replaces(self, earlier: Operation) -> bool:
        """Whether nothing is left to do of the operation right before this one."""
        return False


@dataclass(kw_only=True)
class TurnData:
    """A turn to be added. ``parent`` is a turn's number, None at the beginning. ``id`` is its own
    number, if one was reserved.
    """

    role: str
    content: str
    parent: int | None = None
    state: str = "done"
    writer: str | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    pictures: Sequence[KeptPicture] = ()
    created: float = field(default_factory=lambda: time.time())
    id: int | None = None

    def add(self, connection: sqlite3.Connection, conversation: str) -> int:
        """Write it; return its number."""
        names = ("id", "parent", "role", "content", "state", "writer", "created")
        values = {name: getattr(self, name) for name in names}
        info = stored_info(self.info, self.pictures)
        number = insert(connection, "turn", conversation=conversation, info=info, **values)
        keep_pictures(connection, number, self.pictures)
        return number


@dataclass(kw_only=True)
class Begin(Operation):
    """A new conversation, with the ``turns`` of one branch."""

    model: str
    system: str | None
    options: Mapping[str, Any]
    title: str = ""
    turns: Sequence[TurnData] = ()
    created: float = field(default_factory=lambda: time.time())

    @property
    def words(self) -> bool:  # type: ignore[override]
        return bool(self.turns or self.title)

    @property
    def said(self) -> str:
        return self.title

    @property
    def sync(self) -> bool:  # type: ignore[override]
        return self.words

    def apply(self, connection: sqlite3.Connection) -> None:
        insert(
            connection,
            "conversation",
            id=self.conversation,
            title=self.title,
            model=self.model,
            system=self.system,
            options=json.dumps(dict(self.options)),
            created=self.created,
            updated=self.created,
        )
        number = None
        for turn in self.turns:
            number = replace(turn, parent=number).add(connection, self.conversation)
        if number is not None:
            show(connection, self.conversation, number)
            touch(connection, self.conversation)

    def reserve(self, number: Callable[[], int]) -> None:
        for turn in self.turns:
            turn.id = turn.id or number()


@dataclass(kw_only=True)
class Set(Operation):
    """Changes of ``title``, ``model`` and ``system``, of single ``options`` (None removes one), and
    whether it is ``pinned``.
    """

    facts: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    pinned: bool | None = None

    @property
    def words(self) -> bool:  # type: ignore[override]
        return bool(self.facts.get("title")) or self.pinned is not None

    @property
    def said(self) -> str:
        return "\n".join(filter(None, (self.facts.get("title"), self.facts.get("system"))))

    def apply(self, connection: sqlite3.Connection) -> None:
        row = conversation_row(connection, self.conversation)
        values = dict(self.facts)
        if self.options:
            changed = {**json.loads(row["options"]), **self.options}
            kept = {name: value for name, value in changed.items() if value is not None}
            values["options"] = json.dumps(kept)
        if values:
            names = ", ".join(f"{name} = ?" for name in values)  # names come from code
            change = f"UPDATE conversation SET {names} WHERE id = ?"
            connection.execute(change, (*values.values(), self.conversation))
        if self.pinned is not None:
            pin = "INSERT INTO aside (conversation, pinned) VALUES (?, ?)"
            pin += " ON CONFLICT (conversation) DO UPDATE SET pinned = excluded.pinned"
            connection.execute(pin, (self.conversation, time.time() if self.pinned else None))


@dataclass(kw_only=True)
class Add(Operation):
    """A new turn, which is shown."""

    turn: TurnData
    number: int = field(default=0, init=False)  # the turn's, once it was applied

    @property
    def said(self) -> str:
        return self.turn.content

    def apply(self, connection: sqlite3.Connection) -> None:
        settle_cut(connection)
        row, turn = conversation_row(connection, self.conversation), self.turn
        if turn.parent is not None:
            turn_row(connection, self.conversation, turn.parent)
        self.number = turn.add(connection, self.conversation)
        show(connection, self.conversation, self.number)
        title = title_of(turn.content) or "".join(each.name for each in turn.pictures[:1])
        if title and not row["title"]:
            change = "UPDATE conversation SET title = ? WHERE id = ?"
            connection.execute(change, (title, self.conversation))
        touch(connection, self.conversation)

    def reserve(self, number: Callable[[], int]) -> None:
        self.turn.id = self.turn.id or number()


@dataclass(kw_only=True)
class OfTurn(Operation):
    """A change of one turn."""

    turn: int


@dataclass(kw_only=True)
class Reopen(OfTurn):
    """An answer is written further by the process ``writer``."""

    writer: str | None

    def apply(self, connection: sqlite3.Connection) -> None:
        if turn_row(connection, self.conversation, self.turn)["state"] == "writing":
            settle(connection, self.turn, "cut")
        change = "UPDATE turn SET state = 'writing', writer = ? WHERE id = ?"
        connection.execute(change, (self.writer, self.turn))
        touch(connection, self.conversation)


@dataclass(kw_only=True)
class Piece(OfTurn):
    """The text of an answer so far, of which the first ``start`` characters were saved before."""

    writer: str | None
    start: int
    text: str
    sync: ClassVar[bool] = False

    @property
    def said(self) -> str:
        return self.text

    def apply(self, connection: sqlite3.Connection) -> None:
        row = turn_row(connection, self.conversation, self.turn)
        start = self.start
        if row["state"] != "writing" or row["writer"] != self.writer:  # others thought us dead
            connection.execute("DELETE FROM piece WHERE turn = ?", (self.turn,))
            change = "UPDATE turn SET state = 'writing', writer = ? WHERE id = ?"
            connection.execute(change, (self.writer, self.turn))
            start = 0
        insert(connection, "piece", turn=self.turn, text=self.text[start:])

    def replaces(self, earlier: Operation) -> bool:
        if not isinstance(earlier, Piece) or earlier.turn != self.turn:
            return False
        self.start = earlier.start
        return True


@dataclass(kw_only=True)
class Finish(OfTurn):
    """The end of an answer: its ``text``, unless that is empty, its ``state`` and its ``info``."""

    state: str
    text: str
    info: Mapping[str, Any] | None = None

    @property
    def said(self) -> str:
        return self.text

    def apply(self, connection: sqlite3.Connection) -> None:
        turn_row(connection, self.conversation, self.turn)
        settle(connection, self.turn, self.state, self.text)
        if self.info is not None:
            change = "UPDATE turn SET info = ? WHERE id = ?"
            connection.execute(change, (json.dumps(dict(self.info)), self.turn))
        touch(connection, self.conversation)

    def replaces(self, earlier: Operation) -> bool:
        return isinstance(earlier, Piece) and earlier.turn == self.turn and bool(self.text)


@dataclass(kw_only=True)
class Show(OfTurn):
    """Another branch is shown: the one through the turn."""

    words: ClassVar[bool] = False

    def apply(self, connection: sqlite3.Connection) -> None:
        turn_row(connection, self.conversation, self.turn)
        show(connection, self.conversation, self.turn)


@dataclass(kw_only=True)
class KeepDraft(Operation):
    """What is being written in the window ``writer``, ``""`` for nothing."""

    writer: str
    text: str
    sync: ClassVar[bool] = False

    @property
    def words(self) -> bool:  # type: ignore[override]
        return bool(self.text)

    @property
    def said(self) -> str:
        return self.text

    def apply(self, connection: sqlite3.Connection) -> None:
        conversation_row(connection, self.conversation)
        if self.text:
            change = "INSERT OR REPLACE INTO draft (conversation, writer, text) VALUES (?, ?, ?)"
            connection.execute(change, (self.conversation, self.writer, self.text))
        else:
            change = "DELETE FROM draft WHERE conversation = ? AND writer = ?"
            connection.execute(change, (self.conversation, self.writer))

    def replaces(self, earlier: Operation) -> bool:
        return isinstance(earlier, KeepDraft) and earlier.writer == self.writer


@dataclass(kw_only=True)
class TakeDrafts(Operation):
    """The window ``writer`` takes over what was being written in ``others``, which have ended."""

    writer: str
    others: Sequence[str]
    words: ClassVar[bool] = False
    sync: ClassVar[bool] = False

    def apply(self, connection: sqlite3.Connection) -> None:
        query = "SELECT text FROM draft WHERE conversation = ? AND writer = ?"
        names = [(self.conversation, name) for name in (self.writer, *self.others)]
        found = [row["text"] for name in names for row in connection.execute(query, name)]
        gone = "DELETE FROM draft WHERE conversation = ? AND writer = ?"
        connection.executemany(gone, names)
        text = "\n\n".join(found)
        KeepDraft(conversation=self.conversation, writer=self.writer, text=text).apply(connection)


@dataclass(kw_only=True)
class Remove(OfTurn):
    """A turn and what follows it go; the latest of its alternatives is shown instead.

    ``sweep``: their words leave the word index and the saved KV caches, too.
    """

    sweep: bool = True
    gone: set[int] = field(default_factory=set, init=False)  # the turns that went

    def apply(self, connection: sqlite3.Connection) -> None:
        top = turn_row(connection, self.conversation, self.turn)
        gone = connection.execute(_BELOW, (self.turn, self.conversation)).fetchall()
        first = conversation_row(connection, self.conversation)["title"] == title_of(top["content"])
        others = connection.execute(
            "SELECT id, content FROM turn WHERE conversation = ? AND parent IS ? AND id != ?"
            " ORDER BY created, id",
            (self.conversation, top["parent"], self.turn),
        ).fetchall()
        latest = others[-1] if others else None
        number = latest["id"] if latest else None
        for table, column in (("turn", "next"), ("conversation", "first")):
            key = "id" if table == "conversation" else "conversation"
            change = f"UPDATE {table} SET {column} = ? WHERE {key} = ? AND {column} = ?"
            connection.execute(change, (number, self.conversation, self.turn))
        self.gone = {row["id"] for row in gone}
        delete_turns(connection, self.gone)
        if self.sweep:
            left = "SELECT content FROM turn WHERE conversation = ? AND role = 'user'"
            kept = {row["content"] for row in connection.execute(left, (self.conversation,))}
            said = [row for row in gone if row["content"] not in kept]
            if top["role"] != "user" and top["parent"] is not None:
                # The caches that hold an answer are found by its question.
                said.append(turn_row(connection, self.conversation, top["parent"]))
            owe(connection, said, top["created"])
        touch(connection, self.conversation)
        if first and top["parent"] is None:
            title = title_of(latest["content"]) if latest else ""
            change = "UPDATE conversation SET title = ? WHERE id = ?"
            connection.execute(change, (title, self.conversation))


@dataclass(kw_only=True)
class Delete(Operation):
    """The conversation goes, with all its branches, as turns do by ``Remove``."""

    def apply(self, connection: sqlite3.Connection) -> None:
        found = connection.execute(_ROW, (self.conversation,)).fetchone()
        if found is None:
            return
        turns = "SELECT * FROM turn WHERE conversation = ?"
        gone = connection.execute(turns, (self.conversation,)).fetchall()
        forget(connection, self.conversation)
        owe(connection, gone, found["created"])


_ROW = "SELECT * FROM conversation WHERE id = ?"
_BELOW = """
    WITH RECURSIVE below (number) AS (
        VALUES (?) UNION
        SELECT turn.id FROM below JOIN turn ON turn.conversation = ? AND turn.parent = number
    )
    SELECT turn.* FROM below JOIN turn ON turn.id = below.number
"""
_ABOVE = """
    WITH RECURSIVE above (number, parent) AS (
        SELECT id, parent FROM turn WHERE id = ? UNION
        SELECT turn.id, turn.parent FROM turn JOIN above ON turn.id = above.parent
    )
    SELECT number, parent FROM above
"""
_MANY = 500  # numbers in one statement


def conversation_row(connection: sqlite3.Connection, id: str) -> sqlite3.Row:
    """The row of a conversation. Raises ``GoneError``."""
    row: sqlite3.Row | None = connection.execute(_ROW, (id,)).fetchone()
    if row is None:
        raise GoneError("this conversation was deleted")
    return row


def turn_row(connection: sqlite3.Connection, conversation: str, number: int) -> sqlite3.Row:
    """The row of a turn. Raises ``GoneError``."""
    conversation_row(connection, conversation)
    query = "SELECT * FROM turn WHERE conversation = ? AND id = ?"
    row: sqlite3.Row | None = connection.execute(query, (conversation, number)).fetchone()
    if row is None:
        raise GoneError(f"the conversation has no turn {number}: it may have been removed")
    return row


def touch(connection: sqlite3.Connection, conversation: str) -> None:
    """Note the conversation as the latest one used: times that a wrong clock has put into the
    future give way.
    """
    now = time.time()
    connection.execute("UPDATE conversation SET updated = ? WHERE updated > ?", (now, now))
    change = "UPDATE conversation SET updated = ? WHERE id = ?"
    connection.execute(change, (now + 1e-3, conversation))


def show(connection: sqlite3.Connection, conversation: str, number: int) -> None:
    """Make every ancestor of a turn point towards it."""
    first = number
    for row in connection.execute(_ABOVE, (number,)).fetchall():
        first = row["number"]
        if row["parent"] is not None:
            change = "UPDATE turn SET next = ? WHERE id = ? AND next IS NOT ?"
            connection.execute(change, (first, row["parent"], first))
    connection.execute("UPDATE conversation SET first = ? WHERE id = ?", (first, conversation))


def delete_turns(connection: sqlite3.Connection, numbers: set[int]) -> None:
    """Delete turns with their pieces and pictures."""
    ordered = sorted(numbers)
    for at in range(0, len(ordered), _MANY):
        some = ordered[at : at + _MANY]
        marks = ", ".join("?" * len(some))
        for table, column in (("piece", "turn"), ("turn_picture", "turn"), ("turn", "id")):
            connection.execute(f"DELETE FROM {table} WHERE {column} IN ({marks})", some)


def forget(connection: sqlite3.Connection, conversation: str) -> None:
    """Delete all rows of a conversation."""
    query = "SELECT id FROM turn WHERE conversation = ?"
    delete_turns(connection, {row["id"] for row in connection.execute(query, (conversation,))})
    for table in ("aside", "draft"):
        connection.execute(f"DELETE FROM {table} WHERE conversation = ?", (conversation,))
    connection.execute("DELETE FROM conversation WHERE id = ?", (conversation,))


def owe(connection: sqlite3.Connection, said: Sequence[sqlite3.Row], since: float) -> None:
    """Note that the words of deleted turns must leave the saved KV caches and the word index. Of
    caches without marks, those used ``since`` go.
    """
    from localrt.engine.saved_caches import marks_of  # brings numpy

    marks = json.dumps(sorted(marks_of(map(dict, said))))
    connection.execute("INSERT INTO debt (marks, since) VALUES (?, ?)", (marks, since))
    # Begun anew, if it is under way.
    connection.execute("DELETE FROM debt WHERE marks IS NULL")
    connection.execute("INSERT INTO debt (marks) VALUES (NULL)")


def settle(connection: sqlite3.Connection, turn: int, state: str, text: str = "") -> None:
    """End a turn: its content is ``text`` if given, otherwise the saved pieces, otherwise what it
    was before it was reopened.
    """
    if not text:
        pieces = connection.execute("SELECT text FROM piece WHERE turn = ? ORDER BY id", (turn,))
        text = "".join(row["text"] for row in pieces)
    connection.execute("DELETE FROM piece WHERE turn = ?", (turn,))
    connection.execute(
        "UPDATE turn SET content = coalesce(nullif(?, ''), content), state = ?, writer = NULL"
        " WHERE id = ?",
        (text, state, turn),
    )


def settle_cut(connection: sqlite3.Connection) -> None:
    """End the answers whose writers have ended. Reading also tells so, but writes nothing."""
    writing = connection.execute("SELECT id, writer FROM turn WHERE state = 'writing'").fetchall()
    for row in writing:
        if not is_alive(row["writer"]):
            settle(connection, row["id"], "cut")


def title_of(content: str) -> str:
    """A title for a conversation that begins with ``content``."""
    line = next((line.strip() for line in content.splitlines() if line.strip()), "")
    return line if len(line) <= _TITLE_LENGTH else line[: _TITLE_LENGTH - 1].rstrip() + "…"
