"""Draft sources: a ``DraftSource`` proposes trees, a ``Drafter`` computes logits for one.

A source gets the whole history at every step and finds out by itself what is new: no call tells it
that a token was accepted. ``TreeSource`` makes a source of any ``Drafter``: a draft model, which
reads tokens, or a trained head, which reads the target's hidden states or keys and values as well.
Neither knows the target or text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from localrt.common.errors import CancelledError, LocalrtError
from localrt.quant.formats.packed import Floats
from localrt.quant.ops.kv import KVCache
from localrt.quant.ops.protocol import Check as Check
from localrt.speculative.tree import TokenTree

DEPTH = 16
MOST_NODES = 2048

# The accepted draft tokens and the one after them, once they are known.
Outcome = Callable[[], Sequence[int] | None]


class DraftFailedError(LocalrtError):
    """A source cannot continue: its model produced NaN logits, or it is out of memory."""


@dataclass(frozen=True, slots=True)
class TreeSize:
    """At most ``budget`` nodes, ``depth`` deep.

    A level behind tokens that are together less likely than ``least`` may be left out.
    """

    budget: int
    depth: int = DEPTH
    least: float = 0.0


class DraftSource(ABC):
    """Drafts for one sequence. Used by one thread at a time."""

    name: str
    """``"ngram"``, ``"model"``, ``"head"``."""

    prepares = False
    """Whether it can draft further while its draft is verified, by ``ahead``."""

    def begin(self, history: Sequence[int]) -> None:  # noqa: B027 - most need nothing
        """Start a generation with ``history``, which need not continue what was seen so far."""

    @abstractmethod
    def propose(
        self, history: Sequence[int], size: TreeSize, *, check: Check | None = None
    ) -> TokenTree:
        """Propose a tree of tokens that may follow ``history``.

        ``history`` is not empty, and continues that of the previous call.

        Raises:
            DraftFailedError: the source has failed and must not be called again.
        """

    def proposal(self, history: Sequence[int], size: TreeSize) -> Proposal:
        """``propose`` as steps, whose rows the caller computes with their drafter."""
        yield from ()  # lookups have no steps
        return self.propose(history, size)

    def ahead(  # noqa: B027
        self, history: Sequence[int], nodes: int, *, check: Check, outcome: Outcome
    ) -> None:
        """Prepare the next ``propose`` with at most ``nodes`` steps of work.

        ``history`` is that of the last proposal, or continues it; with ``nodes`` 0 only its missing
        tokens are computed, in pieces. Once there is an ``outcome``, no new work starts, and
        running work ends as soon as it turns out to be useless.

        Raises:
            DraftFailedError: the source has failed.
            CancelledError: ``check`` raised it, or the outcome differs.
        """

    def missing(self, history: Sequence[int]) -> int:
        """Return how many tokens of ``history`` must be computed before a tree can follow it."""
        return 0

    def catch_up(  # noqa: B027
        self, history: Sequence[int], *, check: Check | None = None
    ) -> None:
        """Compute the missing tokens.

        Raises:
            DraftFailedError: the source has failed.
        """

    def ready(self, history: Sequence[int]) -> int:
        """Return how many levels of a tree after ``history`` are prepared, without computing."""
        return 0


Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rows:
    """The next rows of a cache, for known or draft tokens. The last ``wanted`` get logits.

    ``tokens`` (n,), ``positions`` (n,). Draft tokens have a ``mask``, as in ``Span``, and ``above``
    (n,): the row that each follows, counted from the tree's first; -1 for the last known token.
    """

    tokens: Sequence[int]
    positions: Ints
    wanted: int
    mask: npt.NDArray[np.bool_] | None = None
    above: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """Rows that a source needs computed."""

    drafter: Drafter
    cache: KVCache
    rows: Rows


Proposal: TypeAlias = "Generator[Step, Floats, TokenTree]"
"""The steps of a source's proposal, each answered by logits (wanted, V)."""


class Drafter(ABC):
    """Computes drafts for one sequence. Used by one thread at a time."""

    name: str
    """The source's name in metrics and options."""

    tokens: Ints | None = None
    """The target's token ids for the columns of logits; None where they are the same."""

    lasting = True
    """Whether the cached row of a draft token stays valid once it is accepted; else it is computed
    again.

    Only a drafter whose rows last can draft while the target computes.
    """

    @abstractmethod
    def cache(self, capacity: int) -> KVCache:
        """Return an empty cache for one sequence."""

    def first(self, length: int) -> int | None:
        """Return the first token whose row is needed to draft after ``length`` tokens.

        All rows from it on must be held to draft. None: drafting is impossible.
        """
        return 0

    @abstractmethod
    def compute(self, cache: KVCache, rows: Rows, *, check: Check | None) -> Floats:
        """Compute ``rows``; return logits (wanted, V) for the token after each."""

    @property
    def weights(self) -> object:
        """What drafters must share to compute rows of several sequences in one pass."""
        return self

    def compute_together(self, steps: Sequence[Step], *, check: Check | None) -> list[Floats]:
        """Compute the rows of drafters with the same ``weights``."""
        return [step.drafter.compute(step.cache, step.rows, check=check) for step in steps]


def propose_together(
    proposals: Sequence[Proposal], *, check: Check | None
) -> list[TokenTree | LocalrtError]:
    """Run the proposals of several sequences; rows that can be computed together are.

    Returns each one's tree, or why its source has failed.
    """
    found: list[TokenTree | LocalrtError] = [TokenTree.empty()] * len(proposals)
    waiting: dict[int, Step] = {}

    def resume(number: int, logits: Floats | None) -> None:
        waiting.pop(number, None)
        steps = proposals[number]
        try:
            waiting[number] = next(steps) if logits is None else steps.send(logits)
        except StopIteration as done:
            found[number] = done.value
        except CancelledError:
            raise
        except LocalrtError as error:
            found[number] = error

    try:
        for number in range(len(proposals)):
            resume(number, None)
        while waiting:
            first = next(iter(waiting.values())).drafter
            alike = {n: s for n, s in waiting.items() if s.drafter.weights is first.weights}
            try:
                logits = first.compute_together(list(alike.values()), check=check)
            except CancelledError:
                raise
            except LocalrtError as error:
                for number in alike:
                    del waiting[number]
                    found[number] = error
                continue
            for number, own in zip(alike, logits, strict=True):
                resume(number, own)
    finally:
        for steps in proposals:
            steps.close()
    return found
