"""Foreign text made fit for a one-line message. Knows nothing of models."""

from __future__ import annotations

__all__ = ["one_line"]


def one_line(text: object, limit: int = 200) -> str:
    """``text`` with its white space folded, cut at ``limit`` characters."""
    line = " ".join(str(text).split())
    return line if len(line) <= limit else line[: limit - 3] + "..."
