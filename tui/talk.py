"""The conversation that is on screen, kept in the history for as long as the disk allows.

When the history fails, the conversation goes on in memory with one line to say so; what was said
meanwhile is brought back into the history, branches included, as soon as that works again. Knows
the history and no widget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from localrt.errors import StorageError
from localrt.tui.memory import Memory

if TYPE_CHECKING:
    from localrt import Message
    from localrt.history import AnswerWriter, Conversation, Turn
    from localrt.tui.memory import MemoryWriter

    Writer = AnswerWriter | MemoryWriter

__all__ = ["Talk", "unanswered"]

_Result = TypeVar("_Result")


class Talk:
    """A ``Conversation`` of the history, or one in memory.

    ``on_moved`` is told which numbers of turns have become which when they reach the history,
    ``on_problem`` one line when keeping stops or works again.
    """

    def __init__(
        self,
        kept: Conversation | Memory,
        *,
        on_moved: Callable[[Mapping[int, int]], None] = lambda moved: None,
        on_problem: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._now: Conversation | Memory = kept
        self._file: Conversation | None = None  # where it belongs while it is in memory
        self._on_moved, self._on_problem = on_moved, on_problem
        self._moved: dict[int, int] = {}
        self._open: list[tuple[Writer, str, Mapping[str, Any]]] = []  # ended, not yet saved
        self._told = False
        self._seen: tuple[Turn, ...] = kept.turns
        self._facts = self._read_facts(kept)

    @property
    def kept(self) -> bool:
        """Whether it is all in the history."""
        return self._file is None and not self._open and not isinstance(self._now, Memory)

    @property
    def unsaved(self) -> bool:
        """Whether something belongs into the history and is not there."""
        return self._file is not None or bool(self._open)

    @property
    def id(self) -> str:
        """As in the history; empty in memory."""
        return str(self._facts["id"])

    @property
    def title(self) -> str:
        """The name, or the beginning of what was said first."""
        return str(self._fresh()["title"])

    @property
    def model(self) -> str:
        """The model that answered last."""
        return str(self._facts["model"])

    @property
    def system(self) -> str | None:
        """The system prompt."""
        return self._facts["system"] or None

    @property
    def options(self) -> dict[str, Any]:
        """Generation options that were set in it."""
        return dict(self._facts["options"])

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The shown branch, oldest first."""
        try:
            turns = self._now.turns
        except StorageError:
            return self._seen
        texts = {writer.turn: (writer.text, state) for writer, state, _ in self._open}
        self._seen = tuple(
            replace(turn, content=texts[turn.id][0], state=texts[turn.id][1])
            if turn.id in texts
            else turn
            for turn in turns
        )
        return self._seen

    def messages(self, before: int | None = None) -> list[Message]:
        """What the model is to see, up to turn ``before``: system prompt, questions, answers."""
        messages: list[Message] = []
        if self.system:
            messages.append({"role": "system", "content": self.system})
        turns = self.turns
        for turn, following in zip(turns, (*turns[1:], None), strict=True):
            if before is not None and turn.id == before:
                break
            if unanswered(turn, following) or (turn.state == "failed" and not turn.content):
                continue
            messages.append({"role": turn.role, "content": turn.content})
        return messages

    @property
    def end(self) -> int:
        """The turn that a new message follows; 0 at the beginning.

        A message that got no answer is not followed: the next one takes its place.
        """
        turns = list(self.turns)
        while turns:
            last = turns[-1]
            if last.role == "user" or (last.state == "failed" and not last.content):
                turns.pop()
            else:
                return last.id
        return 0

    # -- changes ---------------------------------------------------------------------------------

    def set(self, **changes: Any) -> None:
        """Change ``title``, ``model``, ``system`` or ``options``."""
        self._facts.update(changes)
        self._do(lambda: self._now.set(**changes))

    def add(
        self, role: str, content: str, *, after: int, info: Mapping[str, Any] | None = None
    ) -> Turn:
        """Put a turn behind turn ``after``, 0 for the beginning; it is shown then."""
        self.save()
        after = self._moved.get(after, after)
        return self._do(lambda: self._now.add(role, content, after=after, info=info))

    def answer(self, *, after: int) -> Writer:
        """Begin an answer; ``finish`` ends it."""
        after = self._moved.get(after, after)
        return self._do(lambda: self._now.answer(after=after))

    def finish(self, writer: Writer, state: str, info: Mapping[str, Any]) -> None:
        """The answer is whole: ``"done"``, ``"cancelled"`` or ``"failed"``."""
        try:
            writer.finish(state, info=info)
        except StorageError as error:
            self._open.append((writer, state, info))
            self._tell(error)

    def show(self, number: int) -> None:
        """Show the branch that a turn is on."""
        self._do(lambda: self._now.show(number))

    def siblings(self, number: int) -> tuple[int, ...]:
        """The turns in the place of a turn, itself included."""
        try:
            return tuple(self._now.siblings(number))
        except StorageError:
            return (number,)

    def save(self) -> bool:
        """Bring what is in memory into the history; whether all is there now."""
        if not self.unsaved:
            return True
        try:
            while self._open:
                writer, state, info = self._open[0]
                writer.finish(state, info=info)
                del self._open[0]
            self._move_back()
        except StorageError:
            return False
        self._told = False
        self._on_problem("The conversation is kept again")
        return True

    # -- parts -----------------------------------------------------------------------------------

    def _do(self, change: Callable[[], _Result]) -> _Result:
        try:
            return change()
        except StorageError as error:
            if isinstance(self._now, Memory):
                raise
            self._tell(error)
            self._file = self._now
            facts = self._facts
            self._now = Memory(turns=self.turns, **facts)
            return change()

    def _tell(self, error: StorageError) -> None:
        if not self._told:
            self._told = True
            self._on_problem(f"Not kept on disk for now: {error}; /export PATH saves a copy")

    def _move_back(self) -> None:
        memory, file = self._now, self._file
        if file is None or not isinstance(memory, Memory):
            return
        for unsaved in memory.unsaved:
            turn = unsaved.turn
            if turn.id in self._moved:
                continue
            if turn.state == "writing":
                raise StorageError("an answer is still being written")
            after = self._moved.get(unsaved.parent, unsaved.parent)
            if turn.role == "assistant":
                writer = file.answer(after=after)
                writer.write(turn.content)
                writer.finish(turn.state, info=turn.info)
                self._moved[turn.id] = writer.turn
            else:
                added = file.add(turn.role, turn.content, after=after, info=turn.info)
                self._moved[turn.id] = added.id
        changes = {name: value for name, value in self._facts.items() if name != "id"}
        file.set(**changes)
        shown = memory.turns
        if shown:
            file.show(self._moved.get(shown[-1].id, shown[-1].id))
        self._now, self._file = file, None
        self._on_moved(self._moved)

    def _fresh(self) -> dict[str, Any]:
        with suppress(StorageError):
            self._facts = self._read_facts(self._now)
        return self._facts

    def _read_facts(self, kept: Conversation | Memory) -> dict[str, Any]:
        return {name: getattr(kept, name) for name in ("id", "title", "model", "system", "options")}


def unanswered(turn: Turn, following: Turn | None) -> bool:
    """Whether a user's turn got no answer: none follows, or one that failed without a word."""
    if turn.role != "user":
        return False
    if following is None:
        return True
    return following.role == "user" or (following.state == "failed" and not following.content)
