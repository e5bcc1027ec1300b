"""What computes guesses: the contract of draft models, and of whatever reads a target's state.

A draft model reads tokens. A trained head, a multi-token-prediction block or an assistant reads the
target's features, or its keys and values, as well: each is made for one session of the target and
takes from it what it needs. Most guess one step at a time, from rows of guesses behind those of the
known tokens; one that guesses all depths at once (block diffusion) needs no such rows. It knows no
trees: ``TreeSource`` grows them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from localrt.quant.ops.protocol import KVCache
from localrt.speculative.source import Check

__all__ = ["Drafter", "Rows"]

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that come next in a cache: known tokens, or guesses. The last ``wanted`` get logits.

    ``tokens`` (n,), ``positions`` (n,). Guesses have a ``mask``, as in ``Span``, and ``above``
    (n,): the row that each follows, counted from the first guess of the tree; -1 for the last known
    token's.
    """

    tokens: Sequence[int]
    positions: Ints
    wanted: int
    mask: npt.NDArray[np.bool_] | None = None
    above: Sequence[int] | None = None


class Drafter(ABC):
    """Computes guesses for one sequence. Used by one thread at a time."""

    name: str
    """The source's name in metrics and options."""

    tokens: Ints | None = None
    """The target's token ids for the columns of logits; None where they are the same."""

    lasting = True
    """Whether the row of a guess that came true is that of the token. Else it is computed anew."""

    prepares = True
    """Whether guessing may go on while the target computes. Only of what lasts."""

    held_rows = True
    """Whether a mask may cover rows of earlier passes; else a round computes the tree again."""

    @abstractmethod
    def cache(self, capacity: int) -> KVCache:
        """An empty cache for one sequence."""

    def first(self, length: int) -> int | None:
        """Of a sequence of ``length``, the token whose row is computed first where none is held.

        All rows behind it must be there to guess. None: there can be no guesses.
        """
        return 0

    def drafting(self) -> AbstractContextManager[object]:
        """Around all passes of one tree, but for those while the target computes."""
        return nullcontext()

    @abstractmethod
    def compute(self, cache: KVCache, rows: Rows, *, check: Check | None) -> Floats:
        """Compute ``rows``: logits (wanted, V) of what follows each.

        Behind the last known token, (depths, V): of the next token, and of those after it where
        they are guessed at once.
        """
