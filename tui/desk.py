"""Which conversation lies on the desk: the history, the open conversation, the model's chat of it.

Conversations and model come and go independently: one can be read before the model is there, and
stays when the model changes. Knows no widget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localrt.errors import LocalrtError, StorageError
from localrt.tui.memory import Memory
from localrt.tui.session import Session
from localrt.tui.talk import Talk

if TYPE_CHECKING:
    from localrt import History, Model
    from localrt.history import ConversationInfo

__all__ = ["Desk", "Usual"]


@dataclass(frozen=True, slots=True)
class Usual:
    """What the user wants new conversations to begin with."""

    system: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


class Desk:
    """Begins with an empty conversation.

    Args:
        open_history: opens the history; None keeps nothing.
        model: name to note in the history until the model is loaded.
        system, options: of the command line: for new conversations, over what others have.
        usual: what new conversations begin with beside these.
        on_problem, on_moved: as of ``Talk``.
    """

    def __init__(
        self,
        open_history: Callable[[], History] | None,
        *,
        model: str,
        system: str | None,
        options: dict[str, Any],
        on_problem: Callable[[str], None],
        on_moved: Callable[[Mapping[int, int]], None],
        usual: Usual | None = None,
    ) -> None:
        self.system, self.options = system, options
        self.usual = usual or Usual()
        self.model_name = model
        self.session: Session | None = None
        self.history: History | None = None
        self.notes: tuple[str, ...] = ()
        self._model: Model | None = None
        self._on_problem, self._on_moved = on_problem, on_moved
        if open_history is not None:
            try:
                self.history = open_history()
                self.notes = self.history.notes
            except StorageError as error:
                self.notes = (f"Conversations are not kept: {error}",)
        self.talk = self._blank()

    def list(self, search: str = "") -> list[ConversationInfo]:
        """The conversations of the history, those used last first."""
        return self.history.list(search, limit=500) if self.history is not None else []

    def take(self, model: Model) -> Session:
        """A model is loaded: it goes on with the conversation."""
        self._model, self.model_name = model, model.info.name
        self.session = Session(model, self.talk, self.options)
        return self.session

    def part(self) -> tuple[Session | None, Model | None]:
        """The model leaves the desk, with its session; the conversation stays."""
        left = self.session, self._model
        self.session = self._model = None
        return left

    def new(self) -> Session | None:
        """Put an empty conversation on the desk; the session that is left, to be ended."""
        return self._put(self._blank())

    def open(self, id: str) -> Session | None:
        """Put a conversation of the history on the desk; the session that is left."""
        if self.history is None:
            raise StorageError("there is no history: conversations are not kept")
        return self._put(self._talk(self.history.open(id)))

    def load(self, path: Path) -> Session | None:
        """Put an exported or saved chat on the desk, as a new conversation; the session left."""
        if self._model is None:
            raise StorageError("the model is still loading")
        chat = self._model.load_chat(path)
        messages, options = list(chat.messages), dict(chat.options)
        chat.close()
        talk = self._blank()
        talk.set(options={**options, **self.options})
        for message in messages:
            role, content = message["role"], str(message["content"])
            if role == "system":
                talk.set(system=self.system or content)
            else:
                turns = talk.turns
                talk.add(role, content, after=turns[-1].id if turns else 0)
        return self._put(talk)

    def delete(self, id: str) -> Session | None:
        """Delete a conversation; the session that is left when it was the open one."""
        if self.history is not None:
            self.history.delete(id)
        return self.new() if id == self.talk.id else None

    def rename(self, id: str, title: str) -> None:
        """Name a conversation of the history."""
        if id == self.talk.id:
            self.talk.set(title=title)
        elif self.history is not None:
            self.history.open(id).set(title=title)

    def close(self) -> None:
        """The app ends: save what is left to save, close the file."""
        self.talk.save()
        if self.history is not None:
            self.history.close()

    def _put(self, talk: Talk) -> Session | None:
        self.talk.save()
        left, self.talk = self.session, talk
        self.session = None
        if self._model is not None:
            try:
                self.session = Session(self._model, talk, self.options)
            except LocalrtError:
                self.session = left
                raise
        return left

    def _blank(self) -> Talk:
        system = self.usual.system if self.system is None else self.system
        options = {**self.usual.options, **self.options}
        if self.history is not None:
            try:
                return self._talk(
                    self.history.new(model=self.model_name, system=system, options=options)
                )
            except StorageError as error:
                self._on_problem(f"Not kept on disk: {error}; /export PATH saves a copy")
        return self._talk(Memory(model=self.model_name, system=system, options=options))

    def _talk(self, kept: Any) -> Talk:
        return Talk(kept, on_moved=self._on_moved, on_problem=self._on_problem)
