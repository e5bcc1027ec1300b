"""A conversation in memory alone, with the face of one in the history.

For when nothing can be kept: the history cannot be opened, or the disk is full. Turns that came
from the history keep their numbers; new ones have negative numbers, so that they can be told apart.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from localrt.history import Turn
from localrt.history.conversation import title_of

__all__ = ["Memory", "MemoryWriter", "Unsaved"]


@dataclass(frozen=True, slots=True)
class Unsaved:
    """A turn that the history does not have, and the turn it follows (0: it is a first one)."""

    turn: Turn
    parent: int


@dataclass(slots=True)
class _Node:
    turn: Turn
    parent: int
    children: list[int] = field(default_factory=list)
    shown: int | None = None  # of the children


class Memory:
    """A tree of turns; ``turns`` is the shown branch to begin with."""

    def __init__(
        self,
        *,
        model: str,
        system: str | None = None,
        options: Mapping[str, Any] | None = None,
        title: str = "",
        id: str = "",
        turns: Iterable[Turn] = (),
    ) -> None:
        self.id, self.title, self.model, self.system = id, title, model, system
        self.options = dict(options or {})
        root = Turn(0, "", "", 0.0, "done", 1, 1)
        self._nodes: dict[int, _Node] = {0: _Node(root, 0)}
        self._next = -1
        parent = 0
        for turn in turns:
            self._put(turn, parent)
            parent = turn.id

    def set(self, **changes: Any) -> None:
        """Change ``title``, ``model``, ``system`` or ``options``."""
        for name, value in changes.items():
            setattr(self, name, value)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The shown branch, oldest first."""
        found, node = [], self._nodes[0]
        while node.shown is not None:
            found.append(self.turn(node.shown))
            node = self._nodes[node.shown]
        return tuple(found)

    @property
    def unsaved(self) -> tuple[Unsaved, ...]:
        """The turns that the history does not have, in the order they came."""
        numbers = sorted((n for n in self._nodes if n < 0), reverse=True)
        return tuple(Unsaved(self.turn(n), self._nodes[n].parent) for n in numbers)

    def turn(self, number: int) -> Turn:
        """One turn."""
        node = self._nodes[number]
        beside = self._nodes[node.parent].children
        if len(beside) == 1:
            return node.turn
        return replace(node.turn, branch=1 + beside.index(number), branches=len(beside))

    def siblings(self, number: int) -> tuple[int, ...]:
        """The turns in the place of turn ``number``, itself included."""
        return tuple(self._nodes[self._nodes[number].parent].children)

    def show(self, number: int) -> None:
        """Show the branch that turn ``number`` is on."""
        while number:
            parent = self._nodes[number].parent
            self._nodes[parent].shown = number
            number = parent

    def add(
        self,
        role: str,
        content: str,
        *,
        after: int | None = None,
        info: Mapping[str, Any] | None = None,
        state: str = "done",
    ) -> Turn:
        """Put a turn behind turn ``after``: 0 is the beginning, None the end of what is shown."""
        if after is None:
            shown = self.turns
            after = shown[-1].id if shown else 0
        number, self._next = self._next, self._next - 1
        self.title = self.title or title_of(content)
        self._put(Turn(number, role, content, time.time(), state, 1, 1, dict(info or {})), after)
        return self.turn(number)

    def answer(self, *, after: int | None = None) -> MemoryWriter:
        """Begin an assistant's turn."""
        return MemoryWriter(self, self.add("assistant", "", after=after, state="writing").id)

    def change(self, number: int, **changes: Any) -> None:
        """Replace what a turn says, or how it ended."""
        node = self._nodes[number]
        node.turn = replace(node.turn, **changes)

    def _put(self, turn: Turn, parent: int) -> None:
        self._nodes[turn.id] = _Node(turn, parent)
        self._nodes[parent].children.append(turn.id)
        self._nodes[parent].shown = turn.id


class MemoryWriter:
    """An answer that grows in memory."""

    problem: str | None = None

    def __init__(self, memory: Memory, turn: int) -> None:
        self.turn = turn
        self._memory = memory
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """All that was written."""
        return "".join(self._pieces)

    def write(self, text: str) -> None:
        """Append."""
        self._pieces.append(text)

    def finish(self, state: str = "done", *, info: Mapping[str, Any] | None = None) -> None:
        """The answer is whole."""
        self._memory.change(self.turn, content=self.text, state=state, info=dict(info or {}))
