"""What torch starts on a GPU: its kernels, functions of the host in a stream, and graphs."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import ClassVar

import torch
from cuda.bindings import driver as cuda
from torch import Tensor

from tests.driver.standin import Driver, HostFunction
from tests.driver.torch_cuda.memory import bytes_at, gpu_memory
from tests.driver.torch_cuda.streams import MODES, call, current_stream, using

Place = tuple[int, int, torch.dtype, torch.Size, tuple[int, ...]]  # address, bytes, ...


def place_of(tensor: Tensor) -> Place:
    """Where a tensor lies, without keeping it."""
    span = 0
    if tensor.numel():
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        span = (last + 1) * tensor.element_size()
    return tensor.data_ptr(), span, tensor.dtype, tensor.shape, tensor.stride()


def at_place(place: Place) -> Tensor:
    """What lies there."""
    address, span, dtype, shape, stride = place
    if not span:
        return torch.empty(shape, dtype=dtype)
    return bytes_at(address, span)[0].view(dtype).as_strided(shape, stride)


def is_place(each: object) -> bool:
    """Whether it is a ``Place``."""
    return isinstance(each, tuple) and len(each) == 5 and isinstance(each[2], torch.dtype)


class Kernels:
    """Functions of the host that stand for torch's kernels, by their numbers."""

    installed: ClassVar[Kernels]  # the latest

    def __init__(self, driver: Driver) -> None:
        Kernels.installed = self
        self._driver = driver
        self._all: dict[int, tuple[Callable[[], None], list[Place], int, bool]] = {}
        self._numbers = itertools.count(1)
        self._called = HostFunction(self._run)
        self.errors: list[BaseException] = []
        self.launches: list[str] = []  # kernels, ours too, by their names; record; replay
        self.refused = False  # an error of the runtime's that was not asked for

    def launch(self, name: str, body: Callable[[], None], index: int, uses: list[Place]) -> None:
        """Start ``body`` in the current stream, which uses this memory."""
        if self.refused:
            self.refused = False
            raise RuntimeError("CUDA error: of an earlier call")
        where, memory = current_stream(index), gpu_memory(index)
        memory.drain()
        number = next(self._numbers)
        self.launches.append(name)
        self._all[number] = (body, uses, index, where in memory.pools)
        with using(index):
            self._driver.launch(where.cuda_stream, self._called, number)

    def _run(self, number: int) -> None:
        body, uses, index, recorded = self._all[number]
        if not recorded:  # a graph may replay it, even once it has ended
            del self._all[number]
        try:
            if not all(self._driver.has(place[0], place[1]) for place in uses):
                self._driver.fault(index)
                return
            with torch.inference_mode():
                body()
        except BaseException as error:  # noqa: BLE001 - nothing may pass through the driver
            self.errors.append(error)
            self._driver.fault(index)


class Graph:
    """See ``torch.cuda.CUDAGraph``."""

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        self._stream = current_stream()
        self._memory = gpu_memory(self._stream.index)
        self._memory.drain()
        pool = pool or object()
        self._memory.begin_graph(pool)
        weakref.finalize(self, self._memory.end_graph, pool)
        with using(self._stream.index):
            call("cuStreamBeginCapture", self._stream.cuda_stream, MODES[capture_error_mode])
        self._memory.pools[self._stream] = pool

    def capture_end(self) -> None:
        Kernels.installed.launches.append("record")
        self._memory.drain()
        del self._memory.pools[self._stream]
        with using(self._stream.index):
            made = call("cuStreamEndCapture", self._stream.cuda_stream)
            self._exec = int(call("cuGraphInstantiate", made, 0))
            call("cuGraphDestroy", made)
        weakref.finalize(self, cuda.cuGraphExecDestroy, self._exec)

    def replay(self) -> None:
        where = current_stream()
        gpu_memory(where.index).drain()
        Kernels.installed.launches.append("replay")
        with using(where.index):
            call("cuGraphLaunch", self._exec, where.cuda_stream)
