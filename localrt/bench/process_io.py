"""Bytes that this process has had read from disk, by the kernel's own account.

Page faults on mapped files, buffered and direct reads all count, and what the page cache already
holds does not: so every engine's reading is measured alike.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["disk_bytes_read"]


def disk_bytes_read(account: Path = Path("/proc/self/io")) -> int | None:
    """Bytes fetched from storage so far for all threads of this process; None where not known."""
    try:
        text = account.read_text(encoding="ascii")
    except OSError:  # not Linux, or a kernel without task accounting
        return None
    for line in text.splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    return None
