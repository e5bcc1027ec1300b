"""Mixtures of experts: which experts are held, which are brought in, and who computes them.

What stands here is numbers and names only: policies, schedules, traces. ``memory``, ``card``,
``stage`` and ``hybrid`` carry them out with weights, threads and a clock.
"""

from localrt.offload.experts.assignment import Assignment, Device, ExpertCosts, Rate, Ready
from localrt.offload.experts.cache import CacheStats, Demand, ExpertCache, Key, slots_within
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
    "Rate",
    "Ready",
    "RoutingTrace",
    "TraceHeader",
    "TraceRecorder",
    "q_star",
    "schedule",
    "slots_within",
]
