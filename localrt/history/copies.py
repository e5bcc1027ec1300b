"""A conversation goes on in memory while its file cannot be written, and is brought back later.

Turns keep the numbers that they have in the file; those added to the copy have numbers that no file
uses, so the two cannot be mixed up.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from typing import Any

from localrt.common.errors import StorageError
from localrt.history.conversation import Conversation, Turn
from localrt.history.database import MEMORY_FIRST, insert
from localrt.history.history import History
from localrt.history.writer import own_name, settle

_TURN = ("role", "content", "state", "info", "created")
_FACTS = ("title", "model", "system", "options", "updated")


def copy_to_memory(
    memory: History, id: str, turns: Iterable[Turn], facts: Mapping[str, Any]
) -> Conversation:
    """A branch of a conversation as one of ``memory``, under the same id.

    ``facts`` are ``title``, ``model``, ``system`` and ``options``. Nothing is read from the file:
    it may be locked, damaged or gone.
    """
    now, parent = time.time(), None
    kept = {name: facts[name] for name in ("title", "model", "system")}
    options = json.dumps(facts["options"])
    with memory._database.transaction() as connection:
        insert(connection, "conversation", id=id, **kept, options=options, created=now, updated=now)
        copy = Conversation(memory._database, id)
        for turn in turns:
            parent = insert(
                connection,
                "turn",
                id=turn.id,
                conversation=id,
                parent=parent,
                role=turn.role,
                content=turn.content,
                state=turn.state,
                writer=own_name() if turn.state == "writing" else None,
                info=json.dumps(dict(turn.info)),
                created=turn.created,
            )
        if parent is not None:
            copy._show(connection, parent)
    return copy


def end_answer(
    copy: Conversation, number: int, state: str, content: str, info: Mapping[str, Any]
) -> None:
    """End an answer in the copy whose writer began it in the file."""
    with copy._database.transaction() as connection:
        settle(connection, number, state, content, info)


def merge(file: Conversation, copy: Conversation) -> dict[int, int]:
    """Write what was added to the copy, and the answers that ended there, into the file.

    Returns:
        The numbers in the file of the turns that came, by their numbers in the copy.

    Raises:
        StorageError: an answer is still being written, or the file cannot be; nothing is changed.
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
