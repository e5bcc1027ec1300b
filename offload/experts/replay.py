"""A trace through a cache: the hits that a policy has, whatever computes the misses.

Every miss is brought in, as it is where a machine has no GPU and experts come from an SSD; it stays
if the policy finds it worth more than what it would replace. It knows no time: ``scheduler.py``
and the benchmark do.
"""

from __future__ import annotations

from localrt.offload.experts.belady import PassHits
from localrt.offload.experts.cache import ExpertCache
from localrt.offload.experts.trace import RoutingTrace

__all__ = ["replay"]


def replay(trace: RoutingTrace, cache: ExpertCache) -> PassHits:
    """Hits and demands of each pass."""
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
