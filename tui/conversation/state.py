"""The app's state: the history, the open conversation, and the model's chat session.

Conversations and models change independently: a conversation can be read before the model is
loaded, and stays open when the model changes. The methods of slash commands return the line to
show, or raise it as a ``LocalrtError``. Knows the public API, no widget.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import localrt
from localrt import History
from localrt.common.errors import LocalrtError, OptionError, StorageError
from localrt.common.files import parse_json
from localrt.common.option_names import did_you_mean
from localrt.engine.option_help import OPTION_HELP
from localrt.history.conversation import changed_options
from localrt.history.export import Exporter
from localrt.history.messages import Way, ways_out
from localrt.history.presets import Defaults, Preset, PresetsFile
from localrt.mcp.servers import ToolServers
from localrt.mcp.toolbox import Toolbox
from localrt.tui.conversation.attachments import Attachments, SentMessage
from localrt.tui.conversation.open_conversation import OpenConversation
from localrt.tui.text import human_count, short_name

if TYPE_CHECKING:
    from localrt import (
        ChatModel,
        ChatSession,
        ConversationInfo,
        LoadedFile,
        PlannedContext,
    )
    from localrt.common.progress import ProgressCallback

_NONE = ("none", "default")


class Session:
    """A model and its chat session for ``conversation``.

    Raises:
        OptionError: the model has no such ``options``.
    """

    def __init__(
        self, model: ChatModel, conversation: OpenConversation, options: dict[str, Any]
    ) -> None:
        self.model = model
        self.conversation = conversation
        self.notes: tuple[str, ...] = ()
        chat = model.chat(system=conversation.system, **options)
        try:
            chat.set(**{**conversation.options, **options})
        except OptionError as error:  # saved by another version
            self.notes = (f"Options of this conversation are ignored: {error}",)
        self.chat: ChatSession = chat
        self._options_then = conversation.options
        chat.save_while(lambda: conversation.saved)
        conversation.sees = self.sees
        if not self.sees and any(turn.pictures for turn in conversation.turns):
            self.notes += ("This model cannot see: of earlier pictures it gets the names",)
        if conversation.model != model.info.name:
            if conversation.model and conversation.turns:
                self.notes += (
                    f"So far with {conversation.model}, from here with {model.info.name}",
                )
            conversation.set(model=model.info.name)

    def take_facts(self) -> None:
        """Answer with the system prompt and the options that another window has set meanwhile."""
        before, now = self._options_then, self.conversation.options
        self._options_then, self.chat.system = now, self.conversation.system
        with suppress(OptionError):  # of another version
            self.chat.set(**changed_options(before, now))

    @property
    def sees(self) -> bool:
        """Whether the model sees pictures; a server may refuse them."""
        return self.model.info.sees

    def check_sees(self) -> None:
        """Raise ``OptionError`` if the model cannot see pictures."""
        if not self.sees:
            raise OptionError(f"{self.title} cannot see pictures: the message was not sent")

    def measured(self, draft: SentMessage) -> SentMessage:
        """The message with the token counts of its pictures; slow for many pictures.

        Raises:
            OptionError: the model cannot see pictures, or cannot read one of these.
        """
        if not draft.pictures:
            return draft
        self.check_sees()
        text = self.model.count([{"role": "user", "content": "a"}])
        tokens = []
        for picture in draft.pictures:
            content = [picture.part, {"type": "text", "text": "a"}]
            tokens.append(self.model.count([{"role": "user", "content": content}]) - text)
        return replace(draft, tokens=tuple(tokens))

    def fitted(
        self, attachments: Attachments, text: str, progress: ProgressCallback
    ) -> tuple[str, list[str]]:
        """The message with its files as they fit the context, and notes; may take a while."""
        ctx = self.chat.capacity
        free = lambda: max(ctx - self.tokens(), 2) if ctx else 0  # noqa: E731
        keep = not self.conversation.temporary
        return attachments.fitted(text, progress, free, self.model.count, keep=keep)

    def describe(self) -> str:
        info = self.model.info
        if info.engine == "remote":
            return f"{info.name} at {info.device}" + (f", context {info.ctx:,}" if info.ctx else "")
        name = short_name(info.name) if Path(info.name).is_absolute() else info.name
        return (
            f"{name}: {info.architecture} {human_count(info.parameters)}, "
            f"{info.quantization} on {info.device} ({info.engine}), context {info.ctx:,}"
        )

    def tokens(self) -> int:
        """Tokens of the conversation: as of its last answer, or counted, which takes a while."""
        turns = self.conversation.turns
        match turns[-1].info if turns else {}:
            case {"context": [int(used), name]} if name == self.model.info.name:
                return used
            case {"tokens": int(answer)} as info if "context" not in info:  # of older versions
                return self.model.count(self.conversation.messages(turns[-1].id)) + answer
        messages = self.conversation.messages()
        return self.model.count(messages) if messages else 0

    def ways_out(self) -> tuple[Way, ...]:
        """What can be done when the context is full; takes a while."""
        info = self.model.info
        if info.engine == "remote":  # a server has its own ways
            return ways_out(0, 0)[-1:]
        contexts: Sequence[PlannedContext] = ()
        with suppress(LocalrtError):
            contexts = localrt.plan(str(info.path)).contexts
        return ways_out(self.tokens(), self.chat.capacity, contexts)

    def leave(self) -> None:
        """Save the KV cache to disk for the next time, and free it; takes a while."""
        try:
            self.chat.park()
        except LocalrtError:
            pass  # it will be computed again
        finally:
            self.chat.close()

    def system(self, text: str) -> str:
        """``/system``: show, set or remove."""
        system = self.conversation.system
        if not text:
            return (
                f"System prompt (/system none removes it): {system}"
                if system
                else "No system prompt: /system TEXT sets one"
            )
        system = None if text.lower() in _NONE else text
        self.conversation.set(system=system)
        self.chat.system = system
        return "System prompt set" if system else "System prompt removed"

    def set(self, argument: str) -> str:
        """``/set``: list the options, or change one."""
        if not argument:
            return self._options()
        name, _, text = argument.partition(" ")
        name = name.replace("-", "_")
        if name not in OPTION_HELP:
            hint = did_you_mean(name, OPTION_HELP) or "/set lists them"
            raise OptionError(f"there is no option {name!r:.60}: {hint}")
        if not text.strip():
            raise OptionError(f"/set {name} needs a value; none restores the model's default")
        value = _value(name, text.strip())
        self.chat.set(**{name: value})
        self.conversation.set(options=dict(self.chat.options))
        return (
            f"{name} = {_as_text(value)}" if value is not None else f"{name} is back to its default"
        )

    def offer_tools(self, offered: bool) -> None:
        """Switch tools on or off in this conversation, as the chat page does."""
        self.chat.set(tool_choice=None if offered else "none")
        self.conversation.set(options=dict(self.chat.options))

    def use(self, preset: Preset) -> None:
        """Switch to exactly the preset's options, and to its system prompt if it has one.

        Raises:
            OptionError: the model does not accept them; nothing is changed.
        """
        changed: dict[str, Any] = {**dict.fromkeys(self.chat.options), **preset.options}
        self.chat.set(**changed)
        self.conversation.set(options=dict(self.chat.options))
        if preset.system is not None:
            self.system(preset.system.strip() or "none")

    def preset(self, presets: PresetsFile, name: str) -> str:
        """``/preset``: list the presets, or use one."""
        if name:
            preset = presets.find(name)
            self.use(preset)
            return f"This conversation uses {preset.name}: {preset.summary}"
        lines = [f"{preset.name}: {preset.summary}" for preset in presets.list()]
        return "\n".join([*lines, *presets.notes]) or "No presets yet: /config saves one"

    def adapter(self, name: str) -> str:
        """``/adapter``: list the adapters, or use one."""
        there = self.model.adapters
        if name:
            self.chat.set(adapter=name)
            self.conversation.set(options=dict(self.chat.options))
            return f"This conversation uses {self.title}"
        if not there:
            return "The model has no adapters: localrt chat MODEL --adapter [NAME=]PATH"
        chosen = self.chat.options.get("adapter") or self.model.defaults.get("adapter")
        return "\n".join(f"{'>' if each == chosen else ' '} {each}" for each in there)

    @property
    def title(self) -> str:
        """The model, and the adapter that it answers with."""
        name = short_name(self.model.info.name)
        chosen = self.chat.options.get("adapter") or self.model.defaults.get("adapter")
        if not self.model.adapters or chosen in (None, "none"):
            return name
        return f"{name}+{chosen if isinstance(chosen, str) else '+'.join(chosen)}"

    def _options(self) -> str:
        width = max(map(len, OPTION_HELP))
        chosen, defaults = self.chat.options, self.model.defaults
        return "\n".join(
            f"{name:<{width}}  {option_text(name, chosen, defaults)}"
            for name in sorted(OPTION_HELP)
        )


def option_text(name: str, options: Mapping[str, object], defaults: Mapping[str, object]) -> str:
    """An option's value as text: ``0.7``, a default as ``0.2 (default)``, none as ``-``."""
    if options.get(name) is not None:
        return _as_text(options[name])
    default = defaults.get(name)
    if default is None:
        ours = localrt.Options()
        default = getattr(ours, name, getattr(ours.sampling, name, None))
    return "-" if default in ((), {}, None) else f"{_as_text(default)} (default)"


