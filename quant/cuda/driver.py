"""A GPU through CUDA's driver and NVIDIA's bindings: all driver calls are here.

Kernels and the copies that they depend on run in order on one stream, or on the capture's stream
while a thread records. Copies that overlap kernels have streams of their own.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from math import prod
from types import ModuleType
from typing import Any, SupportsInt

import numpy as np
import numpy.typing as npt

from localrt.common.errors import LocalrtError, MemoryBudgetError, MissingExtraError
from localrt.common.extras import install
from localrt.common.forks import free_in_child
from localrt.common.option_names import option
from localrt.common.settings import Settings
from localrt.quant.cuda.device import Device, Grid, Handle, Ram, Values
from localrt.quant.cuda.memory import Pool, PoolBlock
from localrt.quant.cuda.programs import OLDEST, Program, kernels_folder, machine_code

_OUT_OF_MEMORY, _NOT_READY = 2, 600
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_SLEEPS, _UNTIMED = 1, 2  # CU_EVENT_BLOCKING_SYNC, CU_EVENT_DISABLE_TIMING
_THREAD_LOCAL, _RELAXED = 1, 2  # CU_STREAM_CAPTURE_MODE_...
_STAGED = 256 << 10


class Event:
    """A point in a stream's work."""

    def __init__(self, gpu: Cuda, handle: Handle, spare: deque[Handle]) -> None:
        self._gpu, self.handle = gpu, handle
        weakref.finalize(self, spare.append, handle)

    def record(self, stream: Handle | None = None) -> None:
        self._gpu.call("cuEventRecord", self.handle, stream or self._gpu.stream)

    def synchronize(self) -> None:
        self._gpu.call("cuEventSynchronize", self.handle)

    def query(self) -> bool:
        return bool(self._gpu.call("cuEventQuery", self.handle, among=(0, _NOT_READY)) == 0)

    def ms_until(self, later: Event) -> float:
        return float(self._gpu.call("cuEventElapsedTime", self.handle, later.handle))


