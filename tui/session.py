"""The conversation's own affairs behind the slash commands: options, system prompt, files.

Every method returns the line to show, or raises a ``LocalrtError`` that is one. Knows the public
API, no widget. File work is done where it is called from: the app calls it in a thread.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localrt.errors import OptionError, StorageError
from localrt.tui.commands import OPTIONS
from localrt.tui.text import human_count

if TYPE_CHECKING:
    from localrt import ChatSession, Model

__all__ = ["Session"]

_NONE = ("none", "default")


class Session:
    """A model, the chat with it, and the file that the chat belongs to, if any."""

    def __init__(self, model: Model, system: str | None, options: dict[str, Any]) -> None:
        self.model = model
        self.chat: ChatSession = model.chat(system=system, **options)
        self.path: Path | None = None
        self._asked: Path | None = None  # a file that /save would replace, named once

    def describe(self) -> str:
        """One line about the model."""
        info = self.model.info
        return (
            f"{info.name}: {info.architecture} {human_count(info.parameters)}, "
            f"{info.format} on {info.device} ({info.engine}), context {info.ctx:,}"
        )

    # -- system prompt and options ---------------------------------------------------------------

    def system(self, text: str) -> str:
        """``/system``: show, set or remove."""
        if not text:
            return (
                f"System prompt (/system none removes it): {self.chat.system}"
                if self.chat.system
                else "No system prompt: /system TEXT sets one"
            )
        self.chat.system = None if text.lower() in _NONE else text
        return "System prompt set" if self.chat.system else "System prompt removed"

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

    # -- files -----------------------------------------------------------------------------------

    def save(self, argument: str) -> str:
        """``/save``: to the path, else to the chat's own file, else to a new one here."""
        path = Path(argument).expanduser() if argument else self.path
        if path is None:
            path = Path(f"localrt-chat-{datetime.now():%Y%m%d-%H%M%S}.json")
        if path.exists() and path not in (self.path, self._asked):
            self._asked = path
            raise StorageError(f"{path} exists: enter the same command again to replace it")
        self.chat.save(path)
        self.path, self._asked = path, None
        return f"Saved to {path}"

    def load(self, argument: str | Path) -> str:
        """``/load``: go on with a saved conversation."""
        if not str(argument):
            raise OptionError("/load needs the path of a saved conversation")
        path = Path(argument).expanduser()
        chat = self.model.load_chat(path)
        self.chat.close()
        self.chat, self.path = chat, path
        return f"Opened {path}"

    def tokens(self) -> int:
        """Tokens of the conversation as it is sent to the model; slow for a long one."""
        return self.model.count(self.chat.messages) if self.chat.messages else 0


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
