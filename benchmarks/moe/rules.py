"""Rules that divide a layer's experts between CPU and GPU, to compare the product's scheduler with.

All on one device, HybriMoE's greedy rule, FreeToken's split of the misses. They know costs only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localrt.offload.experts.assignment import (
    NOW,
    Assignment,
    Device,
    ExpertCosts,
    LayerWork,
    Ready,
    loaded_end,
)

__all__ = ["all_on", "greedy", "q_star"]


def all_on(
    device: Device,
    rows: Sequence[int] | NDArray[Any],
    resident: Sequence[bool] | NDArray[np.bool_],
    costs: ExpertCosts,
    ready: Ready = NOW,
) -> Assignment:
    """One rule for all. ``CPU``: everything there. ``FETCH``: everything on the GPU.

    ``GPU``: cached experts there and absent ones on the CPU, as a static placement has it.
    """
    work = LayerWork(rows, resident, costs, ready)
    return work.assign(
        kept=0 if device is Device.CPU else len(work.cached),
        fetched=len(work.absent) if device is Device.FETCH else 0,
    )


def greedy(
    rows: Sequence[int] | NDArray[Any],
    resident: Sequence[bool] | NDArray[np.bool_],
    costs: ExpertCosts,
    ready: Ready = NOW,
    *,
    most_fetched: int | None = None,
) -> Assignment:
    """HybriMoE's rule: a list's head to the GPU or its tail to the CPU, whichever ends first.

    The list is the cached experts by falling load, then the absent ones by falling load; of these
    the head waits for its copy. Ties go to the GPU.
    """
    layer = LayerWork(rows, resident, costs, ready)
    held, listed = len(layer.cached), layer.cached + layer.absent
    limit = len(layer.absent) if most_fetched is None else most_fetched
    head, tail = 0, len(listed)
    cpu, gpu, link = ready.cpu, ready.gpu, ready.link
    while head < tail:
        cpu_end = cpu + layer.cpu_s[listed[tail - 1]]
        gpu_end = float("inf")
        if head < held:
            gpu_end = gpu + layer.gpu_s[listed[head]]
        elif head - held < limit:
            gpu_end = max(gpu, link + costs.fetch) + layer.gpu_s[listed[head]]
        if gpu_end + ready.gpu_back <= cpu_end + ready.cpu_back:
            link += costs.fetch if head >= held else 0.0
            gpu, head = gpu_end, head + 1
        else:
            cpu, tail = cpu_end, tail - 1
    return layer.assign(kept=min(head, held), fetched=max(0, head - held))


def q_star(misses: int, *, link_bytes_s: float, host_bytes_s: float) -> int:
    """FreeToken's: how many of ``misses`` to copy over the link, about misses * link / host.

    ``host_bytes_s`` is what the CPU and the link reach together: the CPU has what copies leave of
    it while they go on, and with just that share both end together. Of the two whole numbers around
    it, the one that ends sooner; a tie copies.
    """
    if misses < 1 or link_bytes_s <= 0:
        return 0
    if link_bytes_s >= host_bytes_s:
        return misses
    share = link_bytes_s / host_bytes_s

    def end(copied: int) -> float:  # for experts of one byte
        copying = copied / link_bytes_s
        return max(copying, loaded_end(0.0, (misses - copied) / host_bytes_s, copying, share))

    fewer = int(misses * share)
    more = min(misses, fewer + 1)
    return more if end(more) <= end(fewer) else fewer
