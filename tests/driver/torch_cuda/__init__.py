"""torch's CUDA for torch's CPU build, on a driver: tensors, memory, streams, events and graphs.

Each of torch's own kernels is a function of the host in a stream: once the driver comes to it, it
runs torch's kernel for the CPU on the GPU's memory. So it is late, recorded and replayed as ours
are. Memory is kept for reuse as torch does, at once in its own stream; what is freed is
overwritten. The driver is called by the real bindings.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.bindings import driver as cuda
from torch import Tensor

from tests.driver.standin import Driver
from tests.driver.torch_cuda.launches import Graph, Kernels, Place, at_place, place_of
from tests.driver.torch_cuda.memory import gpu_memory, host_memory, memories
from tests.driver.torch_cuda.streams import (
    Event,
    Stream,
    call,
    current_stream,
    device,
    index_of,
    stream,
    using,
)
from tests.driver.torch_cuda.tensors import DeviceTensor, new, upload

__all__ = ["Event", "Kernels", "call", "close", "install"]

_MADE = ("tensor", "empty", "zeros", "ones", "full", "arange", "randn", "randint")
_LIKE = ("empty_like", "zeros_like")


def _factory(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function that makes tensors, for GPUs and pinned RAM too."""
    name = plain.__name__

    def make(*args: Any, device: Any = None, pin_memory: bool = False, **options: Any) -> Tensor:
        if pin_memory:
            like = plain(*args, device="meta", **options)
            room = host_memory.tensor(like.numel() * like.element_size())
            return room.view(like.dtype).view(like.shape)
        if device is None or torch.device(device).type != "cuda":
            return plain(*args, device=device, **options)
        index = index_of(device)
        if isinstance(args[0], DeviceTensor):
            return plain(*args, **options)
        if name == "tensor":
            return upload(plain(*args, **options), index)
        if name in ("empty", "empty_like"):
            like = plain(*args, device="meta", **options)
            return new(like.shape, like.dtype, index)
        values = plain(*args, **options)
        out = new(values.shape, values.dtype, index)
        place = place_of(out.inner)
        Kernels.installed.launch(name, lambda: _copy_values(place, values), index, [place])
        return out

    return make


def _copy_values(place: Place, values: Tensor) -> None:
    at_place(place).copy_(values)


def _to(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def to(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
        if isinstance(tensor, DeviceTensor):
            return plain(tensor, *args, **options)
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **options)
        if device is None or device.type != "cuda":
            return plain(tensor, *args, **options)
        source = tensor if dtype is None else plain(tensor, dtype)
        return upload(source, index_of(device), non_blocking=non_blocking)

    return to


def _pin(tensor: Tensor, device: Any = None) -> Tensor:
    out = host_memory.tensor(tensor.numel() * tensor.element_size()).view(tensor.dtype)
    return out.view(tensor.shape).copy_(tensor)


class _Runtime:
    """See ``torch.cuda.cudart``: an error is raised again by the next kernel of torch's."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        return self._call(cuda.cuMemHostRegister, address, nbytes, flags)

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        return self._call(cuda.cuMemHostUnregister, address)

    def _call(self, function: Callable[..., Any], *args: int) -> int:
        with using(index_of()):
            (status,) = function(*args)
        Kernels.installed.refused |= int(status) != 0
        return int(status)


def _attribute(name: str, index: int) -> int:
    kinds = cuda.CUdevice_attribute
    return int(call("cuDeviceGetAttribute", getattr(kinds, f"CU_DEVICE_ATTRIBUTE_{name}"), index))


def _properties(device: Any = None) -> Any:
    index = index_of(device)
    return SimpleNamespace(
        multi_processor_count=_attribute("MULTIPROCESSOR_COUNT", index),
        L2_cache_size=_attribute("L2_CACHE_SIZE", index),
    )


def _capability(device: Any = None) -> tuple[int, int]:
    kinds = ("COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR")
    major, minor = (_attribute(kind, index_of(device)) for kind in kinds)
    return major, minor


def _name(device: Any = None) -> str:
    return bytes(call("cuDeviceGetName", 256, index_of(device))).rstrip(b"\0").decode()


def _info(device: Any = None) -> tuple[int, int]:
    with using(index_of(device)):
        free, total = call("cuMemGetInfo")
        return int(free), int(total)


def _synchronize(device: Any = None) -> None:
    with using(index_of(device)):
        call("cuCtxSynchronize")


def _reserved(device: Any = None) -> int:
    return sum(block.nbytes for block in gpu_memory(device).blocks.values())


def install(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Have torch compute on ``driver``."""
    kernels = Kernels(driver)
    _runtime = _Runtime()
    for name, replacement in {
        "is_available": lambda: True,
        "device_count": lambda: int(call("cuDeviceGetCount")),
        "current_device": index_of,
        "get_device_capability": _capability,
        "get_device_name": _name,
        "get_device_properties": _properties,
        "mem_get_info": _info,
        "memory_reserved": _reserved,
        "memory_allocated": lambda device=None: gpu_memory(device).allocated(),
        "empty_cache": lambda: [memory.empty_cache() for memory in memories.values()],
        "synchronize": _synchronize,
        "cudart": lambda: _runtime,
        "graph_pool_handle": object,
        "current_stream": current_stream,
        "device": device,
        "stream": stream,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    for name in (*_MADE, *_LIKE):
        monkeypatch.setattr(torch, name, _factory(getattr(torch, name)))
    monkeypatch.setattr(Tensor, "to", _to(Tensor.to))
    monkeypatch.setattr(Tensor, "pin_memory", _pin)
    monkeypatch.setattr(
        Tensor,
        "is_pinned",
        lambda t, device=None: driver.has(t.data_ptr(), t.numel() * t.element_size()),
    )
    return kernels


def close() -> None:
    """Every tensor has ended: the GPUs are empty."""
    gc.collect()
    for memory in memories.values():
        memory.empty_cache()
        # Those of pools end with their graphs.
        left = [block.nbytes for block in memory.blocks.values() if not block.free]
        assert not left, f"{len(left)} tensors are left, of {sum(left)} bytes"
        memory.give_back()
    memories.clear()
    host_memory.give_back()
