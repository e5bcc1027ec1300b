"""GPUs for placed models: the driver's, or the same kernels on the CPU, which are never late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from localrt.offload.device.cuda import CudaGpu
from localrt.offload.device.gpu import Clock
from localrt.offload.experts.scheduler import Assignment, schedule
from localrt.quant.cuda.cuda_memory import CudaCopies
from localrt.quant.cuda.ops import CudaOps
from tests.offload.placed import PLENTY


class StepByStep(CudaOps):
    """Records nothing."""

    def recorder(self) -> None:  # type: ignore[override]
        return None


def made(device: str, *, recorded: bool = True) -> Callable[[Clock], CudaGpu]:
    """What makes the GPU of a ``device``; not ``recorded``, it computes step by step."""
    kind = CudaOps if recorded else StepByStep
    return lambda clock: CudaGpu(
        clock, kind(device=device), CudaCopies(device=device), capacity=PLENTY
    )


def copy_none(rows: Any, resident: Any, *more: Any) -> Assignment:
    """A scheduler that leaves absent experts to the CPU."""
    return schedule(rows, resident, *more, fetched=0)


def copy_one(rows: Any, resident: Any, *more: Any) -> Assignment:
    """A scheduler that has an expert copied wherever one is absent."""
    return schedule(rows, resident, *more, fetched=min(1, sum(~np.asarray(resident))))
