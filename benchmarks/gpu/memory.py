"""A GPU's memory: what is free, by the driver, and the most that a piece of work takes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from localrt.quant.cuda.driver import device_of


def free_memory(device: str = "cuda") -> int:
    """Bytes that are free, without what this process keeps for later."""
    gc.collect()
    torch.cuda.empty_cache()
    gpu = device_of(device)
    gpu.trim()
    return int(gpu.memory()[0])


def watch(gpu: Any, free_before: int) -> Callable[[], int]:
    """Watch a ``Cuda`` until the returned function is called, which gives the most bytes that this
    process has taken since ``free_before`` were free.

    Of our own memory it is the peak; of all else (kernels, graphs, cuBLAS), what is taken then.
    """
    alloc, before = gpu._alloc, gpu.taken_nbytes
    most = before

    def noted(nbytes: int) -> int:
        nonlocal most
        address: int = alloc(nbytes)
        most = max(most, gpu.taken_nbytes)
        return address

    def peak() -> int:
        del gpu._alloc  # the class has its own
        beside = free_before - gpu.memory()[0] - (gpu.taken_nbytes - before)
        return int(most - before + max(0, beside))

    gpu._alloc = noted
    return peak
