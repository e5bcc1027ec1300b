"""What each slash command does.

A command's method takes its argument; what it raises as a ``LocalrtError`` is shown as a line.
Knows the chat screen's parts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from localrt.errors import LocalrtError, OptionError, StorageError
from localrt.files import write_text
from localrt.tui.chips import read_attachment
from localrt.tui.commands import Command
from localrt.tui.dialogs import Confirm
from localrt.tui.export import as_json, as_markdown, default_path
from localrt.tui.text import one_line

if TYPE_CHECKING:
    from localrt.tui.chat_screen import ChatScreen

__all__ = ["Slash"]


class Slash:
    """``run`` a command that a line was read as."""

    def __init__(self, screen: ChatScreen) -> None:
        self._screen = screen
        self._asked: Path | None = None  # a file that /export would replace, named once
        self._written: Path | None = None  # the file of the last /export
        self._commands: dict[str, Callable[[str], Awaitable[None] | None]] = {
            "help": lambda argument: screen.action_help(),
            "new": lambda argument: screen.action_new(),
            "open": screen.list_conversations,
            "rename": self._rename,
            "delete": self._delete,
            "edit": lambda argument: screen.actions.edit(),
            "retry": lambda argument: screen.actions.retry(),
            "branch": lambda argument: screen.actions.branch(-1 if argument == "prev" else 1),
            "copy": self._copy,
            "fold": lambda argument: screen.actions.fold(),
            "attach": self._attach,
            "editor": lambda argument: screen.action_editor(),
            "system": self._system,
            "set": self._set,
            "preset": self._preset,
            "config": lambda argument: screen.action_settings(),
            "models": screen.list_models,
            "panel": lambda argument: screen.action_panel(),
            "export": self.export,
            "load": self._load,
            "quit": lambda argument: screen.app.action_quit(),
        }

    def add(self, name: str, does: Callable[[str], Awaitable[None] | None]) -> None:
        """Let another part of the app do a command."""
        self._commands[name] = does

    async def run(self, command: Command) -> None:
        """Do it, or say why not."""
        entry, does = command.entry, self._commands.get(command.name)
        if entry is None or does is None:
            self._screen.say(
                f"No command /{command.name}: /help lists them, // sends a slash", "error"
            )
            return
        if entry.idle and not self._screen.idle(command.name):
            return
        try:
            waiting = does(command.argument)
            if waiting is not None:
                await waiting
        except LocalrtError as error:
            self._screen.say(one_line(error), "error")

    # -- the conversation ------------------------------------------------------------------------

    async def _rename(self, title: str) -> None:
        if not title:
            self._screen.action_rename()
            return
        self._screen.turns.talk.set(title=title)
        self._screen.flash(f"Named “{title}”")

    def _delete(self, argument: str) -> None:
        screen, talk = self._screen, self._screen.turns.talk

        def confirmed(yes: bool | None) -> None:
            if yes:
                screen.put(lambda: screen.desk.delete(talk.id), "Deleted; a new conversation")

        question = f"Delete “{talk.title or 'this conversation'}”? This cannot be undone."
        screen.app.push_screen(Confirm(question, "delete"), confirmed)

    def _copy(self, argument: str) -> None:
        if argument == "code":
            self._screen.actions.copy_code()
        elif argument:
            raise OptionError("/copy copies the answer, /copy code its last code block")
        else:
            self._screen.actions.copy()

    async def _attach(self, argument: str) -> None:
        name, text = await asyncio.to_thread(read_attachment, argument)
        self._screen.composer.put_chip(name, text)
        self._screen.flash(f"{name} goes with the message; Tab behind it unfolds it")

    # -- the model's side ------------------------------------------------------------------------

    def _system(self, argument: str) -> None:
        assert self._screen.desk.session is not None
        self._screen.say(self._screen.desk.session.system(argument))

    def _set(self, argument: str) -> None:
        assert self._screen.desk.session is not None
        self._screen.say(self._screen.desk.session.set(argument))

    def _preset(self, name: str) -> None:
        work = self._screen.app.settings
        if name:
            preset = work.presets.find(name)
            work.use(preset)
            self._screen.say(f"This conversation uses {preset.name}: {preset.summary}")
            return
        presets = work.presets.list()
        lines = [f"{preset.name}: {preset.summary}" for preset in presets]
        lines += work.presets.notes
        self._screen.say("\n".join(lines) or "No presets yet: /config saves one")

    # -- files -----------------------------------------------------------------------------------

    async def export(self, argument: str = "") -> None:
        """Write the shown branch to a file; asks before it replaces one that it did not write."""
        talk = self._screen.turns.talk
        path = Path(argument).expanduser() if argument else default_path(talk.title)
        if path.is_dir():
            path = path / default_path(talk.title)
        if path.exists() and path not in (self._written, self._asked):
            self._asked = path
            raise StorageError(f"{path} exists: enter the same command again to replace it")
        text = as_json(talk) if path.suffix.lower() == ".json" else as_markdown(talk)
        await asyncio.to_thread(write_text, path, text, mode=0o600)
        self._written, self._asked = path, None
        self._screen.say(f"Saved to {path}")

    def _load(self, argument: str) -> None:
        if not argument:
            raise OptionError("/load needs the path of a saved conversation (.json)")
        path = Path(argument).expanduser()
        self._screen.put(lambda: self._screen.desk.load(path), f"Opened {path}")
