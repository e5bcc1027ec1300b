"""How ``localrt bench`` uses a GPU while a model decodes: energy, use, memory, busy shares.

No card has run this yet.

NVIDIA's management library (NVML, through ctypes) gives energy, use, and memory of the GPUs and the
peak memory of a process; what it does not report is missing or None. The pipeline's events measure
the busy shares; a model that is all on the GPU has none.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

import psutil

from localrt import system
from localrt.bench.workload import BenchOptions
from localrt.common.closing import Closing
from localrt.offload import hardware

if TYPE_CHECKING:
    from localrt.api import Model

_UNKNOWN = (1 << 64) - 1  # NVML_VALUE_NOT_AVAILABLE: Windows' driver does not say
_EVERY_S = 0.05


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_ulonglong) for name in ("total", "free", "used"))


class _Process(ctypes.Structure):
    _fields_ = (("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong), ("parts", 2 * ctypes.c_uint))


_MOST_PROCESSES = 256
_Processes = _MOST_PROCESSES * _Process


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the library; None if it is not installed."""
    try:
        found = ctypes.CDLL(system.NVML)
        known = hasattr(found, "nvmlDeviceGetTotalEnergyConsumption")
        return found if known and found.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):
        return None


def _ask(name: str, kind: Any, *more: Any) -> Iterator[tuple[int, Any]]:
    """Yield each GPU's number and its value of a function ``nvmlDeviceGet...``, if it has one."""
    nvml, count = library(), ctypes.c_uint()
    ask = getattr(nvml, f"nvmlDeviceGet{name}", None)
    if nvml is None or ask is None:
        return
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    for index in range(count.value):
        device, value = ctypes.c_void_p(), kind()
        nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device))
        if not ask(device, *more, ctypes.byref(value)):
            yield index, value


def joules() -> dict[int, float]:
    """Return the energy counters of the GPUs, by number."""
    found = _ask("TotalEnergyConsumption", ctypes.c_ulonglong)
    return {index: millijoules.value / 1e3 for index, millijoules in found}


def use() -> dict[str, float | None] | None:
    """Return the busiest GPU's utilization and the memory in use on all GPUs, if any."""
    if library() is None:
        return None
    busy = [rates.gpu / 100 for _, rates in _ask("UtilizationRates", _Utilization)]
    return {"busy": max(busy, default=None), "bytes": used_nbytes()}


def used_nbytes() -> int | None:
    """Return the bytes that all programs take of all GPUs; None if that is not known."""
    used = [memory.used for _, memory in _ask("MemoryInfo", _Memory)]
    return sum(used) if used else None


def process_nbytes(pid: int) -> int:
    """Return the GPU memory of a process; 0 if the driver does not list it, as in a container."""
    count, total = ctypes.c_uint(_MOST_PROCESSES), 0
    for _, listed in _ask("ComputeRunningProcesses_v3", _Processes, ctypes.byref(count)):
        own = (each for each in listed[: count.value] if each.pid == pid)
        total += sum(each.used for each in own if each.used != _UNKNOWN)
        count.value = _MOST_PROCESSES
    return total


class Peaks(Closing):
    """Watches the memory of a process until it is closed: ``ram`` is the most that was resident."""

    def __init__(self, pid: int) -> None:
        self.ram: int | None = None
        self._pid, self._own, self._more, self._before = pid, 0, 0, used_nbytes()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="localrt-peaks", daemon=True)
        self._thread.start()

    @property
    def vram(self) -> int | None:
        """The peak of its GPU memory so far; None if not measured. If the driver does not list the
        process, what all programs took more than at the beginning.
        """
        return self._own or self._more or None

    def close(self) -> None:
        """Stop watching."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with suppress(psutil.Error):
                self.ram = max(self.ram or 0, int(psutil.Process(self._pid).memory_info().rss))
            if self._before is not None:
                self._more = max(self._more, (used_nbytes() or 0) - self._before)
                self._own = max(self._own, process_nbytes(self._pid))
            if self._over.wait(_EVERY_S):
                return


_TOKENS = 16
_NAMES = {"gpu": "GPU", "link": "link to the GPU", "cpu": "CPU", "ssd": "disk"}


def busy_line(busy: Mapping[str, float]) -> str:
    """Format the result of ``busy_shares`` as one line for people."""
    shares = ", ".join(f"{_NAMES[name]} {busy[name]:.0%}" for name in _NAMES if name in busy)
    return f"busy while decoding: {shares}"


def busy_shares(model: Model, prompt: Sequence[int]) -> dict[str, float]:
    """Decode tokens after ``prompt``, once CUDA graphs have been recorded; return the share of the
    time for which each resource was busy. Empty for a model that is all on the GPU.
    """
    room = max(1, model.info.ctx - 2 * _TOKENS)
    stream = model.stream(
        token_ids=prompt[:room], max_tokens=2 * _TOKENS, ignore_eos=True, temperature=0
    )
    for _ in islice(stream, _TOKENS):
        pass
    before = model.status(lanes=True)  # meanwhile the pipeline times every pass
    for _ in stream:
        pass
    return dict(model.status(lanes=False).since(before).busy)


def lacks_gpu(options: BenchOptions) -> bool:
    """Whether the options give GPU memory but name no GPU, and this machine has none."""
    any_gpu = options.gpu_memory is not None and options.device in (None, "auto")
    return any_gpu and not hardware.gpus()
