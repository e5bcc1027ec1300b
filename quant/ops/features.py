"""Rows of the residual stream that a pass copies out, for draft heads and embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

AFTER_LAST = -1
"""Stands for the residual stream after the last layer, where layers are listed."""

CARRIED = -2
"""Stands for what an assistant makes of its own output, to be given to the next draft token."""


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """Where a pass copies its residual stream: as it is before each of ``layers``, or after the
    last, side by side in ``rows`` (R, len(layers) * D).
    """

    layers: tuple[int, ...]
    rows: npt.NDArray[np.float32]

    @property
    def within(self) -> bool:
        """Whether any is taken before the pass has ended."""
        return any(layer != AFTER_LAST for layer in self.layers)

    def of(self, layer: int) -> npt.NDArray[np.float32] | None:
        """Return the columns for ``layer``, (R, D), if it is listed."""
        if layer not in self.layers:
            return None
        at, width = self.layers.index(layer), self.rows.shape[1] // len(self.layers)
        return self.rows[:, at * width : (at + 1) * width]

    def copy(self, layers: Sequence[int], first: int, out: npt.NDArray[np.float32]) -> None:
        """Fill ``out`` (n, len(layers) * D) from the rows that begin with ``first``."""
        width = out.shape[1] // len(layers)
        for at, layer in enumerate(layers):
            own = self.of(layer)
            assert own is not None, "the pass has recorded it"
            out[:, at * width : (at + 1) * width] = own[first : first + len(out)]
