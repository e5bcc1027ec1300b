"""How much of one sequence of tokens another one repeats."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["common_prefix"]


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading tokens that ``a`` and ``b`` share."""
    size = min(len(a), len(b))
    differ = np.flatnonzero(np.asarray(a[:size]) != np.asarray(b[:size]))
    return int(differ[0]) if len(differ) else size
