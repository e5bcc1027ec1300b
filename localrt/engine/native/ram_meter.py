"""What an engine's caches and passes have taken of RAM at the most, against what was forecast."""

from __future__ import annotations

from typing import TypeVar
from weakref import WeakSet

from localrt.offload.account import RamForecast
from localrt.quant.ops.protocol import KVCache

__all__ = ["RamMeter"]

_Cache = TypeVar("_Cache", bound=KVCache)


class RamMeter:
    """Without a ``forecast`` nothing is known of the rest of the process."""

    def __init__(self, forecast: RamForecast | None) -> None:
        self._forecast = forecast
        self._caches: WeakSet[KVCache] = WeakSet()
        self._kv = self._rows = self._logit_rows = 0

    def holds(self, cache: _Cache) -> _Cache:
        """Count ``cache`` as long as there is one; the same cache."""
        self._caches.add(cache)
        return cache

    def set_budget(self, nbytes: int) -> None:
        """The process may take ``nbytes`` from now on."""
        if self._forecast is not None:
            self._forecast = self._forecast.within(nbytes)

    def passed(self, rows: int, logit_rows: int) -> None:
        """A pass of ``rows`` rows is over, ``logit_rows`` of them with logits."""
        self._kv = max(self._kv, sum(cache.nbytes for cache in self._caches))
        self._rows = max(self._rows, rows)
        self._logit_rows = max(self._logit_rows, logit_rows)

    @property
    def logit_rows(self) -> int | None:
        """Rows with logits that fit beside the caches there are; None: as many as wanted."""
        if self._forecast is None:
            return None
        return self._forecast.logit_rows(sum(cache.nbytes for cache in self._caches))

    def idle_caches(self, nbytes: int, most: int) -> int:
        """Of caches of ``nbytes``, how many may wait beside one that works, ``most`` at most."""
        spare = None if self._forecast is None else self._forecast.spare(nbytes)
        return most if spare is None else min(most, spare // max(1, nbytes))

    def forecast(self) -> int | None:
        """The process's peak, by the account, after the passes so far."""
        if self._forecast is None:
            return None
        return self._forecast.nbytes(kv=self._kv, rows=self._rows, logit_rows=self._logit_rows)
