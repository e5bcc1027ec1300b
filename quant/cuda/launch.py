"""A GPU as torch and the driver show it: launching kernels, copying to it, timing, full memory.

Kernels of ``quant/cuda/src`` go to torch's current stream; their machine code is loaded once for
each program. ``noting`` finds out which programs steps would launch; ``prepare`` compiles one
before it is needed. On ``device="cpu"`` a launcher given to ``emulate`` runs them, for tests.
"""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from localrt.common.errors import LocalrtError, MemoryBudgetError
from localrt.common.option_names import option
from localrt.common.settings import Settings
from localrt.common.version import __version__
from localrt.quant.cuda.gpu_file import GpuFile
from localrt.quant.cuda.programs import (
    OLDEST,
    Program,
    machine_code,
    toolchain,
)

Grid = tuple[int, int, int]


class Launcher(Protocol):
    """Runs kernels on one device."""

    def launch(self, program: Program, grid: Grid, threads: int, args: ctypes.Structure) -> None:
        """Start ``grid`` blocks of ``threads``, with ``args`` as the kernel's one argument."""

    def prepare(self, program: Program) -> None:
        """Get the machine code, so that launching need not compile. Any thread may call it."""


_emulator: Launcher | None = None
_noted = threading.local()
_opening = threading.Lock()


def emulate(launcher: Launcher | None) -> Launcher | None:
    """Have ``launcher`` run kernels on the CPU; returns the previous launcher."""
    global _emulator
    before, _emulator = _emulator, launcher
    return before


def launch(
    device: torch.device, program: Program, grid: Grid, threads: int, args: ctypes.Structure
) -> None:
    """Start a kernel whose pointers are memory of ``device``.

    Raises:
        LocalrtError: the GPU is too old, or refuses.
    """
    noted: dict[Program, None] | None = getattr(_noted, "programs", None)
    if noted is not None:
        noted[program] = None
        return
    _launcher(device).launch(program, grid, threads, args)


def pointers(*tensors: torch.Tensor | None) -> list[int | None]:
    """The addresses of tensors, as kernel arguments in order; None stays None."""
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


@contextmanager
def noting(programs: dict[Program, None]) -> Iterator[None]:
    """Collect in ``programs`` what this thread would launch, in order; nothing is started."""
    before = getattr(_noted, "programs", None)
    _noted.programs = programs
    try:
        yield
    finally:
        _noted.programs = before


def is_noting() -> bool:
    """Whether this thread's launches are only noted."""
    return getattr(_noted, "programs", None) is not None


def prepare(device: torch.device, program: Program) -> None:
    """Compile a kernel for ``device``, or find it on the disk. Any thread may call it.

    Raises:
        LocalrtError: it does not compile.
    """
    _launcher(device).prepare(program)


def _launcher(device: torch.device) -> Launcher:
    if device.type == "cuda":
        with _opening:  # two threads that come first would get one each
            return _gpu(torch.cuda.current_device() if device.index is None else device.index)
    assert _emulator is not None, "kernels run on a GPU"
    return _emulator


def gpu_file(device: torch.device) -> GpuFile:
    """A CUDA GPU's kept figures, under the key of all that they depend on."""
    from cuda.bindings import driver

    _, version = driver.cuDriverGetVersion()
    compiler, digest = toolchain()
    key = (
        f"driver for CUDA {version // 1000}.{version % 1000 // 10}",
        f"NVRTC {compiler}",
        f"kernels {digest}",
        f"torch {torch.__version__}",
        f"localrt {__version__}",
    )
    return GpuFile(Settings.from_environment().cache_dir, torch.cuda.get_device_name(device), key)


@cache
def _gpu(index: int) -> Launcher:
    return _Gpu(index)


