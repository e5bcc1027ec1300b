"""The model's side of the conversation on screen: the chat, its options and its system prompt.

Methods behind slash commands return the line to show, or raise a ``LocalrtError`` that is one.
Knows the public API, no widget.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from localrt.errors import LocalrtError, OptionError
from localrt.tui.commands import OPTIONS
from localrt.tui.text import human_count

if TYPE_CHECKING:
    from localrt import ChatSession, Model
    from localrt.tui.talk import Talk

__all__ = ["Session"]

_NONE = ("none", "default")


class Session:
    """A model and its chat of ``talk``.

    Raises:
        OptionError: ``options`` are not the model's.
    """

    def __init__(self, model: Model, talk: Talk, options: dict[str, Any]) -> None:
        self.model = model
        self.talk = talk
        self.notes: tuple[str, ...] = ()
        chat = model.chat(system=talk.system, **options)
        try:
            chat.set(**{**talk.options, **options})
        except OptionError as error:  # kept by another version
            self.notes = (f"Options of this conversation are left out: {error}",)
        self.chat: ChatSession = chat
        if talk.model != model.info.name:
            if talk.model and talk.turns:
                self.notes += (f"So far with {talk.model}, from here with {model.info.name}",)
            talk.set(model=model.info.name)

    def describe(self) -> str:
        """One line about the model."""
        info = self.model.info
        if info.engine == "remote":
            return f"{info.name} at {info.device}" + (f", context {info.ctx:,}" if info.ctx else "")
        return (
            f"{info.name}: {info.architecture} {human_count(info.parameters)}, "
            f"{info.format} on {info.device} ({info.engine}), context {info.ctx:,}"
        )

    def tokens(self) -> int:
        """Tokens of the conversation as it is sent to the model; slow for a long one."""
        messages = self.talk.messages()
        return self.model.count(messages) if messages else 0

    def leave(self) -> None:
        """Put the KV cache on disk for the next time, and free it; takes a while."""
        park = getattr(self.chat, "park", None)
        try:
            if park is not None and self.talk.kept:
                park()
        except LocalrtError:
            pass  # it is computed again then
        finally:
            self.chat.close()

    # -- system prompt and options ---------------------------------------------------------------

    def system(self, text: str) -> str:
        """``/system``: show, set or remove."""
        system = self.talk.system
        if not text:
            return (
                f"System prompt (/system none removes it): {system}"
                if system
                else "No system prompt: /system TEXT sets one"
            )
        system = None if text.lower() in _NONE else text
        self.talk.set(system=system)
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
        self.talk.set(options=dict(self.chat.options))
        return f"{name} = {_shown(value)}" if value is not None else f"{name} is the default again"

    def _options(self) -> str:
        chosen, defaults = self.chat.options, self.model.defaults
        width = max(map(len, OPTIONS))
        lines = []
        for name in OPTIONS:
            if name in chosen:
                value = _shown(chosen[name])
            else:
                value = "-" if defaults.get(name) is None else f"{_shown(defaults[name])} (default)"
            lines.append(f"{name:<{width}}  {value}")
        return "\n".join(lines)


def _value(name: str, text: str) -> Any:
    """``0.2``, ``true``, ``["a", "b"]`` and ``none`` as what they say; anything else as text."""
    if text.lower() in _NONE:
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return text
    # A stop string may look like a number.
    return text if name == "stop" and not isinstance(value, (str, list)) else value


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
