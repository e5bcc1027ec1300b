"""Finds room for files of a model's size, in RAM or on a disk, and measures that disk."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.timing import Check, Values
from localrt.offload.memory import memory_state
from localrt.offload.reading import disk_speed

_ROOT = Path(__file__).resolve().parents[2]
MEMORY = Path("/dev/shm")
_SAMPLE = 2 << 30
_PART = 64 << 20


def find_memory(nbytes: int) -> Path | None:
    """A folder in RAM for ``nbytes``, if the loaded model fits in RAM as well."""
    if not MEMORY.is_dir() or memory_state().available < 3 * nbytes:
        return None
    return MEMORY if shutil.disk_usage(MEMORY).free > 1.1 * nbytes else None


def find_disk(nbytes: int) -> Path:
    """A folder on a disk with room for ``nbytes``.

    Raises:
        OSError: there is none; the message names the folders tried.
    """
    mounts = [
        line.split()[1:3] for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
    ]
    seen = []
    for folder in (Path(tempfile.gettempdir()).resolve(), _ROOT):
        _, kind = max((where, kind) for where, kind in mounts if folder.is_relative_to(where))
        free = shutil.disk_usage(folder).free
        if kind not in ("tmpfs", "ramfs") and free > nbytes:
            return folder
        seen.append(f"{folder} ({kind}) has {free / 1e9:.1f} GB")
    raise OSError(
        f"{nbytes / 1e9:.1f} GB of a disk are needed: {', '.join(seen)}; name a folder: TMPDIR=..."
    )


def check_disk(device: str) -> Iterator[Check]:
    """Check the disk's speed."""
    yield "disk", _speeds


def _speeds() -> Values:
    """GB/s of writing a file, and of reading it without the page cache, as the pipeline does."""
    try:
        folder = find_disk(_SAMPLE)
    except OSError as error:
        return {"not run": str(error)}
    with tempfile.TemporaryDirectory(dir=folder) as name:
        file, part = Path(name, "sample"), os.urandom(_PART)
        started = time.perf_counter()
        with file.open("wb") as opened:
            for _ in range(0, _SAMPLE, _PART):
                opened.write(part)
            opened.flush()
            os.fsync(opened.fileno())
        values: Values = {"written_gb_s": _SAMPLE / (time.perf_counter() - started) / 1e9}
        for mode in (mode for mode in disk_speed._CANDIDATES if mode.direct):
            starts = range(0, _SAMPLE, mode.block)
            jobs = [(file.name, start, min(mode.block, _SAMPLE - start)) for start in starts]
            rate, _ = disk_speed._time(file.parent, jobs, mode)
            values[f"gb_s_{mode.threads}_x_{mode.block >> 20}_mb"] = rate / 1e9
        return values
