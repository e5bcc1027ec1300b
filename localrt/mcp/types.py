"""What the parts of this room hand each other: a tool, what a call of it gave, a server's state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Ending = Literal["done", "failed", "refused", "stopped"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool in its server's words; ``schema`` is the JSON schema of its arguments."""

    server: str
    name: str
    description: str
    schema: Mapping[str, Any]

    @property
    def title(self) -> str:
        """``files.read_file``: how people see it."""
        return f"{self.server}.{self.name}"


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the model is told of a call, and how the call ended."""

    text: str
    ending: Ending = "done"

    def cut(self, most: int) -> ToolResult:
        """At most ``most`` characters of it, and a line that says so."""
        if len(self.text) <= most:
            return self
        note = f"\n[cut: {most:,} of {len(self.text):,} characters]"
        return ToolResult(self.text[:most] + note, self.ending)


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """A server now. ``problem`` goes on from its name: why it failed, in one line."""

    name: str
    state: Literal["starting", "ready", "failed"]
    tools: tuple[Tool, ...] = ()
    problem: str = ""
