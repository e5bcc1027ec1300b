"""Opens the GPU that a model is placed on, if there is one.

The result has the GPU that the pipeline drives, its clock, and its rates for the planner.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from localrt import system
from localrt.common.errors import LocalrtError, MemoryBudgetError
from localrt.common.formatting import format_bytes
from localrt.common.option_names import option
from localrt.common.progress import Progress, ProgressCallback
from localrt.offload.account import CUDA_CONTEXT_NBYTES, ROUNDED_VRAM_NBYTES, SPARE_VRAM_NBYTES
from localrt.offload.device.gpu import Clock, Gpu
from localrt.offload.memory import pinnable_nbytes
from localrt.planning.machine import GpuProfile, MachineProfile, measured_profile
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.cuda.gpu_cache import GpuRates
from localrt.quant.ops.kv_formats import parse_kv_format
from localrt.quant.ops.protocol import Ops, implementation

_CONTEXT_PART_NBYTES = 4 << 20  # per multiprocessor of a large GPU: 527 MB for an H100's 132
# An unmeasured GPU's memory rate is that of copies within it: reading alone is about as fast.
_ARITHMETIC_PER_BYTE = 100.0  # operations per byte of memory traffic; GPUs since 2018 reach it


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenGpu:
    """The GPU, or None, and ``host_ops`` for the layers that the CPU computes.

    ``capacity`` is the GPU memory that may be used, in bytes; ``unused`` bytes are kept free, and
    ``beside`` is what CUDA itself and rounding take.
    """

    host_ops: Ops
    clock: Clock
    gpu: Gpu | None = None
    capacity: int = 0
    unused: int = 0
    beside: int = CUDA_CONTEXT_NBYTES + ROUNDED_VRAM_NBYTES
    profile: GpuProfile | None = None
    link_bytes_s: float | None = None
    link_latency_s: float | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    def free_memory(self) -> int | None:
        """Return the free bytes of GPU memory that may be used; None without a GPU."""
        free = None if self.gpu is None else self.gpu.ops.free_memory()
        return None if free is None else max(0, free - self.unused)

    def on(self, machine: MachineProfile) -> MachineProfile:
        """Return ``machine`` with this GPU added."""
        return replace(
            machine,
            gpu=self.profile,
            link_bytes_s=self.link_bytes_s,
            link_latency_s=self.link_latency_s or machine.link_latency_s,
            sources={**machine.sources, **self.sources},
        )


def open_gpu(
    ops: Ops,
    *,
    threads: int | None,
    gpu_memory: int | None,
    kv_format: str | None = None,
    formats: Iterable[str] = (),
    progress: ProgressCallback | None = None,
) -> OpenGpu:
    """Open the GPU that ``ops`` computes on, if any.

    With a GPU, the CPU's layers keep keys and values in ``kv_format`` too. The GPU is measured
    unless it was before with ``formats``.
    """
    if ops.free_memory() is None:
        return OpenGpu(host_ops=ops, clock=Clock())
    host = NativeOps(threads=threads, kv_format=parse_kv_format(kv_format))
    return _cuda(ops, host, gpu_memory, formats, progress)


def _cuda(
    ops: Ops,
    host: NativeOps,
    gpu_memory: int | None,
    formats: Iterable[str],
    progress: ProgressCallback | None,
) -> OpenGpu:
    # These two import the driver.
    from localrt.offload.device.cuda import CudaGpu
    from localrt.quant.cuda.cuda_memory import CudaCopies

    copies = CudaCopies(ops.device, most_pinned=pinnable_nbytes())
    rates = _rates(ops, host, formats, progress)
    unused = system.spilling_nbytes(copies.total_nbytes)
    free = max(0, (ops.free_memory() or 0) - unused)
    context, cublas = _cuda_nbytes(ops.device, formats)
    beside = context + cublas + ROUNDED_VRAM_NBYTES
    asked = free if gpu_memory is None else gpu_memory - beside
    spare = SPARE_VRAM_NBYTES + cublas  # the context is there already
    capacity = min(free - spare, asked)
    if capacity <= 0:
        least = format_bytes(beside if asked <= 0 else spare)
        raise MemoryBudgetError(
            f"the GPU has no room for weights: {least} of {option('gpu_memory')} are for CUDA "
            f"itself; close other programs that use it, give more, or use {option('device', 'cpu')}"
        )
    if unused:
        copies.keep_free(unused)
    clock = Clock()
    if rates is not None:
        link, profile = rates.to_gpu_bytes_s, measured_profile(copies.name, capacity, rates)
    else:
        link, memory = copies.measure()
        flops = _ARITHMETIC_PER_BYTE * memory
        profile = GpuProfile(name=copies.name, vram_bytes=capacity, bytes_s=memory, flops=flops)
    return OpenGpu(
        host_ops=host,
        gpu=CudaGpu(clock, ops, copies, capacity=capacity),
        clock=clock,
        capacity=capacity,
        unused=unused,
        beside=beside,
        profile=profile,
        link_bytes_s=link,
        link_latency_s=None if rates is None else rates.crossing_s,
        sources=dict.fromkeys(("gpu", "link_bytes_s"), "measured"),
    )


def _cuda_nbytes(name: str, formats: Iterable[str]) -> tuple[int, int]:
    """Return the GPU memory of CUDA's context and of cuBLAS, which multiplies many rows with
    weights that are not packed, or are unpacked first.
    """
    from localrt.quant.cuda import cublas
    from localrt.quant.cuda.driver import device_of
    from localrt.quant.cuda.formats import TYPES
    from localrt.quant.cuda.launch import prefers_int8

    device = device_of(name)
    context = max(CUDA_CONTEXT_NBYTES, device.processors * _CONTEXT_PART_NBYTES)
    if not cublas.multiplies(device):
        return context, 0
    if not prefers_int8(device):
        return context, cublas.NBYTES + 2 * cublas.UNPACKED
    return context, 0 if all(each in TYPES for each in formats) else cublas.NBYTES


def _rates(
    ops: Ops, host: NativeOps, formats: Iterable[str], progress: ProgressCallback | None
) -> GpuRates | None:
    """Return the GPU's rates, measured now or before; None if it cannot be measured."""
    from localrt.quant.cuda.measuring import gpu_rates
    from localrt.quant.cuda.ops import CudaOps

    def on_step(done: int, total: int) -> None:
        if progress is not None:
            progress(Progress("measure", done, total, "rates"))

    try:
        return gpu_rates(implementation(ops, CudaOps), formats, host=host, on_step=on_step)
    except LocalrtError:  # the caller measures plain copies, and loading reports what is wrong
        return None
