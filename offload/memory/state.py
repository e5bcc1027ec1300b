"""How much RAM there is, and how much of it this process can still take.

A limit of the container or cgroup counts as much as the RAM that is there: both bound what is
available.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# cgroup v1 writes "no limit" as the largest page-aligned 64-bit number.
_UNLIMITED = 1 << 60


@dataclass(frozen=True, slots=True)
class MemoryState:
    """RAM in bytes as this process sees it; ``limit`` is the tightest cgroup limit, if any."""

    total: int
    available: int
    limit: int | None = None


def memory_state(root: Path = Path("/")) -> MemoryState:
    """RAM that is there and that this process can still take, cgroup v1 and v2 limits included.

    ``root`` is where ``proc`` and ``sys`` lie; tests pass a folder of their own.
    """
    total, available = _machine(root)
    limit: int | None = None
    for group_limit, used in _cgroup_levels(root):
        limit = group_limit if limit is None else min(limit, group_limit)
        available = min(available, max(0, group_limit - used))
    if limit is not None and limit >= total:
        limit = None
    return MemoryState(total if limit is None else limit, available, limit)


def _machine(root: Path) -> tuple[int, int]:
    """Bytes of RAM, and those that are free or soon can be; from Linux without a package's help."""
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


def _cgroup_levels(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes in use that cannot be reclaimed) of every limited cgroup this process is in."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mount = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit_file, usage_file, prefix = mount, "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            base, limit_file = mount / "memory", "memory.limit_in_bytes"
            usage_file, prefix = "memory.usage_in_bytes", "total_"
        else:
            continue
        # A limit binds every group below it. In a container the path may name folders that only
        # the host sees: those are skipped, and the mount's own root still counts.
        names = [name for name in path.split("/") if name]
        if ".." in names:  # a group outside this cgroup namespace
            names = []
        for depth in range(len(names), -1, -1):
            folder = base.joinpath(*names[:depth])
            limit = _read_number(folder / limit_file)
            if limit is not None and limit < _UNLIMITED:
                used = _read_number(folder / usage_file) or 0
                yield limit, max(0, used - _reclaimable(folder / "memory.stat", prefix))


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # not there, or "max"
        return None


def _reclaimable(stat: Path, prefix: str) -> int:
    """Bytes of page cache, which the kernel gives back before it refuses memory.

    Mapped pages are left out: they are programs and libraries at work, and would be read again.
    """
    try:
        lines = (line.split() for line in stat.read_text().splitlines())
        values = {name: int(value) for name, value in lines}
    except (OSError, ValueError):
        return 0
    cached = sum(values.get(f"{prefix}{name}", 0) for name in ("active_file", "inactive_file"))
    # Shared memory is mapped, and counted with files, but on no list of file pages.
    shared = values.get(f"{prefix}shmem", 0)
    mapped = values.get("file_mapped", values.get(f"{prefix}mapped_file", 0))
    return max(0, cached - max(0, mapped - shared))
