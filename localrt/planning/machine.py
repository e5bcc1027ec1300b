"""Machine profiles: the rates of disk, memory, link, kernels and GPU; and a table of GPUs by name.

``measure.py`` measures the rates of this machine. A profile tells for each rate whether it was
measured. It knows no model.

``gpus.csv`` lists common GPUs with the vendor's figures: the memory's size and rate, and arithmetic
from cores and boost clocks; among GPUs with the same name, the most common is first. Those without
PCIe are other makers' (amd.com, ark.intel.com), for llama.cpp alone. The sources are NVIDIA's
architecture papers (Turing, GA102, Ada, Blackwell) and its comparisons of GPUs and of laptops
(nvidia.com/geforce). A laptop may run its GPU at a lower clock. Links are PCIe by generation and
lanes; pinned copies reach four fifths of that rate. A made-up GPU is written
``virtual:8GB@12GB/s,256GB/s,20TFLOPS``.
"""

from __future__ import annotations

import csv
import difflib
import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from localrt import system
from localrt.common.errors import OptionError
from localrt.common.formatting import parse_size
from localrt.quant.cuda.gpu_cache import ROWS, GpuRates
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


# -- GPUs by name ----------------------------------------------------------------------------------

_VIRTUAL = re.compile(r"virtual:(?P<size>[^@]+)@(?P<link>[^,]+),(?P<memory>[^,]+),(?P<flops>[^,]+)")
_FLOPS = re.compile(r"(\d{1,30}(?:\.\d+)?|\.\d+)\s*([GTP])(?:FLOPS?|OPS?)", re.IGNORECASE)
_SCALE = {"G": 1e9, "T": 1e12, "P": 1e15}
# The share of a GPU's memory bandwidth that kernels reach.
_REACHED = 0.85
# The share of clocks for which the busiest part of a GPU's processors works: instruction issue in
# products, or tensor cores in attention. FlashAttention-2 (Dao, 2023) reports 0.5 to 0.73. One half
# agrees with published products: on an RTX 3090, a prompt of an 8B in Q6_K reaches a fifth of the
# peak of 8-bit operations in llama.cpp (pull request 8062: 3,600 tokens per second), here a sixth.
_BUSY = 0.5
# Operations of one scheduler's tensor cores per clock, 16 bits with float32 sums.
_CLOCK_OPS, _WORKSTATION_CLOCK_OPS = 128, 256
_WORKSTATION = ("T4", "Titan", "RTX A2000")
_NO_TENSOR_CORES = ("GTX", "MX450", "MX550")
# A dense layer launches ten kernels, and has two units.
_UNIT_LAUNCHES = 5


@dataclass(frozen=True, slots=True)
class GpuModel:
    """A GPU by its vendor's figures: bytes, bytes per second, and operations per second of dense
    16-bit products with float32 sums (on GeForce GPUs, half as many as with float16 sums).
    """

    name: str
    vram_bytes: int
    link_bytes_s: float
    bytes_s: float
    flops: float
    reached: float = _REACHED

    @property
    def profile(self) -> GpuProfile:
        """The rates that kernels reach on it."""
        virtual = self.reached == 1.0
        ops = _WORKSTATION_CLOCK_OPS if self.name.startswith(_WORKSTATION) else _CLOCK_OPS
        int8 = not virtual and not self.name.startswith(_NO_TENSOR_CORES)
        return GpuProfile(
            name=self.name,
            vram_bytes=self.vram_bytes,
            bytes_s=self.reached * self.bytes_s,
            flops=self.reached * self.flops,
            instructions_s=_BUSY * self.flops / ops if int8 else None,
            attention_flops=None if virtual else _BUSY * self.flops,
            call_s=0.0 if virtual else 1e-5,
        )


# GB/s of pinned copies by PCIe generation and lanes.
_LINKS = {
    "3x8": 6.2,
    "3x16": 12.5,
    "4x4": 6.2,
    "4x8": 12.5,
    "4x16": 25.0,
    "5x8": 25.0,
    "5x16": 50.0,
}

with Path(__file__).with_name("gpus.csv").open(encoding="utf-8", newline="") as _file:
    _ROWS = tuple(csv.DictReader(_file))

