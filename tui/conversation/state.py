"""Which conversation is open: the history, the open conversation, the model's chat of it.

Conversations and models come and go independently: one can be read before the model is there, and
stays when the model changes. Knows no widget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localrt import History
from localrt.common.errors import LocalrtError, OptionError, StorageError
from localrt.tui.conversation.call_messages import infos_of
from localrt.tui.conversation.open_conversation import OpenConversation
from localrt.tui.conversation.session import Session

if TYPE_CHECKING:
    from localrt import ChatModel, Conversation, ConversationInfo


@dataclass(frozen=True, slots=True)
class Defaults:
    """What the user wants new conversations to begin with."""

    system: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


class ChatState:
    """Begins with an empty conversation.

    Args:
        open_history: opens the history; None keeps nothing.
        model: name to note in the history until the model is loaded.
        system, options: of the command line: for new conversations, over ``defaults``.
        defaults: what new conversations begin with.
        on_problem, on_moved: as of ``OpenConversation``.
    """

    def __init__(
        self,
        open_history: Callable[[], History] | None,
        *,
        model: str,
        system: str | None,
        options: dict[str, Any],
        on_problem: Callable[[str], None],
        on_moved: Callable[[Mapping[int, int]], None] = lambda numbers: None,
        defaults: Defaults | None = None,
    ) -> None:
        self.system, self.options = system, options
        self.defaults = defaults or Defaults()
        self.model_name = model
        self.session: Session | None = None
        self.notes: tuple[str, ...] = ()
        self._model: ChatModel | None = None
        self._on_problem: Callable[[str], None] = self._note
        self._on_moved = on_moved
        self.history = self._memory
        if open_history is not None:
            try:
                self.history = open_history()
                self.notes = self.history.notes
            except StorageError as error:
                self.notes = (f"Conversations are not kept: {error}",)
        self.conversation = self._new()
        self._on_problem = on_problem

    @cached_property
    def _memory(self) -> History:
        """For conversations that cannot be kept."""
        return History(":memory:")

    def list(self, search: str = "") -> list[ConversationInfo]:
        """The conversations of the history, those used last first."""
        return self.history.list(search, limit=500)

    def take_model(self, model: ChatModel) -> Session:
        """A model is loaded: it goes on with the conversation."""
        self._model, self.model_name = model, model.info.name
        self.session = Session(model, self.conversation, self.options)
        return self.session

    def drop_model(self) -> tuple[Session | None, ChatModel | None]:
        """Part from the model and its session, to be ended; the conversation stays."""
        left = self.session, self._model
        self.session = self._model = None
        return left

    def new(self) -> Session | None:
        """Open an empty conversation; the session that is left, to be ended."""
        return self._open(self._new())

    def open(self, id: str) -> Session | None:
        """Open a conversation of the history; the session that is left."""
        return self._open(self._kept(self.history.open(id)))

    def load(self, path: str | Path) -> Session | None:
        """Open an exported or saved chat as a new conversation; the session that is left."""
        if self._model is None:
            raise StorageError("the model is still loading")
        if not path:
            raise OptionError("/load needs the path of a saved conversation (.json)")
        chat = self._model.load_chat(Path(path).expanduser())
        messages, options = list(chat.messages), dict(chat.options)
        chat.close()
        conversation = self._new()
        conversation.set(options={**options, **self.options})
        last = 0
        for message, info in zip(messages, infos_of(messages), strict=True):
            role, content = message["role"], str(message["content"] or "")
            if role == "system":
                conversation.set(system=self.system or content)
            else:
                last = conversation.add(role, content, after=last, info=info).id
        return self._open(conversation)

    def delete(self, id: str) -> Session | None:
        """Delete a conversation; the session that is left when it was the open one."""
        self.history.delete(id)
        return self.new() if id == self.conversation.id else None

    def rename(self, id: str, title: str) -> None:
        """Name a conversation of the history."""
        if id == self.conversation.id:
            self.conversation.set(title=title)
        else:
            self.history.open(id).set(title=title)

    def close(self) -> None:
        """The app ends: save what is left to save, close the files."""
        self.conversation.save()
        self.history.close()
        self._memory.close()

    def _open(self, conversation: OpenConversation) -> Session | None:
        self.conversation.save()
        left, self.conversation = self.session, conversation
        self.session = None
        if self._model is not None:
            try:
                self.session = Session(self._model, conversation, self.options)
            except LocalrtError:
                self.session = left
                raise
        return left

    def _new(self) -> OpenConversation:
        system = self.defaults.system if self.system is None else self.system
        options = {**self.defaults.options, **self.options}
        values: dict[str, Any] = {"model": self.model_name, "system": system, "options": options}
        try:
            return self._kept(self.history.new(**values))
        except StorageError as error:
            self._on_problem(f"Not kept on disk: {error}; /export PATH saves a copy")
            return OpenConversation(self._memory.new(**values), None)

    def _kept(self, conversation: Conversation) -> OpenConversation:
        memory = None if self.history is self._memory else lambda: self._memory
        return OpenConversation(
            conversation,
            memory,
            on_moved=self._on_moved,
            on_problem=lambda line: self._on_problem(line),
        )

    def _note(self, line: str) -> None:
        self.notes += (line,)
