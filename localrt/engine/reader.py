"""What a reader is for the loop: it sees an answer's text first, and takes calls of tools out.

It gets the text of the control tokens that it names too. It knows no templates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from localrt.engine.types import ToolCall

__all__ = ["MakeReader", "Reader"]


class Reader(Protocol):
    """One answer's. Not thread-safe."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Control tokens that it reads as text; others stay hidden."""

    def push(self, piece: str) -> str:
        """Text to show, now that ``piece`` has come."""

    def flush(self) -> str:
        """What was held back, at the end."""

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls found so far."""


MakeReader: TypeAlias = Callable[[], Reader]
