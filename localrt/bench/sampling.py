"""Samples the machine: energy counters, and in a thread CPU, memory by owner, disks, GPU,
temperature.

Energy in joules is that of the whole machine, other programs included: of CPUs and their memory
(RAPL on Linux, by default readable only by root) and of NVIDIA GPUs (NVML). Values that this
machine does not report, or this user may not read, are None. Nothing is estimated.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from localrt import system
from localrt.bench import gpu
from localrt.common.closing import Closing
from localrt.offload.memory import memory_state

Energy = Mapping[str, tuple[float, float]]
"""By counter name: its joules, and the joules at which it wraps around to 0."""

_NO_END = float("inf")


def read_energy(root: Path = system.ROOT) -> Energy:
    """Read every counter that this process may read; takes much less than a millisecond."""
    found: dict[str, tuple[float, float]] = {}
    for zone in root.glob("sys/class/powercap/intel-rapl:*"):
        try:
            # Subzones of a package, and the platform zone that contains it, would count energy
            # twice.
            name = _text(zone / "name")
            if not name.startswith("package") and name != "dram":
                continue
            joules, end = (_text(zone / f"{name}_uj") for name in ("energy", "max_energy_range"))
            found[zone.name] = float(joules) / 1e6, float(end) / 1e6
        except (OSError, ValueError):
            continue
    found |= {f"gpu {index}": (joules, _NO_END) for index, joules in gpu.joules().items()}
    return found


def joules_between(before: Energy, after: Energy) -> float | None:
    """Return the joules between two readings with at most one counter wrap; None if unknown."""
    both = before.keys() & after.keys()
    if not both:
        return None
    used = {name: after[name][0] - before[name][0] for name in both}
    return sum(joules if joules >= 0 else joules + after[name][1] for name, joules in used.items())


def _text(path: Path) -> str:
    return path.read_text(encoding="ascii").strip()


# -- samples ---------------------------------------------------------------------------------------

_EVERY_S = 0.5
_RATES = ("disk_read_bytes_s", "disk_write_bytes_s")
_FAMILY_EVERY = 10  # samples between searches for child processes


@dataclass(slots=True)
class Samples:
    """The samples; ``counters`` names the counters included in ``joules``."""

    samples: list[dict[str, Any]] = field(default_factory=list)
    joules: float | None = None
    counters: list[str] = field(default_factory=list)
    cpu_s: float = 0.0  # CPU time of the sampling thread


class Sampler(Closing):
    """Samples until it is closed; then ``found`` is complete.

    ``owners`` maps names to process ids, whose children count too. ``clock`` returns the time since
    the start of the mix.
    """

    def __init__(self, owners: Mapping[str, int], clock: Callable[[], float]) -> None:
        self.found = Samples()
        self._owners = {name: _Owner(pid) for name, pid in owners.items()}
        self._clock = clock
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="localrt-sampling", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop sampling."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        psutil.cpu_percent()  # starts the interval of the next call
        before_s, before, energy = self._clock(), self._counts(), read_energy()
        self.found.counters = sorted(energy)
        while True:
            over = self._over.wait(_EVERY_S)
            now_s, now, energy_now = self._clock(), self._counts(), read_energy()
            joules = joules_between(energy, energy_now)
            if joules is not None:
                self.found.joules = (self.found.joules or 0.0) + joules
            if over:  # too soon after the last sample for rates
                break
            seconds = now_s - before_s
            rates = {
                f"{name}_s": (value - before[name]) / seconds if name in before else None
                for name, value in now.items()
            }
            self.found.samples.append(
                {
                    "at_s": now_s,
                    "cpu": psutil.cpu_percent() / 100,
                    "owners": {name: each.resident() for name, each in self._owners.items()},
                    "free_bytes": memory_state().available,
                    **dict.fromkeys(_RATES),
                    **rates,
                    "gpu": gpu.use(),
                    "celsius": _celsius(),
                    "watts": None if joules is None else joules / seconds,
                }
            )
            before_s, before, energy = now_s, now, energy_now
        self.found.cpu_s = time.thread_time()

    def _counts(self) -> dict[str, int]:
        """Return the byte counters of the disks, if they can be read."""
        with suppress(OSError, RuntimeError):
            if disk := psutil.disk_io_counters():
                return {"disk_read_bytes": disk.read_bytes, "disk_write_bytes": disk.write_bytes}
        return {}


class _Owner:
    """A process and its children, which are searched for only now and then, since that takes
    milliseconds.
    """

    def __init__(self, pid: int) -> None:
        self._pid, self._family, self._calls = pid, list[psutil.Process](), 0

    def resident(self) -> int | None:
        """Return the bytes in RAM; None if the processes have ended.

        Pages shared by two of them count twice, since a proportional count (PSS) would walk all
        page tables.
        """
        with suppress(psutil.Error):
            if self._calls % _FAMILY_EVERY == 0:
                process = psutil.Process(self._pid)
                self._family = [process, *process.children(recursive=True)]
        self._calls += 1
        found = []
        for each in self._family:
            with suppress(psutil.Error):
                found.append(int(each.memory_info().rss))
        return sum(found) if found else None


def _celsius() -> float | None:
    """Return the highest temperature of the sensors."""
    read = getattr(psutil, "sensors_temperatures", dict)  # missing on some systems
    with suppress(OSError, RuntimeError):
        return max((each.current for group in read().values() for each in group), default=None)
    return None
