"""A GPU that does everything as late as it may, with CUDA's ``Ops``: kernels run on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from localrt.models.decoder import Decoder
from localrt.offload.device.gpu import Clock, Event
from localrt.offload.placement import Where
from localrt.quant.cuda.cuda_memory import CudaCopies
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.formats.packed import Bytes
from localrt.quant.ops.arrays import Array
from tests.offload.gpu.fakes import LateGpu
from tests.offload.gpu.placed_on_gpu import on_gpu
from tests.offload.placed import PLENTY, Model

__all__ = ["on_late_gpu"]


class StepByStep(CudaOps):
    """Records nothing."""

    def recorder(self) -> None:  # type: ignore[override]
        return None


class LateCudaGpu(LateGpu):
    """With the GPU's own ``Ops``, whose kernels run on the CPU."""

    def __init__(self, clock: Clock, ops: CudaOps) -> None:
        super().__init__(clock, ops, capacity=PLENTY)
        self._cuda = CudaCopies(device="cpu")

    def to_gpu(self, x: Array) -> Array:
        return self._cuda.to_gpu(x)

    def to_host(self, x: Array) -> Array:
        return self._cuda.to_host(x)

    def record(self, *read: Any, last: bool = False) -> Event | None:
        return super().record(*(memory.numpy() for memory in read), last=last)

    def free(self, memory: Any, unpacked: int = 0) -> None:
        super().free(memory.numpy(), unpacked)

    def _alloc(self, nbytes: int) -> Any:
        return torch.from_numpy(super()._alloc(nbytes))

    def _begin_copy(self, source: Bytes, out: Any, after: Event | None) -> Event | None:
        return super()._begin_copy(source, out.numpy(), after)


def on_late_gpu(
    model: Model,
    where: Mapping[str, Where],
    *,
    recorded: bool = True,
    slack: tuple[int, int] = (2, 2),
) -> AbstractContextManager[Decoder]:
    """The decoder that follows ``where``; not ``recorded``, it computes step by step."""
    ops = (CudaOps if recorded else StepByStep)(device="cpu")
    return on_gpu(model, where, slack=slack, make=lambda clock: LateCudaGpu(clock, ops))
