"""GPUs for placed models, and who computes their experts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import numpy as np

from localrt.offload.device.cuda import CudaGpu
from localrt.offload.device.gpu import Clock
from localrt.offload.experts.hybrid import HybridExperts
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


def bring_some(hybrid: HybridExperts) -> None:
    """Copy the same experts to all slots."""
    cache = hybrid.slots.cache
    for expert, layer in islice(np.ndindex(cache.count, cache.layers), cache.capacity):
        hybrid.copies.bring(layer, expert)
    hybrid.settle()
