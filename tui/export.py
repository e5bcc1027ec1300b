"""A conversation as a file to read (Markdown) or to load again (JSON).

The JSON is what ``ChatSession.load`` takes, with title and times beside. Knows turns, no widget.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localrt.tui.text import short_name
from localrt.tui.thinking import split_thinking

if TYPE_CHECKING:
    from localrt.history import Turn
    from localrt.tui.talk import Talk

__all__ = ["as_json", "as_markdown", "default_path"]


def as_markdown(talk: Talk) -> str:
    """Title, model, system prompt, and every turn of the shown branch under a heading."""
    turns = talk.turns
    title = talk.title or _first_line(turns) or "Conversation"
    begun = f", {datetime.fromtimestamp(turns[0].created):%Y-%m-%d %H:%M}" if turns else ""
    parts = [f"# {title}", f"*{short_name(talk.model) or 'localrt'}{begun}*"]
    if talk.system:
        parts += ["## System prompt", talk.system]
    for turn in turns:
        if turn.role == "user":
            parts += ["## You", turn.content]
            continue
        parts.append("## Model" if turn.role == "assistant" else f"## {turn.role.capitalize()}")
        thought = split_thinking(turn.content)
        if thought.thinking:
            # The empty lines let Markdown inside be Markdown.
            parts += ["<details><summary>Thinking</summary>", thought.thinking, "</details>"]
        parts.append(thought.answer or "*no answer*")
        if turn.state in ("cut", "cancelled", "failed"):
            parts.append(f"*{'stopped' if turn.state == 'cancelled' else turn.state}*")
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def as_json(talk: Talk) -> str:
    """A saved chat: version, model, options, messages; title and turns' times beside."""
    messages: list[dict[str, Any]] = []
    if talk.system:
        messages.append({"role": "system", "content": talk.system})
    for turn in talk.turns:
        messages.append({"role": turn.role, "content": turn.content})
    record = {
        "version": 1,
        "title": talk.title,
        "model": talk.model,
        "options": talk.options,
        "messages": messages,
        "turns": [
            {"role": t.role, "created": t.created, "state": t.state, "info": dict(t.info)}
            for t in talk.turns
        ],
    }
    return json.dumps(record, ensure_ascii=False, indent=2, default=str) + "\n"


def default_path(title: str) -> Path:
    """A name for a file in the current folder that says what is in it."""
    words = re.sub(r"[^\w]+", "-", title.lower()).strip("-")[:40].strip("-") or "chat"
    return Path(f"{words}-{datetime.now():%Y%m%d-%H%M%S}.md")


def _first_line(turns: Sequence[Turn]) -> str:
    return next((line for turn in turns for line in turn.content.splitlines() if line), "")[:60]
