"""Which cores compute by default: a thread for each physical performance core.

Threads are not bound to these cores. Systems put busy threads on fast cores by themselves, and work
is handed out in pieces, so a thread on a slow or busy core takes fewer of them. A bound thread
could not make way for another program.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from localrt import system
from localrt.common.control_groups import group_folders, read_small

# How much faster than the others the cores of another kind are, by each file that says so. A higher
# clock alone makes none: AMD's compact cores do the same work a cycle at up to 1.55 times less.
_KINDS = (("cpu_capacity", 1.3), ("cpufreq/cpuinfo_max_freq", 1.6))


@dataclass(frozen=True, slots=True)
class Cores:
    """Physical cores that this process may use; if they are of one kind, all are ``performance``.

    ``threads`` is how many compute by default: fewer than ``performance`` only if the process's
    control group is limited to less CPU time.
    """

    performance: int
    efficiency: int
    threads: int


def default_threads() -> int:
    """Return the number of threads that compute if the user names none."""
    return find_cores().threads


def find_cores(root: Path = system.ROOT, allowed: Set[int] | None = None) -> Cores:
    """Return the cores of this process.

    ``root`` is where ``proc`` and ``sys`` lie, ``allowed`` the logical cores that the process may
    use; tests pass their own.
    """
    allowed = system.allowed_cores() if allowed is None else allowed
    if allowed is not None:
        fast, slow = _linux_cores(root, frozenset(allowed))
    else:
        fast, slow = system.count_cores()
    if not fast:
        fast, slow = slow or os.cpu_count() or 1, 0
    times = min(_cpu_limits(root), default=fast)
    return Cores(fast, slow, threads=max(1, min(fast, round(times))))


@lru_cache(16)  # passes ask again and again, as the limits may change
def _linux_cores(root: Path, allowed: frozenset[int]) -> tuple[int, int]:
    folder = root / "sys/devices/system/cpu"

    def physical(logical: Set[int]) -> int:
        files = (folder / f"cpu{number}/topology/thread_siblings_list" for number in logical)
        return len({read_small(file) or str(file) for file in files})

    fast = _fast(root, folder, allowed)
    return physical(fast), physical(allowed - fast)


def _fast(root: Path, folder: Path, allowed: Set[int]) -> Set[int]:
    """Return the logical cores of the fast kind: above the widest step between speeds."""
    if performance := read_small(root / "sys/devices/cpu_core/cpus"):  # Intel's, of two kinds
        return allowed & _numbers(performance)
    for name, least in _KINDS:
        speeds = {number: read_small(folder / f"cpu{number}" / name) for number in allowed}
        known = {number: int(text) for number, text in speeds.items() if text.isdigit()}
        steps = [(b / a, b) for a, b in pairwise(sorted(set(known.values()))) if a]
        if len(known) == len(allowed) and steps and max(steps)[0] >= least:
            return {number for number, speed in known.items() if speed >= max(steps)[1]}
    return allowed


def _numbers(text: str) -> set[int]:
    """Parse a list as Linux writes it: ``0-3,8``."""
    ranges = (part.partition("-") for part in text.split(","))
    return {n for first, _, last in ranges for n in range(int(first), int(last or first) + 1)}


def _cpu_limits(root: Path) -> Iterator[float]:
    """Return how many cores' time each control group of this process may use, if limited."""
    for version, folder in group_folders(root, "cpu"):
        names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        texts = [read_small(f"{folder}/{name}") for name in names]
        with suppress(ValueError):  # not there, or "max"
            quota, period = map(int, " ".join(texts).split())
            if quota > 0 and period > 0:
                yield quota / period


def giving_way(name: str) -> ThreadPoolExecutor:
    """Return an executor with one such thread. Threads that it starts give way too on Linux."""
    return ThreadPoolExecutor(1, thread_name_prefix=name, initializer=system.give_way)
