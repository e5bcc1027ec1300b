"""What a loaded model takes of RAM, forecast and counted, and the rates it has reached of late.

An engine asks before caches grow and passes run; the figures are those of ``offload/account.py``.
Rates come from a pipeline's counts: a forecast is for now, not for the start.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import TypeVar
from weakref import WeakSet

from localrt.engine.protocol import Rates
from localrt.models.checkpoints.base import Checkpoint
from localrt.models.config import DecoderConfig
from localrt.models.weight_store import PipelineCounts
from localrt.offload.account import (
    GROWTH_NBYTES,
    KERNEL_SCRATCH_NBYTES,
    MARGIN_NBYTES,
    TORCH_GROWTH_NBYTES,
    Account,
    activation_nbytes,
    logits_nbytes,
    weight_nbytes,
)
from localrt.offload.shapes import ModelShape, PassSizes
from localrt.quant.ops.kv import KVCache
from localrt.quant.ops.protocol import Ops


@dataclass(frozen=True, slots=True, kw_only=True)
class RamForecast:
    """What the process of a loaded model will take of RAM, by what it is made to do.

    ``process`` is what it takes beside the model, ``weights`` what stays in memory, rings included.
    Of a streamed model ``room`` bounds weights, caches and logits together: it gives weights back
    before each pass. ``budget`` is that of one that cannot: its passes have as many rows as fit.
    """

    process: int
    weights: int
    sizes: PassSizes
    room: int | None = None
    budget: int | None = None

    def nbytes(self, *, kv: int, rows: int, logit_rows: int) -> int:
        """With caches of ``kv`` bytes after passes of at most ``rows`` rows, ``logit_rows`` of them
        with logits.
        """
        held = self.weights + kv + logits_nbytes(self.sizes.vocab, max(0, logit_rows - 1))
        if self.room is not None:
            held = min(held, self.room)
        return self.process + held + activation_nbytes(self.sizes, rows)

    def within(self, budget: int) -> RamForecast:
        """The same with another budget, where there is one."""
        if self.budget is None:
            return self
        return replace(self, budget=budget - MARGIN_NBYTES)

    def beside(self, nbytes: int) -> RamForecast:
        """The same where something else takes ``nbytes`` of the process."""
        room = None if self.room is None else max(0, self.room - nbytes)
        return replace(self, process=self.process + nbytes, room=room)

    def spare(self, kv: int) -> int | None:
        """Bytes that the budget leaves beside caches of ``kv`` bytes, for passes and more caches.

        None where that is seen to before each pass.
        """
        if self.budget is None:
            return None
        return max(0, self.budget - self.nbytes(kv=kv, rows=0, logit_rows=0))

    def logit_rows(self, kv: int) -> int | None:
        """Rows with logits that a pass may have beside caches of ``kv`` bytes; None: any number."""
        spare = self.spare(kv)
        if spare is None:
            return None
        row = activation_nbytes(self.sizes, 1) - activation_nbytes(self.sizes, 0)
        return spare // (row + logits_nbytes(self.sizes.vocab, 1))


def resident_forecast(
    checkpoint: Checkpoint, config: DecoderConfig, ops: Ops, *, rss: int, budget: int
) -> RamForecast:
    """Of a model that is loaded whole, into a process that takes ``rss`` bytes before, of
    ``budget``.
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
    """Of a model that was placed within ``budget`` bytes, whose account is ``memory``."""
    streamed = ("weights", "keys and values", "activations")
    fixed = memory.total() - sum(memory.nbytes(what) for what in streamed)
    return RamForecast(
        process=fixed - MARGIN_NBYTES,
        weights=memory.nbytes("weights"),
        sizes=shape.pass_sizes,
        room=budget - fixed - memory.nbytes("activations"),
    )


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
