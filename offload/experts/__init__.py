"""Mixtures of experts: which experts are held, which are brought in, and who computes them.

Numbers and names only: no weights, no threads, no clock.
"""

from localrt.offload.experts.assignment import Assignment, Device, ExpertCosts, Rate, Ready
from localrt.offload.experts.cache import CacheStats, Demand, ExpertCache, Key, slots_within
from localrt.offload.experts.misses import MissPlan, order_misses
from localrt.offload.experts.policies import DEFAULT_POLICY, POLICIES
from localrt.offload.experts.q_star import q_star
from localrt.offload.experts.scheduler import schedule
from localrt.offload.experts.trace import RoutingTrace, TraceHeader, TraceRecorder

__all__ = [
    "DEFAULT_POLICY",
    "POLICIES",
    "Assignment",
    "CacheStats",
    "Demand",
    "Device",
    "ExpertCache",
    "ExpertCosts",
    "Key",
    "MissPlan",
    "Rate",
    "Ready",
    "RoutingTrace",
    "TraceHeader",
    "TraceRecorder",
    "order_misses",
    "q_star",
    "schedule",
    "slots_within",
]
