"""A model whose units are where a placement puts them: the same passes, larger models.

A pass goes through the stages in order; each waits for its own weights and for nothing else, while
readers and copies run ahead. The arithmetic is that of a resident model: the output does not depend
on the placement. It knows no files and no plans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from localrt.models.config import DecoderConfig
from localrt.models.layers.inputs import input_scale
from localrt.models.layers.ngram_layer import rows_of_pass
from localrt.models.layers.ngrams import NgramHash
from localrt.models.layers.parts import Part, PassState
from localrt.models.residency import Check, Residency
from localrt.models.timing import PipelineCounts, Task
from localrt.offload.account import pass_logits_nbytes
from localrt.offload.cards.clock import WallClock
from localrt.offload.experts.hybrid import HybridStage
from localrt.offload.experts.stage import SparseStage
from localrt.offload.pipeline.balance import Balance
from localrt.offload.pipeline.caches import Caches
from localrt.offload.pipeline.head import JoinedHead
from localrt.offload.pipeline.lane import Lane, StreamedState
from localrt.offload.pipeline.ngram_table import NgramTable
from localrt.offload.pipeline.row_table import RowTable
from localrt.offload.pipeline.stage import Stage
from localrt.offload.pipeline.stretches import Stretches
from localrt.offload.placement import Placement, Where
from localrt.quant.ops.protocol import Batch, KVCache, Ops

__all__ = ["Pipeline", "Streamed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """What streams a model's weights. ``opening.py`` makes it, and ``close`` frees all of it.

    ``placement`` is what it was opened with. ``card`` is None without one. ``experts`` run the
    sparse layers, by lane. ``before_pass`` raises where files have changed; ``abandon`` ends what
    copies wait for.
    """

    placement: Placement
    cpu: Lane
    card: Lane | None
    layers: Sequence[Stage]
    head: Sequence[Stage]
    stretches: Stretches
    joined_head: JoinedHead
    caches: Caches
    embedding: RowTable
    inputs: RowTable | None  # per-layer embeddings
    ngrams: NgramTable | None
    balance: Balance
    clock: WallClock
    load_s: float
    before_pass: Callable[[], None]
    abandon: Callable[[], None]
    ssd_bytes: Callable[[], int]
    close: Callable[[], None]
    experts: Mapping[str, SparseStage | HybridStage] = field(default_factory=dict)


class Streamed(Residency):
    """See ``Residency``. Units are given back as caches grow beyond what the budget leaves."""

    memory: Balance

    def __init__(self, config: DecoderConfig, pipeline: Pipeline) -> None:
        self.pipeline = pipe = pipeline
        self.config = config
        self.ops, self.norm = pipe.cpu.ops, pipe.cpu.norm
        self.memory = pipe.balance
        self._embed: list[Part] = [
            partial(_embed, pipe.embedding, pipe.cpu, config.embedding_scale)
        ]
        if pipe.inputs is not None:
            scale = input_scale(config)
            self._embed.append(partial(_take_inputs, pipe.inputs, pipe.cpu, scale, config.layers))
        if config.ngrams is not None and pipe.ngrams is not None:
            hashed = NgramHash(config.ngrams.spec)
            # First of all: what is read while the embedding's rows are may as well be read.
            self._embed.insert(
                0, partial(_ask_ngrams, pipe.ngrams, pipe.cpu, hashed, config.ngram_place)
            )
        self.body: Sequence[Part] = [*self._embed, *pipe.layers]
        self.stages = [*pipe.layers, *pipe.head]
        self.sparse = pipe.experts
        self.experts = list(pipe.experts.values())
        self.load_s = pipe.load_s  # seconds that reading the resident units took
        self._lanes = [lane for lane in (pipe.cpu, pipe.card) if lane is not None]
        self._passes = self._decode_passes = 0
        self._cpu_before = self._decode_cpu_s = 0.0

    @property
    def implementations(self) -> tuple[Ops, ...]:
        """See ``Residency``."""
        return tuple({id(lane.ops): lane.ops for lane in self._lanes}.values())

    # -- a pass ----------------------------------------------------------------------------------

    def begin(
        self, batch: Batch, wanted: npt.NDArray[np.intp], check: Check | None
    ) -> StreamedState:
        """See ``Residency``."""
        pipe = self.pipeline
        pipe.before_pass()
        if any(lane.failed for lane in self._lanes):
            self.abandon()  # read ahead, some time ago: the disk may have come back
        self.memory.follow(crossing=pipe.placement.crosses(len(batch.tokens)))
        logits = pass_logits_nbytes(self.config.vocab_size, len(wanted))
        caches = pipe.caches
        self.memory.make_room(caches.growth(batch) + logits, caches.card_growth(batch))
        if not len(wanted):
            self._skip_head()
        self.body = [*self._embed, *pipe.stretches.parts(pipe.layers)]
        self._cpu_before = pipe.clock.busy().get("cpu", 0.0)
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
            busy = self.pipeline.clock.busy().get("cpu", 0.0)
            self._decode_cpu_s += busy - self._cpu_before
        self.memory.settle()

    def abandon(self) -> None:
        """See ``Residency``: what is on its way is dropped."""
        self.pipeline.abandon()
        for lane in self._lanes:  # the CPU's first: a card's copies ask it for what they need
            lane.rewind()

    def relieve(self) -> bool:
        """See ``Residency``."""
        return self.memory.relieve()

    def _skip_head(self) -> None:
        """The pass reads and copies none of the head, but for what is on its way to the card."""
        pipe, head = self.pipeline, self.pipeline.head
        pipe.cpu.skip(stage.name for stage in head if stage.where is Where.SSD)
        if pipe.card is not None:  # of what it copies from the CPU's ring it tells the reader
            pipe.card.skip(stage.name for stage in head if stage.where.copied)

    # -- caches ----------------------------------------------------------------------------------

    def cache(self, capacity: int) -> KVCache:
        """See ``Residency``: each layer's where its attention is computed."""
        return self.pipeline.caches.make(capacity)

    def reserve(self, cache: KVCache, length: int) -> None:
        """See ``Residency``.

        Raises:
            MemoryBudgetError: as in ``begin``.
        """
        batch = Batch.extend([(cache, [0] * (length - cache.length))])
        caches = self.pipeline.caches
        self.memory.make_room(caches.growth(batch), caches.card_growth(batch))
        cache.reserve(length)

    # -- what passes report ----------------------------------------------------------------------

    @property
    def clock(self) -> WallClock:
        """See ``Residency``."""
        return self.pipeline.clock

    def tasks(self, keep: int | None = None) -> list[Task]:
        """See ``Residency``."""
        if keep is not None:
            self.pipeline.clock.keep(keep)
        return self.pipeline.clock.tasks()

    def counts(self) -> PipelineCounts:
        """See ``Residency``."""
        pipe, stages = self.pipeline, self.sparse.values()
        card = None if pipe.card is None else pipe.card.card
        return PipelineCounts(
            ssd_read_bytes=pipe.ssd_bytes(),
            link_bytes=0 if card is None else card.link_bytes,
            busy_s=pipe.clock.busy(),
            passes=self._passes,
            clock_s=pipe.clock.now(),
            decode_passes=self._decode_passes,
            decode_cpu_s=self._decode_cpu_s,
            memory_note=self.memory.note,
            expert_hits=sum(each.hits for each in stages),
            expert_uses=sum(each.uses for each in stages),
        )

    def close(self) -> None:
        """See ``Residency``."""
        self.pipeline.close()


def _embed(table: RowTable, cpu: Lane, scale: float, state: StreamedState) -> None:
    """The first part: rows of the embedding, from RAM where they are."""
    state.enter(cpu)
    with cpu.ops.scope():
        rows = table.embed(cpu.ops, state.step, state.tokens, scale, state.check)
        state.x = rows if state.step is None else cpu.ops.adapt_tokens(rows, state.step, scale)


def _ask_ngrams(
    table: NgramTable, cpu: Lane, hashed: NgramHash, place: int, state: StreamedState
) -> None:
    """The first part, where a layer has hashed n-grams: their rows are asked for."""
    state.enter(cpu)
    assert state.batch is not None, "a pass has one"
    rows = rows_of_pass(hashed, state.batch, place).reshape(-1)
    state.ngrams = table.ask(cpu.ops, state.step, rows, state.check)


def _take_inputs(
    table: RowTable, cpu: Lane, scale: float, layers: int, state: StreamedState
) -> None:
    """The second part, where every layer has inputs of its own: their rows."""
    state.enter(cpu)
    with cpu.ops.scope():
        state.inputs = table.embed(
            cpu.ops, state.step, state.tokens, scale, state.check, each=layers
        )
