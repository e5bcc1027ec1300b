"""The best assignment of a layer's experts to CPU and GPU, in decode and prefill.

The CPU and the GPU each compute one expert at a time, and copies go over the link one after
another. The GPU computes cached experts; it begins before the others are known. Of the absent
experts, those with the most rows are copied (HybriMoE's rule), since all copies take equally long,
while the CPU's time grows with the rows. ``schedule`` finds the best number of copies, so its
result is at least as good as any fixed number. Costs are measured elsewhere: nothing here knows a
model or a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCosts:
    """Seconds for one expert of a layer, on either device by its number of rows.

    ``fetch`` is the copy over the link. Starting the copy and the expert's kernels takes ``start``
    on the host, during which the CPU computes nothing. ``link_load`` is the share of the CPU's
    speed lost while copies run, since both read the same memory: about link over memory bandwidth
    if the CPU's kernels are bound by memory.
    """

    cpu: Callable[[int], float]
    gpu: Callable[[int], float]
    fetch: float
    link_load: float = 0.0
    start: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.link_load < 1:
            raise ValueError(f"link_load must be at least 0 and below 1, is {self.link_load}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Seconds from scheduling until each resource can begin.

    ``cpu`` includes copying the activations to the host; ``cpu_back`` is the time to copy results
    to the GPU, which sums them. The link is busy until ``link``.
    """

    cpu: float = 0.0
    link: float = 0.0
    cpu_back: float = 0.0


_NOW = Ready()  # everything is free


@dataclass(frozen=True, slots=True)
class Assignment:
    """Which experts each processor computes, as indices in the caller's list.

    ``cpu`` and ``gpu`` are in order of computing, ``fetch`` in order of copying; copied experts are
    in ``gpu`` too. ``*_end`` is when each resource is free again, ``end`` when all results can be
    summed, in seconds from scheduling.
    """

    cpu: list[int]
    gpu: list[int]
    fetch: list[int]
    cpu_end: float
    gpu_end: float
    link_end: float
    end: float


def loaded_end(start: float, work: float, link_until: float, load: float) -> float:
    """The end of ``work`` seconds begun at ``start``, slowed by ``load`` while the link is busy."""
    if link_until <= start:
        return start + work
    done = (link_until - start) * (1 - load)
    return start + work / (1 - load) if work <= done else link_until + work - done


def schedule(
    rows: Sequence[int] | NDArray[np.integer],
    resident: Sequence[bool] | NDArray[np.bool_],
    costs: ExpertCosts,
    ready: Ready = _NOW,
    *,
    fetched: int | None = None,
) -> Assignment:
    """The assignment that ends first, over all numbers of copies or with ``fetched`` copies; ties
    go to the GPU.

    ``rows`` and ``resident`` describe the experts that the pass uses. Resident ones are computed on
    the GPU; of the absent ones, those with the most rows are copied, and the CPU computes the
    others, those with the fewest rows first.
    """
    counts: Sequence[int] = rows.tolist() if isinstance(rows, np.ndarray) else rows
    is_cached: Sequence[bool] = resident.tolist() if isinstance(resident, np.ndarray) else resident
    order = sorted(range(len(counts)), key=counts.__getitem__, reverse=True)
    cpu_s = {n: costs.cpu(n) for n in set(counts)}
    gpu_s = {n: costs.gpu(n) for n in set(counts)}
    cached = [i for i in order if is_cached[i]]
    absent = [i for i in order if not is_cached[i]]
    left = [0.0]  # the CPU's work without the first n absent experts
    for i in reversed(absent):
        left.append(left[-1] + cpu_s[counts[i]])
    gpu, link = sum(gpu_s[counts[i]] for i in cached), ready.link
    best: tuple[int, float, float, float, float] | None = None
    for copies in range(len(absent) + 1):
        if copies:
            link += costs.fetch
            gpu = max(gpu, link) + gpu_s[counts[absent[copies - 1]]]
        begin = ready.cpu + copies * costs.start
        cpu = loaded_end(begin, left[len(absent) - copies], link, costs.link_load)
        end = gpu if cached or copies else 0.0
        if copies < len(absent):
            end = max(end, cpu + ready.cpu_back)
        if copies == fetched or (fetched is None and (best is None or end <= best[-1])):
            best = copies, cpu, gpu, link, end
    assert best is not None, "no more can be copied than are absent"
    copied = absent[: best[0]]
    return Assignment(absent[best[0] :][::-1], cached + copied, copied, *best[1:])
