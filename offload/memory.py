"""Measures RAM: its size, this process's use, and whether other programs need some.

A limit of the container or cgroup binds in any case. Without a budget from the user, the desktop
keeps some room. The memory of helper processes counts as this one's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from localrt import system
from localrt.common.control_groups import group_folders

# cgroup v1 writes "no limit" as the largest page-aligned 64-bit number.
_UNLIMITED = 1 << 60
_LEAST_OTHERS = 4 << 20  # fewer bytes of others may be the kernel's counting in batches


@dataclass(frozen=True, slots=True)
class MemoryState:
    """RAM in bytes as this process sees it; ``limit`` is the tightest cgroup limit, if any.

    ``shared``: other processes take of what is ``available``, too.
    """

    total: int
    available: int
    limit: int | None = None
    shared: bool = True


def memory_state(root: Path = system.ROOT, own: int | None = None) -> MemoryState:
    """Read total RAM and what this process can still take, within cgroup v1 and v2 limits.

    ``root`` is where ``proc`` and ``sys`` lie, ``own`` the unshared memory of this process and its
    helpers; tests pass their own.
    """
    total, available = _machine(root)
    limit, shared = None, True
    for group_limit, used, unshared in _cgroup_levels(root):
        if own is None:
            own = system.unshared_nbytes(os.getpid()) + helpers_nbytes()
        limit = group_limit if limit is None else min(limit, group_limit)
        if (room := max(0, group_limit - used)) <= available:
            available, shared = room, unshared > own + _LEAST_OTHERS
    if limit is not None and limit >= total:
        limit = None
    return MemoryState(total if limit is None else limit, available, limit, shared)


def _machine(root: Path) -> tuple[int, int]:
    """Total bytes of RAM, and bytes that are or can be freed; on Linux without extra packages."""
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
        sizes = {
            name: int(rest.split()[0]) << 10 for name, _, rest in (x.partition(":") for x in lines)
        }
        return sizes["MemTotal"], sizes["MemAvailable"]
    except (OSError, ValueError, LookupError):
        import psutil

        machine = psutil.virtual_memory()
        return machine.total, machine.available


def _cgroup_levels(root: Path) -> Iterator[tuple[int, int, int]]:
    """(limit, bytes in use that cannot be reclaimed, unshared memory of all processes) of every
    limited cgroup this process is in.
    """
    limit_files: tuple[str, ...]
    for version, folder in group_folders(root, "memory"):
        if version == 2:
            # Above memory.high the kernel slows the processes down until they give memory back.
            limit_files, usage_file, prefix = ("memory.max", "memory.high"), "memory.current", ""
        else:
            limit_files, prefix = ("memory.limit_in_bytes",), "total_"
            usage_file = "memory.usage_in_bytes"
        limits = [_read_number(folder / name) for name in limit_files]
        limit = min((each for each in limits if each is not None), default=_UNLIMITED)
        if limit < _UNLIMITED:
            used, stat = _read_number(folder / usage_file) or 0, _read_stat(folder / "memory.stat")
            unshared = stat.get("anon", stat.get("total_rss", 0))
            yield limit, max(0, used - _reclaimable(stat, prefix)), unshared


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not there, or "max"
        return None


def _read_stat(path: Path) -> dict[str, int]:
    try:
        lines = (line.split() for line in path.read_text(encoding="utf-8").splitlines())
        return {name: int(value) for name, value in lines}
    except (OSError, ValueError):
        return {}


def _reclaimable(values: Mapping[str, int], prefix: str) -> int:
    """Bytes of page cache, which the kernel gives back before it refuses memory.

    Mapped pages do not count: running programs would read them again.
    """
    cached = sum(values.get(f"{prefix}{name}", 0) for name in ("active_file", "inactive_file"))
    # Shared memory is mapped, and counted with files, but on no list of file pages.
    shared = values.get(f"{prefix}shmem", 0)
    mapped = values.get("file_mapped", values.get(f"{prefix}mapped_file", 0))
    return max(0, cached - max(0, mapped - shared))


# Left to the desktop if the user sets no budget.
_DESKTOP_SHARE = 0.1
_MOST_DESKTOP_BYTES = 2 << 30
_MODELS_SHARE = 0.85  # of all RAM; the rest is the system's and other programs'
# What counting in pages and the system's own bookkeeping may take within a hard limit.
_LIMIT_MARGIN = 6 << 20
HELPERS: set[int] = set()
"""Ids of processes that work for this one alone: their memory counts as its own."""


def helpers_nbytes() -> int:
    """The unshared memory of ``HELPERS``, in bytes; 0 if the system does not say."""
    return sum(map(system.unshared_nbytes, tuple(HELPERS)))


def current_rss() -> int:
    """Bytes of this process and its helpers that are in RAM."""
    return system.resident_nbytes() + helpers_nbytes()


def peak_rss() -> int:
    """Bytes of this process's highest resident set plus its helpers' present memory."""
    return system.peak_nbytes() + helpers_nbytes()


def share_for_models(total: int | None = None) -> int:
    """The bytes of a PC's RAM that recommendations count on, whatever is free at this moment;
    ``total``: its RAM, by default this PC's or what this process may have of it.
    """
    if total is None:
        state = memory_state()
        total = state.total if state.limit is None else min(state.total, state.limit)
    return int(_MODELS_SHARE * total)


def ram_budget(ram: int | None, *, state: MemoryState | None = None, rss: int | None = None) -> int:
    """Bytes that this process may take in all, including what it already has.

    ``ram`` is the user's budget, if set.
    """
    state = memory_state() if state is None else state
    rss = current_rss() if rss is None else rss
    available = state.available + rss
    if state.limit is not None:
        available -= _LIMIT_MARGIN
    elif ram is None:
        available -= min(_MOST_DESKTOP_BYTES, int(_DESKTOP_SHARE * state.total))
    return max(0, available if ram is None else min(ram, available))


def pinnable_nbytes() -> int | None:
    """Bytes of RAM that may be pinned for a GPU's copies; None where the system sets no limit."""
    return system.pinnable_nbytes(memory_state().total)


_INTERVAL_S = 0.5
# Below this the system begins to swap, and to drop the pages of programs at work.
_LEAST_FREE = 256 << 20
_LEAST_FREE_ALONE = 2 << 20  # within a cgroup whose limit applies to us alone
_SHARED_PART = 8  # within one with others, which grow between two looks: this part of the limit
_STEP = 8 << 20  # so as not to evict again for every megabyte
_LEAST_FREE_VRAM = 150 << 20


class MemoryPressure:
    """Called before passes; returns how many bytes of RAM and GPU memory others need now."""

    def __init__(self, free_vram: Callable[[], int | None]) -> None:
        self._free_vram = free_vram
        self._asked = time.monotonic()

    def __call__(self) -> tuple[int, int]:
        """(RAM, VRAM) in bytes; negative numbers are free again."""
        now = time.monotonic()
        if now - self._asked < _INTERVAL_S:
            return 0, 0
        self._asked = now
        state = memory_state()
        least = _LEAST_FREE
        if state.limit is not None:
            least = min(least, state.limit // _SHARED_PART) if state.shared else _LEAST_FREE_ALONE
        free = self._free_vram()
        vram = 0 if free is None else _needed(free, _LEAST_FREE_VRAM)
        return _needed(state.available, least), vram


def _needed(free: int, least: int) -> int:
    if free < least:
        return -(-(least - free) // _STEP) * _STEP
    # Half of what is free beyond a good reserve may be taken again.
    return min(0, 2 * least + _STEP - free) // 2
