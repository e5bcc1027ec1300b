"""Hits of a cache on a trace, and Belady's optimum: the most that any of its size could have had.

The optimum knows the future, so it is a yardstick and no policy. All experts of one layer and pass
are demanded together; afterwards the cache keeps, of what it held and what was brought in, those
that are used again soonest, and nothing forces it to keep what was just brought in. Hence no policy
has more hits, whether or not it may refuse to keep an expert.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from benchmarks.moe.routing_trace import RoutingTrace
from localrt.offload.experts.cache import ExpertCache

__all__ = ["PassHits", "belady", "replay"]

_NEVER = 1 << 60


@dataclass(frozen=True, slots=True)
class PassHits:
    """Hits and demands of each pass, in order."""

    hits: tuple[int, ...]
    demands: tuple[int, ...]

    @property
    def hit_rate(self) -> float:
        """Over all passes."""
        return sum(self.hits) / max(1, sum(self.demands))


def belady(trace: RoutingTrace, capacity: int) -> PassHits:
    """Replay a trace with ``capacity`` slots, from an empty cache, seeing what is to come."""
    layers, count, used = trace.header.layers, trace.header.count, trace.header.used
    demanded = [np.unique(step.experts[:, :used]) for step in trace.steps()]
    again = [np.empty(0, np.int64)] * len(demanded)  # the step of each one's next use
    following = np.full((layers, count), _NEVER, np.int64)
    for step in range(len(demanded) - 1, -1, -1):
        layer = step % layers
        again[step] = following[layer, demanded[step]]
        following[layer, demanded[step]] = step
    passes = len(demanded) // layers
    hits, demands = [0] * passes, [0] * passes
    held: dict[int, int] = {}
    furthest: list[tuple[int, int]] = []
    for step, (experts, nexts) in enumerate(zip(demanded, again, strict=True)):
        number, layer = divmod(step, layers)
        demands[number] += len(experts)
        for expert, upcoming in zip(experts.tolist(), nexts.tolist(), strict=True):
            key = layer * count + expert
            hits[number] += key in held
            held[key] = upcoming
            heapq.heappush(furthest, (-upcoming, key))
        while len(held) > capacity:
            negative, key = heapq.heappop(furthest)
            if held.get(key) == -negative:  # else a use since then has moved it
                del held[key]
    return PassHits(tuple(hits), tuple(demands))


def replay(trace: RoutingTrace, cache: ExpertCache) -> PassHits:
    """Hits and demands of each pass, every miss being brought in, as where no GPU computes."""
    hits, demands = [], []
    for step in trace.steps():
        if step.layer == 0:
            hits.append(0)
            demands.append(0)
        layer = step.layer
        demand = cache.touch(layer, step.experts, step.scores)
        demands[-1] += len(demand.experts)
        hits[-1] += int(demand.resident.sum())
        for expert in demand.experts[~demand.resident].tolist():
            if cache.room and cache.keeps(layer, expert):
                cache.admit(layer, expert)
        cache.release(layer)
    return PassHits(tuple(hits), tuple(demands))
