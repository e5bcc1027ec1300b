"""What a constraint is for the loop: which tokens may come next, and whether the answer may end.

The sampler chooses among the allowed tokens only. Speculation stays exact: a guess counts where it
is the token that the sampler chooses under the constraint. It knows no grammars and no text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from localrt.engine.sampling import Distribution, Logits, Sampling, distribution
from localrt.errors import LocalrtError

__all__ = ["Constraint", "MakeConstraint", "allowed_ids", "constrained"]

Ids = npt.NDArray[np.intp]


class Constraint(Protocol):
    """One answer's. Not thread-safe."""

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Which tokens may come next, (vocab,); those that end a generation are not among them."""

    def accept(self, token: int) -> None:
        """``token``, which was allowed, has been chosen."""

    @property
    def may_end(self) -> bool:
        """Whether the answer is complete as it is."""

    @property
    def done(self) -> bool:
        """Whether nothing may follow."""


MakeConstraint: TypeAlias = Callable[[], Constraint]


def allowed_ids(constraint: Constraint, ends: frozenset[int], logits: Logits) -> Ids:
    """The ids that may be chosen from ``logits`` (V,): ``ends`` only where the answer may end.

    Raises:
        LocalrtError: there is none: the vocabulary, or a bias, leaves no way to go on.
    """
    allowed = np.zeros(len(logits), np.bool_)
    known = constraint.allowed()[: len(logits)]
    allowed[: len(known)] = known
    allowed[[token for token in ends if token < len(logits)]] = constraint.may_end
    allowed &= logits > -np.inf
    ids = np.flatnonzero(allowed)
    if not len(ids):
        raise LocalrtError("no token of the model can go on within json_schema or regex")
    return ids


def constrained(logits: Logits, ids: Ids, sampling: Sampling) -> Distribution:
    """``distribution`` of adjusted logits (V,) among ``ids`` alone."""
    found = distribution(logits[ids], sampling)
    return Distribution(ids[found.tokens], found.probs)
