"""What an expert in a cache is worth: the rule by which one makes room for another.

A policy keeps one number per expert of the whole model, (layers, count); the cache evicts the
smallest. It is told of every layer's routing in every pass and of nothing else: not of the cache's
contents, of time or of weights. The numbers must be comparable across layers, for one cache serves
them all: shares of a layer's own routing are, scores and ages on a common clock are not.
docs/mixtures.md compares the one below with LRU and the optimum.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


class Learned:
    """The chance that an expert is used next, from how often it was lately: weights fitted online.

    Four moving averages of each expert, of being chosen and of its share of the scores, over about
    3 and about 30 rows, and a constant: least squares over all layers' routing so far, forgetting
    slowly, says how much each tells of the next use. So a workload with long phases leans on the
    slow averages and one that flickers on the fast ones, without anything to set.

    The chances are ``value`` (layers, count).
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
        """One layer has routed one pass.

        ``chosen`` are the experts that the pass uses, each once, with the ``rows`` that each sees;
        ``experts`` and ``scores`` are (rows of the pass, ranks), best first, ranks going beyond the
        chosen ones where the caller has more. Only this layer's values change.
        """
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
            features[2:4, top] += self._rates * (self._used * _shares_of(scores[0, : self._top]))
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


def _shares_of(scores: NDArray[Any]) -> Values:
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
