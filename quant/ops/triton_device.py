"""What the launchers of the GPU kernels ask about a tensor's device."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

__all__ = ["compiled", "processors"]


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
