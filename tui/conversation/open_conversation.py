"""The open conversation, kept in the history as long as the disk allows.

If its file cannot be written, it continues in a history in memory and tells the user in one line;
new turns are written back, branches included, as soon as that works again. Knows no widget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from localrt.common.errors import StorageError
from localrt.history.conversation import withdraw
from localrt.history.history import copy_to_memory, end_answer, merge
from localrt.history.messages import is_nothing, messages_for_model, summary_turns

if TYPE_CHECKING:
    from localrt import AnswerWriter, Conversation, History, Message, Turn

_Result = TypeVar("_Result")
_FACTS = ("id", "title", "model", "system", "options")
_SHOWN_PROMPT = 60  # characters
_NOTES = {
    "cut": "cut off: the app ended here",
    "cancelled": "stopped",
    "failed": "failed",
    "writing": "being written by another window",
}


class OpenConversation:
    """A conversation of a history, as one window shows it.

    ``turns`` is the branch last read, so that only visible turns are sent to the model; ``refresh``
    adds what other windows have written. If another window begins a branch, this window keeps
    showing its own. A model that does not see gets pictures' names in their places.

    Args:
        stored: the conversation.
        memory: opens the fallback history in memory; None if ``stored`` is in memory.
        temporary: nothing of it may be written to the disk.
        on_moved: called with the old and new numbers of turns when they reach the file.
        on_problem: called with one line when saving fails or works again.
    """

    def __init__(
        self,
        stored: Conversation,
        memory: Callable[[], History] | None,
        *,
        temporary: bool = False,
        on_moved: Callable[[Mapping[int, int]], None] = lambda numbers: None,
        on_problem: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.sees, self.temporary = True, temporary
        self._stored = stored
        self._memory = memory
        self._file: Conversation | None = None  # the stored one while this is in memory
        self._on_moved, self._on_problem = on_moved, on_problem
        self._moved: dict[int, int] = {}
        self._facts: dict[str, Any] = {name: getattr(stored, name) for name in _FACTS}
        self._writing = set[int]()  # turns being written by this window
        self._hidden = set[int]()  # hidden turns; everything after them is hidden too
        self._version = stored.version
        self._turns = stored.turns

    @property
    def saved(self) -> bool:
        """Whether all of it is in a file, and no window has deleted it."""
        if self._memory is None or self._file is not None:
            return False
        with suppress(StorageError):  # raised if it was deleted
            return isinstance(self._stored.title, str)
        return False

    @property
    def unsaved(self) -> bool:
        """Whether something is not in the file yet."""
        return self._file is not None

    @property
    def id(self) -> str:
        return str(self._facts["id"])

    @property
    def title(self) -> str:
        """The name, or the beginning of the first message."""
        with suppress(StorageError):
            self._facts["title"] = self._stored.title
        return str(self._facts["title"])

    @property
    def model(self) -> str:
        return str(self._facts["model"])

    @property
    def system(self) -> str | None:
        return self._facts["system"] or None

    @property
    def prompt_line(self) -> str:
        """The beginning of the system prompt, for the line above the conversation; "" if none."""
        words = " ".join((self.system or "").split())
        shown = words if len(words) <= _SHOWN_PROMPT else f"{words[: _SHOWN_PROMPT - 1]}…"
        return f"System prompt: {shown}" if words else ""

    @property
    def options(self) -> dict[str, Any]:
        return dict(self._facts["options"])

    @property
    def turns(self) -> tuple[Turn, ...]:
        return self._turns

    @property
    def written_elsewhere(self) -> bool:
        """Whether another window is writing in the shown branch."""
        return not self.unsaved and any(
            turn.state == "writing" and turn.id not in self._writing for turn in self._turns
        )

    def turns_now(self) -> tuple[Turn, ...]:
        """The shown branch, with the saved part of an answer that is being written."""
        with suppress(StorageError):
            if self._turns:
                return self._stored.branch(self._turns[-1].id)
        return self._turns

    def refresh(self) -> bool:
        """Read what other windows may have written; False if there is nothing new."""
        with suppress(StorageError):
            version = self._stored.version
            # If another window is killed, the end of its answer is never written.
            if version != self._version or self.written_elsewhere:
                self._version = version
                self._read()
                return True
        return False

    def _read(self, through: int | None = None) -> None:
        """Read the branch that contains turn ``through``, by default the shown one: another window
        may have taken its end back.
        """
        wanted = [turn.id for turn in reversed(self._turns)] if through is None else [through]
        with suppress(StorageError):
            stored = self._stored
            there = next(filter(stored.siblings, wanted), None)
            turns = stored.turns if there is None else stored.branch(there)
            ends = (place for place, turn in enumerate(turns) if turn.id in self._hidden)
            self._turns = turns[: next(ends, None)]

    def messages(self, before: int | None = None, *, continued: int | None = None) -> list[Message]:
        """The messages for the model up to turn ``before``: system prompt, questions, answers. With
        answer ``continued`` they end with it, to be continued.
        """
        how: dict[str, Any] = {"sees": self.sees, "continued": continued, "model": self.model}
        return messages_for_model(self.turns, self.system, before=before, **how)

    @property
    def end(self) -> int:
        """The turn that a new message follows; 0 at the beginning.

        An unanswered message is skipped: the new one takes its place.
        """
        for turn in reversed(self.turns):
            if turn.role != "user" and not is_nothing(turn):
                return turn.id
        return 0

    def question(self, number: int | None = None) -> Turn | None:
        """The user's turn that is or is answered by turn ``number``, by default the last."""
        question: Turn | None = None
        for turn in self.turns:
            if turn.role == "user":
                question = turn
            if turn.id == number:
                break
        return question

    def before(self, number: int) -> int | None:
        """The turn before ``number``, 0 for the first; None if ``number`` is not shown."""
        numbers = [0, *(turn.id for turn in self.turns)]
        return numbers[numbers.index(number) - 1] if number in numbers else None

    def set(self, **changes: Any) -> None:
        """Change ``title``, ``model``, ``system`` or ``options``."""
        self._facts.update(changes)
        self._change(lambda: self._stored.set(**changes))

    def add(
        self,
        role: str,
        content: str | Sequence[Mapping[str, object]],
        *,
        after: int,
        info: Mapping[str, object] | None = None,
    ) -> Turn:
        """Add a turn after turn ``after``, 0 for the beginning, and show it."""
        self.save()
        after = self._moved.get(after, after)
        turn = self._change(lambda: self._stored.add(role, content, after=after, info=info))
        self._read(turn.id)
        return turn

    def answer(
        self, *, after: int, role: str = "assistant", info: Mapping[str, object] | None = None
    ) -> AnswerWriter:
        """Begin an answer, or the result of a ``"tool"``; ``finish`` ends it."""
        after = self._moved.get(after, after)
        writer = self._change(lambda: self._stored.answer(after=after, role=role, info=info))
        self._writing.add(writer.turn)
        self._read(writer.turn)
        return writer

    def reopen(self, number: int) -> AnswerWriter:
        """Continue the last answer, as ``Conversation.reopen``; ``finish`` ends it."""
        self.save()
        number = self._moved.get(number, number)
        writer = self._change(lambda: self._stored.reopen(number))
        self._writing.add(number)
        self._read(number)
        return writer

    def edit_answer(self, number: int, text: str) -> Turn:
        """Add and show an answer with this text beside answer ``number``."""
        self.save()
        number = self._moved.get(number, number)
        turn = self._change(lambda: self._stored.edit_answer(number, text))
        self._read(turn.id)
        return turn

    def remove(self, number: int) -> None:
        """Remove a turn and what follows it, for good."""
        if not self.save():
            raise StorageError("nothing can be removed while the file cannot be written")
        self._stored.remove(self._moved.get(number, number))
        self._read()

    @property
    def draft(self) -> str:
        """The message that was not sent, or that is being written."""
        return self._stored.draft

    def keep_draft(self, text: str) -> None:
        self._stored.keep_draft(text)

    def finish(self, writer: AnswerWriter, state: str, info: Mapping[str, object]) -> None:
        """End an answer; ``state`` is ``"done"``, ``"cancelled"`` or ``"failed"``."""
        try:
            writer.finish(state, info=info)
        except StorageError as error:
            self._go_on_in_memory(error)
        if self.unsaved:
            old = next((turn.content for turn in self._turns if turn.id == writer.turn), "")
            end_answer(self._stored, writer.turn, state, writer.text or old, info)
        self._writing.discard(writer.turn)
        self._read()

    def begin_summary(self) -> Turn:
        """Begin a branch at the root with the request for a summary of this one."""
        request, last = summary_turns((), None)[1], self.turns[-1].id
        return self.add("user", request, after=0, info={"summary_of": last})

    def to_summarize(self, before: int) -> list[Message]:
        """The messages whose summary turn ``before`` will be; none if it is another answer."""
        question = self.question(before)
        if question is None or self.before(before) != question.id:
            return []
        with suppress(StorageError, KeyError):  # that branch was removed, or there is none
            turns = self._stored.branch(question.info["summary_of"])
            return summary_turns(turns, self.system, sees=self.sees)[0]
        return []

    def show(self, number: int) -> None:
        self._change(lambda: self._stored.show(number))
        self._hidden.clear()
        self._read(number)

    def leave(self, number: int) -> None:
        """Remove a turn and what follows it, such as a message that was refused. Its alternatives
        are hidden: the next message comes in its place.
        """
        self._hidden.update(self.siblings(number))
        self._change(lambda: withdraw(self._stored, number))
        self._read()

    def show_sibling(self, number: int, step: int) -> int:
        """Show the sibling ``step`` places from turn ``number``, cyclically; returns its number."""
        siblings = self.siblings(number)
        if number in siblings:
            number = siblings[(siblings.index(number) + step) % len(siblings)]
            self.show(number)
        return number

    def siblings(self, number: int) -> tuple[int, ...]:
        """The alternatives of a turn, itself included."""
        try:
            return self._stored.siblings(number)
        except StorageError:
            return (number,)

    def save(self) -> bool:
        """Write unsaved turns to the file; returns whether all are saved now."""
        if self._file is None:
            return True
        assert self._memory is not None, "it was in a file before"
        try:
            numbers = merge(self._file, self._stored)
            self._memory().delete(self.id)
        except StorageError:
            return False
        self._stored, self._file = self._file, None
        self._moved |= numbers
        if self._turns:
            last = self._turns[-1].id
            self._hidden = {numbers.get(turn, turn) for turn in self._hidden}
            self._read(numbers.get(last, last))
        self._on_moved(numbers)
        self._on_problem("The conversation is saved to disk again")
        return True

    def _change(self, change: Callable[[], _Result]) -> _Result:
        try:
            return change()
        except StorageError as error:
            self._go_on_in_memory(error)
            return change()

    def _go_on_in_memory(self, error: StorageError) -> None:
        if self._memory is None or self._file is not None:
            raise error
        self._on_problem(f"Not saved to disk for now: {error}; /export PATH saves a copy")
        copy = copy_to_memory(self._memory(), self.id, self.turns, self._facts)
        self._stored, self._file = copy, self._stored


def answer_note(state: str, finish_reason: str | None = None, *, full: bool = False) -> str:
    """The note below an answer; empty if it ended normally. ``full``: the context is full."""
    if state in _NOTES:
        return _NOTES[state]
    if finish_reason == "length":
        return "cut off: the context is full" if full else "cut off at max_tokens"
    return ""
