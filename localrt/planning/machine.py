"""Describes a machine by its rates: disk, memory, link, kernels, GPU.

``measure.py`` measures the rates of this machine; ``gpus.py`` has other GPUs. A profile tells for
each rate whether it was measured. It knows no model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from localrt.quant.formats import FORMATS

_TYPICAL_CORES = 8


@dataclass(frozen=True, slots=True)
class KernelRate:
    """Seconds per weight of a matrix product, for several numbers of rows at once.

    This includes reading the weights from memory. For attention a weight is one
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
        """Return the seconds per weight: linear between measured rows, proportional beyond."""
        if rows <= self.rows[0]:
            return self.seconds[0]
        points = list(zip(self.rows, self.seconds, strict=True))
        for (low, before), (high, after) in itertools.pairwise(points):
            if rows <= high:
                return before + (after - before) * (rows - low) / (high - low)
        return self.seconds[-1] * rows / self.rows[-1]

    def slower(self, times: float) -> KernelRate:
        """Return a rate with ``times`` the seconds."""
        return KernelRate(self.rows, tuple(times * s for s in self.seconds))

    def scaled(self, bits: float) -> KernelRate:
        """Scale to ``bits`` times the bits: only up to 4 rows are memory-bound and slow down."""
        return KernelRate(
            self.rows,
            tuple(
                s * (bits if rows <= 4 else 1.0)
                for rows, s in zip(self.rows, self.seconds, strict=True)
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProfile:
    """A GPU: its memory, and the bytes and operations per second that its kernels reach.

    ``call_s`` is the overhead of a unit's kernels. ``kernels`` are measured rates by format;
    without any, the times of products follow from ``bytes_s`` and ``flops``, those of packed
    weights from ``instructions_s``, the warps' instruction rate for 8-bit tensor cores (None: there
    are none). ``attention_flops`` are those of attention; None means ``flops``. While copies and
    the CPU both read RAM, copies reach ``busy_link`` of their rate, and the CPU ``busy_cpu`` of its
    own; None means unknown.
    """

    name: str
    vram_bytes: int
    bytes_s: float
    flops: float
    instructions_s: float | None = None
    attention_flops: float | None = None
    call_s: float = 1e-5
    kernels: Mapping[str, KernelRate] = field(default_factory=dict)
    busy_link: float | None = None
    busy_cpu: float | None = None

    def __post_init__(self) -> None:
        for name in ("vram_bytes", "bytes_s", "flops"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above zero, is {getattr(self, name)}")

    def kernel(self, format: str) -> KernelRate | None:
        """Return the rate for a format, as ``MachineProfile.kernel``; None if none was measured."""
        return _rate_of(self.kernels, format) if self.kernels else None


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherGpu:
    """A GPU that only llama.cpp can use. ``room_bytes`` of its own memory can be had; None means
    that it has none, or that nobody knows. ``bytes_s`` is its maker's figure, if there is one.
    """

    name: str
    room_bytes: int | None = None
    bytes_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineProfile:
    """A machine's rates in bytes and operations per second, and times in seconds.

    ``kernels`` has the rate of each measured format; other formats are scaled by their bits from
    the nearest one. ``ssd_cpu_s``: one thread's CPU time per byte read. ``call_s``: a unit's
    overhead. ``shared_s``: the host's time for a layer that CPU and GPU share, if the host starts
    both, or for a dense layer that is streamed to the GPU; ``recorded_s``: for a mixture's layer
    that they share in a recorded pass. ``token_s``: a pass's overhead besides its units, per entry
    of the vocabulary. ``sources`` tells for each figure whether it was measured, given,
    or typical (like a GPU's published figures).
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
    shared_s: float = 1.2e-4
    recorded_s: float = 1e-5
    token_s: float = 2e-9
    link_bytes_s: float | None = None
    link_latency_s: float = 1e-5
    gpu: GpuProfile | None = None
    other_gpu: OtherGpu | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("ssd_bytes_s", "ram_bytes_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above zero, is {getattr(self, name)}")
        if self.gpu is not None and not (self.link_bytes_s and self.link_bytes_s > 0):
            raise ValueError("a machine with a GPU has a link to it: link_bytes_s is missing")

    def kernel(self, format: str) -> KernelRate:
        """Return the rate for a format; an unmeasured one is scaled from the format with the
        nearest bits.
        """
        return _rate_of(self.kernels, format)

    def with_cpu(self, times: float) -> MachineProfile:
        """Return the machine with a CPU that takes ``times`` times as long to compute."""
        kernels = {name: rate.slower(times) for name, rate in self.kernels.items()}
        return replace(
            self,
            kernels=kernels,
            attention=self.attention.slower(times),
            call_s=self.call_s * times,
            shared_s=self.shared_s * times,
            recorded_s=self.recorded_s * times,
        )

    def with_ram_speed(self, ram_bytes_s: float) -> MachineProfile:
        """Return the machine with another RAM speed, which scales products of a few rows."""
        times = self.ram_bytes_s / ram_bytes_s
        kernels = {name: rate.scaled(times) for name, rate in self.kernels.items()}
        return replace(self, kernels=kernels, ram_bytes_s=ram_bytes_s)

    def with_cores(self, cores: int) -> MachineProfile:
        """Return the machine with ``cores`` cores, which scales products of many rows."""
        times = self.threads / cores
        kernels = {n: rate.slower(times).scaled(1 / times) for n, rate in self.kernels.items()}
        attention = self.attention.slower(times)
        return replace(self, kernels=kernels, attention=attention, threads=cores)

    def without_gpu(self) -> MachineProfile:
        """Return the machine without its GPU."""
        return replace(self, gpu=None, link_bytes_s=None)

    def to_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        return asdict(self)


def typical_machine(
    *, ram_bytes_s: float = 41e9, cores: int = 8, ssd_bytes_s: float = 2e9
) -> MachineProfile:
    """Return a typical desktop, for rates not measured; by default dual DDR4-3200 and an NVMe disk.

    The speed of a few rows depends on the memory, that of many rows on the cores.
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
