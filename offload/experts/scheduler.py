"""The best assignment of a layer's experts to CPU and GPU, for decoding and for prompts alike.

The CPU and the GPU each compute one expert at a time, and copies go over the link one after
another. The GPU computes what is cached: it has begun before anybody knows the rest. Of the absent
experts the most loaded are copied (HybriMoE's rule), since copying takes the same for all, and on
the CPU they take the longer the more rows they see. ``schedule`` finds the best number of copies,
so it ends no later than any fixed one. Costs are measured elsewhere: nothing here knows a model or
a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCosts:
    """Seconds for one expert of a layer: on either device by the rows that it sees.

    ``fetch`` is the copy over the link. ``link_load`` is the share of the CPU's speed that copying
    costs while it goes on, for both read the same memory: about link over memory bandwidth where
    the CPU's kernels are bound by memory.
    """

    cpu: Callable[[int], float]
    gpu: Callable[[int], float]
    fetch: float
    link_load: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.link_load < 1:
            raise ValueError(f"link_load must be at least 0 and below 1, is {self.link_load}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Seconds from when a schedule is made until each can begin, and results' way back.

    ``cpu`` includes what brings the activations there, ``cpu_back`` is what takes the results to
    the GPU, where they are added up. The link is busy until ``link``.
    """

    cpu: float = 0.0
    link: float = 0.0
    cpu_back: float = 0.0


_NOW = Ready()  # everything is free


@dataclass(frozen=True, slots=True)
class Assignment:
    """Who computes which expert, by its place in the caller's list.

    ``cpu``, ``gpu`` and ``fetch`` are the orders of computing and of copying; what is copied is in
    ``gpu`` too. ``*_end`` are when each resource is free again, ``end`` is when all results are
    where they are added up. Seconds from when the schedule was made.
    """

    cpu: list[int]
    gpu: list[int]
    fetch: list[int]
    cpu_end: float
    gpu_end: float
    link_end: float
    end: float


class LayerWork:
    """The experts of one layer and pass, sorted: places in the caller's list, most loaded first."""

    __slots__ = ("absent", "cached", "costs", "cpu_s", "gpu_s", "ready")

    def __init__(
        self,
        rows: Sequence[int] | NDArray[Any],
        resident: Sequence[bool] | NDArray[np.bool_],
        costs: ExpertCosts,
        ready: Ready,
    ) -> None:
        counts: Sequence[int] = rows.tolist() if isinstance(rows, np.ndarray) else rows
        held: Sequence[bool] = resident.tolist() if isinstance(resident, np.ndarray) else resident
        self.costs, self.ready = costs, ready
        order: Sequence[int]
        if max(counts, default=1) == 1:  # decoding
            order = range(len(counts))
            self.cpu_s = [costs.cpu(1)] * len(counts)
            self.gpu_s = [costs.gpu(1)] * len(counts)
        else:
            order = sorted(range(len(counts)), key=counts.__getitem__, reverse=True)
            self.cpu_s = [costs.cpu(n) for n in counts]
            self.gpu_s = [costs.gpu(n) for n in counts]
        self.cached = [i for i in order if held[i]]
        self.absent = [i for i in order if not held[i]]

    def assign(self, fetched: int) -> Assignment:
        """The cached experts on the GPU, and the ``fetched`` most loaded of the absent, copied.

        The CPU has the others, the least loaded first.
        """
        ready, fetch_s, load = self.ready, self.costs.fetch, self.costs.link_load
        gpu, link = 0.0, ready.link
        copied = self.absent[:fetched]
        for i in self.cached:
            gpu += self.gpu_s[i]
        for i in copied:
            link += fetch_s
            gpu = (link if link > gpu else gpu) + self.gpu_s[i]
        on_cpu = self.absent[fetched:][::-1]
        work = sum(self.cpu_s[i] for i in on_cpu)
        cpu = loaded_end(ready.cpu, work, link, load) if load else ready.cpu + work
        end = cpu + ready.cpu_back if on_cpu else 0.0
        on_gpu = self.cached + copied
        if on_gpu:
            end = max(end, gpu)
        return Assignment(on_cpu, on_gpu, copied, cpu, gpu, link, end)


def loaded_end(start: float, work: float, link_until: float, load: float) -> float:
    """The end of ``work`` seconds from ``start``, slowed by ``load`` while the link is busy."""
    if link_until <= start:
        return start + work
    done = (link_until - start) * (1 - load)
    return start + work / (1 - load) if work <= done else link_until + work - done


def schedule(
    rows: Sequence[int] | NDArray[Any],
    resident: Sequence[bool] | NDArray[np.bool_],
    costs: ExpertCosts,
    ready: Ready = _NOW,
    *,
    fetched: int | None = None,
) -> Assignment:
    """The earliest end over every number of copies, or with ``fetched`` of them; ties go to the
    GPU.

    ``rows`` and ``resident`` are of the experts that the pass uses.
    """
    layer = LayerWork(rows, resident, costs, ready)
    if fetched is not None:
        return layer.assign(fetched)
    missing = len(layer.absent)
    left = [0.0]  # the CPU's work without the first so many of the absent, from the last
    for i in reversed(layer.absent):
        left.append(left[-1] + layer.cpu_s[i])
    gpu = sum(layer.gpu_s[i] for i in layer.cached)
    link, best, copies = ready.link, float("inf"), 0
    for count in range(missing + 1):
        if count:
            link += costs.fetch
            gpu = max(gpu, link) + layer.gpu_s[layer.absent[count - 1]]
        end = gpu if layer.cached or count else 0.0
        if count < missing:
            cpu = loaded_end(ready.cpu, left[missing - count], link, costs.link_load)
            end = max(end, cpu + ready.cpu_back)
        if end <= best:
            best, copies = end, count
    return layer.assign(copies)
