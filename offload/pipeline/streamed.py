"""Weight streaming (offloading): runs a model that may exceed memory, as a placement says.

A pass goes through the stages in order; each waits only for its own weights, while readers and
copies run ahead. The arithmetic is that of a resident model: the output does not depend on the
placement. This module knows no files and no plans.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from localrt.models.config import Part, Table
from localrt.models.layers.inputs import InputTable
from localrt.models.layers.ngrams import HashedTable
from localrt.models.layers.parts import PassState
from localrt.models.weight_store import PassTask, PipelineCounts, WeightStore
from localrt.offload.account import pass_logits_nbytes
from localrt.offload.experts.hybrid import HybridExperts
from localrt.offload.experts.memory import CpuExperts, ExpertMemory
from localrt.offload.pipeline.balance import Balance
from localrt.offload.pipeline.caches import Caches
from localrt.offload.pipeline.lane import Lane, StreamedState
from localrt.offload.pipeline.setup import Setup
from localrt.offload.pipeline.stage import JoinedParts, Stage
from localrt.offload.pipeline.tables import RowTable
from localrt.offload.placement import Where
from localrt.offload.reading.reader import UnitReader
from localrt.quant.ops.kv import KVCache
from localrt.quant.ops.protocol import Batch, Check, Ops


class StreamedWeights(WeightStore):
    """See ``WeightStore``; created by ``opening.py``. Units are evicted as caches outgrow the
    budget.

    ``sparse`` holds the runners of sparse layers, by lane.
    ``before_pass`` raises if a file has changed, ``close`` frees everything.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        cpu: Lane,
        gpu: Lane | None,
        layers: Sequence[Stage],
        head: Sequence[Stage],
        segments: JoinedParts,
        joined_head: JoinedParts,
        caches: Caches,
        embedding: RowTable,
        tables: Sequence[tuple[Table, RowTable]],
        memory: Balance,
        before_pass: Callable[[], None],
        expert_memory: ExpertMemory | None,
        sparse: Mapping[str, CpuExperts | HybridExperts],
        close: Callable[[], None],
    ) -> None:
        self.config = config = setup.config
        self.ops, self.norm = cpu.ops, cpu.norm
        self.cpu, self.gpu, self.embedding = cpu, gpu, embedding
        self.memory: Balance = memory
        self.stages = [*layers, *head]
        self.sparse, self.experts = sparse, list(sparse.values())
        self._placement, self._clock, self._kv_tier = setup.placement, setup.clock, setup.kv_tier
        self._device, self._caches = setup.gpu, caches
        self._layers, self._head = layers, head
        self._segments, self._joined_head = segments, joined_head
        self._before_pass, self._close = before_pass, close
        grams = next((rows for table, rows in tables if isinstance(table, HashedTable)), None)
        reader = cpu.reader if isinstance(cpu.reader, UnitReader) else None
        self._reading = [source for source in (reader, expert_memory, grams) if source is not None]
        self._embed: list[Part] = [partial(_embed, embedding, cpu, config.embedding_scale)]
        for table, rows in tables:
            if isinstance(table, InputTable):
                self._embed.append(partial(_take_inputs, rows, cpu, table))
            elif isinstance(table, HashedTable):
                # Before the embedding, so that both read their rows at the same time.
                self._embed.insert(0, partial(_ask_ngrams, rows, cpu, table))
        self.body: Sequence[Part] = [*self._embed, *layers]
        self._lanes = [lane for lane in (cpu, gpu) if lane is not None]
        self._counted_from: PipelineCounts | None = None
        self._passes = self._decode_passes = 0
        self._cpu_before = self._decode_cpu_s = 0.0

    @property
    def embedding_part(self) -> Part:
        return partial(_embed_draft, self.embedding, self.config.embedding_scale)

    @property
    def implementations(self) -> tuple[Ops, ...]:
        return tuple(lane.ops for lane in self._lanes)

    @property
    def exact_rows(self) -> int:
        divided = any(isinstance(each, HybridExperts) and each.divided for each in self.experts)
        return 1 if divided else super().exact_rows

    # -- a pass ----------------------------------------------------------------------------------

    def begin(
        self, batch: Batch, logit_rows: npt.NDArray[np.intp], check: Check | None
    ) -> StreamedState:
        self._before_pass()
        if any(lane.failed for lane in self._lanes):
            self.abandon()  # the failure may be old, and the disk may work again
        if self._device is not None:
            self._device.begin_pass(len(batch.tokens))
        self.memory.follow(crossing=self._placement.crosses(len(batch.tokens)))
        logits = pass_logits_nbytes(self.config.vocab_size, len(logit_rows))
        caches = self._caches
        self.memory.make_room(caches.growth(batch) + logits, caches.gpu_growth(batch))
        if not len(logit_rows):
            self._skip_head()
        self.body = [*self._embed, *self._segments.parts(self._layers)]
        self._cpu_before = self._clock.busy().get("cpu", 0.0)
        if batch.best_only and len(self._joined_head.parts(self._head)) > 1:
            batch = replace(batch, best_only=False)  # no part of the head knows the others' logits
        return StreamedState(batch, logit_rows, self.cpu, check)

    def head(self, state: PassState) -> Sequence[Part]:
        return self._joined_head.parts(self._head) if len(state.logit_rows) else ()

    def end(self, state: PassState, batch: Batch) -> None:
        self._passes += 1
        if len(batch.tokens) == 1 and len(state.logit_rows):
            self._decode_passes += 1
            self._decode_cpu_s += self._clock.busy().get("cpu", 0.0) - self._cpu_before
        self.memory.settle()
        if self._device is not None:
            self._device.count_times()

    def abandon(self) -> None:
        """See ``WeightStore``: drops pending reads and copies."""
        self.memory.drop_restore()
        if self.gpu is not None:
            self.gpu.stop_copies()
        for lane in self._lanes:  # the CPU first, since copies to a GPU read from its ring
            lane.rewind()

    def relieve(self) -> bool:
        return self.memory.relieve()

    def _skip_head(self) -> None:
        """Have the pass skip the head, except slices that are being copied to the GPU."""
        self.cpu.skip(stage.name for stage in self._head if stage.where is Where.SSD)
        if self.gpu is not None:  # also skips them in the RAM ring
            self.gpu.skip(stage.name for stage in self._head if stage.where.copied)

    # -- caches ----------------------------------------------------------------------------------

    def cache(self, capacity: int) -> KVCache:
        """See ``WeightStore``: each layer's cache is where its attention is computed."""
        return self._caches.make(capacity)

    def reserve(self, cache: KVCache, length: int) -> None:
        """See ``WeightStore``.

        Raises:
            MemoryBudgetError: as in ``begin``.
        """
        batch = Batch.extend([(cache, [0] * (length - cache.length))])
        caches = self._caches
        self.memory.make_room(caches.growth(batch), caches.gpu_growth(batch))
        cache.reserve(length)

    # -- counts ----------------------------------------------------------------------------------

    def tasks(self, keep: int | None = None) -> list[PassTask]:
        if keep is not None:
            self._clock.keep(keep)
        return self._clock.tasks()

    def counts(self) -> PipelineCounts:
        read = sum(source.bytes_read for source in self._reading)
        totals = PipelineCounts(
            ssd_read_bytes=read + (0 if self._kv_tier is None else self._kv_tier.read_bytes),
            link_bytes=0 if self._device is None else self._device.link_bytes,
            busy_s=self._clock.busy(),
            passes=self._passes,
            clock_s=time.perf_counter(),
            decode_passes=self._decode_passes,
            decode_cpu_s=self._decode_cpu_s,
            memory_note=self.memory.note,
            expert_hits=sum(source.hits for source in self.sparse.values()),
            expert_uses=sum(source.uses for source in self.sparse.values()),
        )
        return totals if self._counted_from is None else totals.since(self._counted_from)

    def forget_counts(self) -> None:
        self._counted_from = None
        self._counted_from = self.counts()

    def close(self) -> None:
        self.memory.drop_restore()
        self._close()


