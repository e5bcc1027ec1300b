"""Hits of an expert cache on a routing trace, beside least recently used and Belady's optimum.

The optimum knows the future, so it is a yardstick and no policy. All experts of one layer and pass
are demanded together; afterwards the cache keeps, of what it held and what was brought in, those
that are used again soonest, and nothing forces it to keep what was just brought in. Hence no policy
has more hits, whether or not it may refuse to keep an expert.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.moe.routing_trace import RoutingTrace
from localrt.offload.experts.cache import ExpertCache
from localrt.offload.experts.policy import Values

__all__ = ["LRU", "Hits", "belady", "hit_rates", "replay"]

_NEVER = 1 << 60


class Hits(NamedTuple):
    """What was asked for and how much of it was held, over all layers and passes."""

    hits: int
    demands: int

    @property
    def rate(self) -> float:
        """The share of hits."""
        return self.hits / max(1, self.demands)


class LRU:
    """The least recently used expert goes first, on one clock for all layers: see ``Policy``."""

    def __init__(self, layers: int, count: int) -> None:
        self.value: Values = np.zeros((layers, count))
        self._clock = 0.0

    def touch(self, layer: int, chosen: NDArray[Any], *_: Any) -> None:
        """See ``Policy``."""
        self._clock += 1.0
        self.value[layer, chosen] = self._clock


def hit_rates(trace: RoutingTrace, slots: int) -> Mapping[str, float]:
    """LRU, localrt's policy and the optimum with ``slots`` slots, from an empty cache."""
    layers, count, used = trace.header.layers, trace.header.count, trace.header.used
    policies = {"lru": LRU(layers, count), "learned": None}
    rates = {
        name: replay(trace, ExpertCache(layers, count, used, slots, policy=policy)).rate
        for name, policy in policies.items()
    }
    return {**rates, "belady": belady(trace, slots).rate}


def replay(trace: RoutingTrace, cache: ExpertCache) -> Hits:
    """The cache's own, every miss being brought in if it is worth it."""
    hits = demands = 0
    for step in trace.steps():
        layer = step.layer
        demand = cache.touch(layer, step.experts, step.scores)
        demands += len(demand.experts)
        hits += int(demand.resident.sum())
        for expert in demand.experts[~demand.resident].tolist():
            if cache.room and cache.keeps(layer, expert):
                cache.admit(layer, expert)
        cache.release(layer)
    return Hits(hits, demands)


def belady(trace: RoutingTrace, capacity: int) -> Hits:
    """The most that ``capacity`` slots can have, from an empty cache, seeing what is to come."""
    layers, count, used = trace.header.layers, trace.header.count, trace.header.used
    demanded = [np.unique(step.experts[:, :used]) for step in trace.steps()]
    again = [np.empty(0, np.int64)] * len(demanded)  # the step of each one's next use
    following = np.full((layers, count), _NEVER, np.int64)
    for step in range(len(demanded) - 1, -1, -1):
        layer = step % layers
        again[step] = following[layer, demanded[step]]
        following[layer, demanded[step]] = step
    hits = demands = 0
    held: dict[int, int] = {}
    furthest: list[tuple[int, int]] = []
    for step, (experts, nexts) in enumerate(zip(demanded, again, strict=True)):
        demands += len(experts)
        for expert, upcoming in zip(experts.tolist(), nexts.tolist(), strict=True):
            key = step % layers * count + expert
            hits += key in held
            held[key] = upcoming
            heapq.heappush(furthest, (-upcoming, key))
        while len(held) > capacity:
            negative, key = heapq.heappop(furthest)
            if held.get(key) == -negative:  # else a use since then has moved it
                del held[key]
    return Hits(hits, demands)
