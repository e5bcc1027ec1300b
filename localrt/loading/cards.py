"""The card that a model is placed on: none, one of CUDA, or a virtual one.

Opening gives the accelerator that the pipeline drives, its clock, and its figures for the planner.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from localrt.errors import LocalrtError
from localrt.offload.account import CUDA_CONTEXT_NBYTES, SPARE_VRAM_NBYTES
from localrt.offload.cards.accelerator import Accelerator
from localrt.offload.cards.clock import VirtualClock, WallClock
from localrt.offload.cards.virtual import VirtualAccelerator
from localrt.offload.planner.cards import measured_profile, parse_card
from localrt.offload.planner.machine import GpuProfile, MachineProfile
from localrt.progress import Progress, ProgressCallback
from localrt.quant.ops.cuda.rates import CardRates
from localrt.quant.ops.native.kv import parse_kv_format
from localrt.quant.ops.native.ops import NativeOps
from localrt.quant.ops.protocol import Ops

__all__ = ["OpenCard", "open_card"]

# Reads and writes of a copy within the card's memory reach about what reading alone does.
_ARITHMETIC_PER_BYTE = 100.0  # operations per byte of memory traffic, of any card since 2018


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCard:
    """``host_ops`` computes what the CPU does. Without a card ``accelerator`` is None.

    ``capacity`` is bytes of the card's memory that may be used.
    """

    host_ops: Ops
    clock: WallClock
    accelerator: Accelerator | None = None
    capacity: int = 0
    profile: GpuProfile | None = None
    link_bytes_s: float | None = None
    link_latency_s: float | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    def free_memory(self) -> int | None:
        """Bytes free on a real card."""
        return None if self.accelerator is None else self.accelerator.ops.free_memory()

    def on(self, machine: MachineProfile) -> MachineProfile:
        """The machine with this card in it."""
        return replace(
            machine,
            gpu=self.profile,
            link_bytes_s=self.link_bytes_s,
            link_latency_s=self.link_latency_s or machine.link_latency_s,
            sources={**machine.sources, **self.sources},
        )


def open_card(
    device: str,
    ops: Ops,
    *,
    threads: int | None,
    gpu_memory: int | None,
    kv_format: str | None = None,
    formats: Iterable[str] = (),
    progress: ProgressCallback | None = None,
) -> OpenCard:
    """The card of ``device``, whose ``Ops`` are ``ops`` unless it is virtual or the CPU.

    Beside a card, layers of the CPU keep keys and values in ``kv_format`` too. A card of CUDA is
    measured if it never was with ``formats``.

    Raises:
        OptionError: no such card.
    """
    if device.startswith("virtual:"):
        return _virtual(device, ops, gpu_memory)
    if ops.free_memory() is None:
        return OpenCard(host_ops=ops, clock=WallClock())
    host = NativeOps(threads=threads, kv_format=parse_kv_format(kv_format))
    return _cuda(ops, host, gpu_memory, formats, progress)


def _virtual(device: str, ops: Ops, gpu_memory: int | None) -> OpenCard:
    card = parse_card(device)
    profile, clock = card.profile, VirtualClock()
    capacity = card.vram_bytes if gpu_memory is None else min(card.vram_bytes, gpu_memory)
    accelerator = VirtualAccelerator(
        clock,
        ops,
        name=card.name,
        capacity=capacity,
        link_bytes_s=card.link_bytes_s,
        memory_bytes_s=profile.bytes_s,
        flops=profile.flops,
        call_s=profile.call_s,
    )
    return OpenCard(
        host_ops=ops,
        accelerator=accelerator,
        clock=clock,
        capacity=capacity,
        profile=profile,
        link_bytes_s=card.link_bytes_s,
    )


def _cuda(
    ops: Ops,
    host: NativeOps,
    gpu_memory: int | None,
    formats: Iterable[str],
    progress: ProgressCallback | None,
) -> OpenCard:
    # These two import torch.
    from localrt.offload.cards.cuda import CudaAccelerator
    from localrt.quant.ops.cuda.cuda_memory import CudaCopies

    copies = CudaCopies(ops.device)
    rates = _rates(ops, host, formats, progress)
    free = ops.free_memory() or 0
    asked = free if gpu_memory is None else gpu_memory - CUDA_CONTEXT_NBYTES
    capacity = max(0, min(free - SPARE_VRAM_NBYTES, asked))
    clock = WallClock()
    if rates is not None:
        link, profile = rates.to_card_bytes_s, measured_profile(copies.name, capacity, rates)
    else:
        link, memory = copies.measure()
        flops = _ARITHMETIC_PER_BYTE * memory
        profile = GpuProfile(name=copies.name, vram_bytes=capacity, bytes_s=memory, flops=flops)
    return OpenCard(
        host_ops=host,
        accelerator=CudaAccelerator(clock, ops, copies, capacity=capacity),
        clock=clock,
        capacity=capacity,
        profile=profile,
        link_bytes_s=link,
        link_latency_s=None if rates is None else rates.crossing_s,
        sources=dict.fromkeys(("gpu", "link_bytes_s"), "measured"),
    )


def _rates(
    ops: Ops, host: NativeOps, formats: Iterable[str], progress: ProgressCallback | None
) -> CardRates | None:
    """What was measured of the card, now or before; None if it cannot be."""
    from localrt.quant.ops.cuda.measuring import card_rates
    from localrt.quant.ops.cuda.ops import CudaOps

    def on_step(done: int, total: int) -> None:
        if progress is not None:
            progress(Progress("measure", done, total, "rates"))

    assert isinstance(ops, CudaOps), "a card of CUDA computes by them"
    try:
        return card_rates(ops, formats, host=host, on_step=on_step)
    except LocalrtError:  # plain copies are measured then, and loading says what is wrong
        return None
