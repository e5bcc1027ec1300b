"""How much of one sequence of tokens another one repeats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Tokens: TypeAlias = npt.NDArray[np.int64]
"""Of a sequence that is compared again and again: a list is converted each time."""


def common_prefix(a: Sequence[int] | Tokens, b: Sequence[int] | Tokens) -> int:
    """Number of leading tokens that ``a`` and ``b`` share."""
    size = min(len(a), len(b))
    differ = np.flatnonzero(np.asarray(a[:size]) != np.asarray(b[:size]))
    return int(differ[0]) if len(differ) else size