GPUS: Mapping[str, GpuModel] = MappingProxyType(
    {
        row["name"]: GpuModel(
            name=row["name"],
            vram_bytes=int(row["GiB"]) << 30,
            link_bytes_s=_LINKS[row["PCIe"]] * 1e9,
            bytes_s=float(row["GB/s"]) * 1e9,
            flops=float(row["TFLOPS"]) * 1e12,
        )
        for row in _ROWS
        if row["PCIe"]
    }
)
"""GPUs by name."""

DEFAULT_GPU = "RTX 4060 8GB"


def measured_profile(name: str, vram_bytes: int, rates: GpuRates) -> GpuProfile:
    """Return the profile of this machine's GPU from its measured rates."""
    known = find_gpu(name, vram_bytes)  # measured products may be faster than 16-bit attention
    return GpuProfile(
        name=name,
        vram_bytes=vram_bytes,
        bytes_s=rates.memory_bytes_s,
        flops=rates.flops,
        attention_flops=_BUSY * min(rates.flops, known.flops if known else rates.flops),
        call_s=_UNIT_LAUNCHES * rates.replay_s,
        kernels={name: KernelRate(ROWS, seconds) for name, seconds in rates.products.items()},
        busy_link=rates.busy_link,
        busy_cpu=rates.busy_cpu,
    )


# The share of a GPU's memory that a desktop leaves free, and the least that it takes.
GPU_SHARE = 0.92
_DESKTOP, _WINDOWS_DESKTOP = 800_000_000, 1_000_000_000


def beside_desktop(gpu: GpuModel, *, windows: bool = system.IS_WINDOWS) -> int:
    """Return the bytes of a GPU's memory that a desktop leaves free; a made-up GPU has none."""
    if gpu.reached == 1.0:
        return gpu.vram_bytes
    taken = max(_WINDOWS_DESKTOP if windows else _DESKTOP, (1 - GPU_SHARE) * gpu.vram_bytes)
    return gpu.vram_bytes - int(taken)


# Names of unsupported GPUs: AMD, Intel, and NVIDIA before Turing.
OTHERS = (
    r"\bRX\s?\d{3,4}|radeon|\bvega\b|instinct|\bMI\d{2,3}\b|\b[6-9]\d0M\b"
    r"|\barc\b|\biris\b|\bu?hd\sgraphics\b|\bxe\b|intel\sgraphics"
    r"|\bGTX?\s?(?:[4-9]\d\d|10\d\d)\b|\bMX[1-3]\d\d\b|\bGT\s?\d{3,4}\b"
    r"|\b(?:quadro|tesla)\s[KMP]\d|\b[KMP](?:40|100|4)\b"
)
"""A pattern that matches their names."""
_APPLE = re.compile(
    r"\b(?:apple|i?mac(?:book)?)\b[\s\w]*|(?<!tesla )\bM[1-9](?:\s*(?:pro|max|ultra))?(?![\w.])",
    re.IGNORECASE,
)


def other_gpu(text: str, memory_bytes: int | None = None) -> OtherGpu | None:
    """Return an unsupported GPU that ``text`` names, of several the one with about that memory;
    None if it names none.
    """
    if re.search(OTHERS, text, re.IGNORECASE) is None or find_gpu(text) is not None:
        return None
    words = _words(text)
    sizes = [int(word.removesuffix("gb")) for word in words if re.fullmatch(r"\d{1,6}gb", word)]
    gib = sizes[0] if sizes else memory_bytes and round(memory_bytes / (1 << 30))
    found: list[tuple[int, int, int, int]] = []
    for row in _ROWS:
        name, size = row["name"], int(row["GiB"])
        if not row["PCIe"] and set(_words(name)) <= set(words):
            apart = abs(size - gib) if gib else 0
            found.append((apart, -len(_words(name)), size, int(row["GB/s"])))
    *_, own, gb_s = min(found, default=(0, 0))
    room = memory_bytes or (own or gib or 0) << 30
    return OtherGpu(name=text.strip(), room_bytes=room or None, bytes_s=1e9 * gb_s or None)


def refuse_apple(text: str) -> None:
    """Refuse a computer or chip of Apple's, whose GPUs only llama.cpp can use.

    Raises:
        OptionError: ``text`` names one.
    """
    if (named := _APPLE.search(text)) is not None:
        raise OptionError(f"{named[0].strip()!r:.80}: Apple's GPUs are not planned")


