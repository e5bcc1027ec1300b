"""A hard memory limit for one process: a Linux memory control group, version 1 or 2.

The process's page cache counts too, so that mapping a model instead of reading it does not evade
the limit. Pages cached by other processes, which would not count, are dropped first. Creating a
group needs root or a delegated group.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from localrt.bench.process import ENGINE, ChildProcess
from localrt.bench.runner import model_files, run_bench
from localrt.bench.workload import BenchOptions, Outcome
from localrt.common.control_groups import group_folders
from localrt.common.errors import LocalrtError
from localrt.common.formatting import format_bytes
from localrt.common.settings import Settings

_V1 = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
_V2 = ("memory.max", "memory.swap.max")
_DROP_ALL = Path("/proc/sys/vm/drop_caches")
_PEAKS = ("memory.max_usage_in_bytes", "memory.peak")


class MemoryLimit:
    """A control group of ``size`` bytes. Call ``remove`` when its processes have ended."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def create(cls, size: int, root: Path = Path("/")) -> MemoryLimit:
        """A new group below one that this process is in.

        Raises:
            LocalrtError: not permitted, or the system has no control groups.
        """
        for parent, (limit, swap) in _parents(root):
            for number in itertools.count():
                folder = parent / f"localrt-bench-{os.getpid()}-{number}"
                if not folder.exists():
                    break
            try:
                folder.mkdir()
            except OSError:
                continue
            try:
                (folder / limit).write_text(str(size))
            except OSError:  # version 2 without the memory controller, or not permitted
                folder.rmdir()
                continue
            # Version 1 counts memory and swap together, version 2 swap alone.
            with suppress(OSError):  # no swap accounting, and then usually no swap
                (folder / swap).write_text(str(size) if limit == _V1[0] else "0")
            return cls(folder)
        raise LocalrtError(
            f"cannot limit memory to {format_bytes(size)} here: no memory control group can be made"
            " (run as root on Linux, or under systemd-run --user --scope -p MemoryMax=SIZE)"
        )

    @property
    def processes(self) -> Path:
        """The file that a process writes its id to, to be under the limit."""
        return self._folder / "cgroup.procs"

    def add(self, pid: int) -> None:
        """Put a process under the limit, with everything that it will allocate."""
        self.processes.write_text(str(pid))

    def peak(self) -> int | None:
        """Peak bytes of the group, page cache included; None if unknown."""
        for name in _PEAKS:
            try:
                return int((self._folder / name).read_text())
            except (OSError, ValueError):  # a file of the other version, or a kernel before 5.19
                continue
        return None

    def remove(self) -> None:
        """Remove the group; it must be empty."""
        with suppress(OSError):  # a process is still in it; a leftover group costs nothing
            self._folder.rmdir()


class LimitedChild(ChildProcess):
    """A child within ``limit``; its ``generate`` results also have ``peak_cgroup_bytes``."""

    def __init__(self, command: Sequence[str], limit: MemoryLimit) -> None:
        super().__init__(command)
        self._limit = limit
        # The child waits for its first request and has imported nothing large yet.
        limit.add(self.pid)

    def ask(self, do: str, **values: Any) -> Any:
        """Like ``ChildProcess.ask``."""
        answer = super().ask(do, **values)
        if do == "generate":
            answer["peak_cgroup_bytes"] = self._limit.peak()
        return answer

    def close(self) -> None:
        """End the child, then remove its group."""
        super().close()
        self._limit.remove()


def run_limited(options: BenchOptions, limit: int) -> Outcome:
    """Like ``run_bench``, each engine alone within ``limit`` bytes, on an empty page cache.

    Raises:
        LocalrtError: no limit can be set.
    """
    files = [options.path, Settings.from_environment().data_dir / "stores"]

    def start(engine: str) -> ChildProcess:
        drop_from_cache(files)
        return LimitedChild(ENGINE, MemoryLimit.create(limit))

    def notify(line: str) -> None:
        print(f"  {line}", flush=True)

    try:
        return run_bench(options, notify=notify, start=start, alone=True)
    finally:
        drop_from_cache(files)


def drop_from_cache(paths: Iterable[Path]) -> None:
    """Drop the model files' pages from the cache and, if permitted, all clean pages."""
    if hasattr(os, "posix_fadvise"):
        for file in (file for path in paths for file in model_files(path)):
            with suppress(OSError), file.open("rb", buffering=0) as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with suppress(OSError):  # not root, or not Linux
        _DROP_ALL.write_text("1\n", encoding="ascii")


def _parents(root: Path) -> Iterator[tuple[Path, tuple[str, str]]]:
    """Groups in which one could be created, nearest first, with their version's file names."""
    for version, folder in group_folders(root, "memory"):
        if (folder / "cgroup.procs").exists():
            yield folder, _V1 if version == 1 else _V2
