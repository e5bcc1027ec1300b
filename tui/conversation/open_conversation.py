"""The open conversation, as one window shows it.

What other windows change of it is read again; what this one changes is the history's to keep, which
tries again while its file cannot be written. Knows no widget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from localrt.common.errors import StorageError
from localrt.history.conversation import changed_options
from localrt.history.database import GoneError
from localrt.history.messages import is_nothing, messages_for_model, summary_turns

if TYPE_CHECKING:
    from localrt import AnswerWriter, Conversation, Message, Turn

_FACTS = ("title", "model", "system", "options")
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

    ``temporary``: nothing of it may be written to the disk.
    """

    def __init__(self, stored: Conversation, *, temporary: bool = False) -> None:
        self.sees, self.temporary = True, temporary
        self.gone = False  # whether another window has deleted it
        self._stored = stored
        self._facts: dict[str, Any] = {name: getattr(stored, name) for name in _FACTS}
        self._writing = set[int]()  # turns being written by this window
        self._hidden = set[int]()  # hidden turns; everything after them is hidden too
        self._version = -1  # of the file, when it was last read
        self._turns = stored.turns

    @property
    def saved(self) -> bool:
        """Whether all of it is in a file, and no window has deleted it."""
        return self._stored.is_kept

    @property
    def id(self) -> str:
        return self._stored.id

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
        return any(turn.state == "writing" and turn.id not in self._writing for turn in self._turns)

    def turns_now(self) -> tuple[Turn, ...]:
        """The shown branch, with the saved part of an answer that is being written."""
        with suppress(StorageError):
            if self._turns:
                return self._stored.branch(self._turns[-1].id)
        return self._turns

    def refresh(self) -> bool:
        """Read what other windows may have written; False if there is nothing new."""
        try:
            version = self._stored.version
            # If another window is killed, the end of its answer is never written.
            if version != self._version or self.written_elsewhere:
                self._version = version
                self._facts |= {name: getattr(self._stored, name) for name in _FACTS}
                self._read()
                return True
        except GoneError:
            self.gone = True
        except StorageError:  # it cannot be read now
            pass
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
        facts = {name: value for name, value in changes.items() if name != "options"}
        if "options" in changes:  # what another window has set meanwhile stays
            self._stored.change_options(changed_options(self.options, changes["options"]))
        self._stored.set(**facts)
        self._facts.update(changes)

    def add(
        self,
        role: str,
        content: str | Sequence[Mapping[str, object]],
        *,
        after: int,
        info: Mapping[str, object] | None = None,
    ) -> Turn:
        """Add a turn after turn ``after``, 0 for the beginning, and show it."""
        turn = self._stored.add(role, content, after=after, info=info)
        self._read(turn.id)
        return turn

    def answer(
        self, *, after: int, role: str = "assistant", info: Mapping[str, object] | None = None
    ) -> AnswerWriter:
        """Begin an answer, or the result of a ``"tool"``; ``finish`` ends it."""
        return self._begun(self._stored.answer(after=after, role=role, info=info))

    def reopen(self, number: int) -> AnswerWriter:
        """Continue the last answer, as ``Conversation.reopen``; ``finish`` ends it."""
        return self._begun(self._stored.reopen(number))

    def _begun(self, writer: AnswerWriter) -> AnswerWriter:
        self._writing.add(writer.turn)
        self._read(writer.turn)
        return writer

    def edit_answer(self, number: int, text: str) -> Turn:
        """Add and show an answer with this text beside answer ``number``."""
        turn = self._stored.edit_answer(number, text)
        self._read(turn.id)
        return turn

    def remove(self, number: int) -> None:
        """Remove a turn and what follows it, for good."""
        self._stored.remove(number)
        self._read()

    def take_draft(self) -> str:
        """The message that was not sent, of this window or of one that has ended."""
        with suppress(StorageError):
            return self._stored.take_draft()
        return ""

    def keep_draft(self, text: str) -> None:
        self._stored.keep_draft(text)

    def finish(self, writer: AnswerWriter, state: str, info: Mapping[str, object]) -> None:
        """End an answer; ``state`` is ``"done"``, ``"cancelled"`` or ``"failed"``."""
        writer.finish(state, info=info)
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
        self._stored.show(number)
        self._hidden.clear()
        self._read(number)

    def leave(self, number: int) -> None:
        """Remove a turn and what follows it, such as a message that was refused. Its alternatives
        are hidden: the next message comes in its place.
        """
        self._hidden.update(self.siblings(number))
        with suppress(GoneError):
            self._stored.remove(number, sweep=False)
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


def answer_note(state: str, finish_reason: str | None = None, *, full: bool = False) -> str:
    """The note below an answer; empty if it ended normally. ``full``: the context is full."""
    if state in _NOTES:
        return _NOTES[state]
    if finish_reason == "length":
        return "cut off: the context is full" if full else "cut off at max_tokens"
    return ""
