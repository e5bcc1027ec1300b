"""The hidden states of a session's tokens, for drafters that go on from them.

A row is the residual stream after the last block, before the final norm. Rows follow the session's
tokens: appended with them, trimmed with them, and of a tree's rows those are kept that were
accepted. It knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.float32]


class FeatureRows:
    """Rows (n, ``size``) of tokens ``first`` to ``length`` of a sequence."""

    def __init__(self, first: int, size: int) -> None:
        self.first = first
        self.length = first
        self._rows = np.empty((64, size), np.float32)
        self._open: Rows = np.empty((0, size), np.float32)

    def room(self, count: int) -> Rows:
        """Where the next ``count`` rows go, (count, size); ``advance`` counts them as held."""
        held = self.length - self.first
        if held + count > len(self._rows):
            grown = np.empty((max(2 * held, held + count), self._rows.shape[1]), np.float32)
            grown[:held] = self._rows[:held]
            self._rows = grown
        return self._rows[held : held + count]

    def advance(self, count: int) -> None:
        """Count the next rows as held."""
        self.length += count

    def open(self, count: int) -> Rows:
        """Where the rows of a tree's pass go, until some are kept."""
        self._open = np.empty((count, self._rows.shape[1]), np.float32)
        return self._open

    def keep(self, rows: Sequence[int]) -> None:
        """Of the tree's rows these are the next tokens'."""
        self.room(len(rows))[:] = self._open[list(rows)]
        self.advance(len(rows))
        self._open = self._open[:0]

    def trim(self, length: int) -> None:
        """Forget the rows of all tokens from ``length`` on."""
        self.first = min(self.first, length)
        self.length = min(self.length, length)

    def get(self, start: int, stop: int) -> Rows:
        """Rows of tokens ``start`` to ``stop``, valid until the sequence changes.

        Raises:
            IndexError: some of them are not held.
        """
        if not self.first <= start <= stop <= self.length:
            raise IndexError(f"features {start} to {stop} of {self.first} to {self.length}")
        return self._rows[start - self.first : stop - self.first]