def find_gpu(name: str, vram_bytes: int | None = None) -> GpuModel | None:
    """Find a GPU of the table by a name as drivers or people write it; None if none matches.

    Of several with one name, choose the one closest to ``vram_bytes``, else the usual one. The word
    "laptop" may be left out for a GPU that only laptops have.
    """
    return _find(_words(name), vram_bytes) or _find([*_words(name), "laptop"], vram_bytes)


def _find(wanted: list[str], vram_bytes: int | None) -> GpuModel | None:
    sizes = [word for word in wanted if re.fullmatch(r"\d+gb", word)]
    found: list[tuple[int, GpuModel]] = []
    for gpu in GPUS.values():
        *model, size = _words(gpu.name)
        if all(word in wanted for word in model) and (not sizes or sizes[0] == size):
            found.append((len(model), gpu))
    most = max((words for words, _ in found), default=0)
    gpus = [gpu for words, gpu in found if words == most]
    if vram_bytes is not None:
        gpus.sort(key=lambda gpu: abs(gpu.vram_bytes - vram_bytes))
    return gpus[0] if gpus else None


def parse_gpu(text: str) -> GpuModel:
    """Parse a GPU's name in the table, or ``virtual:SIZE@LINK,MEMORY,ARITHMETIC``.

    ``virtual:NAME`` also means the GPU of the table.

    Raises:
        OptionError: the text is neither.
    """
    if text.startswith("virtual:") and "@" in text:
        match = _VIRTUAL.fullmatch(text)
        if match is None:
            raise OptionError(
                f"{text!r:.80} is not a GPU: write it like virtual:8GB@12GB/s,256GB/s,20TFLOPS"
            )
        return GpuModel(
            text,
            parse_size(match["size"]),
            parse_bandwidth(match["link"]),
            parse_bandwidth(match["memory"]),
            _parse_flops(match["flops"]),
            reached=1.0,
        )
    refuse_apple(text)
    gpu = find_gpu(text.removeprefix("virtual:"))
    if gpu is None:
        close = difflib.get_close_matches(text.upper(), GPUS, n=3, cutoff=0.7)
        meant = f"did you mean {' or '.join(close)}? " if close else ""
        raise OptionError(
            f'no GPU {text!r:.80} in the table: {meant}write it like "RTX 4060", '
            '"RTX 4060 Ti 16GB" or "RTX 4060 Laptop" (from GTX 1630 to RTX 5090), '
            "or make one up: virtual:8GB@12GB/s,256GB/s,20TFLOPS"
        )
    return gpu


def parse_bandwidth(text: str) -> float:
    """Parse ``"12GB/s"`` or ``"900 MB/s"`` as bytes per second.

    Raises:
        OptionError: the text is not a bandwidth.
    """
    size, slash, second = text.strip().rpartition("/")
    if not slash or second.strip().lower() not in ("s", "sec"):
        raise OptionError(f"{text!r:.80} is not a bandwidth: write it like 12GB/s or 900MB/s")
    try:
        return float(parse_size(size))
    except OptionError as error:
        raise OptionError(
            f"{text!r:.80} is not a bandwidth: write it like 12GB/s or 900MB/s"
        ) from error


def _parse_flops(text: str) -> float:
    match = _FLOPS.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise OptionError(f"{text!r:.80} is not a rate of arithmetic: write it like 20TFLOPS")
    return float(match[1]) * _SCALE[match[2].upper()]


def _words(name: str) -> list[str]:
    """Split a name into lower-case words. "4060 Ti" becomes one word, as it is another GPU."""
    text = re.sub(r"(\d)\s+gb\b", r"\1gb", name.lower())
    text = re.sub(r"\b(mobile|max-q|notebook)\b", "laptop", text)
    text = re.sub(r"\b(\d{4}(?:\s*ti)?)m\b", r"\1 laptop", text)
    text = re.sub(r"(\d)\s*ti\b", r"\1ti", text)
    text = re.sub(r"(\d(?:ti)?)\s*super\b", r"\1super", text)
    text = re.sub(r"\b([gr]tx)(?=\d)", "", text)
    skipped = {"nvidia", "geforce", "gpu", "tesla", "graphics", "rtx", "gtx", "with"}
    return [word for word in re.findall(r"[a-z0-9]+", text) if word not in skipped]
