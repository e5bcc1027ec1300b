"""Kernel launches: the launch shape of a product, launching, and timing.

A product is divided among blocks and warps by its shape and the number of processors; its result
does not depend on that. ``noting`` collects the programs that steps would launch.
"""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from localrt.common.settings import Settings
from localrt.common.version import __version__
from localrt.quant.cuda.device import Device, Grid
from localrt.quant.cuda.driver import Cuda
from localrt.quant.cuda.formats import halves_steps
from localrt.quant.cuda.gpu_cache import GpuCache
from localrt.quant.cuda.programs import Program, sources, toolchain
from localrt.quant.cuda.tensor import UINT8, Tensor, empty
from localrt.quant.declarations import Declarations

# For linear_many.cu: tiles per block, and rows of records that fit in the GPU's cache.
_BLOCK_TILES, _CACHED_ROWS = 4, 512
# Formats for which four groups of eight rows need more registers than a thread has.
_NARROW = ("nvfp4", "q2_k", "q4_k", "iq3_xxs")


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """How a product is divided: ``pairs`` of tiles per warp, ``groups`` of eight rows at once, and
    ``parts`` blocks that share the columns of the same rows.
    """

    pairs: int
    groups: int
    parts: int = 1


@cache  # called by every launch
def best_shape(format_: str, rows: int, tiles: int, processors: int) -> LaunchShape:
    """The launch shape for ``rows`` rows of records and ``tiles``: enough blocks to occupy the
    ``processors``, within each one's registers.
    """
    # Two pairs share the activations that a warp loads, but need more registers and enough blocks.
    light = format_ == "nvfp4" and rows == 1 and tiles >= 16 * processors
    groups = min(2 if format_ in _NARROW else 4, groups_of(rows))
    blocks = -(-tiles // (4 if light else 2)) * -(-rows // (8 * groups))
    parts = 1 if blocks >= processors else 2 if 2 * blocks >= processors else 4
    return LaunchShape(pairs=2 if light else 1, groups=groups, parts=parts)


def many_grid(format_: str, rows: int, tiles: int, processors: int) -> tuple[int, int, int] | None:
    """The grid of the kernel for many rows; None if the kernel for few rows is used: up to 32 rows,
    or up to 64 if blocks of 64 weight rows would leave processors idle.
    """
    each = 96 if halves_steps(format_) else 128  # ROWS of linear_many.cu
    along, across = -(-rows // each), -(-tiles // _BLOCK_TILES)
    if rows <= 32 or (rows <= 64 and along * across < processors):
        return None
    cached = min(along, _CACHED_ROWS // each)
    return cached, across, -(-along // cached)


def groups_of(rows: int) -> int:
    """The most groups of eight rows that a warp multiplies at once; records are padded to them."""
    return 1 if rows <= 8 else 2 if rows <= 16 else 4


_noted = threading.local()


def launch(
    device: Device, program: Program, grid: Grid, threads: int, args: ctypes.Structure
) -> None:
    """Start a kernel whose pointers are memory of ``device``.

    Raises:
        LocalrtError: the GPU is too old, or refuses.
    """
    noted: dict[Program, None] | None = getattr(_noted, "programs", None)
    if noted is not None:
        noted[program] = None
        return
    device.launch(program, grid, threads, args)


@cache
def declarations(file: str) -> Declarations:
    """The declarations of a file of ``quant/cuda/src``."""
    return Declarations(sources()[file].decode())


def arguments(file: str, name: str) -> type[ctypes.Structure]:
    """The ctypes class of a kernel's arguments: the struct ``name`` of ``file``."""
    return declarations(file).struct(name)(type(name, (ctypes.Structure,), {}))


def pointers(*tensors: Tensor | None) -> list[int | None]:
    """The addresses of tensors, in order, as kernel arguments; None stays None."""
    return [None if tensor is None else tensor.address for tensor in tensors]


@contextmanager
def noting(programs: dict[Program, None]) -> Iterator[None]:
    """Collect in ``programs`` the kernels this thread launches, in order, without starting them."""
    before = getattr(_noted, "programs", None)
    _noted.programs = programs
    try:
        yield
    finally:
        _noted.programs = before


def is_noting() -> bool:
    """Whether this thread's launches are only noted."""
    return getattr(_noted, "programs", None) is not None


def gpu_file(device: Device) -> GpuCache:
    """A CUDA GPU's saved figures, with the key of everything they depend on."""
    assert isinstance(device, Cuda), "figures are of a GPU"
    version = device.version
    compiler, digest = toolchain()
    key = (
        f"driver for CUDA {version // 1000}.{version % 1000 // 10}",
        f"NVRTC {compiler}",
        f"kernels {digest}",
        f"localrt {__version__}",
    )
    return GpuCache(Settings.from_environment().cache_dir, device.name, key)


_RUNS = 5
_WRITES = 4
_WAKING_S = 0.2
_LEAST_CACHE = 16 << 20


class Stopwatch(Protocol):
    """Times launches on one device."""

    def seconds(self, launch: Callable[[], object]) -> float:
        """Seconds of the work that ``launch`` starts; calls it several times."""


class CudaStopwatch:
    """A ``Stopwatch`` by events on the GPU's stream."""

    def __init__(self, device: Cuda) -> None:
        self._device = device
        self._overwritten = 2 * max(device.cache_nbytes, _LEAST_CACHE)
        self._awake = False

    def seconds(self, launch: Callable[[], object]) -> float:
        """See ``Stopwatch``. The median of five runs, after compiling if needed.

        Raises:
            MemoryBudgetError: the GPU has no room for the bytes that fill its cache.
        """
        launch()
        filler = empty(self._overwritten, dtype=UINT8, device=self._device)
        if not self._awake:
            self._wake(filler)
        runs = []
        for _ in range(_RUNS):
            first, last = (self._device.event(timed=True) for _ in range(2))
            for _ in range(_WRITES):
                filler.clear()
            first.record()
            launch()
            last.record()
            runs.append((first, last))
        runs[-1][1].synchronize()
        return statistics.median(first.ms_until(last) for first, last in runs) / 1e3

    def _wake(self, filler: Tensor) -> None:
        """Keep the GPU busy until its clocks rise: otherwise the first timing would be too slow."""
        end = time.perf_counter() + _WAKING_S
        while time.perf_counter() < end:
            filler.clear()
            self._device.synchronize()
        self._awake = True


def prefers_int8(device: Device) -> bool:
    """Whether a GPU's 8-bit integer products are four times as fast as bf16 products with float32
    sums: on all but data centers' GPUs since Ampere.
    """
    return device.capability not in ((8, 0), (9, 0)) and device.capability[0] not in (10, 11)
