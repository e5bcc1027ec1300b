"""What this process has used of memory, from the operating system's own account."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["peak_rss"]


def peak_rss() -> int | None:
    """Highest resident set of this process so far, in bytes; None where it is not known."""
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    if sys.platform == "linux":
        # Not getrusage: its peak outlives exec, so a child would start with its parent's.
        try:
            status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        except OSError:
            status = ""
        for line in status.splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
