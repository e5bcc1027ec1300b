"""A conversation as a file to read (Markdown) or to load again (JSON).

For Markdown, pictures are files in a folder next to it. The JSON is what ``ChatSession.load``
takes, plus title and times; its pictures are data URIs. Knows turns, no widget.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from localrt.chat_format.thinking import split_thinking
from localrt.common.errors import OptionError, StorageError
from localrt.common.files import user_path, write_bytes, write_text
from localrt.history.conversation import Conversation, Turn
from localrt.history.messages import call_line
from localrt.history.pictures import KeptPicture, joined_content, joined_text


class Exported(Protocol):
    """What is written of a conversation besides its turns."""

    @property
    def title(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def system(self) -> str | None: ...
    @property
    def options(self) -> dict[str, Any]: ...


class Exporter:
    """``/export``: asks before it replaces a file that it did not write."""

    def __init__(self) -> None:
        self._to_confirm: Path | None = None
        self._own_files: set[Path] = set()

    def export(self, conversation: Exported, turns: Sequence[Turn], argument: str) -> Path:
        """Write a branch's turns to a file: Markdown, or JSON by its name.

        Raises:
            OptionError: nothing has been said yet.
            StorageError: it cannot be written, or it exists (repeating the command replaces it).
        """
        if not turns:
            raise OptionError("there is nothing to export yet")
        path = user_path(argument) if argument else _default_path(conversation.title)
        if path.is_dir():
            path = path / _default_path(conversation.title)
        if path.exists() and path != self._to_confirm and path not in self._own_files:
            self._to_confirm = path
            raise StorageError(f"{path} exists: enter the same command again to replace it")
        if path.suffix.lower() == ".json":
            text = as_json(conversation, turns)
        else:
            text = as_markdown(conversation, turns, _PicturesBeside(path))
        write_text(path, text, private=True)
        self._to_confirm = None
        self._own_files.add(path)
        return path


class _PicturesBeside:
    """Writes pictures to a folder next to ``path``, each once, and links to them."""

    def __init__(self, path: Path) -> None:
        self._folder = path.with_name(f"{path.stem}-pictures")
        self._written: dict[str, str] = {}

    def __call__(self, picture: KeptPicture) -> str:
        name = self._written.get(picture.digest)
        if name is None:
            kept = re.sub(r"[^\w.-]+", "-", picture.name).strip("-.")
            name = self._written[picture.digest] = f"{len(self._written) + 1}-{kept}"
            write_bytes(self._folder / name, picture.data, private=True, folder=True)
        return f"![{name}]({quote(f'{self._folder.name}/{name}')})"


def as_markdown(
    conversation: Exported, turns: Sequence[Turn], link: Callable[[KeptPicture], str]
) -> str:
    """Title, model, system prompt, and every turn under a heading.

    ``link`` returns the text that represents a picture.
    """
    title = conversation.title or _first_line(turns) or "Conversation"
    model = conversation.model.replace("\\", "/").rstrip("/").rpartition("/")[2]
    begun = f", {datetime.fromtimestamp(turns[0].created):%Y-%m-%d %H:%M}" if turns else ""
    parts = [f"# {title}", f"*{model or 'localrt'}{begun}*"]
    if conversation.system:
        parts += ["## System prompt", conversation.system]
    for turn in turns:
        if turn.role == "user":
            parts += ["## You", joined_text(turn.content, turn.pictures, link)]
            continue
        if turn.role == "tool":
            fence = "```" if "```" not in turn.content else "~~~~"
            parts += [f"## {call_line(turn.info)}", f"{fence}\n{turn.content}\n{fence}"]
            continue
        if turn.info.get("tool_calls") and not turn.content:
            continue  # calls are shown with their results
        parts.append("## Model")
        thought = split_thinking(turn.content)
        if thought.thinking:
            # With empty lines around, Markdown inside is rendered.
            parts += ["<details><summary>Thinking</summary>", thought.thinking, "</details>"]
        parts.append(thought.answer or "*no answer*")
        if turn.state in ("cut", "cancelled", "failed"):
            parts.append(f"*{'stopped' if turn.state == 'cancelled' else turn.state}*")
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def as_json(conversation: Exported, turns: Sequence[Turn]) -> str:
    """A saved chat: version, model, options, messages; plus title and turns' times."""
    messages: list[dict[str, object]] = []
    if conversation.system:
        messages.append({"role": "system", "content": conversation.system})
    for turn in turns:
        content = joined_content(turn.content, turn.pictures, _as_data)
        messages.append({**turn.message, "content": content})
    record = {
        "version": 1,
        "title": conversation.title,
        "model": conversation.model,
        "options": conversation.options,
        "messages": messages,
        "turns": [
            {"role": t.role, "created": t.created, "state": t.state, "info": dict(t.info)}
            for t in turns
        ],
    }
    return json.dumps(record, ensure_ascii=False, indent=2, default=str) + "\n"


def as_branches(conversation: Conversation | None, said: Sequence[str]) -> str:
    """All turns, and the draft, in the form that ``History.load_file`` reads. What was ``said`` and
    is not among them, since what it followed was deleted, is a message of its own.
    """
    record: dict[str, Any] = {}
    messages, turns = list[dict[str, object]](), list[Turn]()
    if conversation is not None:
        for turn, parent in conversation.tree():
            turns.append(turn)
            content = joined_content(turn.content, turn.pictures, _as_data)
            place = {"id": str(turn.id), "parent": str(parent or ""), "created": turn.created}
            messages.append({**turn.message, "content": content, **place})
        names = ("title", "model", "system", "options", "draft")
        record = {name: getattr(conversation, name) for name in names}
        record["current"] = next((str(turn.id) for turn in reversed(conversation.turns)), "")
    there: set[object] = {"", *(record.get(name) for name in ("draft", "title", "system"))}
    there |= {turn.content for turn in turns}
    for number, text in enumerate(said):
        if text not in there:
            place = {"id": f"alone-{number}", "parent": ""}
            messages.append({"role": "user", "content": text, **place})
    record["messages"] = messages
    return json.dumps(record, ensure_ascii=False, indent=2, default=str) + "\n"


def _as_data(picture: KeptPicture) -> dict[str, object]:
    return {"type": "image", "image": picture.data_uri, "name": picture.name}


def _default_path(title: str) -> Path:
    """A descriptive file name in the current folder."""
    words = re.sub(r"[^\w]+", "-", title.lower()).strip("-")[:40].strip("-") or "chat"
    return Path(f"{words}-{datetime.now():%Y%m%d-%H%M%S}.md")


def _first_line(turns: Sequence[Turn]) -> str:
    return next((line for turn in turns for line in turn.content.splitlines() if line), "")[:60]
