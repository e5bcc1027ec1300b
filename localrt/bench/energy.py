"""Reads energy counters in joules: of CPUs and their memory (RAPL, Linux), and NVIDIA GPUs (NVML).

They count what the whole machine takes, other programs included. Linux shows RAPL to the
administrator only, unless it was opened to others.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Mapping
from pathlib import Path

Energy = Mapping[str, tuple[float, float]]
"""A counter's joules, and the joules at which it starts again from 0, by the counter's name."""

_NO_END = float("inf")


def read_energy(root: Path = Path("/")) -> Energy:
    """Read every counter that this process may read; takes well under a millisecond."""
    found: dict[str, tuple[float, float]] = {}
    for zone in root.glob("sys/class/powercap/intel-rapl:*"):
        try:
            # Other parts of a package, and the platform that holds it, would count energy twice.
            name = _text(zone / "name")
            if not name.startswith("package") and name != "dram":
                continue
            joules, end = (_text(zone / f"{name}_uj") for name in ("energy", "max_energy_range"))
            found[zone.name] = float(joules) / 1e6, float(end) / 1e6
        except (OSError, ValueError):
            continue
    library = nvml()
    if library is not None:
        count, millijoules, device = ctypes.c_uint(), ctypes.c_ulonglong(), ctypes.c_void_p()
        library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for index in range(count.value):
            library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device))
            if not library.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(millijoules)):
                found[f"gpu {index}"] = millijoules.value / 1e3, _NO_END
    return found


def joules_between(before: Energy, after: Energy) -> float | None:
    """Return the joules between two readings, at most one turn of a counter; None without any."""
    both = before.keys() & after.keys()
    if not both:
        return None
    used = {name: after[name][0] - before[name][0] for name in both}
    return sum(joules if joules >= 0 else joules + after[name][1] for name, joules in used.items())


def _text(path: Path) -> str:
    return path.read_text(encoding="ascii").strip()


@functools.cache
def nvml() -> ctypes.CDLL | None:
    """Return NVIDIA's library for the state of GPUs; None where there is none."""
    try:
        library = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
        known = hasattr(library, "nvmlDeviceGetTotalEnergyConsumption")
        return library if known and library.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):
        return None
