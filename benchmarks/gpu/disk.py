"""Finds room for files of a model's size, in RAM or on a disk."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from localrt.offload.memory import memory_state

_ROOT = Path(__file__).resolve().parents[2]
MEMORY = Path("/dev/shm")


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
