"""A model whose units are where a placement puts them: the same passes, larger models.

A pass goes through the stages in order; each waits for its own weights and for nothing else, while
readers and copies run ahead. The arithmetic is that of a resident model: the output does not depend
on the placement. It knows no files and no plans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from localrt.models.config import DecoderConfig
from localrt.models.parts import Part, PassState
from localrt.models.residency import Check, Residency
from localrt.models.timing import Clock, PipelineCounts, Task
from localrt.offload.experts.hybrid import HybridStage
from localrt.offload.experts.stage import SparseStage
from localrt.offload.pipeline.balance import Balance
from localrt.offload.pipeline.head import HeadStage, JoinedHead
from localrt.offload.pipeline.lane import Lane, StreamedState
from localrt.offload.pipeline.row_table import RowTable
from localrt.offload.pipeline.split_cache import SplitCache, grown_length
from localrt.offload.pipeline.stage import Stage
from localrt.offload.placement import Where
from localrt.offload.trace import Trace
from localrt.quant.ops.protocol import Batch, KVCache

__all__ = ["Pipeline", "Streamed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """What streams a model's weights. ``opening.py`` makes it, and ``close`` frees all of it.

    ``card`` is None without one; ``attention_on_card`` are the layers whose attention it computes.
    ``experts`` run the sparse layers, by lane. ``before_pass`` raises where files have changed;
    ``abandon`` ends what copies wait for.
    """

    cpu: Lane
    card: Lane | None
    layers: Sequence[Stage]
    head: Sequence[HeadStage]
    joined_head: JoinedHead
    attention_on_card: frozenset[int]
    embedding: RowTable
    balance: Balance
    clock: Clock
    trace: Trace
    load_s: float
    before_pass: Callable[[], None]
    abandon: Callable[[], None]
    ssd_bytes: Callable[[], int]
    close: Callable[[], None]
    experts: Mapping[str, SparseStage | HybridStage] = field(default_factory=dict)


class Streamed(Residency):
    """See ``Residency``. Units are given back as caches grow beyond what the budget leaves."""

    streams = True

    def __init__(self, config: DecoderConfig, pipeline: Pipeline) -> None:
        self.pipeline = pipe = pipeline
        self.config = config
        self.ops, self.norm = pipe.cpu.ops, pipe.cpu.norm
        self.body: Sequence[Part] = [
            partial(_embed, pipe.embedding, pipe.cpu, config.embedding_scale),
            *pipe.layers,
        ]
        self.stages = [*pipe.layers, *pipe.head]
        self.sparse = pipe.experts
        self.experts = list(pipe.experts.values())
        self.load_s = pipe.load_s  # seconds that reading the resident units took
        self._lanes = [lane for lane in (pipe.cpu, pipe.card) if lane is not None]
        on_card = pipe.attention_on_card
        self._host_specs = [s for n, s in enumerate(config.attention) if n not in on_card]
        self._caches: WeakSet[KVCache] = WeakSet()
        self._passes = self._decode_passes = 0
        self._cpu_before = self._decode_cpu_s = 0.0

    # -- a pass ----------------------------------------------------------------------------------

    def begin(
        self, batch: Batch, wanted: npt.NDArray[np.intp], check: Check | None
    ) -> StreamedState:
        """See ``Residency``."""
        pipe = self.pipeline
        pipe.before_pass()
        if any(lane.failed for lane in self._lanes):
            self.abandon()  # read ahead, some time ago: the disk may have come back
        self._make_room(batch, len(wanted))
        if not len(wanted):
            self._skip_head()
        self._cpu_before = pipe.trace.busy().get("cpu", 0.0)
        # On a virtual clock a pass begins where the one before ended.
        mark = pipe.clock.now() if pipe.clock.simulated else None
        return StreamedState(batch, wanted, pipe.cpu, mark, check)

    def head(self, state: PassState) -> Sequence[Part]:
        """See ``Residency``."""
        assert isinstance(state, StreamedState), "begin makes it"
        state.rows = len(state.wanted)
        pipe = self.pipeline
        return pipe.joined_head.parts(pipe.head) if state.rows else ()

    def end(self, state: PassState, batch: Batch) -> None:
        """See ``Residency``."""
        self._passes += 1
        if len(batch.tokens) == 1 and len(state.wanted):
            self._decode_passes += 1
            busy = self.pipeline.trace.busy().get("cpu", 0.0)
            self._decode_cpu_s += busy - self._cpu_before
        self.pipeline.balance.settle()

    def abandon(self) -> None:
        """See ``Residency``: what is on its way is dropped."""
        self.pipeline.abandon()
        for lane in self._lanes:  # the CPU's first: a card's copies ask it for what they need
            lane.rewind()

    def _skip_head(self) -> None:
        """The pass reads and copies none of the head, but for what is on its way to the card."""
        pipe, head = self.pipeline, self.pipeline.head
        pipe.cpu.skip(stage.name for stage in head if stage.where is Where.SSD)
        if pipe.card is not None:  # of what it copies from the CPU's ring it tells the reader
            pipe.card.skip(stage.name for stage in head if stage.where.copied)

    # -- caches ----------------------------------------------------------------------------------

    def cache(self, capacity: int) -> KVCache:
        """An empty KV cache for one sequence, each layer's where its attention is computed."""
        specs, card = self.config.attention, self.pipeline.card
        cache: KVCache
        if card is None or card.ops is self.ops:
            cache = self.ops.kv_cache(specs, capacity)
        else:
            cache = SplitCache(self.ops, card.ops, specs, self.pipeline.attention_on_card, capacity)
        self._caches.add(cache)
        return cache

    def reserve(self, cache: KVCache, length: int) -> None:
        """See ``Residency``.

        Raises:
            MemoryBudgetError: as in ``begin``.
        """
        self._make_room(Batch.extend([(cache, [0] * (length - cache.length))]), 0)
        cache.reserve(length)

    def _make_room(self, batch: Batch, wanted: int) -> None:
        """Give units back for what caches and logits of this pass are about to grow by."""
        growth = sum(
            max(0, self._grown(span.cache, span.rows) - self._in_ram(span.cache))
            for span in batch.spans
        )
        logits = 4 * self.config.vocab_size * max(0, wanted - 1)
        self.pipeline.balance.make_room(self._caches_nbytes + growth + logits)

    @property
    def _caches_nbytes(self) -> int:
        return sum(map(self._in_ram, self._caches))

    def _grown(self, cache: KVCache, rows: int) -> int:
        if isinstance(cache, SplitCache):
            return cache.grown_host_nbytes(rows)
        if self.ops.kv_nbytes(self._host_specs, cache.length + rows) <= self._in_ram(cache):
            return 0  # there is room already
        return self.ops.kv_nbytes(self._host_specs, grown_length(cache, rows))

    def _in_ram(self, cache: KVCache) -> int:
        """Bytes of a cache in RAM; what a virtual card's attention sees counts as the card's."""
        if isinstance(cache, SplitCache) or len(self._host_specs) == self.config.layers:
            return cache.nbytes
        ops, all_specs = self.ops, self.config.attention
        return cache.nbytes * ops.kv_nbytes(self._host_specs, 1) // ops.kv_nbytes(all_specs, 1)

    # -- memory ----------------------------------------------------------------------------------

    @property
    def reclaimable(self) -> int:
        """See ``Residency``."""
        return self.pipeline.balance.reclaimable

    def give_back(self, nbytes: int) -> int:
        """See ``Residency``."""
        return self.pipeline.balance.give_back(nbytes)

    def set_ram_budget(self, nbytes: int, words: str) -> None:
        """See ``Residency``; called between passes."""
        self.pipeline.balance.set_budget(nbytes, self._caches_nbytes, words)

    def take_ram(self, nbytes: int) -> None:
        """See ``Residency``."""
        self.pipeline.balance.take(nbytes, self._caches_nbytes)

    @property
    def card_memory(self) -> tuple[int, int] | None:
        """See ``Residency``."""
        card = None if self.pipeline.card is None else self.pipeline.card.card
        return None if card is None else (card.used, card.capacity)

    def shrink_card(self, nbytes: int, words: str) -> int:
        """See ``Residency``."""
        return self.pipeline.balance.shrink_card(nbytes, words)

    # -- what passes report ----------------------------------------------------------------------

    @property
    def clock(self) -> Clock:
        """See ``Residency``."""
        return self.pipeline.clock

    def tasks(self, keep: int | None = None) -> list[Task]:
        """See ``Residency``."""
        if keep is not None:
            self.pipeline.trace.keep(keep)
        return self.pipeline.trace.tasks()

    def counts(self) -> PipelineCounts:
        """See ``Residency``."""
        pipe, stages = self.pipeline, self.sparse.values()
        card = None if pipe.card is None else pipe.card.card
        return PipelineCounts(
            ssd_read_bytes=pipe.ssd_bytes(),
            link_bytes=0 if card is None else card.link_bytes,
            busy_s=pipe.trace.busy(),
            passes=self._passes,
            clock_s=pipe.clock.now(),
            decode_passes=self._decode_passes,
            decode_cpu_s=self._decode_cpu_s,
            memory_note=pipe.balance.note,
            expert_hits=sum(each.hits_and_uses[0] for each in stages),
            expert_uses=sum(each.hits_and_uses[1] for each in stages),
            expert_prefetches=sum(each.proposals[0] for each in stages),
            expert_prefetch_hits=sum(each.proposals[1] for each in stages),
        )

    def close(self) -> None:
        """See ``Residency``."""
        self.pipeline.close()


def _embed(table: RowTable, cpu: Lane, scale: float, state: StreamedState) -> None:
    """The first part: rows of the embedding, from RAM where they are."""
    state.enter(cpu)
    with cpu.ops.scope():
        state.x = table.embed(cpu.ops, state.step, state.tokens, scale, state.check)
