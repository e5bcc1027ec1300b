"""What a pipeline has reached of late, from its counts: a forecast is for now, not for the start.

It knows counts, not what they are of.
"""

from __future__ import annotations

from localrt.engine.protocol import Rates
from localrt.models.timing import PipelineCounts

__all__ = ["RecentRates"]

_RATE_SAMPLE = 256 << 20  # bytes of reading that tell a disk's speed
_PASSES_SAMPLE = 16  # passes that tell the CPU's
_EXPERTS_SAMPLE = 512  # experts asked for that tell how many are in memory


class RecentRates:
    """What disk and CPU have reached of late: others use them too."""

    def __init__(self, ssd_bytes_s: float) -> None:
        self._ssd_bytes_s = ssd_bytes_s
        self._read = (0, 0.0)  # bytes and busy seconds
        self._cpu_s: float | None = None
        self._decoded = (0, 0.0)  # passes and busy seconds
        self._hits: float | None = None
        self._asked = (0, 0)  # experts asked for, and those that were in memory

    def now(self, counts: PipelineCounts) -> Rates:
        """For a ``Forecaster``: since the call before, if that was long enough to tell."""
        read = counts.ssd_read_bytes, counts.busy_s.get("ssd", 0.0)
        nbytes, seconds = (new - old for new, old in zip(read, self._read, strict=True))
        if nbytes > _RATE_SAMPLE and seconds > 0:
            self._ssd_bytes_s, self._read = nbytes / seconds, read
        decoded = counts.decode_passes, counts.decode_cpu_s
        passes, seconds = (new - old for new, old in zip(decoded, self._decoded, strict=True))
        if passes >= _PASSES_SAMPLE and seconds > 0:
            self._cpu_s, self._decoded = seconds / passes, decoded
        asked = counts.expert_uses, counts.expert_hits
        uses, hits = (new - old for new, old in zip(asked, self._asked, strict=True))
        if uses >= _EXPERTS_SAMPLE:
            self._hits, self._asked = hits / uses, asked
        return Rates(self._ssd_bytes_s, self._cpu_s, self._hits)
