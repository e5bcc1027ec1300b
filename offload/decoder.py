"""A decoder whose units are where a placement puts them: the same passes, larger models.

A pass goes through the stages in order; each waits for its own weights and for nothing else, while
readers and copies run ahead. The arithmetic is that of ``models/decoder.py`` on the same ``Ops``:
the output does not depend on the placement. It knows no files and no plans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from localrt.models.decoder import DecoderConfig
from localrt.offload.cpu_lane import CpuLane
from localrt.offload.placement import Where
from localrt.offload.ram_budget import RamBudget
from localrt.offload.row_table import RowTable
from localrt.offload.stages import Stage
from localrt.offload.trace import PipelineCounts, Trace
from localrt.quant.ops.protocol import Array, Batch, KVCache, Ops, Pass, Vector

__all__ = ["PlacedDecoder"]

Logits = npt.NDArray[np.float32]
Check = Callable[[], None]


class PlacedDecoder:
    """See ``Decoder``, whose interface for engines this is.

    ``budget`` bounds what weights and caches
    take together; resident units are given back as caches grow.
    """

    def __init__(
        self,
        config: DecoderConfig,
        lane: CpuLane,
        stages: Sequence[Stage],
        *,
        embedding: RowTable,
        norm: Vector,
        budget: RamBudget,
        trace: Trace,
        load_s: float,
        before_pass: Callable[[], None],
        close: Callable[[], None],
    ) -> None:
        self.config = config
        self.ops: Ops = lane.ops
        self._lane = lane
        self._stages = list(stages)
        self._embedding = embedding
        self._norm = norm
        self._budget = budget
        self._trace = trace
        self._before_pass = before_pass
        self._close = close
        self._caches: WeakSet[KVCache] = WeakSet()
        self._passes = 0
        self.load_s = load_s  # seconds that reading the resident units took

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages with their present places."""
        return tuple(self._stages)

    @property
    def trace(self) -> Trace:
        """What the pipeline did."""
        return self._trace

    def counts(self) -> PipelineCounts:
        """Totals so far."""
        return PipelineCounts(self._lane.bytes_read, 0, self._trace.busy(), self._passes)

    def cache(self, capacity: int) -> KVCache:
        """An empty KV cache for one sequence."""
        cache = self.ops.kv_cache(self.config.attention, capacity)
        self._caches.add(cache)
        return cache

    def forward(
        self,
        batch: Batch,
        *,
        rows: Sequence[int] | None = None,
        check: Check | None = None,
    ) -> Logits:
        """See ``Decoder.forward``: logits of the chosen ``rows``, (rows, vocab) float32.

        Raises:
            MemoryBudgetError: the caches have outgrown what the budget leaves beside the weights.
            CheckpointError: a file fails, or is no longer what it was.
        """
        wanted = np.arange(len(batch.tokens)) if rows is None else np.asarray(rows, np.intp)
        self._before_pass()
        self._make_room(batch)
        if not len(wanted):
            self._lane.skip([stage for stage in self._stages if stage.kind == "head"])
        try:
            with self.ops.scope():
                step = self.ops.begin(batch)
                logits = self._run(batch, step, wanted, check)
        except BaseException:
            self._lane.rewind()
            raise
        for span in batch.spans:
            span.cache.advance(span.rows)
        self._passes += 1
        return logits

    def close(self) -> None:
        """End all threads and free all weights."""
        self._close()

    def give_back(self, nbytes: int) -> int:
        """Stream resident units of at least ``nbytes`` from now on; returns the bytes freed."""
        names = self._budget.choose(self._stages, nbytes)
        if not names:
            return 0
        freed = sum(self._lane.drop(name) for name in names)
        self._stages = [
            Stage(s.unit, s.kind, Where.SSD, s.layer, s.first_row) if s.name in names else s
            for s in self._stages
        ]
        self._lane.stream([stage for stage in self._stages if stage.where.read])
        return freed

    # -- parts of a pass -------------------------------------------------------------------------

    def _run(
        self, batch: Batch, step: Pass, wanted: npt.NDArray[np.intp], check: Check | None
    ) -> Logits:
        ops, lane = self.ops, self._lane
        tokens = np.asarray(batch.tokens, np.int64)
        x = self._embedding.embed(ops, step, tokens, self.config.embedding_scale)
        for stage in self._stages:
            if stage.kind == "head":
                continue
            if check is not None:
                check()
            with lane.part(stage, check) as part:
                started = self._trace.begin("cpu")
                y = part(ops, x, step) if stage.kind == "attention" else part(ops, x)
                x = ops.add(x, y)
                self._trace.end("cpu", stage.name, started)
        return self._head(x, wanted, check)

    def _head(self, x: Array, wanted: npt.NDArray[np.intp], check: Check | None) -> Logits:
        """Every slice's logits in its place; slices nobody wants are passed over."""
        config = self.config
        logits = np.empty((len(wanted), config.vocab_size), np.float32)
        if not len(wanted):
            return logits
        for stage in self._stages:
            if stage.kind != "head":
                continue
            if check is not None:
                check()
            with self._lane.part(stage, check) as weight:
                started = self._trace.begin("cpu")
                part = self.ops.head(
                    x, wanted, self._norm, config.norm_eps, weight, config.final_softcap
                )
                logits[:, stage.first_row : stage.first_row + stage.rows] = part
                self._trace.end("cpu", stage.name, started)
        return logits

    def _make_room(self, batch: Batch) -> None:
        """Give units back for what the caches of this pass are about to grow by."""
        held = sum(cache.nbytes for cache in self._caches)
        growth = sum(
            max(0, self._grown(span.cache, span.rows) - span.cache.nbytes) for span in batch.spans
        )
        missing = self._budget.missing(self._lane.resident_nbytes, held + growth)
        if missing > 0 and self.give_back(missing) < missing:
            raise self._budget.error(held + growth)

    def _grown(self, cache: KVCache, rows: int) -> int:
        length = min(cache.capacity, (cache.length + rows) * 3 // 2)
        return self.ops.kv_nbytes(self.config.attention, length)