def _value(name: str, text: str) -> Any:
    """Parse ``0.2``, ``true``, ``["a", "b"]`` and ``none``; anything else is text."""
    if text.lower() in _NONE:
        return None
    try:
        value = parse_json(text)
    except ValueError:
        return text
    # A stop string may look like a number.
    texts = name in ("stop", "dry_sequence_breakers")
    return text if texts and not isinstance(value, (str, list)) else value


def _as_text(value: object) -> str:
    """The value as typed for ``/set``."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


class ChatState:
    """Begins with an empty conversation.

    Args:
        open_history: opens the history; None keeps nothing.
        model: the name to store in the history until the model is loaded.
        system, options: from the command line, for new conversations; they override ``defaults``.
        defaults: system prompt and options of new conversations.
        presets, toolbox: the user's presets, and the tools that a model is offered.
        on_left: called with a replaced session, to end it.
    """

    def __init__(
        self,
        open_history: Callable[[], History] | None,
        *,
        model: str,
        system: str | None,
        options: dict[str, object],
        on_left: Callable[[Session], None] = Session.leave,
        defaults: Defaults | None = None,
        presets: PresetsFile | None = None,
        toolbox: Toolbox | None = None,
    ) -> None:
        self.system, self.options = system, options
        self.defaults = defaults or Defaults()
        self.presets = presets or PresetsFile()
        self.toolbox = toolbox or Toolbox(ToolServers(()))
        self.exporter = Exporter()
        self.model_name = model
        self.session: Session | None = None
        self.notes: tuple[str, ...] = ()
        self._model: ChatModel | None = None
        self._on_left = on_left
        self._defaults_then = self.defaults  # when the open conversation was opened
        self._told, self._folder = "", ""  # the problem that was told, where it was written
        self.history = self._memory
        if open_history is not None:
            try:
                self.history = open_history()
                self.notes = self.history.notes
            except StorageError as error:
                self.notes = (f"Conversations are not saved: {error}",)
        self._notes = self.history.notes  # those that were told
        self.conversation = self._new()

    @cached_property
    def _memory(self) -> History:
        """A history in memory, for temporary conversations."""
        return History(":memory:")

    def take_unsent(self) -> None:
        """Take over the message that was being written in an empty conversation of before."""
        with suppress(StorageError):
            if (unsent := self.history.unsent()) is not None:
                self.conversation.keep_draft(unsent.draft)
                unsent.keep_draft("")

    def news(self) -> str:
        """A line about what is not saved, once for each reason, and once all is saved again; or
        what opening the file again has found.
        """
        if len(self.history.notes) > len(self._notes):
            self._notes = self.history.notes
            return self._notes[-1]
        problem, told = self.history.problem, self._told
        if self.conversation.gone:
            problem = problem or "This conversation was deleted in another window: /export keeps it"
        reason, before = problem.partition(":")[2], told.partition(":")[2]
        if problem and (not told or reason != before):
            self._told = problem
            return f"{problem[0].upper()}{problem[1:]}"
        if told and not problem:
            self._told = ""
            return "All is saved to disk again"
        return ""

    def unsaved(self) -> str:
        """What the user loses by quitting now, in one line; tries to save it first."""
        if self.history is self._memory or self.history.save():
            return ""
        return self.history.problem if self.history.unsaved else ""

    def write_unsaved(self, folder: str) -> str:
        """Write what is not saved to files in a folder; returns the line to show."""
        if not folder.strip():
            raise OptionError("name a folder")
        written = self.history.write_unsaved(folder)
        self._folder = folder
        if not written:
            return "It has no words that could be written"
        return f"Written to {', '.join(map(str, written))}; /load reads them"

    @property
    def loaded(self) -> Session:
        """The session; only for use after the model is loaded."""
        assert self.session is not None, "this waits for the model"
        return self.session

    def export(self, path: str) -> Path:
        """``/export``: write the shown branch to a file."""
        return self.exporter.export(self.conversation, self.conversation.turns_now(), path)

    def tools(self, argument: str) -> str:
        """``/tools``: list servers and tools, start servers again, or switch this conversation's
        tools ``on`` or ``off``.

        Raises:
            OptionError: another argument, or the model is still loading.
        """
        if argument in ("on", "off"):
            if self.session is None:
                raise OptionError(f"/tools {argument} has to wait: the model is still loading")
            self.session.offer_tools(argument == "on")
            return f"Tools are {argument} in this conversation"
        listed = self.toolbox.command(argument, self.conversation.id)
        if argument or self.conversation.options.get("tool_choice") != "none":
            return listed
        return f"Tools are off in this conversation, /tools on offers them\n{listed}"

    def list(self, search: str = "") -> list[ConversationInfo]:
        return self.history.list(search, limit=500)

    def take_model(self, model: ChatModel) -> Session:
        """Set the loaded model, which continues the conversation."""
        self._model, self.model_name = model, model.info.name
        self.session = Session(model, self.conversation, self.options)
        return self.session

    def drop_model(self) -> tuple[Session | None, ChatModel | None]:
        """Detach the model and its session, for the caller to end; the conversation stays."""
        left = self.session, self._model
        self.session = self._model = None
        return left

    def new(self, *, temporary: bool = False) -> str:
        """Open an empty conversation with the settings in force, unless other defaults were chosen
        meanwhile; returns the line to show. Nothing of a ``temporary`` one is written to the disk.
        """
        same = self.defaults is self._defaults_then
        self._open(self._new(same=same, temporary=temporary), {} if same else self.options)
        if temporary:
            return "Temporary conversation: nothing of it is written to the disk"
        return "New conversation" + ("" if same else ", with your new defaults")

    def fork(self, number: int) -> str:
        """Open a copy of the conversation up to turn ``number``; returns the line to show."""
        history = self._memory if self.conversation.temporary else self.history
        copy = history.fork(self.conversation.id, number)
        copy.set(options=self._in_force)
        temporary = self.conversation.temporary
        self._open(OpenConversation(copy, temporary=temporary), {})
        before = "is gone" if temporary else "stays as it is"
        return f"This is a copy; the conversation of before {before}"

    def remove(self, number: int) -> None:
        """Remove a turn and what follows it, from the model's memory too."""
        self.conversation.remove(number)
        if self.session is not None:
            self.session.chat.close()

    def pin(self, id: str) -> str:
        """List a conversation before others, or no longer; returns the line to show."""
        if id == self.conversation.id and self.conversation.temporary:
            raise OptionError("a temporary conversation is in no list")
        conversation = self.history.open(id)
        conversation.set(pinned=not conversation.pinned)
        return "Pinned: it is at the top of the list" if conversation.pinned else "Not pinned now"

    def open(self, id: str) -> None:
        """Open a conversation of the history."""
        self._open(OpenConversation(self.history.open(id)))

    def load(self, path: str | Path) -> str:
        """Keep the conversations of a file and open the newest; returns the line to show."""
        return self.open_loaded(path, self.read_file(path))

    def read_file(self, path: str | Path) -> LoadedFile:
        """Keep the conversations of a file; takes a while if it is large."""
        if not path:
            raise OptionError("/load needs the path of a file with conversations")
        return self.history.load_file(path)

    def open_loaded(self, path: str | Path, found: LoadedFile) -> str:
        """Open the newest conversation of a file that was read; returns the line to show."""
        newest = max(reversed(found.conversations), key=lambda each: each.updated)
        options = {**newest.options, **self.options}
        newest.set(system=self.system or newest.system, options=options)
        self._open(OpenConversation(newest))
        count = len(found.conversations)
        more = () if count == 1 else (f"{count} conversations, this is the newest",)
        return "; ".join((f"Opened {path}", *more, *found.left_out))

    def delete(self, id: str) -> str:
        """Delete a conversation; if it is open, a new one replaces it. Returns the line to show."""
        self.history.delete(id)
        if id != self.conversation.id:
            return "Deleted"
        self.new()
        return "Deleted. This is a new conversation"

    @property
    def damaged_copies(self) -> str:
        """A sentence about damaged files that may still contain a deleted conversation, or ""."""
        path = self.history.path
        found = path.parent.glob(f"{path.name}.damaged-*") if path is not None else ()
        names = ", ".join(sorted(each.name for each in found))
        return f" Damaged copies of the history may still hold it: {names}" if names else ""

    def rename(self, id: str, title: str) -> None:
        if id == self.conversation.id:
            self.conversation.set(title=title)
        else:
            self.history.open(id).set(title=title)

    def close(self, *, asked: bool = False) -> str:
        """Called when the app ends: save what is not saved yet and close the file. Without having
        ``asked`` the user, what cannot be saved is written to a folder; returns the line about it.
        """
        line = self.unsaved()
        if asked and not self._folder:
            line = ""  # it was given up
        elif line:  # perhaps of an answer that has ended since
            with suppress(StorageError):
                folder = self._folder or mkdtemp(prefix="localrt-unsaved-")
                line = f"{line}. {self.write_unsaved(folder)}"
        with suppress(StorageError):  # it was said
            self.history.close()
        self._memory.close()
        return line

    def _open(self, conversation: OpenConversation, options: dict[str, Any] | None = None) -> None:
        """``options`` override the conversation's; None: those of the command line."""
        left, before = self.session, self.conversation
        self.conversation = conversation
        self._defaults_then = self.defaults
        if self._model is not None:
            options = self.options if options is None else options
            self.session = Session(self._model, conversation, options)
        if left is not None:
            self._on_left(left)
        if before.temporary:
            self._memory.delete(before.id)

    @property
    def _in_force(self) -> dict[str, Any]:
        """The options with which the open conversation is answered."""
        if self.session is not None:
            return dict(self.session.chat.options)
        return {**self.conversation.options, **self.options}

    def _new(self, *, same: bool = False, temporary: bool = False) -> OpenConversation:
        """An empty conversation, with the ``same`` settings as the open one or the defaults."""
        system = self.defaults.system if self.system is None else self.system
        options = {**self.defaults.options, **self.options}
        if same:
            system, options = self.conversation.system, self._in_force
        values: dict[str, Any] = {"model": self.model_name, "system": system, "options": options}
        history = self._memory if temporary else self.history
        return OpenConversation(history.new(**values), temporary=temporary)
