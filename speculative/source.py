"""The contracts of what drafts: ``DraftSource`` proposes trees, ``Drafter`` computes logits.

A source is handed the whole history at every step and finds out by itself what is new of it:
nothing has to be told that a token was accepted. ``TreeSource`` makes one of any ``Drafter``: a
draft model, which reads tokens, or a trained head, which reads the target's hidden states or keys
and values as well. Neither knows the target or text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from localrt.common.errors import LocalrtError
from localrt.quant.ops.kv import KVCache
from localrt.speculative.tree import TokenTree

DEPTH = 16
MOST_NODES = 2048

# Called now and then while a source works; raises CancelledError to abandon it.
Check = Callable[[], None]
# The accepted draft tokens and the one after them, once they are known.
Outcome = Callable[[], Sequence[int] | None]


class DraftFailedError(LocalrtError):
    """A source cannot go on: its model produced NaN logits, or its memory is used up."""


class DraftSource(ABC):
    """Drafts for one sequence. Used by one thread at a time."""

    name: str
    """``"ngram"``, ``"model"``, ``"head"``."""

    prepares = False
    """Whether it can go on while its draft is verified. The last four methods are for that."""

    def begin(self, history: Sequence[int]) -> None:  # noqa: B027 - most need nothing
        """A generation begins with ``history``, which need not go on from what was seen so far."""

    @abstractmethod
    def propose(
        self, history: Sequence[int], budget: int, depth: int, *, check: Check | None = None
    ) -> TokenTree:
        """At most ``budget`` tokens that may follow ``history``, at most ``depth`` ahead.

        ``history`` is not empty, and goes on from that of the call before.

        Raises:
            DraftFailedError: the source is of no use any more; it must not be called again.
        """

    def ahead(  # noqa: B027
        self, history: Sequence[int], nodes: int, *, check: Check, outcome: Outcome
    ) -> None:
        """Prepare what ``propose`` will be asked for next, by at most ``nodes`` steps of work.

        ``history`` is that of the last proposal, or goes on from it; with no ``nodes`` only what is
        missing of it is computed, in pieces. Once there is an ``outcome``,
        nothing is begun, and what is at work ends as soon as it is seen to be of no use.

        Raises:
            DraftFailedError: the source is of no use any more.
            CancelledError: ``check`` raised it, or the outcome is another.
        """

    def missing(self, history: Sequence[int]) -> int:
        """Tokens of ``history`` that must be computed before there can be a tree behind it."""
        return 0

    def catch_up(  # noqa: B027
        self, history: Sequence[int], *, check: Check | None = None
    ) -> None:
        """Compute them.

        Raises:
            DraftFailedError: the source is of no use any more.
        """

    def ready(self, history: Sequence[int]) -> int:
        """The levels of a tree behind ``history`` that were prepared; computes nothing."""
        return 0


Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that come next in a cache: known or draft tokens. The last ``wanted`` get logits.

    ``tokens`` (n,), ``positions`` (n,). Draft tokens have a ``mask``, as in ``Span``, and ``above``
    (n,): the row that each follows, counted from the tree's first; -1 for the last known token's.
    """

    tokens: Sequence[int]
    positions: Ints
    wanted: int
    mask: npt.NDArray[np.bool_] | None = None
    above: Sequence[int] | None = None


class Drafter(ABC):
    """Computes drafts for one sequence. Used by one thread at a time."""

    name: str
    """The source's name in metrics and options."""

    tokens: Ints | None = None
    """The target's token ids for the columns of logits; None where they are the same."""

    lasting = True
    """Whether the row of an accepted draft token is that of the token, else it is computed anew.

    Only a drafter whose rows last goes on while the target computes.
    """

    held_rows = True
    """Whether a mask may cover rows of earlier passes; else a round computes the tree again."""

    @abstractmethod
    def cache(self, capacity: int) -> KVCache:
        """An empty cache for one sequence."""

    def first(self, length: int) -> int | None:
        """Of a sequence of ``length``, the token whose row is computed first where none is held.

        All rows behind it must be there to draft. None: there can be no draft.
        """
        return 0

    @abstractmethod
    def compute(self, cache: KVCache, rows: Rows, *, check: Check | None) -> Floats:
        """Compute ``rows``: logits (wanted, V) of what follows each."""
