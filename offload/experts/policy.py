"""The policy of the expert cache: how likely each expert is to be used next, by routing alone, and
from which likelihood on a copy to a GPU pays.

docs/mixtures.md compares it with LRU and the optimum.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
Ids = NDArray[np.integer]
Scores = NDArray[np.floating]


class Learned:
    """Estimates each expert's probability of being used next from its recent use, fitted online.

    Features are a constant and four moving averages for each expert: of being chosen and of its
    share of the scores, each over about 3 and about 30 rows. Their weights are fitted by least
    squares over all layers' past routing, with slow forgetting. So slow averages dominate for
    workloads with long phases and fast ones for changing workloads, without settings.

    The probabilities are ``value`` (layers, count).
    """

    RATES = (0.3, 0.03)
    FORGET = 0.999  # decay of the evidence per pass
    PRIOR = 10.0  # weight of the prior, in layers' worth of evidence; never forgotten

    def __init__(self, layers: int, count: int, used: int) -> None:
        self.value: Values = np.zeros((layers, count))
        self._top = min(2 * used, count)
        self._used = float(used)
        # (layers, features, count): chosen fast, slow, scores fast, slow, one
        self._features = np.zeros((layers, 5, count))
        self._features[:, 4] = 1.0
        self._rates = np.array(self.RATES)[:, None]
        self._row = np.zeros((2, 1, count))  # one row's features: chosen, shares of the scores
        self._decay = 1.0 - np.array([*self.RATES, *self.RATES, 0.0])[:, None]
        self._weights = np.array([0.2, 0.3, 0.2, 0.3, 0.0])
        self._prior = self.PRIOR * np.eye(5) * used / count
        self._prior_target = self._prior @ self._weights
        self._moments, self._target = self._prior.copy(), self._prior_target.copy()
        self._last = layers

    def touch(
        self, layer: int, chosen: Ids, rows: Ids, experts: Ids,
        scores: Scores,
    ) -> None:  # fmt: skip
        """Learn from the routing of one layer in one pass.

        ``chosen`` are the distinct experts that the pass uses, with the number of ``rows`` of each;
        ``experts`` and ``scores`` are (rows of the pass, ranks), best first, possibly with more
        ranks than are chosen. Only this layer's values change.
        """
        features, steps = self._features[layer], len(experts)
        self._begin(layer)
        self._last = layer
        self._moments += features @ features.T
        if steps == 1:
            new, top = self._row, self._top
            new.fill(0.0)
            new[0, 0, chosen] = 1.0
            self._target += features @ new[0, 0]
            new[1, 0, experts[0, :top]] = self._used * _shares_of(scores[0, :top])
            features *= self._decay
            averages = features[:4].reshape(2, 2, -1)
            averages += self._rates * new
        else:
            chosen_shares = np.zeros(features.shape[1])
            chosen_shares[chosen] = rows / steps
            shares = self._used * _mean_shares(experts, scores, self._top, len(chosen_shares))
            self._target += features @ chosen_shares
            decay = self._decay**steps
            features *= decay
            features[:2] += (1.0 - decay[:2]) * chosen_shares
            features[2:4] += (1.0 - decay[2:4]) * shares
        np.dot(self._weights, features, out=self.value[layer])

    def touch_rows(self, layers: Ids, experts: Ids, scores: Scores, used: int) -> None:
        """As ``touch`` for each of the ``layers`` (n,), ascending, of a pass of one row: (n, ranks)
        of experts and scores each, of which the first ``used`` are chosen.
        """
        self._begin(int(layers[0]))
        self._last = int(layers[-1])
        features = self._features[layers]  # (n, 5, count)
        each = np.arange(len(layers))[:, None]
        new = np.zeros((len(layers), 2, features.shape[2]))  # chosen, shares of the scores
        new[each, 0, experts[:, :used]] = 1.0
        top = self._top
        new[each, 1, experts[:, :top]] = self._used * _shares_of(scores[:, :top])
        flat = features.transpose(1, 0, 2).reshape(5, -1)
        self._moments += flat @ flat.T
        self._target += flat @ new[:, 0].reshape(-1)
        features *= self._decay
        averages = features[:, :4].reshape(len(layers), 2, 2, -1)
        averages += self._rates * new[:, :, None]
        self._features[layers] = features
        self.value[layers] = self._weights @ features

    def _begin(self, layer: int) -> None:
        """If a pass begins with this layer, fit the weights."""
        if layer > self._last:
            return
        self._weights = np.linalg.solve(self._moments, self._target)
        self._moments += (1.0 - self.FORGET) * (self._prior - self._moments)
        self._target += (1.0 - self.FORGET) * (self._prior_target - self._target)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCosts:
    """Seconds for one expert: computing it for one row on the ``cpu`` or the ``gpu``, and copying
    it over the link (``fetch``). A copy costs the CPU ``slowdown``: the host starts it, and it
    takes bandwidth of the RAM.
    """

    cpu: float
    gpu: float
    fetch: float
    slowdown: float = 0.0

    @property
    def min_gain(self) -> float:
        """The value from which on a copy saves more of the CPU's time than it costs."""
        stay = round(1 / min(Learned.RATES))  # passes in a slot: the span of slow averages
        return self.slowdown / (max(self.cpu - self.gpu, 1e-9) * stay)


def _shares_of(scores: Scores) -> Values:
    """Scores (..., n) as shares of a row's sum; equal shares if the sum is 0."""
    values: Values = scores.astype(np.float64)
    total = values.sum(axis=-1, keepdims=True)
    equal = np.full_like(values, 1.0 / values.shape[-1])
    shares: Values = np.divide(values, total, out=equal, where=total > 0)
    return shares


def _mean_shares(experts: Ids, scores: Scores, top: int, count: int) -> Values:
    """(count,): each expert's share of the top scores, averaged over the rows."""
    shares, flat = _shares_of(scores[:, :top]), experts[:, :top].ravel()
    summed = np.bincount(flat, weights=shares.ravel(), minlength=count)
    return np.asarray(summed / len(experts), np.float64)
