"""Samples the machine twice a second in a thread: CPU, memory by owner, disks, GPU, heat, energy.

What this machine cannot tell, or does not let this user read, is None. Nothing is estimated.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from localrt.common.closing import Closing
from localrt.offload.memory import memory_state

_EVERY_S = 0.5
_FAMILY_EVERY = 10  # samples


@dataclass(slots=True)
class Samples:
    """What was sampled. ``joules`` counts the processors, and the GPUs if there are any."""

    samples: list[dict[str, Any]] = field(default_factory=list)
    joules: float | None = None
    cpu_s: float = 0.0  # of the sampling thread


class Sampler(Closing):
    """Samples until it is closed; then ``found`` is complete.

    ``owners`` maps names to process ids, whose children count too. ``clock`` gives the time since
    the start of the mix; ``root`` is where ``sys`` lies.
    """

    def __init__(
        self,
        owners: Mapping[str, int],
        clock: Callable[[], float],
        *,
        root: Path = Path("/"),
        every_s: float = _EVERY_S,
    ) -> None:
        self.found = Samples()
        self._owners = {name: _Owner(pid) for name, pid in owners.items()}
        self._clock, self._every_s = clock, every_s
        self._energy, self._gpus = Energy(root), Gpus()
        self._traffic = [_Counter(path) for path in _traffic_files(root)]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="localrt-sampling", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End sampling."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        psutil.cpu_percent()  # the share is since the last call
        before, disk = self._clock(), _disk_bytes()
        self._read_energy()
        for counter in self._traffic:
            counter.step()
        spent: list[float | None] = []
        while not self._over.wait(self._every_s):
            now, disk_now, energy = self._clock(), _disk_bytes(), self._read_energy()
            seconds = now - before
            moved: list[float | None] = [None, None]
            if disk is not None and disk_now is not None:
                moved = [(b - a) / seconds for a, b in zip(disk, disk_now, strict=True)]
            traffic = [counter.step() for counter in self._traffic]
            spent.append(energy)
            self.found.samples.append(
                {
                    "at_s": now,
                    "cpu": psutil.cpu_percent() / 100,
                    "owners": {name: each.resident() for name, each in self._owners.items()},
                    "free_bytes": memory_state().available,
                    "disk_read_bytes_s": moved[0],
                    "disk_write_bytes_s": moved[1],
                    "memory_bytes_s": _sum(traffic, seconds),
                    "gpu": self._gpus.sample(),
                    "celsius": _celsius(),
                    "watts": None if energy is None else energy / seconds,
                }
            )
            before, disk = now, disk_now
        spent.append(self._read_energy())
        self.found.joules = _sum(spent, 1.0)
        self.found.cpu_s = time.thread_time()

    def _read_energy(self) -> float | None:
        """Return the joules since the last call; None unless every part is known."""
        return _sum([self._energy.step(), *self._gpus.joules()], 1.0)


def _sum(values: Sequence[float | None], over: float) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / over if known and len(known) == len(values) else None


# -- processes and disks ---------------------------------------------------------------------------


class _Owner:
    """A process and its children, who are looked for now and then, as that takes milliseconds."""

    def __init__(self, pid: int) -> None:
        self._pid, self._family, self._calls = pid, list[psutil.Process](), 0

    def resident(self) -> int | None:
        """Return the bytes in RAM; None if the processes have ended.

        Pages that two of them share count twice: a proportional count (PSS) walks all page tables.
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


def _disk_bytes() -> tuple[int, int] | None:
    with suppress(OSError, RuntimeError):
        counts = psutil.disk_io_counters()
        if counts is not None:
            return counts.read_bytes, counts.write_bytes
    return None


def _celsius() -> float | None:
    """Return the highest temperature of the sensors."""
    read = getattr(psutil, "sensors_temperatures", dict)  # missing on some systems
    with suppress(OSError, RuntimeError):
        return max((each.current for group in read().values() for each in group), default=None)
    return None


# -- counters of the processor ---------------------------------------------------------------------


class _Counter:
    """A counter in a file. ``wraps``: the value after which it begins again at 0."""

    def __init__(self, path: Path, wraps: int | None = None) -> None:
        self._path, self._wraps = path, wraps
        self._last: int | None = None

    def step(self) -> int | None:
        """Return by how much it went on since the last call; None if that is unknown."""
        try:
            now: int | None = int(self._path.read_text())
        except (OSError, ValueError):
            now = None
        last, self._last = self._last, now
        if now is None or last is None:
            return None
        if now >= last:
            return now - last
        return None if self._wraps is None else now - last + self._wraps


class Energy:
    """The processors' own energy counters (RAPL), which usually only root may read.

    Packages count, and memory, which is a zone below its package but not part of its energy.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._counters = []
        for zone in sorted((root / "sys/class/powercap").glob("intel-rapl:*")):
            with suppress(OSError, ValueError):
                name = (zone / "name").read_text().strip()
                if name.startswith("package") or name == "dram":
                    wraps = int((zone / "max_energy_range_uj").read_text())
                    self._counters.append(_Counter(zone / "energy_uj", wraps))

    def step(self) -> float | None:
        """Return the joules since the last call."""
        return _sum([counter.step() for counter in self._counters], 1e6)


def _traffic_files(root: Path) -> list[Path]:
    """The memory traffic of each L3 cache (resctrl), where it is mounted."""
    return sorted((root / "sys/fs/resctrl/mon_data").glob("mon_L3_*/mbm_total_bytes"))


class Gpus:
    """NVIDIA's GPUs, if its library for Python (``nvidia-ml-py``) is installed."""

    def __init__(self) -> None:
        self._library: ModuleType | None = None
        self._handles: list[Any] = []
        self._last: list[float | None] = []
        try:
            import pynvml

            pynvml.nvmlInit()
            number = pynvml.nvmlDeviceGetCount()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(number)]
            self._library = pynvml
        except ImportError:
            return
        except pynvml.NVMLError:  # no driver
            return

    def sample(self) -> dict[str, float | None] | None:
        """Return the busiest GPU's share, the bytes in use and the watts of all; None without."""
        if self._library is None or not self._handles:
            return None
        busy = [self._ask("nvmlDeviceGetUtilizationRates", each, "gpu") for each in self._handles]
        used = [self._ask("nvmlDeviceGetMemoryInfo", each, "used") for each in self._handles]
        watts = [self._ask("nvmlDeviceGetPowerUsage", each) for each in self._handles]
        known = [each for each in busy if each is not None]
        return {
            "busy": max(known) / 100 if known else None,
            "bytes": _sum(used, 1.0),
            "watts": _sum(watts, 1e3),
        }

    def joules(self) -> list[float | None]:
        """Return each GPU's joules since the last call."""
        now = [self._ask("nvmlDeviceGetTotalEnergyConsumption", each) for each in self._handles]
        last, self._last = self._last or [None] * len(now), now
        pairs = zip(last, now, strict=True)
        return [None if a is None or b is None else (b - a) / 1000 for a, b in pairs]

    def _ask(self, call: str, handle: Any, name: str | None = None) -> float | None:
        assert self._library is not None
        try:
            found = getattr(self._library, call)(handle)
        except self._library.NVMLError:  # this GPU does not say
            return None
        return float(found if name is None else getattr(found, name))
