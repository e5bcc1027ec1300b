"""Mixtures of experts: which experts are held, which are brought in, and who computes them.

What stands here is numbers and names only: what is held, and schedules. ``memory``, ``card``,
``stage`` and ``hybrid`` carry them out with weights, threads and a clock.
"""

from localrt.offload.experts.assignment import Assignment, Device, ExpertCosts, Rate, Ready
from localrt.offload.experts.cache import CacheStats, Demand, ExpertCache, Key, slots_within
from localrt.offload.experts.scheduler import schedule

__all__ = [
    "Assignment",
    "CacheStats",
    "Demand",
    "Device",
    "ExpertCache",
    "ExpertCosts",
    "Key",
    "Rate",
    "Ready",
    "schedule",
    "slots_within",
]
