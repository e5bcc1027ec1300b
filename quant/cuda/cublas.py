"""bf16 GEMM by cuBLAS, through torch if it is installed with CUDA.

torch gets views of our memory and works in our stream. No other file of this folder needs torch.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any, cast

from localrt.common.errors import MemoryBudgetError
from localrt.quant.cuda.device import Device, Handle
from localrt.quant.cuda.launch import is_noting
from localrt.quant.cuda.tensor import BFLOAT16, Tensor

NBYTES = 160 << 20
"""GPU memory for cuBLAS: its code, its workspace, and torch's cache of results (123 MB on an
H100).
"""
UNPACKED = 64 << 20
"""Weights of a packed matrix that are unpacked to bf16 at once: with smaller pieces, launching
takes longer than computing.
"""


@cache
def multiplies(device: Device) -> bool:
    """Whether torch computes bf16 products of many rows on the device: fast since Ampere."""
    if find_spec("torch") is None:
        return False
    import torch

    return not device.is_gpu or (device.capability >= (8, 0) and torch.cuda.is_available())


def multiply(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    """out (R, rows) = x (R, columns) @ weight (rows, columns).T + bias; x and weight are bf16.

    With (H, R, columns), (H, rows, columns) and (H, R, rows) these are H products.

    Raises:
        MemoryBudgetError: the GPU has no room for it.
    """
    if is_noting():
        return
    import torch

    device, stream = x.device, nullcontext()
    if device.is_gpu:
        cuda: Any = torch.cuda  # not typed throughout
        stream = cuda.stream(cuda.ExternalStream(int(cast(Handle, device.stream)), str(device)))
    with _as_ours(), torch.inference_mode(), stream:
        rows, columns, there = _seen(x), _seen(weight).transpose(-1, -2), _seen(out)
        if bias is None and out.dtype is BFLOAT16:
            torch.matmul(rows, columns, out=there)
            return
        y = torch.matmul(rows, columns)
        there.copy_(y if bias is None else y + _seen(bias))


def trim() -> None:
    """Free the memory that torch caches."""
    if "torch" in sys.modules:
        import torch

        torch.cuda.empty_cache()


@contextmanager
def _as_ours() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "out of memory" in str(error) or "ALLOC_FAILED" in str(error):
            raise MemoryBudgetError("the GPU has no room for products by cuBLAS") from None
        raise


def _seen(tensor: Tensor) -> Any:
    """A torch tensor on the same memory."""
    import torch

    device = tensor.device
    if device.is_gpu:
        found = torch.as_tensor(tensor, device=str(device))
    else:
        nbytes = tensor.span * tensor.dtype.itemsize
        memory = (ctypes.c_ubyte * nbytes).from_address(tensor.address)
        kind = torch.int16 if tensor.dtype is BFLOAT16 else torch.float32
        found = torch.frombuffer(memory, dtype=kind).as_strided(tensor.shape, tensor.strides)
    return found.view(torch.bfloat16) if tensor.dtype is BFLOAT16 else found
