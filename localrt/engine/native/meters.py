"""What an engine's caches and passes have taken of RAM at the most, against what was forecast.

What a pipeline has reached of late, from its counts: a forecast is for now, not for the start.

It knows counts, not what they are of.
"""

from __future__ import annotations

import threading
from typing import TypeVar
from weakref import WeakSet

from localrt.engine.protocol import Rates
from localrt.models.residency import PipelineCounts
from localrt.offload.ram_forecast import RamForecast
from localrt.quant.ops.protocol import KVCache

_Cache = TypeVar("_Cache", bound=KVCache)


class RamMeter:
    """Without a ``forecast`` nothing is known of the rest of the process."""

    def __init__(self, forecast: RamForecast | None) -> None:
        self._forecast = forecast
        self._caches: WeakSet[KVCache] = WeakSet()
        self._lock = threading.Lock()  # sessions open while others' passes end
        self._taken = 0  # by something else in this process, now
        self._rows = 0  # scratch for so many is kept
        self._peak = 0

    def holds(self, cache: _Cache) -> _Cache:
        """Count ``cache`` as long as there is one; the same cache."""
        with self._lock:
            self._caches.add(cache)
        return cache

    def set_budget(self, nbytes: int) -> None:
        """The process may take ``nbytes`` from now on."""
        if self._forecast is not None:
            self._forecast = self._forecast.within(nbytes)

    def take(self, nbytes: int) -> None:
        """Something else in this process takes that much more."""
        self._taken += nbytes

    def passed(self, rows: int, logit_rows: int) -> None:
        """A pass of ``rows`` rows is over, ``logit_rows`` of them with logits."""
        self._rows = max(self._rows, rows)
        if self._forecast is not None:
            forecast = self._forecast.beside(self._taken)
            kv = self._kv_nbytes()
            taken = forecast.nbytes(kv=kv, rows=self._rows, logit_rows=logit_rows)
            self._peak = max(self._peak, taken)

    @property
    def logit_rows(self) -> int | None:
        """Rows with logits that fit beside the caches there are; None: as many as wanted."""
        if self._forecast is None:
            return None
        return self._forecast.beside(self._taken).logit_rows(self._kv_nbytes())

    def idle_caches(self, nbytes: int, most: int) -> int:
        """Of caches of ``nbytes``, how many may wait beside one that works, ``most`` at most."""
        if self._forecast is None:
            return most
        spare = self._forecast.beside(self._taken).spare(nbytes)
        return most if spare is None else min(most, spare // max(1, nbytes))

    def forecast(self) -> int | None:
        """The process's peak, by the account, after the passes so far."""
        if self._forecast is None:
            return None
        return self._peak or self._forecast.nbytes(kv=0, rows=0, logit_rows=0)

    def _kv_nbytes(self) -> int:
        with self._lock:
            caches = list(self._caches)
        return sum(cache.nbytes for cache in caches)


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
