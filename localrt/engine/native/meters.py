"""The RAM that a loaded model takes, forecast and counted, and its recent rates.

An engine asks before caches grow and passes run; the figures are those of ``offload/account.py``.
Rates come from a pipeline's counts, so a forecast holds for now, not for the start.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import TypeVar
from weakref import WeakSet

from localrt.engine.protocol import Rates
from localrt.models.config import DecoderConfig
from localrt.models.tensor_source import Checkpoint
from localrt.models.weight_store import PipelineCounts
from localrt.offload.account import (
    GROWTH_NBYTES,
    KERNEL_SCRATCH_NBYTES,
    MARGIN_NBYTES,
    TORCH_GROWTH_NBYTES,
    Account,
    activation_nbytes,
    logits_nbytes,
    pass_logits_nbytes,
    weight_nbytes,
)
from localrt.offload.shapes import ModelShape, PassSizes
from localrt.quant.ops.kv import KVCache
from localrt.quant.ops.protocol import Ops


@dataclass(frozen=True, slots=True, kw_only=True)
class RamForecast:
    """A forecast of the RAM that a loaded model's process takes, given its caches and passes.

    ``process`` is what it takes besides the model, ``weights`` those that stay in memory, with the
    rings. A streamed model has ``room``, which bounds weights, caches and logits together: it gives
    weights back before each pass. Another model has a ``budget``, which limits the rows of its
    passes.
    """

    process: int
    weights: int
    sizes: PassSizes
    room: int | None = None
    budget: int | None = None

    def nbytes(self, *, kv: int, rows: int, logit_rows: int) -> int:
        """Return the bytes for caches of ``kv`` bytes and passes of at most ``rows`` rows,
        ``logit_rows`` of them with logits.
        """
        held = self.weights + kv
        if self.room is None:
            held += logits_nbytes(self.sizes.vocab, max(0, logit_rows - 1))
        else:  # its head is in slices
            held = min(held + pass_logits_nbytes(self.sizes.vocab, logit_rows), self.room)
        return self.process + held + activation_nbytes(self.sizes, rows)

    def within(self, budget: int) -> RamForecast:
        """Return the same forecast with another budget, if it has one."""
        if self.budget is None:
            return self
        return replace(self, budget=budget - MARGIN_NBYTES)

    def beside(self, nbytes: int) -> RamForecast:
        """Return the same forecast if something else in the process takes ``nbytes``."""
        if not nbytes:
            return self
        room = None if self.room is None else max(0, self.room - nbytes)
        return replace(self, process=self.process + nbytes, room=room)

    def spare(self, kv: int) -> int | None:
        """Return the bytes left for passes and more caches, with caches of ``kv`` bytes.

        None if room is made before each pass instead.
        """
        if self.budget is None:
            return None
        return max(0, self.budget - self.nbytes(kv=kv, rows=0, logit_rows=0))

    def logit_rows(self, kv: int) -> int | None:
        """Return how many rows may have logits, with ``kv`` bytes of caches; None: any number."""
        spare = self.spare(kv)
        if spare is None:
            return None
        row = activation_nbytes(self.sizes, 1) - activation_nbytes(self.sizes, 0)
        return spare // (row + logits_nbytes(self.sizes.vocab, 1))


def resident_forecast(
    checkpoint: Checkpoint, config: DecoderConfig, ops: Ops, *, rss: int, budget: int
) -> RamForecast:
    """Return the forecast for a model loaded whole, with ``budget`` bytes, into a process that
    already takes ``rss`` bytes.
    """
    native = ops.name == "native"
    beside = KERNEL_SCRATCH_NBYTES + GROWTH_NBYTES if native else TORCH_GROWTH_NBYTES
    return RamForecast(
        process=rss + beside,
        weights=weight_nbytes(checkpoint, ops) if ops.free_memory() is None else 0,
        sizes=PassSizes.of_config(config),
        budget=budget - MARGIN_NBYTES if native else None,
    )


def placed_forecast(memory: Account, shape: ModelShape, budget: int) -> RamForecast:
    """Return the forecast for a model placed within ``budget`` bytes by the account ``memory``."""
    streamed = ("weights", "keys and values", "activations")
    fixed = memory.total() - sum(memory.nbytes(what) for what in streamed)
    return RamForecast(
        process=fixed - MARGIN_NBYTES,
        weights=memory.nbytes("weights"),
        sizes=shape.sizes,
        room=budget - fixed - memory.nbytes("activations"),
    )


_Cache = TypeVar("_Cache", bound=KVCache)


class RamMeter:
    """Counts RAM by ``forecast``; without one, it limits nothing."""

    def __init__(self, forecast: RamForecast | None) -> None:
        self._forecast = forecast
        self._caches: WeakSet[KVCache] = WeakSet()
        self._lock = threading.Lock()  # sessions open while passes of others end
        self._taken = 0  # bytes that something else in this process takes now
        self._rows = 0  # the most rows of a pass so far: their scratch memory is kept
        self._peak = 0

    def holds(self, cache: _Cache) -> _Cache:
        """Count ``cache`` for as long as it exists; return it."""
        with self._lock:
            self._caches.add(cache)
        return cache

    def set_budget(self, nbytes: int) -> None:
        """Limit the process to ``nbytes`` from now on."""
        if self._forecast is not None:
            self._forecast = self._forecast.within(nbytes)

    def take(self, nbytes: int) -> None:
        """Something else in this process takes ``nbytes`` more."""
        self._taken += nbytes

    def passed(self, rows: int, logit_rows: int) -> None:
        """Record a pass of ``rows`` rows, ``logit_rows`` of them with logits."""
        self._rows = max(self._rows, rows)
        if self._forecast is not None:
            forecast = self._forecast.beside(self._taken)
            kv = self._kv_nbytes()
            taken = forecast.nbytes(kv=kv, rows=self._rows, logit_rows=logit_rows)
            self._peak = max(self._peak, taken)

    @property
    def logit_rows(self) -> int | None:
        """The number of rows with logits that fit beside the current caches; None: any number."""
        if self._forecast is None:
            return None
        return self._forecast.beside(self._taken).logit_rows(self._kv_nbytes())

    def idle_caches(self, nbytes: int, most: int) -> int:
        """Return how many idle caches of ``nbytes`` fit beside one in use, at most ``most``."""
        if self._forecast is None:
            return most
        spare = self._forecast.beside(self._taken).spare(nbytes)
        return most if spare is None else min(most, spare // max(1, nbytes))

    def forecast(self) -> int | None:
        """Return the forecast of the process's peak, after the passes so far."""
        if self._forecast is None:
            return None
        return self._peak or self._forecast.nbytes(kv=0, rows=0, logit_rows=0)

    def _kv_nbytes(self) -> int:
        with self._lock:
            caches = list(self._caches)
        return sum(cache.nbytes for cache in caches)


_RATE_SAMPLE = 256 << 20  # bytes to read before the disk's speed is updated
_PASSES_SAMPLE = 16  # passes before the CPU's speed is updated
_EXPERTS_SAMPLE = 512  # expert uses before the hit rate is updated


class RecentRates:
    """The recent speeds of disk and CPU, which other programs use too."""

    def __init__(self, ssd_bytes_s: float) -> None:
        self._ssd_bytes_s = ssd_bytes_s
        self._read = (0, 0.0)  # bytes and busy seconds
        self._cpu_s: float | None = None
        self._decoded = (0, 0.0)  # passes and busy seconds
        self._hits: float | None = None
        self._asked = (0, 0)  # expert uses, and how many were in memory

    def now(self, counts: PipelineCounts) -> Rates:
        """Return the rates for a ``Forecaster``, updated where enough was done meanwhile."""
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
