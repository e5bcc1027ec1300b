"""The best assignment of a layer's experts to CPU and GPU, for decoding and for prompts alike.

The CPU and the GPU each compute one expert at a time, and copies go over the link one after
another. Assignments are of one shape, that of HybriMoE's rule: the most loaded of the absent
experts are copied, and the least loaded of the cached ones go to the CPU, since copying takes the
same for all, computing on the GPU nearly the same, and on the CPU the longer the more rows.
``schedule`` finds the best of that shape, so it ends no later than that rule, or than either device
alone. Costs are measured elsewhere: nothing here knows a model or a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "NOW",
    "Assignment",
    "ExpertCosts",
    "LayerWork",
    "Ready",
    "schedule",
    "split_misses",
]


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
    """Seconds from when a schedule is made until each can begin, and results' ways back.

    ``cpu`` and ``gpu`` include what brings the activations there; ``cpu_back`` and ``gpu_back`` are
    what takes the results to where they are added up. The link is busy until ``link``.
    """

    cpu: float = 0.0
    gpu: float = 0.0
    link: float = 0.0
    cpu_back: float = 0.0
    gpu_back: float = 0.0


NOW = Ready()
"""Everything is free."""


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

    def assign(self, *, kept: int, fetched: int) -> Assignment:
        """The ``kept`` most loaded cached experts on the GPU, the ``fetched`` of the absent copied.

        The CPU has the others, absent ones first, the least loaded first.
        """
        ready, fetch_s, load = self.ready, self.costs.fetch, self.costs.link_load
        gpu, link = ready.gpu, ready.link
        on_gpu, copied = self.cached[:kept], self.absent[:fetched]
        for i in on_gpu:
            gpu += self.gpu_s[i]
        for i in copied:
            link += fetch_s
            gpu = (link if link > gpu else gpu) + self.gpu_s[i]
        on_cpu = self.absent[fetched:][::-1] + self.cached[kept:][::-1]
        work = sum(self.cpu_s[i] for i in on_cpu)
        cpu = loaded_end(ready.cpu, work, link, load) if load else ready.cpu + work
        end = cpu + ready.cpu_back if on_cpu else 0.0
        if on_gpu or copied:
            end = max(end, gpu + ready.gpu_back)
        return Assignment(on_cpu, on_gpu + copied, copied, cpu, gpu, link, end)


def loaded_end(start: float, work: float, link_until: float, load: float) -> float:
    """The end of ``work`` seconds from ``start``, slowed by ``load`` while the link is busy."""
    if link_until <= start:
        return start + work
    done = (link_until - start) * (1 - load)
    return start + work / (1 - load) if work <= done else link_until + work - done


def split_misses(
    fetched: int,
    rows: Sequence[int] | NDArray[Any],
    resident: Sequence[bool] | NDArray[np.bool_],
    costs: ExpertCosts,
    ready: Ready = NOW,
) -> Assignment:
    """Cached experts on the GPU, ``fetched`` absent ones copied, the most loaded; the rest: CPU."""
    work = LayerWork(rows, resident, costs, ready)
    return work.assign(kept=len(work.cached), fetched=fetched)


def schedule(
    rows: Sequence[int] | NDArray[Any],
    resident: Sequence[bool] | NDArray[np.bool_],
    costs: ExpertCosts,
    ready: Ready = NOW,
) -> Assignment:
    """The earliest end over every number of copies and of cached experts left to the CPU.

    ``rows`` and ``resident`` are of the experts that the pass uses. Ties go to the GPU. Exact where
    the GPU takes the same for every expert.
    """
    layer = LayerWork(rows, resident, costs, ready)
    cpu_s, gpu_s = layer.cpu_s, layer.gpu_s
    held, missing = len(layer.cached), len(layer.absent)
    on_gpu, on_cpu = [0.0], [0.0]  # the first so many of the cached
    for i in layer.cached:
        on_gpu.append(on_gpu[-1] + gpu_s[i])
        on_cpu.append(on_cpu[-1] + cpu_s[i])
    left = [0.0]  # the CPU's work without the first so many of the absent, from the last
    for i in reversed(layer.absent):
        left.append(left[-1] + cpu_s[i])
    link, copied_gpu, after_link = ready.link, 0.0, 0.0
    best = (float("inf"), 0, 0)  # end, -copies, -kept on the GPU
    for fetched in range(missing + 1):
        if fetched:
            seconds = gpu_s[layer.absent[fetched - 1]]
            link += costs.fetch
            copied_gpu += seconds
            after_link = max(after_link, link) + seconds
        # More on the GPU ends it later and the CPU sooner: look for where they meet.
        low, high = 0, held
        while low <= high:
            kept = (low + high) // 2
            gpu = cpu = 0.0
            if kept or fetched:
                gpu = max(ready.gpu + on_gpu[kept] + copied_gpu, after_link) + ready.gpu_back
            if kept < held or fetched < missing:
                work = left[missing - fetched] + on_cpu[held] - on_cpu[kept]
                cpu = loaded_end(ready.cpu, work, link, costs.link_load) + ready.cpu_back
            found = (gpu if gpu > cpu else cpu, -fetched, -kept)
            if found < best:
                best = found
            if gpu > cpu:
                high = kept - 1
            else:
                low = kept + 1
    return layer.assign(kept=-best[2], fetched=-best[1])
