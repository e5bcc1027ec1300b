"""The Linux control groups of this process: containers and services limit memory and CPU time."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path


def group_folders(root: Path, controller: str) -> tuple[tuple[int, Path], ...]:
    """Return (version, folder) of every group of ``controller`` up to the mount's root.

    A limit binds every group below it. In a container the path may name folders that only the host
    sees; the mount's own root still counts. ``root`` is where ``proc`` and ``sys`` lie.
    """
    return _folders(root, controller, read_small(root / "proc/self/cgroup"))


def read_small(path: str | Path) -> str:
    """Return a small file of ``proc`` or ``sys``, or "". Quicker than ``open``."""
    try:
        file = os.open(path, os.O_RDONLY)
        try:
            return os.fsdecode(os.read(file, 1 << 14)).strip()
        finally:
            os.close(file)
    except OSError:
        return ""


@lru_cache(16)
def _folders(root: Path, controller: str, groups: str) -> tuple[tuple[int, Path], ...]:
    found, mount = [], root / "sys/fs/cgroup"
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            version, base = 2, mount
        elif controller in controllers.split(","):
            version, base = 1, mount / controller
        else:
            continue
        names = [name for name in path.split("/") if name]
        if ".." in names:  # a group outside this cgroup namespace
            names = []
        for depth in range(len(names), -1, -1):
            found.append((version, base.joinpath(*names[:depth])))
    return tuple(found)
