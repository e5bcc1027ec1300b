"""How much RAM is left for a model in this process, now: budgets, limits, and room for others."""

from __future__ import annotations

from localrt.offload.memory.state import MemoryState, memory_state

__all__ = ["current_rss", "ram_budget"]

# Left to the desktop where nobody said how much to use.
_DESKTOP_SHARE = 0.1
_MOST_DESKTOP_BYTES = 2 << 30
# What counting in pages and the system's own bookkeeping may take within a hard limit.
_LIMIT_MARGIN = 6 << 20


def current_rss() -> int:
    """Bytes of this process that are in RAM."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def ram_budget(ram: int | None, *, state: MemoryState | None = None, rss: int | None = None) -> int:
    """Bytes that this process may take in all, what it has already included.

    ``ram`` is the user's word; without it the desktop keeps its room. A limit of the container or
    cgroup binds in any case.
    """
    state = memory_state() if state is None else state
    rss = current_rss() if rss is None else rss
    available = state.available + rss
    if state.limit is not None:
        available -= _LIMIT_MARGIN
    elif ram is None:
        available -= min(_MOST_DESKTOP_BYTES, int(_DESKTOP_SHARE * state.total))
    return max(0, available if ram is None else min(ram, available))
