"""A machine that harms one history in any order, and a model of what must be in it.

Two windows and the chat page's routes change conversations of one file, while the disk is full or
read-only, the file locked or moved away, clocks are set and windows are killed. The model knows
what each change does to a conversation, and which changes wait. After every step what is shown, and
what is in the file, must be what the model says; at the end every word must be in the file.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from localrt import AnswerWriter, Conversation, History, OptionError, StorageError
from localrt.history import conversation as conversation_module
from localrt.history import history as history_module
from localrt.history import operations, outbox
from localrt.history.outbox import Outbox
from localrt.server import conversations as routes
from localrt.server.answers import Answers
from localrt.server.errors import ApiError

# -- the model -------------------------------------------------------------------------------------


@dataclass
class Turn:
    parent: int | None
    role: str
    text: str
    state: str = "done"
    writer: str = ""
    created: float = 0.0


@dataclass
class Kept:
    """A conversation as it must be."""

    title: str = ""
    system: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    pinned: bool = False
    drafts: dict[str, str] = field(default_factory=dict)
    turns: dict[int, Turn] = field(default_factory=dict)
    shown: dict[int | None, int] = field(default_factory=dict)  # after each turn

    def show(self, number: int) -> None:
        here: int | None = number
        while here is not None:
            parent = self.turns[here].parent
            self.shown[parent] = here
            here = parent

    def path(self) -> list[int]:
        found, here = list[int](), self.shown.get(None)
        while here is not None:
            found.append(here)
            here = self.shown.get(here)
        return found

    def below(self, number: int) -> set[int]:
        found = {number}
        while more := {n for n, t in self.turns.items() if t.parent in found} - found:
            found |= more
        return found


Change = Callable[[Kept], bool]  # False: what it changes is gone
File = dict[str, Kept]


@dataclass
class Waiting:
    """A change that a window has made, by the operation that waits for the file."""

    id: str
    change: Change
    operation: Any
    key: tuple[object, ...] | None  # a later one of the same key replaces it
    begins: bool = False

    @property
    def number(self) -> int:
        return id(self.operation)


def added(number: int, turn: Turn) -> Change:
    def change(kept: Kept) -> bool:
        if turn.parent is not None and turn.parent not in kept.turns:
            return False
        kept.turns[number] = copy.copy(turn)
        kept.show(number)
        kept.title = kept.title or turn.text
        return True

    return change


def changed(number: int, **values: Any) -> Change:
    def change(kept: Kept) -> bool:
        if number not in kept.turns:
            return False
        for name, value in values.items():
            setattr(kept.turns[number], name, value)
        return True

    return change


def shown(number: int) -> Change:
    def change(kept: Kept) -> bool:
        if number not in kept.turns:
            return False
        kept.show(number)
        return True

    return change


def removed(number: int) -> Change:
    def change(kept: Kept) -> bool:
        if number not in kept.turns:
            return False
        top, gone = kept.turns[number], kept.below(number)
        others = [n for n, t in kept.turns.items() if t.parent == top.parent and n != number]
        latest = max(others, key=lambda n: (kept.turns[n].created, n), default=None)
        if top.parent is None and kept.title == top.text:
            kept.title = "" if latest is None else kept.turns[latest].text
        if kept.shown.get(top.parent) == number:
            del kept.shown[top.parent]
            if latest is not None:
                kept.shown[top.parent] = latest
        for each in gone:
            del kept.turns[each]
            kept.shown.pop(each, None)
        return True

    return change


def fact(name: str, value: Any) -> Change:
    def change(kept: Kept) -> bool:
        setattr(kept, name, value)
        return True

    return change


def option(name: str, value: Any) -> Change:
    def change(kept: Kept) -> bool:
        kept.options[name] = value
        if value is None:
            del kept.options[name]
        return True

    return change


def drafted(writer: str, text: str) -> Change:
    def change(kept: Kept) -> bool:
        kept.drafts[writer] = text
        if not text:
            del kept.drafts[writer]
        return True

    return change


def taken(writer: str, others: Sequence[str]) -> Change:
    def change(kept: Kept) -> bool:
        found = [name for name in (writer, *others) if name in kept.drafts]
        if found:
            kept.drafts[writer] = "\n\n".join([kept.drafts.pop(name) for name in found])
        return True

    return change


def id_of(operation: object) -> int:
    return id(operation)


# -- windows ---------------------------------------------------------------------------------------


class Window:
    """A history that some process has open, and what it has changed that waits."""

    def __init__(self, name: str, path: Path, alive: set[str]) -> None:
        self.name = name
        alive.add(name)
        outbox.own_name = lambda: name  # type: ignore[assignment]
        self.history = History(path, patient=True)
        self.box = self.history._outbox
        self.open = dict[str, Conversation]()
        self.writers = dict[tuple[str, int], AnswerWriter]()
        self.waiting = list[Waiting]()
        self.deleted = set[str | int]()

    def conversation(self, id: str) -> Conversation:
        if id not in self.open:
            self.open[id] = self.history.open(id)
        return self.open[id]

    def operations(self) -> set[int]:
        return {id(o) for each in self.box._waiting.values() for o in each.operations}

    # What a window does, as the page's routes do it below.

    def add(self, id: str, text: str, after: int) -> int:
        return self.conversation(id).add("user", text, after=after).id

    def set(self, id: str, name: str, value: Any) -> None:
        self.conversation(id).set(**{name: value})

    def edit(self, id: str, number: int, text: str) -> int:
        return self.conversation(id).edit_answer(number, text).id

    def remove(self, id: str, number: int) -> None:
        self.conversation(id).remove(number)

    def draft(self, id: str, text: str) -> None:
        self.conversation(id).keep_draft(text)

    def show(self, id: str, number: int) -> None:
        self.conversation(id).show(number)

    def delete(self, id: str) -> None:
        self.history.delete(id)


class Page(Window):
    """The chat page, by the functions that answer its requests."""

    def __init__(self, name: str, path: Path, alive: set[str]) -> None:
        super().__init__(name, path, alive)
        self._answers = Answers(lambda: self.history, None)

    def _asked(self, work: Callable[..., Any], id: str, **given: Any) -> Any:
        fields, params = given.pop("fields", {}), {"id": id, **given}
        request = SimpleNamespace(path_params=params, query_params={})
        try:
            answer = work(self._answers, request, fields)
            return asyncio.run(answer) if asyncio.iscoroutine(answer) else answer
        except ApiError as error:
            raise StorageError(str(error)) from error

    def add(self, id: str, text: str, after: int) -> int:
        fields = {"content": [{"text": text}], "after": str(after or "")}
        return int(self._asked(routes.add_message, id, fields=fields)["id"])

    def set(self, id: str, name: str, value: Any) -> None:
        field_name = {"system": "instructions"}.get(name, name)
        self._asked(routes.conversation, id, fields={field_name: value})

    def edit(self, id: str, number: int, text: str) -> int:
        fields = {"text": text}
        return int(self._asked(routes.edit_answer, id, item=str(number), fields=fields)["id"])

    def remove(self, id: str, number: int) -> None:
        self._asked(routes.remove, id, item=str(number))

    def draft(self, id: str, text: str) -> None:
        self._asked(routes.conversation, id, fields={"draft": text})

    def show(self, id: str, number: int) -> None:
        self._asked(routes.conversation, id, fields={"shown": str(number)})

    def delete(self, id: str) -> None:
        self._asked(routes.delete, id)


# -- the machine -----------------------------------------------------------------------------------

_NUMBERS = st.integers(0, 999)
_FAULTS = ("well", "full", "read-only", "locked", "gone")


class Storage(RuleBasedStateMachine):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        memory = Path("/dev/shm")
        self.folder = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
        self.path, self.aside = self.folder / "data" / "history.db", self.folder / "aside"
        self.alive, self.file = set[str](), File()
        self.words = self.made = 0
        self.fault, self.clock = "well", 0.0
        self._locker: sqlite3.Connection | None = None
        self._patched = contextlib.ExitStack()
        self._patch(Outbox, "watch", lambda box: None)  # each try is a step
        self._patch(outbox, "_PAUSE_SECONDS", 0.0)
        self._patch(operations, "time", SimpleNamespace(time=self._now))
        for module in (conversation_module, history_module, operations):
            self._patch(module, "is_alive", lambda name: name in self.alive)
        self._patch(outbox, "own_name", outbox.own_name)
        cache = f"{self.folder}/cache"
        folders = SimpleNamespace(from_environment=lambda: SimpleNamespace(cache_dir=Path(cache)))
        self._patch(outbox, "Settings", folders)
        for name in ("submit", "keep"):
            self._patch(Outbox, name, self._noting(getattr(Outbox, name)))
        self._operations = list[Any]()

    def _patch(self, owner: Any, name: str, value: Any) -> None:
        before = getattr(owner, name)
        setattr(owner, name, value)
        self._patched.callback(setattr, owner, name, before)

    def _noting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def noted(box: Outbox, operation: object, *rest: Any) -> None:
            if not any(operation is each for each in self._operations):
                self._operations.append(operation)
            method(box, operation, *rest)

        return noted

    def _now(self) -> float:
        self.made += 1
        return 1e9 + self.clock + self.made

    def teardown(self) -> None:
        try:
            self._end()
        finally:
            for window in getattr(self, "windows", ()):
                window.history._database.close()
            if self._locker is not None:
                self._locker.close()
            self._patched.close()
            shutil.rmtree(self.folder)

    def _end(self) -> None:
        """All is well again: what waits reaches the file, or it is said why not."""
        if not hasattr(self, "windows"):
            return
        self._set_fault("well")
        for window in self.windows:
            window.history.save()
            self._settle()
        self.shows_what_was_done()
        assert self._in_file() == self._expected_file()
        for window in self.windows:
            left = [e for e in window.waiting if not window.box._waiting[e.id].is_empty]
            for each in left:
                kept = copy.deepcopy(self.file.get(each.id))
                assert kept is None or not each.change(kept), "it could be saved"
            words = [e for e in left if getattr(e.operation, "words", False)]
            assert bool(window.history.problem) == bool(window.history.unsaved) >= bool(words)

    # -- what is done ------------------------------------------------------------------------------

    @initialize()
    def begin(self) -> None:
        self.windows = [self._window(Window), self._window(Window), self._window(Page)]
        for number in (0, 1, 2):
            self.new(number)
            self.message(number + 3 * number, 0)

    def _window(self, kind: type[Window]) -> Window:
        self.made += 1
        window = kind(f"window {self.made}", self.path, self.alive)
        self._harm(window)
        return window

    def _word(self) -> str:
        self.words += 1
        return f"word{self.words}."

    def _pick(self, number: int) -> tuple[Window, str] | None:
        """A window, and a conversation that it can see."""
        window = self.windows[number % 3]
        gone = {each.id for each in window.waiting if each.key == ("delete",)}
        new = [each.id for each in window.waiting if each.begins]
        seen = [id for id in [*self.file, *new] if id not in gone]
        return (window, seen[number // 3 % len(seen)]) if seen else None

    def _pick_turn(self, number: int, at: int, role: str = "") -> tuple[Window, str, int] | None:
        """A window, a conversation, and a turn of it."""
        if (found := self._pick(number)) is None:
            return None
        turns = self._view(*found).turns
        there = [n for n, turn in turns.items() if turn.role == role or not role]
        return (*found, there[at % len(there)]) if there else None

    def _view(self, window: Window, id: str) -> Kept:
        """What the window must show of a conversation."""
        kept = copy.deepcopy(self.file.get(id, Kept()))
        for each in window.waiting:
            if each.id == id:
                each.change(kept)
        return kept

    def _did(
        self,
        window: Window,
        id: str,
        made: Callable[[Any], Change],
        do: Callable[[], Any],
        key: tuple[object, ...] | None = None,
    ) -> Any:
        """Do something: it is made, or it waits; it is refused if what it changes is gone. ``made``
        says what it changes, by the operation that was made of it, or None.
        """
        before, view = window.operations(), self._view(window, id)
        self._operations.clear()
        try:
            result = do()
        except StorageError:
            begun = id in self.file or any(each.id == id and each.begins for each in window.waiting)
            assert self.fault == "gone" or not begun or not made(None)(view), "it was refused"
            return None
        for operation in self._operations:
            change = made(operation)
            if isinstance(operation, operations.TakeDrafts):  # the page does it by the way
                change = taken(window.name, operation.others)
            elif (
                key is not None
                and key[0] == "write"
                and id_of(operation) not in window.operations()
            ):
                deletes = any(e.id == id and e.key == ("delete",) for e in window.waiting)
                if deletes or not change(copy.deepcopy(view)):
                    assert {id, key[1]} & window.deleted, "words were dropped"
                    continue
            replaced = before - window.operations()
            if key == ("delete",):  # nothing else of it is to be done
                window.waiting = [each for each in window.waiting if each.id != id]
            window.waiting = [
                each
                for each in window.waiting
                if key is None or (each.id, each.key) != (id, key) or each.number not in replaced
            ]
            window.waiting.append(Waiting(id, change, operation, key))
            key = None
        self._settle()
        return result

    def _settle(self) -> None:
        """What waits no longer has reached the file."""
        for window in self.windows:
            waits = window.operations()
            for each in [each for each in window.waiting if each.number not in waits]:
                window.waiting.remove(each)
                if each.key == ("delete",):
                    self.file.pop(each.id, None)
                    continue
                if each.begins:
                    self.file[each.id] = Kept()
                made = each.id in self.file and each.change(self.file[each.id])
                assert made or not each.operation.words, "it was made, though it is gone"

    @rule(number=_NUMBERS)
    def new(self, number: int) -> None:
        window = self.windows[number % 3]
        self._operations.clear()
        conversation = window.history.new(model="m", system="s", options={"seed": 1})
        window.open[conversation.id] = conversation

        def change(kept: Kept) -> bool:
            kept.system, kept.options = "s", {"seed": 1}
            return True

        begun = Waiting(conversation.id, change, self._operations[-1], None, begins=True)
        window.waiting.append(begun)

    def _add(self, window: Window, id: str, turn: Turn, do: Callable[[], Any]) -> Any:
        def made(operation: Any) -> Change:
            if operation is None:
                return added(-1, turn)
            turn.created = operation.turn.created
            return added(operation.number, turn)

        return self._did(window, id, made, do)

    @rule(number=_NUMBERS, at=_NUMBERS)
    def message(self, number: int, at: int) -> None:
        if found := self._pick(number):
            window, id = found
            places = [0, *self._view(window, id).turns]
            after, text = places[at % len(places)], self._word()
            turn = Turn(after or None, "user", text)
            self._add(window, id, turn, lambda: window.add(id, text, after))

    @rule(number=_NUMBERS, at=_NUMBERS)
    def edit(self, number: int, at: int) -> None:
        if found := self._pick_turn(number, at, "assistant"):
            window, id, old = found
            text, above = self._word(), self._view(window, id).turns[old].parent
            turn = Turn(above, "assistant", text)
            self._add(window, id, turn, lambda: window.edit(id, old, text))

    @rule(number=_NUMBERS, at=_NUMBERS)
    def answer(self, number: int, at: int) -> None:
        """A window begins to write an answer."""
        if (found := self._pick_turn(number - number % 3 + number % 2, at)) is None:
            return
        window, id, question = found
        turn = Turn(question, "assistant", "", "writing", window.name)
        begin = lambda: window.conversation(id).answer(after=question)  # noqa: E731
        if (writer := self._add(window, id, turn, begin)) is not None:
            window.writers[id, writer.turn] = writer

    @rule(number=_NUMBERS, at=_NUMBERS)
    def reopen(self, number: int, at: int) -> None:
        if (found := self._pick_turn(number - number % 3 + number % 2, at, "assistant")) is None:
            return
        window, id, number = found
        turn = self._view(window, id).turns[number]
        below = [t for t in self._view(window, id).turns.values() if t.parent == number]
        if below or not turn.text or turn.state == "writing":
            return
        values = {"state": "writing", "writer": window.name}
        made = lambda operation: changed(number, **values)  # noqa: E731
        with contextlib.suppress(OptionError):  # where it sees an older state
            do = lambda: window.conversation(id).reopen(number)  # noqa: E731
            if (writer := self._did(window, id, made, do)) is not None:
                window.writers[id, number] = writer

    @rule(number=_NUMBERS, at=_NUMBERS)
    def write(self, number: int, at: int) -> None:
        window = self.windows[number % 2]
        if window.writers:
            (id, turn), writer = [*window.writers.items()][at % len(window.writers)]
            self._finish_or_write(window, id, turn, lambda: writer.write(f"{self._word()} "))

    @rule(number=_NUMBERS, at=_NUMBERS, state=st.sampled_from(["done", "cancelled", "failed"]))
    def finish(self, number: int, at: int, state: str) -> None:
        window = self.windows[number % 2]
        if window.writers:
            key = [*window.writers][at % len(window.writers)]
            writer = window.writers.pop(key)
            self._finish_or_write(window, *key, lambda: writer.finish(state))

    def _finish_or_write(self, window: Window, id: str, turn: int, do: Callable[[], Any]) -> None:
        def made(operation: Any) -> Change:
            if isinstance(operation, operations.Finish):
                text = {"text": operation.text} if operation.text else {}
                return changed(turn, state=operation.state, writer="", **text)
            values = {"text": operation.text, "state": "writing", "writer": window.name}
            return changed(turn, **values)

        self._did(window, id, made, do, ("write", turn))

    @rule(number=_NUMBERS, at=_NUMBERS)
    def remove(self, number: int, at: int) -> None:
        if found := self._pick_turn(number, at):
            window, id, turn = found
            window.deleted |= self._view(window, id).below(turn)
            self._did(window, id, lambda o: removed(turn), lambda: window.remove(id, turn))

    @rule(number=_NUMBERS, at=_NUMBERS)
    def show(self, number: int, at: int) -> None:
        if found := self._pick_turn(number, at):
            window, id, turn = found
            made = lambda operation: shown(turn)  # noqa: E731
            self._did(window, id, made, lambda: window.show(id, turn))

    @rule(number=_NUMBERS)
    def delete(self, number: int) -> None:
        if (found := self._pick(number)) and number % 4 == 0:
            window, id = found
            window.deleted.add(id)
            if any(each.id == id and each.begins for each in window.waiting):
                window.delete(id)  # nothing of it was in the file
                window.waiting = [each for each in window.waiting if each.id != id]
            else:
                made = lambda operation: lambda kept: True  # noqa: E731
                self._did(window, id, made, lambda: window.delete(id), ("delete",))

    @rule(number=_NUMBERS, name=st.sampled_from(["title", "system"]))
    def rename(self, number: int, name: str) -> None:
        if found := self._pick(number):
            window, id = found
            text = self._word()
            made = lambda operation: fact(name, text)  # noqa: E731
            self._did(window, id, made, lambda: window.set(id, name, text))

    @rule(number=_NUMBERS, on=st.booleans())
    def pin(self, number: int, on: bool) -> None:
        if found := self._pick(number):
            window, id = found
            made = lambda operation: fact("pinned", on)  # noqa: E731
            self._did(window, id, made, lambda: window.set(id, "pinned", on))

    @rule(number=_NUMBERS, name=st.sampled_from(["seed", "top_k"]), value=st.integers(1, 9))
    def set_option(self, number: int, name: str, value: int) -> None:
        """One option, beside those that others have set meanwhile."""
        if found := self._pick(number):
            window, id = found
            made = lambda operation: option(name, value)  # noqa: E731
            do = lambda: window.conversation(id).change_options({name: value})  # noqa: E731
            self._did(window, id, made, do)

    @rule(number=_NUMBERS)
    def take_draft(self, number: int) -> None:
        if found := self._pick(number):
            window, id = found
            made = lambda operation: fact("pinned", None)  # noqa: E731 - see _did
            self._did(window, id, made, lambda: window.conversation(id).take_draft())

    @rule(number=_NUMBERS, empty=st.booleans())
    def keep_draft(self, number: int, empty: bool) -> None:
        if found := self._pick(number):
            window, id = found
            text = "" if empty else self._word()
            made = lambda operation: drafted(window.name, text)  # noqa: E731
            self._did(window, id, made, lambda: window.draft(id, text), ("draft", window.name))

    # -- harm --------------------------------------------------------------------------------------

    @rule(kind=st.sampled_from(_FAULTS))
    def break_disk(self, kind: str) -> None:
        self._set_fault(kind)

    def _set_fault(self, kind: str) -> None:
        if self.fault == "gone":
            for file in self.aside.iterdir():
                file.rename(self.path.parent / file.name)
        if self._locker is not None:
            self._locker.close()
            self._locker = None
        self.fault = kind
        for window in self.windows:
            self._harm(window)
        if kind == "gone":
            self.aside.mkdir(exist_ok=True)
            for file in [*self.path.parent.iterdir()]:
                file.rename(self.aside / file.name)
        elif kind == "locked":
            self._locker = sqlite3.connect(self.path, isolation_level=None)
            self._locker.execute("BEGIN IMMEDIATE")

    def _harm(self, window: Window) -> None:
        """Make the file's connection fail as the disk does."""
        for connection in window.history._database._connections:
            connection.execute("PRAGMA busy_timeout = 0")
            (pages,) = connection.execute("PRAGMA page_count").fetchone()
            most = pages if self.fault == "full" else 1 << 30
            connection.execute(f"PRAGMA max_page_count = {most}")
            connection.execute(f"PRAGMA query_only = {int(self.fault == 'read-only')}")

    @rule(number=_NUMBERS)
    def try_again(self, number: int) -> None:
        window = self.windows[number % 3]
        window.history.save()
        self._harm(window)  # it may have opened the file again
        self._settle()

    @rule(number=_NUMBERS)
    def kill(self, number: int) -> None:
        """A window ends at once, with what waits in it, and another one is opened."""
        if self.fault == "gone":
            return  # a start without a file begins another
        place = number % 2
        window = self.windows[place]
        window.history._database.close()
        self.alive.discard(window.name)
        self.windows[place] = self._window(Window)

    @rule(seconds=st.sampled_from([-90_000.0, -2.0, 2.0, 90_000.0]))
    def set_clock(self, seconds: float) -> None:
        self.clock += seconds

    @rule()
    def take_for_dead(self) -> None:
        """Another process thinks that all windows have ended."""
        if self.fault in ("gone", "locked"):
            return
        alive = set(self.alive)
        self.alive.clear()
        with contextlib.closing(sqlite3.connect(self.path, isolation_level=None)) as other:
            other.row_factory = sqlite3.Row
            operations.settle_cut(other)
        self.alive |= alive
        for kept in self.file.values():
            for turn in kept.turns.values():
                turn.state = "cut" if turn.state == "writing" else turn.state

    # -- what must be ------------------------------------------------------------------------------

    @invariant()
    def shows_what_was_done(self) -> None:
        """Every window shows the file, with its own changes on top."""
        for window in getattr(self, "windows", ()):
            for id in self.file if self.fault != "gone" else ():
                if not any(each.id == id and each.key == ("delete",) for each in window.waiting):
                    self._compare(window, id)

    def _compare(self, window: Window, id: str) -> None:
        must, conversation = self._view(window, id), window.conversation(id)
        found = {turn.id: (parent, turn) for turn, parent in conversation.tree()}
        shown = {n: (parent, t.role, t.content, t.state) for n, (parent, t) in found.items()}
        turns = must.turns.items()
        assert shown == {n: (t.parent, t.role, t.text, self._state(t)) for n, t in turns}
        assert [turn.id for turn in conversation.turns] == must.path()
        assert (conversation.title, conversation.system) == (must.title, must.system)
        assert (conversation.options, conversation.pinned) == (must.options, must.pinned)
        assert (window.name, conversation.draft) == (window.name, must.drafts.get(window.name, ""))

    def _state(self, turn: Turn) -> str:
        return "cut" if turn.state == "writing" and turn.writer not in self.alive else turn.state

    def _in_file(self) -> File:
        """The file, read by nothing of ours."""
        with contextlib.closing(sqlite3.connect(self.path)) as connection:
            rows = lambda query: connection.execute(query).fetchall()  # noqa: E731
            found = File()
            for id, title, system, first in rows(
                "SELECT id, title, system, first FROM conversation"
            ):
                found[id] = Kept(title, system)
                if first is not None:
                    found[id].shown[None] = first
            for id, writer, text in rows("SELECT conversation, writer, text FROM draft"):
                found[id].drafts[writer] = text
            query = "SELECT conversation, id, parent, next, role, content FROM turn"
            for id, number, parent, following, role, text in rows(query):
                found[id].turns[number] = Turn(parent, role, text)
                if following is not None:
                    found[id].shown[number] = following
            for number, text in rows(
                "SELECT turn, group_concat(text, '') FROM piece GROUP BY turn"
            ):
                next(k for k in found.values() if number in k.turns).turns[number].text = text
            return found

    def _expected_file(self) -> File:
        expected = copy.deepcopy(self.file)
        for kept in expected.values():
            kept.options, kept.pinned = {}, False  # each window was compared
            for number, turn in kept.turns.items():
                kept.turns[number] = Turn(turn.parent, turn.role, turn.text)
        return expected


EXAMPLE_STEPS = 50


def drive(examples: int) -> None:
    """Run so many sequences of ``EXAMPLE_STEPS`` steps."""
    how = settings(max_examples=examples, stateful_step_count=EXAMPLE_STEPS)
    run_state_machine_as_test(Storage, settings=how)  # type: ignore[no-untyped-call]
