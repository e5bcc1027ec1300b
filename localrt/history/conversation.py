"""One conversation: a tree of turns, of which one branch is shown.

Editing or regenerating never loses anything: a turn added after an earlier one begins a branch
there. Each turn stores which of its successors was shown last. A turn is text, pictures and, in
``info``, further data of its writer.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from localrt.chat_format.thinking import CLOSE, OPEN, parted
from localrt.common.errors import OptionError, StorageError
from localrt.common.processes import is_alive
from localrt.engine.types import Message
from localrt.history.answer_writer import AnswerWriter
from localrt.history.database import GoneError
from localrt.history.operations import (
    Add,
    KeepDraft,
    Operation,
    Remove,
    Reopen,
    Set,
    Show,
    TakeDrafts,
    TurnData,
)
from localrt.history.outbox import Outbox, Rows
from localrt.history.pictures import KeptPicture, joined_content, split_content, split_info

_ROLES = ("user", "assistant", "tool")
_FACTS = ("title", "model", "system", "options", "pinned")


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
    """From ``History.new`` or ``History.open``. Safe for several threads and several apps.

    A change that the file does not take now waits, and is shown as if it were made
    (``History.problem``). What another app has deleted cannot be changed: ``StorageError``.
    """

    def __init__(self, outbox: Outbox, id: str) -> None:
        self._outbox = outbox
        self.id = id
        self._seen: Rows | None = None  # its rows when they were last read
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
        rows = self._rows("SELECT pinned FROM aside WHERE conversation = ?", self.id)
        return any(row["pinned"] is not None for row in rows)

    @property
    def is_kept(self) -> bool:
        """Whether all of it is in the file, and no app has deleted it."""
        return self._outbox.is_kept(self.id)

    @property
    def draft(self) -> str:
        """The message that this process keeps with ``keep_draft``."""
        query = "SELECT text FROM draft WHERE conversation = ? AND writer = ?"
        return "".join(row["text"] for row in self._rows(query, self.id, self._outbox.window))

    def take_draft(self) -> str:
        """The message that was not sent: this process's, and those of apps that have ended, which
        are this process's from now on.
        """
        rows = self._rows("SELECT writer FROM draft WHERE conversation = ?", self.id)
        own, names = self._outbox.window, sorted(row["writer"] for row in rows)
        if others := [name for name in names if name != own and not is_alive(name)]:
            self._submit(TakeDrafts(conversation=self.id, writer=own, others=others))
        return self.draft

    def keep_draft(self, text: str) -> None:
        """Keep a message that is not sent yet, ``""`` for none, so that it outlives this process.

        For each pause in typing: it neither waits for the disk nor fails.
        """
        draft = KeepDraft(conversation=self.id, writer=self._outbox.window, text=text)
        self._outbox.keep(draft, self._seen)

    def set(self, **changes: Any) -> None:
        """Change ``title``, ``model``, ``system``, ``options`` or ``pinned``.

        Only what differs is written: of ``options``, each one alone.
        """
        if unknown := set(changes) - set(_FACTS):
            raise OptionError(f"a conversation has no {', '.join(sorted(unknown))}")
        row, pinned = self._row(), changes.pop("pinned", None)
        given = changes.pop("options", None)
        options = {} if given is None else changed_options(self.options, given)
        facts = {name: value for name, value in changes.items() if row[name] != value}
        if facts or options or pinned is not None:
            self._submit(Set(conversation=self.id, facts=facts, options=options, pinned=pinned))

    def change_options(self, changes: Mapping[str, Any]) -> None:
        """Change some of the ``options``; None goes back to the default."""
        if changes:
            self._submit(Set(conversation=self.id, options=json.loads(json.dumps(dict(changes)))))

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
            raise GoneError(f"the conversation has no turn {number}: it may have been removed")
        above, parent = list[sqlite3.Row](), rows[number]["parent"]
        while parent is not None:
            above.append(rows[parent])
            parent = rows[parent]["parent"]
        shown = [*reversed(above), *_path(number, rows)]
        return tuple(self._turn(row, siblings[row["parent"]]) for row in shown)

    def tree(self) -> Iterator[tuple[Turn, int | None]]:
        """Yield the turns of all branches, each with the number of the one before, if any."""
        rows, siblings = self._tree()
        waiting = siblings.get(None, [])[::-1]
        while waiting:
            row = rows[waiting.pop()]
            yield self._turn(row, siblings[row["parent"]]), row["parent"]
            waiting += siblings.get(row["id"], [])[::-1]

    @property
    def version(self) -> int:
        """A number that changes when another app writes to the file."""
        return self._outbox.database.version

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
        return self.turn(self._add(role, text, after, info=info or {}, pictures=pictures))

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
        how: dict[str, Any] = {"state": "writing", "writer": self._outbox.window}
        number = self._add(role, "", after, info=info or {}, **how)
        return self._writer(number)

    def edit_answer(self, number: int, text: str) -> Turn:
        """Add an answer with this text beside answer ``number``, whose thoughts it keeps.

        Raises:
            OptionError: it is no answer, or it calls tools.
        """
        old = self._answered(number, "edited")
        thought = parted(old.content).thinking
        content = f"{OPEN}{thought}{CLOSE}\n\n{text}" if thought else text
        parent = self._rows("SELECT parent FROM turn WHERE id = ?", number)[0]["parent"]
        return self.add("assistant", content, after=parent or 0, info={"edited": True})

    def reopen(self, number: int) -> AnswerWriter:
        """Continue the last answer of a branch. What is written then replaces its text.

        The text stays until then: the model repeats it (``ChatSession.continue_answer``).

        Raises:
            OptionError: it is no answer, calls tools, is empty, being written or finished, or turns
            follow.
        """
        old = self._answered(number, "continued")
        if old.state == "writing" or self._rows("SELECT 1 FROM turn WHERE parent = ?", number):
            raise OptionError("only the last answer of a branch can be continued")
        if not old.content:
            raise OptionError("nothing of this answer was kept: answer the question again")
        ended = old.state == "done" and old.info.get("finish_reason") == "stop"
        if ended and not old.info.get("edited") and "stop" not in self.options:
            raise OptionError("the answer is finished: edit it, or answer the question again")
        self._submit(Reopen(conversation=self.id, turn=number, writer=self._outbox.window))
        return self._writer(number, old.state)

    def remove(self, number: int, *, sweep: bool = True) -> None:
        """Remove a turn and what follows it, with their words in the search index and saved KV
        caches. The latest of its alternatives is shown instead. Without ``sweep``, the index and
        the caches stay: for a message that no model has read.
        """
        self._submit(Remove(conversation=self.id, turn=number, sweep=sweep))
        if sweep:
            self._outbox.pay()

    def turn(self, number: int) -> Turn:
        """One turn, shown or not."""
        rows = self._rows("SELECT * FROM turn WHERE conversation = ? AND id = ?", self.id, number)
        if not rows:
            raise GoneError(f"the conversation has no turn {number}: it may have been removed")
        return self._turn(rows[0], self.siblings(number))

    def siblings(self, number: int) -> tuple[int, ...]:
        """The alternatives to turn ``number``, including itself, oldest first."""
        query = """
            SELECT each.id FROM turn JOIN turn each
            ON each.conversation = turn.conversation AND each.parent IS turn.parent
            WHERE turn.conversation = ? AND turn.id = ? ORDER BY each.created, each.id
        """
        return tuple(row["id"] for row in self._rows(query, self.id, number))

    def show(self, number: int) -> None:
        """Show the branch through turn ``number``, continued by the turns shown last."""
        self._submit(Show(conversation=self.id, turn=number))

    # -- parts -----------------------------------------------------------------------------------

    def _rows(self, query: str, *values: object) -> list[sqlite3.Row]:
        return self._outbox.rows(self.id, query, values, self._seen)

    def _submit(self, operation: Operation) -> None:
        self._outbox.submit(operation, self._seen)

    def _writer(self, turn: int, before: str | None = None) -> AnswerWriter:
        keep, place = self._outbox.keep, {"conversation": self.id, "turn": turn}
        own = self._outbox.window
        return AnswerWriter(lambda operation: keep(operation, self._seen), place, own, before)

    def _row(self) -> sqlite3.Row:
        rows = self._read("conversation", "SELECT * FROM conversation WHERE id = ?")
        if not rows:
            raise GoneError("this conversation was deleted")
        return rows[0]

    def _read(self, table: str, query: str) -> list[sqlite3.Row]:
        """All rows of a table, which are kept for when the file cannot be read."""
        waits = self._outbox.waits(self.id)
        rows = self._rows(query, self.id)
        if rows and not (waits or self._outbox.waits(self.id)):
            self._seen = {**(self._seen or {}), table: rows}
        return rows

    def _tree(self) -> tuple[dict[int, sqlite3.Row], dict[int | None, list[int]]]:
        """All turns by number, and by parent the numbers of its alternatives, oldest first."""
        rows = self._read("turn", "SELECT * FROM turn WHERE conversation = ?")
        if "conversation" not in (self._seen or {}):
            self._row()
        siblings: dict[int | None, list[int]] = {}
        for row in sorted(rows, key=lambda row: (row["created"], row["id"])):
            siblings.setdefault(row["parent"], []).append(row["id"])
        return {row["id"]: row for row in rows}, siblings

    def _turn(self, row: sqlite3.Row, siblings: Sequence[int]) -> Turn:
        content, state = row["content"], row["state"]
        if state == "writing":
            state = "writing" if is_alive(row["writer"]) else "cut"
            pieces = self._rows("SELECT text FROM piece WHERE turn = ? ORDER BY id", row["id"])
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

    def _picture(self, digest: str) -> bytes:
        query = "SELECT data FROM picture WHERE digest = ?"
        rows = self._rows(query, digest) or self._outbox.database.rows(query, (digest,))
        if not rows:
            raise StorageError("this picture is not in the history any more")
        return bytes(rows[0]["data"])

    def _add(self, role: str, content: str, after: int | None, **how: Any) -> int:
        """Add a turn; return its number."""
        if role not in _ROLES:
            raise OptionError(f"a turn is of {', '.join(_ROLES)}, not {role!r}")
        parent = after or None
        if after is None:
            rows = {row["id"]: row for row in self._rows(_LINKS, self.id)}
            parent = next((e["id"] for e in reversed(_path(self._row()["first"], rows))), None)
        turn = TurnData(role=role, content=content, parent=parent, **how)
        self._submit(added := Add(conversation=self.id, turn=turn))
        return added.number


def changed_options(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The options that differ, as they are in ``after``: None for those that it lacks."""
    after = json.loads(json.dumps(dict(after)))
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return {name: after.get(name) for name in names}


_LINKS = "SELECT id, parent, next FROM turn WHERE conversation = ?"


def _path(first: int | None, rows: Mapping[int, sqlite3.Row]) -> list[sqlite3.Row]:
    """The shown branch from turn ``first`` on."""
    path, number, seen = [], first, set[int]()
    while number is not None and number in rows and number not in seen:
        seen.add(number)
        path.append(rows[number])
        number = rows[number]["next"]
    return path
