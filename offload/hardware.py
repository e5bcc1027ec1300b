"""Describes this machine: processor, memory, GPUs, and read speeds of memory and disk.

Functions are divided by cost. `probe` reads what the system already knows, in milliseconds; the
`measure_*` functions and `gpus` take up to seconds and are called only where asked for. This module
knows no model, and imports neither torch nor, outside the memory measurement, numpy.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from localrt import system
from localrt.common.cores import Cores, find_cores
from localrt.common.processes import program_path
from localrt.common.version import __version__
from localrt.offload.memory import MemoryState, memory_state

# The kernels' name for each feature, and how systems spell it.
_FEATURES = {
    "avx2": ("avx2",),
    "fma": ("fma",),
    "avx_vnni": ("avx_vnni",),
    "avx512f": ("avx512f",),
    "avx512_vnni": ("avx512_vnni",),
    "avx512_bf16": ("avx512_bf16",),
    "amx_int8": ("amx_int8",),
    "amx_bf16": ("amx_bf16",),
    "neon": ("asimd", "hw.optional.AdvSIMD"),
    "dotprod": ("asimddp", "hw.optional.arm.FEAT_DotProd"),
    "i8mm": ("i8mm", "hw.optional.arm.FEAT_I8MM"),
    "sve": ("sve",),
}
_MAKERS = {"0x1002": "AMD", "0x8086": "Intel"}  # by PCI's numbers
_LEAST_OWN_MEMORY = 2 << 30  # an integrated GPU's share of RAM is less
_MEMORY_SAMPLE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Cpu:
    """The processor. ``usable_cores`` counts logical cores that this process may run on.

    ``cores`` counts the physical ones among them, and the threads that compute by default.
    """

    name: str
    architecture: str
    physical_cores: int
    logical_cores: int
    usable_cores: int
    cores: Cores
    features: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """A GPU; memory in bytes. Only the name is known without asking the driver."""

    name: str
    memory_bytes: int | None = None
    free_bytes: int | None = None
    driver: str | None = None
    compute_capability: str | None = None


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """Sequential disk reads in bytes per second; ``method`` is how the page cache was avoided."""

    read_bytes_s: float
    method: str


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts about this machine; unmeasured ones are None."""

    system: str
    python: str
    cpu: Cpu
    memory: MemoryState
    gpus: tuple[GpuFacts, ...] = ()
    other_gpus: tuple[GpuFacts, ...] = ()
    memory_read_bytes_s: float | None = None
    disk: DiskSpeed | None = None

    def to_dict(self) -> dict[str, object]:
        """The same names as a plain dictionary."""
        return asdict(self)


def probe(root: Path = system.ROOT) -> Machine:
    """Read what the system knows at once: no driver is called and nothing is measured.

    ``root`` is where ``proc`` and ``sys`` lie; tests pass a folder of their own.
    """
    here = platform.uname()
    return Machine(
        system=f"{here.system} {here.release}",
        python=platform.python_version(),
        cpu=_cpu(root),
        memory=memory_state(root),
        gpus=_gpus_at_a_glance(root),
        other_gpus=other_gpus(root),
    )