def _embed(table: RowTable, cpu: Lane, scale: float, state: StreamedState) -> None:
    """The first part of a pass: rows of the embedding."""
    state.enter(cpu)
    with cpu.ops.scope():
        rows = table.begin_read(cpu.ops, state.step, state.tokens, state.check, scale=scale)()
        state.x = rows if state.step is None else cpu.ops.adapt_tokens(rows, state.step, scale)


def _embed_draft(table: RowTable, scale: float, state: PassState) -> None:
    """The first part of a draft head's pass."""
    assert state.batch is not None, "a pass has one"
    tokens = np.asarray(state.batch.tokens, np.int64)
    state.x = table.begin_read(state.ops, state.step, tokens, state.check, scale=scale)()


def _ask_ngrams(table: RowTable, cpu: Lane, hashed: HashedTable, state: StreamedState) -> None:
    """The first part of models with hashed n-grams: begin to read their rows."""
    state.enter(cpu)
    assert state.batch is not None, "a pass has one"
    rows = hashed.rows_of(state.batch)
    state.ngrams = table.begin_read(cpu.ops, state.step, rows, state.check)


def _take_inputs(table: RowTable, cpu: Lane, inputs: InputTable, state: StreamedState) -> None:
    """The second part of models with per-layer inputs: read their rows."""
    state.enter(cpu)
    with cpu.ops.scope():
        take = table.begin_read(
            cpu.ops, state.step, state.tokens, state.check, scale=inputs.scale, each=inputs.layers
        )
        state.inputs = take()
