"""What the launchers of the GPU kernels ask about a tensor's device."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["compiled", "processors", "upload"]


def compiled(x: Tensor) -> bool:
    """Whether kernels on x are compiled; off a GPU they run in Triton's interpreter.

    The interpreter knows no PTX and multiplies no bf16: kernels have a plain branch for it.
    """
    return x.is_cuda


@cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors; 1 off a GPU."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def upload(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A copy of ``values`` on the device, which the host does not wait for."""
    if device.type != "cuda":
        return torch.from_numpy(np.array(values))
    staged = torch.from_numpy(np.ascontiguousarray(values)).pin_memory()
    return staged.to(device, non_blocking=True)