def gpus() -> tuple[GpuFacts, ...]:
    """Ask the driver for the NVIDIA GPUs, within about a second; none without a driver."""
    query = "--query-gpu=name,memory.total,memory.free,driver_version,compute_cap"
    command = [program_path("nvidia-smi") or "", query, "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return _parse_nvidia_smi(output.stdout)


def other_gpus(root: Path = system.ROOT) -> tuple[GpuFacts, ...]:
    """GPUs that are not NVIDIA's, as the system knows them; those with memory of their own first.

    Memory is None where the GPU shares RAM, or the system does not say.
    """
    found = [GpuFacts(name, nbytes) for name, nbytes in system.display_adapters()]
    for folder in root.glob("sys/class/drm/card*/device"):
        maker, device = (_text(folder / name) for name in ("vendor", "device"))
        if maker in _MAKERS and "-" not in folder.parent.name:  # no connector
            total, used = (_text(folder / f"mem_info_vram_{what}") for what in ("total", "used"))
            own = int(total) if total and int(total) >= _LEAST_OWN_MEMORY else None
            name = f"{_MAKERS[maker]} {_pci_name(root, maker[2:], device[2:])}"
            found.append(GpuFacts(name, own, own and own - int(used or 0)))
    others = [gpu for gpu in found if "nvidia" not in gpu.name.lower()]
    return tuple(sorted(others, key=lambda gpu: -(gpu.memory_bytes or 0)))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _pci_name(root: Path, maker: str, device: str) -> str:
    """A device's name in the list of PCI's numbers that most systems have."""
    for place in ("misc", "hwdata"):
        with suppress(OSError):
            text = (root / "usr/share" / place / "pci.ids").read_text("utf-8", "replace")
            named = rf"^{maker}  .*\n(?:[\t#].*\n)*?\t{device}  (.*)"
            if found := re.search(named, text, re.MULTILINE):
                inside = re.search(r"\[(.+)\]", found[1])
                return inside[1] if inside else found[1]
    return f"GPU {maker}:{device}"


def identity() -> list[str]:
    """The hardware and versions that measured rates depend on, besides the kernels."""
    cpu = _cpu(system.ROOT)
    return [cpu.name, *cpu.features, str(cpu.cores.threads), __version__]


def measure_memory_read(threads: int, size: int = _MEMORY_SAMPLE_BYTES) -> float:
    """Bytes per second that ``threads`` threads read from memory: the best of several kernels.

    It is the floor of decoding: a token cannot take less time than its weights take to be read.
    """
    import numpy as np  # imported here: only measuring needs it

    data = np.ones(size // 4, np.float32)
    parts = np.array_split(data, threads)
    kernels = (
        lambda part: float(part @ part),
        lambda part: int(part.view(np.int32).max()),
        lambda part: int(np.bitwise_or.reduce(part.view(np.uint32))),
    )
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for kernel in kernels:
            for _ in range(3):
                started = time.perf_counter()
                list(pool.map(kernel, parts))
                best = max(best, data.nbytes / (time.perf_counter() - started))
    return best


def _cpu(root: Path) -> Cpu:
    import psutil  # takes ten milliseconds

    logical = os.cpu_count() or 1
    # Only some systems can restrict a process to some cores.
    usable = len(system.allowed_cores() or range(logical))
    name, flags = _name_and_flags(root)
    return Cpu(
        name=name or platform.machine() or "unknown processor",
        architecture=platform.machine(),
        physical_cores=psutil.cpu_count(logical=False) or logical,
        logical_cores=logical,
        usable_cores=usable,
        cores=find_cores(root),
        features=tuple(
            feature for feature, names in _FEATURES.items() if not flags.isdisjoint(names)
        ),
    )


def _name_and_flags(root: Path) -> tuple[str, set[str]]:
    """The processor's name, and its features as the system names them."""
    try:
        lines = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return system.describe_processor()
    entries: dict[str, str] = {}
    for line in lines:
        key, separator, value = line.partition(":")
        if separator:
            entries.setdefault(key.strip(), value.strip())
    flags = entries.get("flags") or entries.get("Features") or ""
    return entries.get("model name") or entries.get("Model") or "", set(flags.split())


def _gpus_at_a_glance(root: Path) -> tuple[GpuFacts, ...]:
    """The GPUs that a loaded NVIDIA driver lists in ``/proc``, by name only."""
    found = []
    for path in sorted(root.glob("proc/driver/nvidia/gpus/*/information")):
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
        found.append(GpuFacts(names[0] if names else "NVIDIA GPU"))
    return tuple(found)


def _parse_nvidia_smi(output: str) -> tuple[GpuFacts, ...]:
    found = []
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 5 or not cells[0]:
            continue
        name, total, free, driver, capability = cells
        found.append(GpuFacts(name, _mebibytes(total), _mebibytes(free), driver, capability))
    return tuple(found)


def _mebibytes(cell: str) -> int | None:
    return int(cell) << 20 if cell.isdigit() else None  # "[N/A]" on GPUs that share RAM
