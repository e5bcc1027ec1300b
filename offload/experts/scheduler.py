"""The best assignment of a layer's experts to CPU and GPU, for decoding and for prompts alike.

Assignments are of one shape, that of HybriMoE's rule: the most loaded of the absent experts are
copied, and the least loaded of the cached ones go to the CPU, since copying takes the same for all,
computing on the GPU nearly the same, and on the CPU the longer the more rows. ``schedule`` finds
the best of that shape, so it ends no later than that rule, or than either device alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localrt.offload.experts.assignment import (
    NOW,
    Assignment,
    ExpertCosts,
    LayerWork,
    Ready,
    loaded_end,
)

__all__ = ["schedule"]


def schedule(
    rows: Sequence[int] | NDArray[Any],
    resident: Sequence[bool] | NDArray[np.bool_],
    costs: ExpertCosts,
    ready: Ready = NOW,
    *,
    most_fetched: int | None = None,
) -> Assignment:
    """The earliest end over every number of copies and of cached experts left to the CPU.

    ``rows`` and ``resident`` are of the experts that the pass uses; ``most_fetched`` limits the
    copies. Ties go to the GPU. Exact where the GPU takes the same for every expert.
    """
    layer = LayerWork(rows, resident, costs, ready)
    cpu_s, gpu_s = layer.cpu_s, layer.gpu_s
    held, missing = len(layer.cached), len(layer.absent)
    limit = missing if most_fetched is None else min(missing, most_fetched)
    on_gpu, on_cpu = [0.0], [0.0]  # the first so many of the cached
    for i in layer.cached:
        on_gpu.append(on_gpu[-1] + gpu_s[i])
        on_cpu.append(on_cpu[-1] + cpu_s[i])
    left = [0.0]  # the CPU's work without the first so many of the absent, from the last
    for i in reversed(layer.absent):
        left.append(left[-1] + cpu_s[i])
    link, copied_gpu, after_link = ready.link, 0.0, 0.0
    best = (float("inf"), 0, 0)  # end, -copies, -kept on the GPU
    for fetched in range(limit + 1):
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
