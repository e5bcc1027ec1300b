"""The Linux control groups of this process: containers and services limit memory and CPU time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def group_folders(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Return (version, folder) of every group of ``controller`` up to the mount's root.

    A limit binds every group below it. In a container the path may name folders that only the host
    sees; the mount's own root still counts. ``root`` is where ``proc`` and ``sys`` lie.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mount = root / "sys/fs/cgroup"
    for line in lines:
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
            yield version, base.joinpath(*names[:depth])
