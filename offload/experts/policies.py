"""What an expert in a cache is worth: the rule by which one makes room for another.

Each policy keeps one number per expert of the whole model, (layers, count); the cache evicts the
smallest. It is told of every layer's routing in every pass and of nothing else: not of the cache's
contents, of time or of weights. The numbers must be comparable across layers, for one cache serves
them all: shares of a layer's own routing are, and ages in visits of an expert's own layer are.
Softmax scores as they are and ages on a common clock are not: on a common clock a sweep over the
layers evicts those that come next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from localrt.errors import OptionError

__all__ = ["DEFAULT_POLICY", "LFU", "LRU", "MRS", "POLICIES", "Learned", "Policy", "Stale",
           "make_policy"]  # fmt: skip

Values = NDArray[np.float64]


class Policy(Protocol):
    """Keeps ``value`` (layers, count) up to date; the expert of the smallest is evicted."""

    value: Values

    def touch(
        self, layer: int, chosen: NDArray[Any], rows: NDArray[Any], experts: NDArray[Any],
        scores: NDArray[Any],
    ) -> None:  # fmt: skip
        """One layer has routed one pass.

        ``chosen`` are the experts that the pass uses, each once, with the ``rows`` that each sees;
        ``experts`` and ``scores`` are (rows of the pass, ranks), best first, ranks going beyond the
        chosen ones where the caller has more. Only this layer's values may change.
        """


class LRU:
    """The least recently used goes first, on one clock for all layers: the textbook's, as measure.

    Where a pass touches about as many experts as there are slots, it evicts those that the next
    layers are about to ask for: see ``Stale``.
    """

    def __init__(self, layers: int, count: int, used: int) -> None:
        self.value: Values = np.zeros((layers, count))
        self._clock = 0.0

    def touch(
        self, layer: int, chosen: NDArray[Any], rows: NDArray[Any], experts: NDArray[Any],
        scores: NDArray[Any],
    ) -> None:  # fmt: skip
        """See ``Policy``."""
        self._clock += 1.0
        self.value[layer, chosen] = self._clock


class Stale:
    """Least recently used by the layer's own clock: the age is the layer's visits since the use.

    A sweep over the layers does not age what it has not reached yet.
    """

    def __init__(self, layers: int, count: int, used: int) -> None:
        self.value: Values = np.full((layers, count), -1e9)

    def touch(
        self, layer: int, chosen: NDArray[Any], rows: NDArray[Any], experts: NDArray[Any],
        scores: NDArray[Any],
    ) -> None:  # fmt: skip
        """See ``Policy``."""
        value = self.value[layer]
        value -= len(experts)
        value[chosen] = 0.0


class LFU:
    """The least often used goes first; every row counts, since the beginning."""

    def __init__(self, layers: int, count: int, used: int) -> None:
        self.value: Values = np.zeros((layers, count))

    def touch(
        self, layer: int, chosen: NDArray[Any], rows: NDArray[Any], experts: NDArray[Any],
        scores: NDArray[Any],
    ) -> None:  # fmt: skip
        """See ``Policy``."""
        self.value[layer, chosen] += rows


class MRS:
    """HybriMoE's moving score: S <- alpha TopP(scores) + (1 - alpha) S, P twice the chosen.

    Scores go to the experts that they belong to, and every row of a pass counts: many rows move S
    as far as they would one by one. A row's P scores are taken as shares of their sum, so that
    layers with flat and with peaked routers compete on equal terms, as do sigmoid gates.
    """

    def __init__(self, layers: int, count: int, used: int, *, alpha: float = 0.1) -> None:
        if not 0 < alpha <= 1:
            raise ValueError(f"alpha must be above 0 and at most 1, is {alpha}")
        self.value: Values = np.zeros((layers, count))
        self._alpha, self._top = alpha, min(2 * used, count)

    def touch(
        self, layer: int, chosen: NDArray[Any], rows: NDArray[Any], experts: NDArray[Any],
        scores: NDArray[Any],
    ) -> None:  # fmt: skip
        """See ``Policy``."""
        value = self.value[layer]
        if len(experts) == 1:
            value *= 1.0 - self._alpha
            shares = _shares(scores[0, : self._top])
            value[experts[0, : self._top]] += self._alpha * shares
            return
        moved = 1.0 - (1.0 - self._alpha) ** len(experts)
        value *= 1.0 - moved
        value += moved * _mean_shares(experts, scores, self._top, len(value))


class Learned:
    """The chance that an expert is used next, from how often it was lately: weights fitted online.

    Four moving averages of each expert, of being chosen and of its share of the scores, over about
    3 and about 30 rows, and a constant: least squares over all layers' routing so far, forgetting
    slowly, says how much each tells of the next use. So a workload with long phases leans on the
    slow averages and one that flickers on the fast ones, without anything to set.
    """

    RATES = (0.3, 0.03)
    FORGET = 0.999  # of the evidence, per pass
    PRIOR = 10.0  # layers' worth of evidence, which is never forgotten

    def __init__(self, layers: int, count: int, used: int) -> None:
        self.value: Values = np.zeros((layers, count))
        self._top = min(2 * used, count)
        self._used = float(used)
        # (layers, features, count): chosen fast, slow, scores fast, slow, one
        self._features = np.zeros((layers, 5, count))
        self._features[:, 4] = 1.0
        self._rates = np.array(self.RATES)[:, None]
        self._keeps = 1.0 - np.array([*self.RATES, *self.RATES, 0.0])[:, None]
        self._weights = np.array([0.2, 0.3, 0.2, 0.3, 0.0])
        self._prior = self.PRIOR * np.eye(5) * used / count
        self._prior_target = self._prior @ self._weights
        self._moments, self._target = self._prior.copy(), self._prior_target.copy()
        self._last = layers

    def touch(
        self, layer: int, chosen: NDArray[Any], rows: NDArray[Any], experts: NDArray[Any],
        scores: NDArray[Any],
    ) -> None:  # fmt: skip
        """See ``Policy``."""
        features, steps = self._features[layer], len(experts)
        if layer <= self._last:  # a new pass
            self._weights = np.linalg.solve(self._moments, self._target)
            self._moments += (1.0 - self.FORGET) * (self._prior - self._moments)
            self._target += (1.0 - self.FORGET) * (self._prior_target - self._target)
        self._last = layer
        self._moments += features @ features.T
        if steps == 1:
            self._target += features[:, chosen].sum(axis=1)
            top = experts[0, : self._top]
            features *= self._keeps
            features[:2, chosen] += self._rates
            features[2:4, top] += self._rates * (self._used * _shares(scores[0, : self._top]))
        else:
            happened = np.zeros(features.shape[1])
            happened[chosen] = rows / steps
            shares = self._used * _mean_shares(experts, scores, self._top, len(happened))
            self._target += features @ happened
            keeps = self._keeps**steps
            features *= keeps
            features[:2] += (1.0 - keeps[:2]) * happened
            features[2:4] += (1.0 - keeps[2:4]) * shares
        np.dot(self._weights, features, out=self.value[layer])


def _shares(scores: NDArray[Any]) -> Values:
    """One row's scores as shares of their sum; where they sum to nothing, equal ones."""
    scores = scores.astype(np.float64)
    total = float(scores.sum())
    return scores / total if total > 0 else np.full(len(scores), 1.0 / len(scores))


def _mean_shares(experts: NDArray[Any], scores: NDArray[Any], top: int, count: int) -> Values:
    """(count,): each expert's share of the top scores, mean over the rows."""
    scores = scores[:, :top].astype(np.float64)
    total = scores.sum(axis=1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = np.where(total > 0, scores / total, 1.0 / scores.shape[1])
    flat = experts[:, :top].ravel()
    summed = np.bincount(flat, weights=shares.ravel(), minlength=count)
    return np.asarray(summed / len(experts), np.float64)


POLICIES: Mapping[str, Callable[[int, int, int], Policy]] = MappingProxyType(
    {"lru": LRU, "lfu": LFU, "mrs": MRS, "stale": Stale, "learned": Learned}
)
"""Policies by name: made from layers, count and used."""

DEFAULT_POLICY = "learned"


def make_policy(name: str, layers: int, count: int, used: int) -> Policy:
    """A policy by its name.

    Raises:
        OptionError: there is none of that name.
    """
    if name not in POLICIES:
        raise OptionError(f"expert policy {name!r} is not known: one of {', '.join(POLICIES)}")
    return POLICIES[name](layers, count, used)
