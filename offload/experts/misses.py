"""Experts that come from an SSD to be computed on the CPU: what to read and to compute first.

Reading and computing overlap, each doing one expert at a time: a flow shop of two machines, for
which Johnson's rule is exact. All reads take the same, and cached experts take none, so it comes
out as: cached experts while the first miss is read, then the misses as they arrive, the most loaded
first, whose computing hides the most reading. It knows times only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from localrt.offload.experts.assignment import Seconds

__all__ = ["MissPlan", "order_misses"]


@dataclass(frozen=True, slots=True)
class MissPlan:
    """Places in the caller's list in the order of reading and of computing, and when they end.

    Seconds from when the plan was made. ``waited`` is how long the CPU stood still.
    """

    reads: list[int]
    computes: list[int]
    ends: list[float]
    read_end: float
    end: float
    waited: float


def order_misses(
    rows: Sequence[int],
    resident: Sequence[bool],
    *,
    cpu: Seconds,
    read_s: float,
    cpu_free: float = 0.0,
    disk_free: float = 0.0,
) -> MissPlan:
    """The plan for experts with ``rows`` each, where one read takes ``read_s``.

    ``cpu_free`` and ``disk_free`` are the seconds until each can begin.
    """
    order = sorted(range(len(rows)), key=rows.__getitem__, reverse=True)
    reads = [i for i in order if not resident[i]]
    computes = [i for i in order if resident[i]] + reads
    ends = [0.0] * len(rows)
    clock, read_end, waited = cpu_free, disk_free, 0.0
    for i in computes:
        if not resident[i]:
            read_end += read_s
            waited += max(0.0, read_end - clock)
            clock = max(clock, read_end)
        clock += cpu.at(rows[i])
        ends[i] = clock
    return MissPlan(reads, computes, ends, read_end, clock, waited)
