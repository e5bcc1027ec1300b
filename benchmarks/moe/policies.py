"""Expert-cache policies to compare the product's with: what an expert in a cache is worth.

They follow ``localrt.offload.experts.policy.Policy``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localrt.offload.experts.policy import Learned, Policy, Values, mean_shares, shares_of

__all__ = ["LFU", "LRU", "MRS", "POLICIES", "Informed", "Stale"]


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
            shares = shares_of(scores[0, : self._top])
            value[experts[0, : self._top]] += self._alpha * shares
            return
        moved = 1.0 - (1.0 - self._alpha) ** len(experts)
        value *= 1.0 - moved
        value += moved * mean_shares(experts, scores, self._top, len(value))


class Informed:
    """Knows how a synthetic trace was made, all but the dice: about what policies can reach."""

    def __init__(self, odds: NDArray[np.float32]) -> None:
        self.value: Values = np.zeros(odds.shape[1:])
        self._odds = odds
        self._token = -1

    def touch(self, layer: int, *_: Any) -> None:
        """See ``Policy``."""
        self._token += layer == 0
        self.value[layer] = self._odds[self._token, layer]


POLICIES: Mapping[str, Callable[[int, int, int], Policy]] = MappingProxyType(
    {"lru": LRU, "lfu": LFU, "mrs": MRS, "stale": Stale, "learned": Learned}
)
"""Policies by name: made from layers, count and used."""
