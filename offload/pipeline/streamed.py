"""A model whose units are where a placement puts them: the same passes, larger models.

A pass goes through the stages in order; each waits for its own weights and for nothing else, while
readers and copies run ahead. The arithmetic is that of a resident model: the output does not depend
on the placement. It knows no files and no plans.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from localrt.models.config import DecoderConfig, Part
from localrt.models.layers.inputs import InputTable
from localrt.models.layers.ngrams import HashedTable
from localrt.models.layers.parts import Check, PassState
from localrt.models.weight_store import PipelineCounts, Task, WeightStore
from localrt.offload.account import pass_logits_nbytes
from localrt.offload.device.gpu import Clock
from localrt.offload.experts.hybrid import HybridExperts
from localrt.offload.experts.memory import CpuExperts, ExpertMemory
from localrt.offload.kv.tier import KvTier
from localrt.offload.pipeline.balance import Balance
from localrt.offload.pipeline.caches import Caches
from localrt.offload.pipeline.lane import Lane, StreamedState
from localrt.offload.pipeline.stage import JoinedHead, Segments, Stage
from localrt.offload.pipeline.tables import NgramTable, RowTable
from localrt.offload.placement import Placement, Where
from localrt.quant.ops.protocol import Batch, KVCache, Ops


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """What streams a model's weights. ``opening.py`` makes it, and ``close`` frees all of it.

    ``placement`` is what it was opened with. ``gpu`` is None without one. ``experts`` run the
    sparse layers, by lane. ``before_pass`` raises where files have changed; ``abandon`` ends what
    copies wait for.
    """

    placement: Placement
    cpu: Lane
    gpu: Lane | None
    layers: Sequence[Stage]
    head: Sequence[Stage]
    segments: Segments
    joined_head: JoinedHead
    caches: Caches
    embedding: RowTable
    inputs: RowTable | None  # per-layer embeddings
    ngrams: NgramTable | None
    balance: Balance
    clock: Clock
    load_s: float
    before_pass: Callable[[], None]
    abandon: Callable[[], None]
    kv_tier: KvTier | None
    expert_memory: ExpertMemory | None
    close: Callable[[], None]
    experts: Mapping[str, CpuExperts | HybridExperts] = field(default_factory=dict)


class StreamedWeights(WeightStore):
    """See ``WeightStore``. Units are given back as caches grow beyond what the budget leaves."""

    memory: Balance

    def __init__(self, config: DecoderConfig, pipeline: Pipeline) -> None:
        self.pipeline = pipe = pipeline
        self.config = config
        self.ops, self.norm = pipe.cpu.ops, pipe.cpu.norm
        self.memory = pipe.balance
        self._embed: list[Part] = [
            partial(_embed, pipe.embedding, pipe.cpu, config.embedding_scale)
        ]
        for beside in config.block.tables(config):
            if isinstance(beside, InputTable) and pipe.inputs is not None:
                self._embed.append(partial(_take_inputs, pipe.inputs, pipe.cpu, beside))
            elif isinstance(beside, HashedTable) and pipe.ngrams is not None:
                # First of all: what is read while the embedding's rows are may as well be read.
                self._embed.insert(0, partial(_ask_ngrams, pipe.ngrams, pipe.cpu, beside))
        self.body: Sequence[Part] = [*self._embed, *pipe.layers]
        self.stages = [*pipe.layers, *pipe.head]
        self.sparse = pipe.experts
        self.experts = list(pipe.experts.values())
        self.load_s = pipe.load_s  # seconds that reading the resident units took
        self._lanes = [lane for lane in (pipe.cpu, pipe.gpu) if lane is not None]
        self._passes = self._decode_passes = 0
        self._cpu_before = self._decode_cpu_s = 0.0

    @property
    def implementations(self) -> tuple[Ops, ...]:
        return tuple({id(lane.ops): lane.ops for lane in self._lanes}.values())

    # -- a pass ----------------------------------------------------------------------------------

    def begin(
        self, batch: Batch, wanted: npt.NDArray[np.intp], check: Check | None
    ) -> StreamedState:
        pipe = self.pipeline
        pipe.before_pass()
        if any(lane.failed for lane in self._lanes):
            self.abandon()  # read ahead, some time ago: the disk may have come back
        self.memory.follow(crossing=pipe.placement.crosses(len(batch.tokens)))
        logits = pass_logits_nbytes(self.config.vocab_size, len(wanted))
        caches = pipe.caches
        self.memory.make_room(caches.growth(batch) + logits, caches.gpu_growth(batch))
        if not len(wanted):
            self._skip_head()
        self.body = [*self._embed, *pipe.segments.parts(pipe.layers)]
        self._cpu_before = pipe.clock.busy().get("cpu", 0.0)
        return StreamedState(batch, wanted, pipe.cpu, check)

    def head(self, state: PassState) -> Sequence[Part]:
        assert isinstance(state, StreamedState), "begin makes it"
        pipe = self.pipeline
        return pipe.joined_head.parts(pipe.head) if len(state.wanted) else ()

    def end(self, state: PassState, batch: Batch) -> None:
        self._passes += 1
        if len(batch.tokens) == 1 and len(state.wanted):
            self._decode_passes += 1
            busy = self.pipeline.clock.busy().get("cpu", 0.0)
            self._decode_cpu_s += busy - self._cpu_before
        self.memory.settle()

    def abandon(self) -> None:
        """See ``WeightStore``: what is on its way is dropped."""
        self.pipeline.abandon()
        for lane in self._lanes:  # the CPU's first: a GPU's copies ask it for what they need
            lane.rewind()

    def relieve(self) -> bool:
        return self.memory.relieve()

    def _skip_head(self) -> None:
        """The pass reads and copies none of the head, but for what is on its way to the GPU."""
        pipe, head = self.pipeline, self.pipeline.head
        pipe.cpu.skip(stage.name for stage in head if stage.where is Where.SSD)
        if pipe.gpu is not None:  # of what it copies from the CPU's ring it tells the reader
            pipe.gpu.skip(stage.name for stage in head if stage.where.copied)

    # -- caches ----------------------------------------------------------------------------------

    def cache(self, capacity: int) -> KVCache:
        """See ``WeightStore``: each layer's where its attention is computed."""
        return self.pipeline.caches.make(capacity)

    def reserve(self, cache: KVCache, length: int) -> None:
        """See ``WeightStore``.

        Raises:
            MemoryBudgetError: as in ``begin``.
        """
        batch = Batch.extend([(cache, [0] * (length - cache.length))])
        caches = self.pipeline.caches
        self.memory.make_room(caches.growth(batch), caches.gpu_growth(batch))
        cache.reserve(length)

    # -- what passes report ----------------------------------------------------------------------

    def tasks(self, keep: int | None = None) -> list[Task]:
        if keep is not None:
            self.pipeline.clock.keep(keep)
        return self.pipeline.clock.tasks()

    def counts(self) -> PipelineCounts:
        pipe, stages = self.pipeline, self.sparse.values()
        gpu = None if pipe.gpu is None else pipe.gpu.gpu
        return PipelineCounts(
            ssd_read_bytes=self._ssd_bytes(),
            link_bytes=0 if gpu is None else gpu.link_bytes,
            busy_s=pipe.clock.busy(),
            passes=self._passes,
            clock_s=time.perf_counter(),
            decode_passes=self._decode_passes,
            decode_cpu_s=self._decode_cpu_s,
            memory_note=self.memory.note,
            expert_hits=sum(each.hits for each in stages),
            expert_uses=sum(each.uses for each in stages),
        )

    def _ssd_bytes(self) -> int:
        """Read so far, by all that reads."""
        pipe = self.pipeline
        readers = (pipe.cpu.reader, pipe.expert_memory, pipe.ngrams)
        read = sum(reader.bytes_read for reader in readers if reader is not None)
        return read + (0 if pipe.kv_tier is None else pipe.kv_tier.read_bytes)

    def close(self) -> None:
        self.pipeline.close()


def _embed(table: RowTable, cpu: Lane, scale: float, state: StreamedState) -> None:
    """The first part: rows of the embedding, from RAM where they are."""
    state.enter(cpu)
    with cpu.ops.scope():
        rows = table.embed(cpu.ops, state.step, state.tokens, scale, state.check)
        state.x = rows if state.step is None else cpu.ops.adapt_tokens(rows, state.step, scale)


def _ask_ngrams(table: NgramTable, cpu: Lane, hashed: HashedTable, state: StreamedState) -> None:
    """The first part, where a layer has hashed n-grams: their rows are asked for."""
    state.enter(cpu)
    assert state.batch is not None, "a pass has one"
    rows = hashed.rows_of(state.batch)
    state.ngrams = table.ask(cpu.ops, state.step, rows, state.check)


def _take_inputs(table: RowTable, cpu: Lane, inputs: InputTable, state: StreamedState) -> None:
    """The second part, where every layer has inputs of its own: their rows."""
    state.enter(cpu)
    with cpu.ops.scope():
        state.inputs = table.embed(
            cpu.ops, state.step, state.tokens, inputs.scale, state.check, each=inputs.layers
        )
