"""What this process takes of RAM, by the system's own account, and what it may take.

Without a budget the desktop keeps its room. A limit of the container or cgroup binds in any case.
"""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

from localrt.offload.memory.state import MemoryState, memory_state

# Left to the desktop where nobody said how much to use.
_DESKTOP_SHARE = 0.1
_MOST_DESKTOP_BYTES = 2 << 30
# What counting in pages and the system's own bookkeeping may take within a hard limit.
_LIMIT_MARGIN = 6 << 20


HELPERS: set[int] = set()
"""Ids of processes that work for this one alone: their memory counts as its own."""


def helpers_nbytes() -> int:
    """The memory of ``HELPERS`` that they share with nobody; 0 where the system does not say."""
    nbytes = 0
    for process in tuple(HELPERS):
        try:
            statm = Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()
            nbytes += (int(statm[1]) - int(statm[2])) * mmap.PAGESIZE
        except OSError:  # it has ended, or there is no /proc
            continue
    return nbytes


def current_rss() -> int:
    """Bytes of this process and its helpers that are in RAM."""
    if sys.platform == "linux":
        try:
            pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
            return int(pages) * mmap.PAGESIZE + helpers_nbytes()
        except OSError:  # no /proc
            pass
    import psutil

    return int(psutil.Process().memory_info().rss) + helpers_nbytes()


def peak_rss() -> int | None:
    """Highest resident set of this process so far, in bytes, and what its helpers take now; None
    where it is not known.
    """
    own = _own_peak()
    return None if own is None else own + helpers_nbytes()


def _own_peak() -> int | None:
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


def ram_budget(ram: int | None, *, state: MemoryState | None = None, rss: int | None = None) -> int:
    """Bytes that this process may take in all, what it has already included.

    ``ram`` is what the user gave, if anything.
    """
    state = memory_state() if state is None else state
    rss = current_rss() if rss is None else rss
    available = state.available + rss
    if state.limit is not None:
        available -= _LIMIT_MARGIN
    elif ram is None:
        available -= min(_MOST_DESKTOP_BYTES, int(_DESKTOP_SHARE * state.total))
    return max(0, available if ram is None else min(ram, available))
