"""GPUs for placed models, and who computes their experts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np

from localrt.offload.device.cuda import CudaGpu
from localrt.offload.device.gpu import Clock
from localrt.offload.experts.hybrid import HybridExperts
from localrt.offload.experts.scheduler import Assignment, schedule
from localrt.quant.cuda.cuda_memory import CudaCopies
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.ops.protocol import Forward
from tests.driver.standin import AT_ONCE
from tests.offload.placed import PLENTY


class StepByStep(CudaOps):
    """Records nothing."""

    def recorder(self) -> None:  # type: ignore[override]
        return None

    def graphed(self, forward: Forward) -> Forward:
        return forward


def made(device: str, *, recorded: bool = True) -> Callable[[Clock], CudaGpu]:
    """What makes the GPU of a ``device``, which computes step by step if it is ``AT_ONCE`` or not
    ``recorded``.
    """
    kind = CudaOps if recorded and device != AT_ONCE else StepByStep
    return lambda clock: CudaGpu(
        clock, kind(device=device), CudaCopies(device=device), capacity=PLENTY
    )


def copy_none(rows: Any, resident: Any, *more: Any) -> Assignment:
    """A scheduler that leaves absent experts to the CPU."""
    return schedule(rows, resident, *more, fetched=0)


def copy_one(rows: Any, resident: Any, *more: Any) -> Assignment:
    """A scheduler that has an expert copied wherever one is absent."""
    return schedule(rows, resident, *more, fetched=min(1, sum(~np.asarray(resident))))


def copy_prompts(rows: Any, resident: Any, *more: Any) -> Assignment:
    """A scheduler that has experts copied where several rows choose them: shorter passes, which are
    recorded, copy none.
    """
    absent = int(np.count_nonzero(~np.asarray(resident)))
    return schedule(rows, resident, *more, fetched=absent if sum(rows) > 16 else 0)


def bring_some(hybrid: HybridExperts) -> None:
    """Copy the same experts to all slots."""
    cache = hybrid.slots.cache
    for expert, layer in islice(np.ndindex(cache.count, cache.layers), cache.capacity):
        hybrid.copies.bring(layer, expert)
    hybrid.settle()
