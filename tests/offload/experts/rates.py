"""Costs of experts by a formula."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rate:
    """``fixed`` + the longer of ``read`` (an expert's weights) and ``row`` * rows, in seconds."""

    fixed: float
    read: float
    row: float

    def __call__(self, rows: int, /) -> float:
        return self.fixed + max(self.read, self.row * rows)