class _Gpu:
    def __init__(self, index: int) -> None:
        from cuda.bindings import driver

        self._driver: Any = driver
        major, minor = torch.cuda.get_device_capability(index)
        self._capability, self._index = 10 * major + minor, index
        if self._capability < OLDEST:
            raise LocalrtError(
                f"{torch.cuda.get_device_name(index)} is too old: localrt computes on GPUs of "
                f"compute capability {OLDEST / 10} and later"
            )
        self._folder = Settings.from_environment().cache_dir / "kernels"
        self._functions: dict[Program, Any] = {}
        self._prepared: dict[Program, bytes] = {}
        self._lock = threading.Lock()
        self._thread = threading.local()

    def launch(self, program: Program, grid: Grid, threads: int, args: ctypes.Structure) -> None:
        if not hasattr(self._thread, "entered"):
            self._enter()
        function = self._functions.get(program) or self._load(program)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        stream = torch.cuda.current_stream(self._index).cuda_stream
        self._check(
            self._driver.cuLaunchKernel(
                function, *grid, threads, 1, 1, 0, stream, ctypes.addressof(pointers), 0
            )
        )

    def _enter(self) -> None:
        """Give this thread a CUDA context, which it lacks before using torch on the GPU."""
        if not int(self._check(self._driver.cuCtxGetCurrent())):
            context = self._check(self._driver.cuDevicePrimaryCtxRetain(self._index))
            self._check(self._driver.cuCtxSetCurrent(context))
        self._thread.entered = True

    def prepare(self, program: Program) -> None:
        if program not in self._functions and program not in self._prepared:
            self._prepared[program] = machine_code(program, self._capability, self._folder)

    def _load(self, program: Program) -> Any:
        with self._lock:
            code = self._prepared.pop(program, None)
            if code is None:
                code = machine_code(program, self._capability, self._folder)
            module = self._check(self._driver.cuModuleLoadData(code))
            name = program.name.encode()
            function = self._check(self._driver.cuModuleGetFunction(module, name))
            self._functions[program] = function
            return function

    def _check(self, answer: tuple[Any, ...]) -> Any:
        status, *values = answer
        if int(status) != 0:
            name = self._driver.cuGetErrorString(status)[1]
            said = name.decode() if isinstance(name, bytes) else str(status)
            raise LocalrtError(f"the GPU refuses a kernel: {said}")
        return values[0] if values else None


_RUNS = 5
_WRITES = 4
_WAKING_S = 0.2
_LEAST_CACHE = 16 << 20


class Stopwatch(Protocol):
    """Times launches on one device."""

    def seconds(self, launch: Callable[[], object]) -> float:
        """Seconds of the work that ``launch`` starts; calls it several times."""


class CudaStopwatch:
    """See ``Stopwatch``; by events on torch's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
        self._overwritten = 2 * max(cache, _LEAST_CACHE)
        self._awake = False

    def seconds(self, launch: Callable[[], object]) -> float:
        """See ``Stopwatch``. The median of five runs, after compiling if needed.

        Raises:
            torch.OutOfMemoryError: the GPU has no room for the bytes that fill its cache.
        """
        launch()
        cuda: Any = torch.cuda  # not typed throughout
        filler = torch.empty(self._overwritten, dtype=torch.uint8, device=self._device)
        if not self._awake:
            self._wake(filler)
        runs = []
        for _ in range(_RUNS):
            first, last = (cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(_WRITES):
                filler.zero_()
            first.record()
            launch()
            last.record()
            runs.append((first, last))
        runs[-1][1].synchronize()
        return float(statistics.median(first.elapsed_time(last) for first, last in runs) / 1e3)

    def _wake(self, filler: torch.Tensor) -> None:
        """Keep the GPU busy until its clocks rise: otherwise the first timing would be too slow."""
        end = time.perf_counter() + _WAKING_S
        while time.perf_counter() < end:
            filler.zero_()
            torch.cuda.current_stream(self._device).synchronize()
        self._awake = True


class FullGpu(AbstractContextManager[None]):
    """Says in our words that a GPU has no memory left.

    Raises:
        MemoryBudgetError: replaces torch's error.
    """

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            raise MemoryBudgetError(
                "the GPU has no memory left: close other programs that use it, or give the model "
                f"less {option('gpu_memory')}"
            ) from error


@cache
def multiplies_bf16(device: torch.device) -> bool:
    """Whether torch's products of bf16 run on the device at full speed."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def prefers_int8(device: torch.device) -> bool:
    """Whether a GPU's products of 8-bit integers are four times as fast as those of bf16 with
    float32 sums: every one but data centers' since Ampere.
    """
    if device.type != "cuda":
        return True
    major, minor = torch.cuda.get_device_capability(device)
    return (major, minor) not in ((8, 0), (9, 0)) and major not in (10, 11)


def upload(values: npt.NDArray[Any], device: torch.device, *, out: Tensor | None = None) -> Tensor:
    """A copy of ``values`` on the device, in ``out`` if given, which the host does not wait for."""
    if device.type != "cuda":
        copied = torch.from_numpy(np.array(values))
        return copied if out is None else out.copy_(copied)
    staged = torch.from_numpy(np.ascontiguousarray(values)).pin_memory()
    if out is None:
        return staged.to(device, non_blocking=True)
    return out.copy_(staged, non_blocking=True)