class Cuda(Device):
    """The GPU number ``index``, in its primary context, which torch shares."""

    is_gpu = True

    def __init__(self, index: int) -> None:
        super().__init__()
        self._driver, self.index = bindings(), index
        handle = self.call("cuDeviceGet", index, enter=False)
        said = self.call("cuDeviceGetName", 256, handle, enter=False)
        self.name = said.partition(b"\0")[0].decode()

        def attribute(name: str) -> int:
            kind = getattr(self._driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
            return int(self.call("cuDeviceGetAttribute", kind, handle, enter=False))

        kinds = "COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR"
        self.capability = attribute(kinds[0]), attribute(kinds[1])
        self.processors = attribute("MULTIPROCESSOR_COUNT")
        self.cache_nbytes = attribute("L2_CACHE_SIZE")
        self.version = int(self.call("cuDriverGetVersion", enter=False))
        self._context = self.call("cuDevicePrimaryCtxRetain", handle, enter=False)
        self._events: defaultdict[int, deque[Handle]] = defaultdict(deque)  # unused ones, by kind
        self._main = self.call("cuStreamCreate", _NON_BLOCKING)
        self._staging = _Staging(self)
        self._folder = kernels_folder(Settings.from_environment().cache_dir)
        self._functions: dict[Program, Handle] = {}
        self._prepared: dict[Program, bytes] = {}
        self._loading = threading.Lock()
        self.most_nbytes: int | None = None
        """Most bytes that may be allocated on the GPU."""
        self._allocations: dict[int, int] = {}  # sizes by address
        self.peak_nbytes = 0
        """The most bytes that this process has had allocated at a time."""

    def __str__(self) -> str:
        return f"cuda:{self.index}"

    # -- calls -----------------------------------------------------------------------------------

    def call(
        self, name: str, *args: object, enter: bool = True, among: tuple[int, ...] = (0,)
    ) -> Any:
        """Call a function of the driver; return its result, a list if there are several, or its
        status if more than one is accepted.

        Raises:
            MemoryBudgetError: the GPU has no memory left.
            LocalrtError: the driver refuses.
        """
        if enter and getattr(_entered, "context", None) is not self._context:
            self.enter()
        status, *values = getattr(self._driver, name)(*args)
        if int(status) not in among:
            raise _error(self._driver, name, status)
        if len(among) > 1:
            return int(status)
        return values[0] if len(values) == 1 else values

    def enter(self) -> None:
        """Make this GPU's context current: other users of CUDA may have changed it."""
        self.call("cuCtxSetCurrent", self._context, enter=False)
        _entered.context = self._context

    def end(self, name: str, *args: object) -> None:
        """Call a function that destroys a handle, ignoring errors."""
        with suppress(LocalrtError), self._unrecorded():
            self.enter()
            getattr(self._driver, name)(*args)

    # -- memory ----------------------------------------------------------------------------------

    def memory(self) -> tuple[int, int]:
        free, total = self.call("cuMemGetInfo")
        return int(free), int(total)

    @property
    def allocated_nbytes(self) -> int:
        """Bytes of GPU memory that this process has allocated, used or not."""
        return sum(list(self._allocations.values()))

    def alloc(self, nbytes: int) -> int:
        try:
            return self._alloc(nbytes)
        except MemoryBudgetError:
            if self.recording:
                raise
            self.trim()
            return self._alloc(nbytes)

    def _alloc(self, nbytes: int) -> int:
        if self.most_nbytes is not None and self.allocated_nbytes + nbytes > self.most_nbytes:
            raise _full()
        with self._unrecorded():
            address = int(self.call("cuMemAlloc", nbytes))
        self._allocations[address] = nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.allocated_nbytes)
        return address

    def free(self, address: int) -> None:
        del self._allocations[address]
        if not self.recording:
            self.end("cuStreamSynchronize", self._main)  # running work may still use it
        self.end("cuMemFree", address)

    @contextmanager
    def _unrecorded(self) -> Iterator[None]:
        """Allow calls within that wait for the GPU, which recording otherwise forbids."""
        before = self.call("cuThreadExchangeStreamCaptureMode", self._mode(_RELAXED))
        try:
            yield
        finally:
            self.call("cuThreadExchangeStreamCaptureMode", before)

    def _mode(self, number: int) -> object:
        return self._driver.CUstreamCaptureMode(number)

    def copy_in(self, to: int, values: Values, stream: Handle | None = None) -> None:
        self.call("cuMemcpyHtoDAsync", to, values.ctypes.data, values.nbytes, stream or self.stream)

    def stage(self, to: int, values: Values) -> None:
        assert not self.recording, "replays would copy what is there by then"
        self._staging.copy_in(to, values)

    def copy_out(self, values: Values, source: int, stream: Handle | None = None) -> None:
        stream = stream or self.stream
        self.call("cuMemcpyDtoHAsync", values.ctypes.data, source, values.nbytes, stream)

    def fetch(self, values: Values, source: int) -> None:
        if values.nbytes > _STAGED or not self._staging.copy_out(values, source):
            self.copy_out(values, source)
            self.synchronize()

    def copy(self, to: int, source: int, nbytes: int) -> None:
        self.call("cuMemcpyDtoDAsync", to, source, nbytes, self.stream)

    def clear(self, to: int, nbytes: int) -> None:
        self.call("cuMemsetD8Async", to, 0, nbytes, self.stream)

    # -- streams and pinned RAM --------------------------------------------------------------------

    @property
    def stream(self) -> Handle:  # type: ignore[override]  # a thread's
        """The stream for work that this thread starts."""
        stream: Handle = getattr(self.thread, "stream", self._main)
        return stream

    @property
    def recording(self) -> bool:  # type: ignore[override]  # a thread's
        return getattr(self.thread, "pool", None) is not None

    def new_stream(self, owner: object) -> Handle:
        """A new stream, destroyed with its ``owner``."""
        stream: Handle = self.call("cuStreamCreate", _NON_BLOCKING)
        weakref.finalize(owner, self.end, "cuStreamDestroy", stream)
        return stream

    def event(self, *, timed: bool = False, sleeps: bool = False) -> Event:
        kind = _SLEEPS * sleeps | _UNTIMED * (not timed)
        spare = self._events[kind]  # reuse is safe: streams that wait captured the event's state
        try:
            handle = spare.pop()
        except IndexError:
            handle = self.call("cuEventCreate", kind)
        return Event(self, handle, spare)

    def wait(self, stream: Handle | None, event: Event) -> None:
        """Have later work of the stream wait for the event."""
        self.call("cuStreamWaitEvent", stream, event.handle, 0)

    def synchronize(self, stream: Handle | None = None) -> None:
        self.call("cuStreamSynchronize", stream or self.stream)

    def pinned(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Values:
        nbytes = max(1, prod(shape) * np.dtype(dtype).itemsize)
        block = PoolBlock(self.alloc_host(nbytes), nbytes, self.free_host)
        ctypes.memset(block.address, 0, nbytes)
        return array_of(block, shape, dtype)

    def alloc_host(self, nbytes: int) -> int:
        """The address of uninitialized pinned RAM."""
        with self._unrecorded():
            return int(self.call("cuMemHostAlloc", nbytes, 0))

    def free_host(self, address: int) -> None:
        """Free RAM of ``alloc_host``."""
        self.end("cuMemFreeHost", address)

    def register(self, data: Values) -> bool:
        """Pin existing RAM; returns whether the system allows it."""
        with self._unrecorded():
            (status,) = self._driver.cuMemHostRegister(data.ctypes.data, data.nbytes, 0)
        return int(status) == 0

    def unregister(self, data: Values) -> None:
        """Unpin it."""
        self.end("cuMemHostUnregister", data.ctypes.data)

    # -- kernels and graphs ------------------------------------------------------------------------

    def launch(self, program: Program, grid: Grid, threads: int, args: ctypes.Structure) -> None:
        function = self._functions.get(program) or self._load(program)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        self.call(
            "cuLaunchKernel",
            *(function, *grid, threads, 1, 1, 0, self.stream, ctypes.addressof(pointers), 0),
        )

    def prepare(self, program: Program) -> None:
        if program not in self._functions and program not in self._prepared:
            self._prepared[program] = self._code(program)

    def _code(self, program: Program) -> bytes:
        major, minor = self.capability
        if 10 * major + minor < OLDEST:
            raise LocalrtError(
                f"{self.name} is too old: localrt computes on GPUs of compute capability "
                f"{OLDEST / 10} and later"
            )
        return machine_code(program, 10 * major + minor, self._folder)

    def _load(self, program: Program) -> Handle:
        with self._loading:
            code = self._prepared.pop(program, None) or self._code(program)
            module = self.call("cuModuleLoadData", code)
            function: Handle = self.call("cuModuleGetFunction", module, program.name.encode())
            self._functions[program] = function
            return function

    @contextmanager
    def record_on(self, stream: Handle | None, pool: Pool) -> Iterator[None]:
        """Send this thread's work to another stream, with its own scratch memory."""
        self.thread.stream, self.thread.pool = stream, pool
        try:
            yield
        finally:
            del self.thread.stream, self.thread.pool

    def begin_graph(self) -> None:
        """Record the thread's work instead of running it."""
        self.call("cuStreamBeginCapture", self.stream, self._mode(_THREAD_LOCAL))

    def end_graph(self) -> Graph:
        """Return the recorded graph.

        Raises:
            LocalrtError: something was called that cannot be recorded.
        """
        graph = self.call("cuStreamEndCapture", self.stream)
        try:
            return Graph(self, self.call("cuGraphInstantiate", graph, 0), self.pool)
        finally:
            self.call("cuGraphDestroy", graph)


class Graph:
    """A captured graph, and the scratch memory that it uses."""

    def __init__(self, gpu: Cuda, handle: Handle, pool: Pool) -> None:
        self._gpu, self._handle, self._pool = gpu, handle, pool
        weakref.finalize(self, gpu.end, "cuGraphExecDestroy", handle)

    def replay(self) -> None:
        """Launch the graph."""
        self._gpu.call("cuGraphLaunch", self._handle, self._gpu.stream)


class _MoveBytes(ctypes.Structure):
    _fields_ = (("source", ctypes.c_void_p), ("to", ctypes.c_void_p), ("count", ctypes.c_int64))


class _Staging:
    """Pinned RAM through which kernels move small arrays to the GPU and back. For uploads it has
    two halves: each is filled again once its last contents have been moved.
    """

    def __init__(self, gpu: Cuda) -> None:
        self._gpu = gpu
        self._halves: list[Values] = []
        self._events: list[Event] = []
        self._half = self._used = 0
        self._back: Values | None = None
        self._lock, self._fetching = threading.Lock(), threading.Lock()

    def copy_in(self, to: int, values: Values) -> None:
        if values.nbytes > _STAGED:
            self._gpu.copy_in(to, values)  # CUDA stages plain RAM itself
            return
        with self._lock:
            if not self._halves:
                self._halves = [self._gpu.pinned((_STAGED,), np.uint8) for _ in range(2)]
                self._events = [self._gpu.event() for _ in range(2)]
            if self._used + values.nbytes > _STAGED:
                self._events[self._half].record()
                self._half, self._used = 1 - self._half, 0
                self._events[self._half].synchronize()
            place = self._halves[self._half][self._used : self._used + values.nbytes]
            place[:] = values.reshape(-1).view(np.uint8)
            self._used += -(-values.nbytes // 16) * 16
            self._move(place.ctypes.data, to, values.nbytes)

    def copy_out(self, values: Values, source: int) -> bool:
        """Copy through pinned RAM; returns False if the system pins no more RAM."""
        with self._fetching:
            if self._back is None:
                try:
                    self._back = self._gpu.pinned((_STAGED,), np.uint8)
                except MemoryBudgetError:
                    return False
            self._move(source, self._back.ctypes.data, values.nbytes)
            self._gpu.synchronize()
            values.reshape(-1).view(np.uint8)[:] = self._back[: values.nbytes]
            return True

    def _move(self, source: int, to: int, nbytes: int) -> None:
        grid = -(-nbytes // (4 * _MOVERS)), 1, 1
        self._gpu.launch(_MOVE_BYTES, grid, _MOVERS, _MoveBytes(source, to, nbytes))


_MOVE_BYTES = Program.of("move_bytes")
_MOVERS = 256  # threads of a block, four bytes each


def array_of(block: PoolBlock, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Values:
    """A block of RAM as an array, freed with its last view."""
    memory = (ctypes.c_ubyte * block.nbytes).from_address(block.address)
    weakref.finalize(memory, block.free)
    whole: Any = memory  # a buffer, though its type does not say so
    values = np.frombuffer(whole, np.uint8)[: prod(shape) * np.dtype(dtype).itemsize]
    return values.view(dtype).reshape(shape)


_entered = threading.local()


def _full() -> MemoryBudgetError:
    return MemoryBudgetError(
        "the GPU has no memory left: close other programs that use it, or give the model less "
        f"{option('gpu_memory')}"
    )


def _error(driver: ModuleType, name: str, status: SupportsInt) -> LocalrtError:
    if int(status) == _OUT_OF_MEMORY and name == "cuMemHostAlloc":
        return MemoryBudgetError(
            "the system pins no more RAM for the GPU: close other programs, or give the model less "
            f"{option('ram')}"
        )
    if int(status) == _OUT_OF_MEMORY:
        return _full()
    said = driver.cuGetErrorString(status)[1]
    why = said.decode() if isinstance(said, bytes) else str(status)
    return LocalrtError(f"the GPU refuses {_CALLS.get(name, name)}: {why}")


_CALLS = {"cuLaunchKernel": "a kernel", "cuModuleLoadData": "a kernel"}


@cache
def bindings() -> ModuleType:
    """The driver's functions; initializes the driver.

    Raises:
        MissingExtraError: they are not installed.
        LocalrtError: there is no driver, or no GPU.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise MissingExtraError(f"a GPU needs NVIDIA's bindings: {install('gpu')}") from error
    try:
        (status,) = driver.cuInit(0)
    except RuntimeError as error:  # libcuda.so.1 is missing
        raise LocalrtError("NVIDIA's driver is not installed") from error
    if int(status) != 0:
        raise _error(driver, "cuInit", status)
    module: ModuleType = driver
    return module


def count_gpus() -> int:
    """GPUs that NVIDIA's driver shows; 0 without it or its bindings."""
    try:
        status, count = bindings().cuDeviceGetCount()
    except LocalrtError:
        return 0
    return int(count) if int(status) == 0 else 0


_opening = free_in_child(threading.Lock())


def device_of(name: str) -> Any:
    """The device called ``"cuda"`` (the first), ``"cuda:N"``, or ``"cpu"``, for tests."""
    with _opening:  # two threads must not create one each
        if name == "cpu":
            return _ram()
        return _cuda(int(name.removeprefix("cuda").removeprefix(":") or "0"))


@cache
def _ram() -> Ram:
    return Ram()


@cache
def _cuda(index: int) -> Device:
    return Cuda(index)
