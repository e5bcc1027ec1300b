"""FreeToken's rule: how many of a layer's misses to copy, and how many to compute meanwhile.

For one row each, where CPU and link read the same memory. It knows two bandwidths.
"""

from __future__ import annotations

from localrt.offload.experts.assignment import loaded_end

__all__ = ["q_star"]


def q_star(misses: int, *, link_bytes_s: float, host_bytes_s: float) -> int:
    """How many of ``misses`` to copy over the link: about misses * link / host.

    ``host_bytes_s`` is what the CPU and the link reach together: the CPU has what copies leave of
    it while they go on, and with just that share both end together. Of the two whole numbers around
    it, the one that ends sooner; a tie copies.
    """
    if misses < 1 or link_bytes_s <= 0:
        return 0
    if link_bytes_s >= host_bytes_s:
        return misses
    share = link_bytes_s / host_bytes_s

    def end(copied: int) -> float:  # for experts of one byte
        copying = copied / link_bytes_s
        return max(copying, loaded_end(0.0, (misses - copied) / host_bytes_s, copying, share))

    fewer = int(misses * share)
    more = min(misses, fewer + 1)
    return more if end(more) <= end(fewer) else fewer
