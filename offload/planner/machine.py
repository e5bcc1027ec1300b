"""A machine in the numbers that time depends on: disk, memory, link, kernels, GPU.

Where the numbers come from is another's business: ``measure.py`` for this machine, ``gpus.py`` for
one that is not here. A profile says of each whether it was measured. It knows no model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from localrt.quant.formats import FORMATS

_TYPICAL_CORES = 8


@dataclass(frozen=True, slots=True)
class KernelRate:
    """Seconds per weight of a product with ``rows`` rows at once, for a few numbers of rows.

    Weights come from memory: reading them is part of it. For attention a weight is one
    multiply-accumulate of one row.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.seconds) or not self.rows:
            raise ValueError(f"{len(self.rows)} numbers of rows, {len(self.seconds)} rates")
        if list(self.rows) != sorted(set(self.rows)) or min(self.seconds) <= 0:
            raise ValueError("rows must ascend and rates be above zero")

    def at(self, rows: int) -> float:
        """Seconds per weight: straight lines between what was measured, in proportion beyond."""
        if rows <= self.rows[0]:
            return self.seconds[0]
        points = list(zip(self.rows, self.seconds, strict=True))
        for (low, before), (high, after) in itertools.pairwise(points):
            if rows <= high:
                return before + (after - before) * (rows - low) / (high - low)
        return self.seconds[-1] * rows / self.rows[-1]

    def slower(self, times: float) -> KernelRate:
        """With ``times`` the seconds."""
        return KernelRate(self.rows, tuple(times * s for s in self.seconds))

    def scaled(self, bits: float) -> KernelRate:
        """For weights of ``bits`` times the bits: few rows wait for memory, many for arithmetic."""
        return KernelRate(
            self.rows,
            tuple(
                s * (bits if rows <= 4 else 1.0)
                for rows, s in zip(self.rows, self.seconds, strict=True)
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProfile:
    """A GPU: memory, and what copies and kernels reach of it, in bytes and operations.

    ``call_s`` is what a unit's kernels take beside their work. ``kernels`` are rates by format, as
    they were measured; without any, products follow from ``bytes_s`` and ``flops``. While the CPU
    reads RAM too, copies over the link have ``busy_link`` of their rate, and the CPU ``busy_cpu``
    of its own; None is not known.
    """

    name: str
    vram_bytes: int
    bytes_s: float
    flops: float
    call_s: float = 1e-5
    kernels: Mapping[str, KernelRate] = field(default_factory=dict)
    busy_link: float | None = None
    busy_cpu: float | None = None

    def __post_init__(self) -> None:
        for name in ("vram_bytes", "bytes_s", "flops"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above zero, is {getattr(self, name)}")

    def kernel(self, format: str) -> KernelRate | None:
        """The rate for a format, as ``MachineProfile.kernel``; None where nothing was measured."""
        return _rate_of(self.kernels, format) if self.kernels else None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineProfile:
    """Rates in bytes and operations per second, times in seconds.

    ``kernels`` holds a rate for each format that was measured; others follow from the nearest by
    their bits. ``ssd_cpu_s`` is processor time per byte read, of one thread. ``call_s`` is what a
    unit costs beside its arithmetic, ``token_s`` what a pass costs beside its units, for each entry
    of the vocabulary. ``sources`` says of each figure whether it was measured, was given, or is
    typical, as a GPU's published figures are.
    """

    name: str
    ssd_bytes_s: float
    ram_bytes_s: float
    kernels: Mapping[str, KernelRate]
    attention: KernelRate
    threads: int = 1
    ssd_cpu_s: float = 0.0
    ssd_latency_s: float = 1.5e-4
    call_s: float = 1.5e-5
    token_s: float = 2e-9
    link_bytes_s: float | None = None
    link_latency_s: float = 1e-5
    gpu: GpuProfile | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("ssd_bytes_s", "ram_bytes_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above zero, is {getattr(self, name)}")
        if self.gpu is not None and not (self.link_bytes_s and self.link_bytes_s > 0):
            raise ValueError("a machine with a GPU has a link to it: link_bytes_s is missing")

    def kernel(self, format: str) -> KernelRate:
        """The rate for a format: its own, or that of the measured one with the nearest bits."""
        return _rate_of(self.kernels, format)

    def with_cpu(self, times: float) -> MachineProfile:
        """The same where computing on the CPU takes ``times`` as long."""
        kernels = {name: rate.slower(times) for name, rate in self.kernels.items()}
        attention, call_s = self.attention.slower(times), self.call_s * times
        return replace(self, kernels=kernels, attention=attention, call_s=call_s)

    def with_ram_speed(self, ram_bytes_s: float) -> MachineProfile:
        """The same with other memory: products of a few rows wait for it."""
        times = self.ram_bytes_s / ram_bytes_s
        kernels = {name: rate.scaled(times) for name, rate in self.kernels.items()}
        return replace(self, kernels=kernels, ram_bytes_s=ram_bytes_s)

    def with_cores(self, cores: int) -> MachineProfile:
        """The same with so many cores: products of many rows wait for them."""
        times = self.threads / cores
        kernels = {n: rate.slower(times).scaled(1 / times) for n, rate in self.kernels.items()}
        attention = self.attention.slower(times)
        return replace(self, kernels=kernels, attention=attention, threads=cores)

    def without_gpu(self) -> MachineProfile:
        """The same with nothing but its processor."""
        return replace(self, gpu=None, link_bytes_s=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def typical_machine(
    *, ram_bytes_s: float = 41e9, cores: int = 8, ssd_bytes_s: float = 2e9
) -> MachineProfile:
    """A desktop, by default with two channels of DDR4-3200 and an NVMe disk: what was not measured.

    A few rows wait for memory; with many the cores count.
    """
    each = _TYPICAL_CORES / cores

    def rate(bits: float) -> KernelRate:
        read = max(bits / 8 / (0.8 * ram_bytes_s), 6.4e-12 * each)
        many = tuple(max(read, s * each) for s in (6.4e-11, 2.1e-10, 1.4e-9))
        return KernelRate((1, 4, 16, 64, 512), (read, 1.1 * read, *many))

    return MachineProfile(
        name="typical desktop",
        ssd_bytes_s=ssd_bytes_s,
        ram_bytes_s=ram_bytes_s,
        kernels={name: rate(_bits(name)) for name in ("int4-g32", "q4_k", "q6_k", "q8_0", "bf16")},
        attention=KernelRate((1, 64), (4e-11 * each, 1e-11 * each)),
        threads=cores,
        ssd_cpu_s=1e-10,
        sources=dict.fromkeys(("ssd_bytes_s", "ram_bytes_s", "kernels", "cores"), "typical"),
    )


def _rate_of(kernels: Mapping[str, KernelRate], format: str) -> KernelRate:
    if format in kernels:
        return kernels[format]
    wanted = _bits(format)
    nearest = min(kernels, key=lambda name: abs(math.log(_bits(name) / wanted)))
    return kernels[nearest].scaled(wanted / _bits(nearest))


def _bits(format: str) -> float:
    known = FORMATS.get(format)
    return 16.0 if known is None else known.bits_per_weight
