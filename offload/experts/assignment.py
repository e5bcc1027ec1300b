"""Experts of one layer and pass on two devices: who computes which, in what order, and until when.

The CPU and the GPU each compute one expert at a time, and copies go over the link one after
another. Which assignment is best is the scheduler's business; what an assignment takes is found
here, for all of them alike. Costs are measured elsewhere: nothing here knows a model or a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "NOW",
    "Assignment",
    "Device",
    "ExpertCosts",
    "LayerWork",
    "Rate",
    "Ready",
    "Seconds",
    "loaded_end",
    "split_misses",
]


class Device(IntEnum):
    """Where an expert of a layer is computed."""

    CPU = 0
    GPU = 1
    FETCH = 2  # on the GPU, once its weights have been copied there


class Seconds(Protocol):
    """A cost that depends on rows."""

    def at(self, rows: int, /) -> float:
        """Seconds for one expert with ``rows`` rows."""


@dataclass(frozen=True, slots=True)
class Rate:
    """``fixed`` + the longer of ``read`` and ``row`` * rows, in seconds.

    ``read`` is the time that an expert's weights take to come from memory, ``row`` a row's
    arithmetic: HybriMoE's a * rows + b, and its floor at few rows.
    """

    fixed: float
    read: float
    row: float

    def at(self, rows: int, /) -> float:
        """Seconds with ``rows`` rows."""
        return self.fixed + max(self.read, self.row * rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCosts:
    """Seconds for one expert of a layer.

    ``fetch`` is the copy over the link. ``link_load`` is the share of the CPU's speed that copying
    costs while it goes on, for both read the same memory: about link over memory bandwidth where
    the CPU's kernels are bound by memory.
    """

    cpu: Seconds
    gpu: Seconds
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
    """Each expert's device and predicted end, by its place in the caller's list.

    ``cpu``, ``gpu`` and ``fetch`` are the orders of computing and of copying; what is copied is in
    ``gpu`` too. ``*_end`` are when each resource is free again, ``end`` is when all results are
    where they are added up. Seconds from when the schedule was made.
    """

    device: list[Device]
    ends: list[float]
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
            self.cpu_s = [costs.cpu.at(1)] * len(counts)
            self.gpu_s = [costs.gpu.at(1)] * len(counts)
        else:
            order = sorted(range(len(counts)), key=counts.__getitem__, reverse=True)
            self.cpu_s = [costs.cpu.at(n) for n in counts]
            self.gpu_s = [costs.gpu.at(n) for n in counts]
        self.cached = [i for i in order if held[i]]
        self.absent = [i for i in order if not held[i]]

    def assign(self, *, kept: int, fetched: int) -> Assignment:
        """The ``kept`` most loaded cached experts on the GPU, the ``fetched`` of the absent copied.

        The CPU has the others, absent ones first, the least loaded first.
        """
        ready, fetch_s, load = self.ready, self.costs.fetch, self.costs.link_load
        device = [Device.CPU] * len(self.cpu_s)
        ends = [0.0] * len(self.cpu_s)
        gpu, link = ready.gpu, ready.link
        on_gpu, copied = self.cached[:kept], self.absent[:fetched]
        for i in on_gpu:
            gpu += self.gpu_s[i]
            device[i] = Device.GPU
            ends[i] = gpu
        for i in copied:
            link += fetch_s
            gpu = (link if link > gpu else gpu) + self.gpu_s[i]
            device[i] = Device.FETCH
            ends[i] = gpu
        on_cpu = self.absent[fetched:][::-1] + self.cached[kept:][::-1]
        cpu, work = ready.cpu, 0.0
        for i in on_cpu:
            work += self.cpu_s[i]
            cpu = loaded_end(ready.cpu, work, link, load) if load else ready.cpu + work
            ends[i] = cpu
        end = cpu + ready.cpu_back if on_cpu else 0.0
        if on_gpu or copied:
            end = max(end, gpu + ready.gpu_back)
        return Assignment(device, ends, on_cpu, on_gpu + copied, copied, cpu, gpu, link, end)


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
