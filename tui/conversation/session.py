"""The model's side of the open conversation: the chat, its options and its system prompt.

Methods behind slash commands return the line to show, or raise a ``LocalrtError`` that is one.
Knows the public API, no widget.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import localrt
from localrt.common.errors import LocalrtError, OptionError
from localrt.tui.commands import OPTIONS
from localrt.tui.conversation.open_conversation import OpenConversation
from localrt.tui.preferences import Preset, PresetsFile
from localrt.tui.text import human_count, short_name

if TYPE_CHECKING:
    from localrt import ChatModel, ChatSession

_NONE = ("none", "default")


class Session:
    """A model and its chat of ``conversation``.

    Raises:
        OptionError: ``options`` are not the model's.
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
        except OptionError as error:  # kept by another version
            self.notes = (f"Options of this conversation are left out: {error}",)
        self.chat: ChatSession = chat
        if conversation.model != model.info.name:
            if conversation.model and conversation.turns:
                self.notes += (
                    f"So far with {conversation.model}, from here with {model.info.name}",
                )
            conversation.set(model=model.info.name)

    def describe(self) -> str:
        """One line about the model."""
        info = self.model.info
        if info.engine == "remote":
            return f"{info.name} at {info.device}" + (f", context {info.ctx:,}" if info.ctx else "")
        name = short_name(info.name) if Path(info.name).is_absolute() else info.name
        return (
            f"{name}: {info.architecture} {human_count(info.parameters)}, "
            f"{info.quantization} on {info.device} ({info.engine}), context {info.ctx:,}"
        )

    def tokens(self) -> int:
        """Tokens of the conversation as it is sent to the model; slow for a long one."""
        messages = self.conversation.messages()
        return self.model.count(messages) if messages else 0

    def leave(self) -> None:
        """Put the KV cache on disk for the next time, and free it; takes a while."""
        try:
            if self.conversation.saved:
                self.chat.park()
        except LocalrtError:
            pass  # it is computed again then
        finally:
            self.chat.close()

    # -- system prompt and options ---------------------------------------------------------------

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
        if not text.strip():
            raise OptionError(f"/set {name} needs a value; none takes the model's default again")
        value = _value(name, text.strip())
        self.chat.set(**{name: value})
        self.conversation.set(options=dict(self.chat.options))
        return f"{name} = {_shown(value)}" if value is not None else f"{name} is the default again"

    def default(self, name: str) -> Any:
        """What an option is where nobody chose."""
        found = self.model.defaults.get(name)
        return library_defaults().get(name) if found is None else found

    def use(self, preset: Preset) -> None:
        """Go on with exactly the preset's options, and its system prompt if it has one.

        Raises:
            OptionError: the model does not take them; nothing changes then.
        """
        cleared = dict.fromkeys(self.chat.options)
        self.chat.set(**{**cleared, **preset.options})
        self.conversation.set(options=dict(self.chat.options))
        if preset.system is not None:
            self.system(preset.system.strip() or "none")

    def preset(self, presets: PresetsFile, name: str) -> str:
        """``/preset``: list them, or use one."""
        if name:
            preset = presets.find(name)
            self.use(preset)
            return f"This conversation uses {preset.name}: {preset.summary}"
        lines = [f"{preset.name}: {preset.summary}" for preset in presets.list()]
        return "\n".join([*lines, *presets.notes]) or "No presets yet: /config saves one"

    def adapter(self, name: str) -> str:
        """``/adapter``: list them, or use one."""
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
        chosen, defaults = self.chat.options, self.model.defaults
        width = max(map(len, OPTIONS))
        lines = []
        for name in sorted(OPTIONS):
            if name in chosen:
                value = _shown(chosen[name])
            else:
                value = "-" if defaults.get(name) is None else f"{_shown(defaults[name])} (default)"
            lines.append(f"{name:<{width}}  {value}")
        return "\n".join(lines)


def library_defaults() -> dict[str, Any]:
    """Generation options that have a default whatever the model."""
    options = localrt.Options()
    found: dict[str, Any] = {}
    for part in (options, options.sampling):
        found |= {each.name: getattr(part, each.name) for each in fields(part)}
    return {name: value for name, value in found.items() if value not in ((), {}, None)}


def _value(name: str, text: str) -> Any:
    """``0.2``, ``true``, ``["a", "b"]`` and ``none`` as what they say; anything else as text."""
    if text.lower() in _NONE:
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return text
    # A stop string may look like a number.
    texts = name in ("stop", "dry_sequence_breakers")
    return text if texts and not isinstance(value, (str, list)) else value


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
