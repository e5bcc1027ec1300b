"""Which experts of the next layer follow those of this one: counts, kept as the run goes.

MoETuner's observation: a token's expert in one layer says much of its expert in the next. A table
of how often each pair met on one token, forgetting slowly, gives the chance of each next expert.
It knows names and counts, not what they are used for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["TransitionTable"]


class TransitionTable:
    """Counts of pairs (expert of layer i, expert of layer i + 1): (layers - 1, count, count) f32.

    Of the last layer there are none: what follows it is the next token.
    """

    FORGET_AT = 4096.0
    """Rows after which a layer's counts are halved: topics change."""

    def __init__(self, layers: int, count: int, used: int) -> None:
        self.layers, self.count, self.used = layers, count, used
        self._pairs = np.zeros((max(0, layers - 1), count, count), np.float32)
        self._seen = np.zeros((max(0, layers - 1), count), np.float32)
        self._rows = [0.0] * layers

    @property
    def nbytes(self) -> int:
        """Memory of the tables."""
        return self._pairs.nbytes + self._seen.nbytes

    def note(self, layer: int, before: NDArray[Any], chosen: NDArray[Any]) -> None:
        """Rows of a pass, (rows, used): ``before`` in ``layer`` - 1, ``chosen`` in ``layer``."""
        if layer < 1 or before.shape != chosen.shape:
            raise ValueError(f"no pairs of {before.shape} and {chosen.shape} into layer {layer}")
        pairs, seen = self._pairs[layer - 1], self._seen[layer - 1]
        if len(before) == 1:  # no pair twice
            pairs[before[0][:, None], chosen[0]] += 1.0
            seen[before[0]] += 1.0
        else:
            left = np.repeat(before.astype(np.intp), chosen.shape[1], axis=1).reshape(-1)
            right = np.tile(chosen.astype(np.intp), (1, before.shape[1])).reshape(-1)
            met = np.bincount(left * self.count + right, minlength=self.count**2)
            pairs += met.reshape(self.count, self.count)
            seen += np.bincount(before.reshape(-1), minlength=self.count)
        self._rows[layer] += len(before)
        if self._rows[layer] >= self.FORGET_AT:
            self._rows[layer] /= 2
            pairs *= 0.5
            seen *= 0.5

    def predict(self, layer: int, before: NDArray[Any]) -> NDArray[np.float32]:
        """(count,): how likely each expert of ``layer`` is after ``before`` (used,) of the last.

        The mean over ``before`` of the share of its rows that went on to each expert; what was
        never seen predicts nothing.
        """
        if layer < 1:
            raise ValueError("nothing comes before layer 0")
        seen = self._seen[layer - 1, before]
        weights = np.where(seen > 0, 1.0 / np.maximum(seen, 1e-6), 0.0).astype(np.float32)
        chances: NDArray[np.float32] = weights @ self._pairs[layer - 1, before]
        return chances / np.float32(max(1, len(before)))
