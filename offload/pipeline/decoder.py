"""A decoder whose units are where a placement puts them: the same passes, larger models.

A pass goes through the stages in order; each waits for its own weights and for nothing else, while
readers and copies run ahead. The arithmetic is that of ``models/decoder.py`` on the same ``Ops``:
the output does not depend on the placement. It knows no files and no plans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from localrt.models.decoder import Attention, DecoderConfig, GatedMlp
from localrt.models.latent import LatentAttention
from localrt.models.moe import SparseMlp
from localrt.offload.cards.clock import Clock, later
from localrt.offload.experts.foresight import Foresight
from localrt.offload.experts.hybrid import HybridStage
from localrt.offload.experts.stage import SparseStage
from localrt.offload.pipeline.lane import Lane
from localrt.offload.pipeline.residency import Residency
from localrt.offload.pipeline.row_table import RowTable
from localrt.offload.pipeline.split_cache import SplitCache, grown_length, split_batch
from localrt.offload.pipeline.stages import Stage
from localrt.offload.placement import Where
from localrt.offload.ring import Mark
from localrt.offload.trace import PipelineCounts, Trace
from localrt.quant.ops.aligned import large_floats
from localrt.quant.ops.arrays import copy_to_host
from localrt.quant.ops.experts import Routing
from localrt.quant.ops.protocol import Array, Batch, KVCache, Ops, Pass, Vector, Weight

__all__ = ["PlacedDecoder", "Resources"]

Logits = npt.NDArray[np.float32]
Check = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What a placed decoder runs on, made and freed by ``pipeline.py``.

    ``card`` is None without one. ``norms`` are the final norm's weights, on each lane, ``experts``
    what runs the sparse layers of a mixture on each.
    """

    cpu: Lane
    card: Lane | None
    embedding: RowTable
    norms: dict[str, Vector]
    residency: Residency
    clock: Clock
    trace: Trace
    load_s: float
    before_pass: Callable[[], None]
    abandon: Callable[[], None]
    ssd_bytes: Callable[[], int]
    close: Callable[[], None]
    experts: Mapping[str, SparseStage | HybridStage] = field(default_factory=dict)


class PlacedDecoder:
    """See ``Decoder``, whose interface for engines this is.

    Resident units are given back as caches grow beyond what the budget leaves beside them.
    """

    def __init__(self, config: DecoderConfig, resources: Resources) -> None:
        self.config = config
        self.load_s = resources.load_s  # seconds that reading the resident units took
        self._res = resources
        self._residency = resources.residency
        self._cpu, self._card = resources.cpu, resources.card
        self.ops: Ops = self._cpu.ops
        stages = resources.residency.stages
        on_card = {s.layer for s in stages if s.kind == "attention" and s.where.on_gpu}
        self._on_card = frozenset(on_card)
        self._host_specs = [s for n, s in enumerate(config.attention) if n not in on_card]
        self._caches: WeakSet[KVCache] = WeakSet()
        self._passes = self._decode_passes = 0
        self._decode_cpu_s = 0.0

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages with their present places."""
        return tuple(self._residency.stages)

    @property
    def trace(self) -> Trace:
        """What the pipeline did."""
        return self._res.trace

    @property
    def norm(self) -> Vector:
        """The final norm's weights, as the CPU's ``Ops`` have them."""
        return self._res.norms["cpu"]

    @property
    def clock(self) -> Clock:
        """What its passes are timed by."""
        return self._res.clock

    @property
    def simulated(self) -> bool:
        """Whether its clock is a virtual card's."""
        return self._res.clock.simulated

    def counts(self) -> PipelineCounts:
        """Totals so far."""
        res = self._res
        link = 0 if self._card is None or self._card.card is None else self._card.card.link_bytes
        found = [stages.hits_and_uses for stages in res.experts.values()]
        hits, uses = sum(pair[0] for pair in found), sum(pair[1] for pair in found)
        guesses = [stages.proposals for stages in res.experts.values()]
        return PipelineCounts(
            ssd_read_bytes=res.ssd_bytes(),
            link_bytes=link,
            busy_s=res.trace.busy(),
            passes=self._passes,
            clock_s=res.clock.now(),
            decode_passes=self._decode_passes,
            decode_cpu_s=self._decode_cpu_s,
            memory_note=self._residency.note,
            expert_uses=uses,
            expert_hits=hits,
            expert_prefetches=sum(pair[0] for pair in guesses),
            expert_prefetch_hits=sum(pair[1] for pair in guesses),
        )

    def cache(self, capacity: int) -> KVCache:
        """An empty KV cache for one sequence, each layer's where its attention is computed."""
        specs = self.config.attention
        cache: KVCache
        if self._card is None or self._card.ops is self._cpu.ops:
            cache = self.ops.kv_cache(specs, capacity)
        else:
            cache = SplitCache(self._cpu.ops, self._card.ops, specs, self._on_card, capacity)
        self._caches.add(cache)
        return cache

    def reserve(self, cache: KVCache, length: int) -> None:
        """Make room in ``cache`` for ``length`` tokens that do not come from a pass.

        Raises:
            MemoryBudgetError: as in ``forward``.
        """
        self._make_room(Batch.extend([(cache, [0] * (length - cache.length))]), 0)
        cache.reserve(length)

    def forward(
        self,
        batch: Batch,
        *,
        rows: Sequence[int] | None = None,
        check: Check | None = None,
        features: Logits | None = None,
    ) -> Logits:
        """See ``Decoder.forward``: logits of the chosen ``rows``, (rows, vocab) float32.

        Raises:
            MemoryBudgetError: the caches have outgrown what the budget leaves beside the weights.
            CheckpointError: a file fails, or is no longer what it was.
        """
        wanted = np.arange(len(batch.tokens)) if rows is None else np.asarray(rows, np.intp)
        self._res.before_pass()
        if any(lane.failed for lane in self._lanes):
            self._abandon()  # read ahead, some time ago: the disk may have come back
        self._make_room(batch, len(wanted))
        if not len(wanted):
            self._skip_head()
        decoding = len(batch.tokens) == 1 and len(wanted) > 0
        before = self._res.trace.busy().get("cpu", 0.0) if decoding else 0.0
        try:
            logits = self._run(batch, wanted, check, features)
        except BaseException:
            self._abandon()
            raise
        for span in batch.spans:
            span.cache.advance(span.rows)
        self._passes += 1
        if decoding:
            self._decode_passes += 1
            self._decode_cpu_s += self._res.trace.busy().get("cpu", 0.0) - before
        self._residency.settle()
        return logits

    def watch_routing(self, watch: Callable[[int, Routing], None]) -> None:
        """See ``Decoder.watch_routing``."""
        for stages in self._res.experts.values():
            stages.watch = watch

    @property
    def foresights(self) -> Mapping[str, Foresight]:
        """What proposes experts ahead of their need, by the lane that computes their layers."""
        return {lane: stages.foresight for lane, stages in self._res.experts.items()}

    def close(self) -> None:
        """End all threads and free all weights."""
        self._res.close()

    @property
    def card_memory(self) -> tuple[int, int] | None:
        """Bytes used of the card's memory, and the most that may be; None without a card."""
        card = None if self._card is None else self._card.card
        return None if card is None else (card.used, card.capacity)

    def give_back(self, nbytes: int) -> int:
        """Stream resident units of at least ``nbytes`` of RAM from now on; returns bytes freed.

        0 where that is not possible.
        """
        return self._residency.give_back(nbytes)

    def set_ram_budget(self, nbytes: int, words: str) -> None:
        """From now on ``nbytes`` of RAM for weights and caches; called between passes.

        Raises:
            MemoryBudgetError: what cannot be streamed takes more; nothing changes then.
        """
        self._residency.set_budget(nbytes, sum(map(self._in_ram, self._caches)), words)

    def take_ram(self, nbytes: int) -> None:
        """Leave ``nbytes`` of the budget to something else; see ``Residency.take``."""
        self._residency.take(nbytes, sum(map(self._in_ram, self._caches)))

    def shrink_card(self, nbytes: int, words: str) -> int:
        """Have ``nbytes`` less of the card's memory; returns the bytes freed, 0 if none can be."""
        return self._residency.shrink_card(nbytes, words)

    @property
    def reclaimable(self) -> int:
        """Bytes of RAM that weights could give back."""
        return self._residency.reclaimable

    # -- parts of a pass -------------------------------------------------------------------------

    @property
    def _lanes(self) -> list[Lane]:
        return [self._cpu] if self._card is None else [self._cpu, self._card]

    def _lane(self, stage: Stage) -> Lane:
        if stage.where.on_gpu:
            assert self._card is not None, "a placement on a card needs one"
            return self._card
        return self._cpu

    def _abandon(self) -> None:
        """Drop what is on its way; the next pass begins with the first unit."""
        self._res.abandon()
        for lane in self._lanes:  # the CPU's first: a card's copies ask it for what they need
            lane.rewind()

    def _run(
        self,
        batch: Batch,
        wanted: npt.NDArray[np.intp],
        check: Check | None,
        features: Logits | None,
    ) -> Logits:
        run = _Run(self._res, self.config, batch, check)
        at = self._cpu
        joined = 0  # slices of the head that were computed with one before them
        for index, stage in enumerate(self._residency.stages):
            if stage.kind == "head" and features is not None:
                run.features(features)
                features = None
            if stage.kind == "head" and not len(wanted):
                break
            if check is not None:
                check()
            if joined:
                joined -= 1
                continue
            lane = self._lane(stage)
            if lane is not at:
                run.move(lane)
                at = lane
            if stage.kind == "head" and lane.holds(stage):
                joined = run.head(lane, self._residency.stages[index:], wanted) - 1
            else:
                run.stage(lane, stage, wanted)
        return run.logits(len(wanted))

    def _skip_head(self) -> None:
        """The pass reads and copies none of the head, but for what is on its way to the card."""
        head = [stage for stage in self._residency.stages if stage.kind == "head"]
        self._cpu.skip(stage.name for stage in head if stage.where is Where.SSD)
        if self._card is not None:  # of what it copies from the CPU's ring it tells the reader
            self._card.skip(stage.name for stage in head if stage.where.copied)

    def _make_room(self, batch: Batch, wanted: int) -> None:
        """Give units back for what caches and logits of this pass are about to grow by."""
        held = sum(self._in_ram(cache) for cache in self._caches)
        growth = sum(
            max(0, self._grown(span.cache, span.rows) - self._in_ram(span.cache))
            for span in batch.spans
        )
        logits = 4 * self.config.vocab_size * max(0, wanted - 1)
        self._residency.make_room(held + growth + logits)

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


class _Run:
    """One pass: the activations, where they are, and by which mark."""

    def __init__(
        self, resources: Resources, config: DecoderConfig, batch: Batch, check: Check | None
    ) -> None:
        self._res = resources
        self._residency = resources.residency
        self._config = config
        self._batch = batch
        self._check = check
        self._rows = len(batch.tokens)
        self._steps: dict[int, Pass] = {}
        clock = resources.clock
        # On a virtual clock a pass begins where the one before ended.
        self._mark: Mark = clock.now() if clock.simulated else None
        self._at = resources.cpu
        self._logits: Logits | None = None
        tokens = np.asarray(batch.tokens, np.int64)
        ops = resources.cpu.ops
        with ops.scope():
            step = self._step(resources.cpu)
            self._x: Array = resources.embedding.embed(
                ops, step, tokens, config.embedding_scale, check
            )

    def move(self, lane: Lane) -> None:
        """Take the activations to another lane."""
        card = lane.card or self._at.card
        assert card is not None, "there are two lanes where there is a card"
        change = card.to_card if lane.card is not None else card.to_host
        self._x, self._mark = change(self._x, self._mark)
        self._at = lane

    def features(self, out: Logits) -> None:
        """The activations as they are now, to the host."""
        x, card = self._x, self._at.card
        if card is not None:
            x, self._mark = card.to_host(x, self._mark)
        copy_to_host(x, out)

    def head(self, lane: Lane, stages: Sequence[Stage], wanted: npt.NDArray[np.intp]) -> int:
        """All resident slices that ``stages`` begins with, at once; returns how many."""
        run = list(takewhile(lane.holds, stages))
        clock = self._res.clock
        weight = lane.joined(run)
        with lane.ops.scope():
            started = clock.begin(lane.resource)
            self._project(lane, weight, run[0].first_row, wanted)
            cost = None
            if lane.card is not None:
                nbytes = sum(stage.unit.nbytes for stage in run)
                cost = lane.card.cost_s(nbytes, sum(stage.macs for stage in run), len(wanted))
            self._mark = clock.end(lane.resource, "head", started, after=self._mark, cost_s=cost)
        return len(run)

    def stage(self, lane: Lane, stage: Stage, wanted: npt.NDArray[np.intp]) -> None:
        """Compute one stage once its weights are there."""
        clock, ops, scale = self._res.clock, lane.ops, self._config.residual_scale
        part, there, memory = lane.acquire(stage, self._check)
        ended: Mark = None
        try:
            if memory is not None and lane.card is None:
                self._res.residency.adopt(stage, memory)
            with ops.scope():
                if isinstance(part, SparseMlp):
                    ended = self._mark = self._sparse(stage, part, lane, later(self._mark, there))
                    return
                step = self._step(lane) if stage.kind == "attention" else None
                started = clock.begin(lane.resource)
                if isinstance(part, Attention | LatentAttention):
                    self._x = ops.add(self._x, part(ops, self._x, step), scale)
                elif isinstance(part, GatedMlp):
                    self._x = ops.add(self._x, part(ops, self._x), scale)
                else:
                    self._project(lane, part, stage.first_row, wanted)
                cost = None
                if lane.card is not None:
                    rows = len(wanted) if stage.kind == "head" else self._rows
                    cost = lane.card.cost_s(stage.unit.nbytes, stage.macs, rows)
                ended = clock.end(
                    lane.resource, stage.name, started, after=later(self._mark, there), cost_s=cost
                )
            self._mark = ended
        finally:
            lane.release(stage, ended)

    def _sparse(self, stage: Stage, part: SparseMlp, lane: Lane, mark: Mark) -> Mark:
        """A mixture of experts; returns the mark of its end."""
        cost = (
            None
            if lane.card is None
            else lane.card.cost_s(stage.unit.nbytes, stage.macs, self._rows)
        )
        if cost is not None:  # the router and the shared experts, on a virtual card
            started = self._res.clock.begin(lane.resource)
            mark = self._res.clock.end(lane.resource, stage.name, started, after=mark, cost_s=cost)
        stages = self._res.experts[lane.resource]
        out, mark = stages.run(stage.layer, part, self._x, mark, self._check)
        self._x = lane.ops.add(self._x, out, self._config.residual_scale)
        return mark

    def _project(
        self, lane: Lane, weight: Weight, first_row: int, wanted: npt.NDArray[np.intp]
    ) -> None:
        """Logits of a slice of the vocabulary."""
        norm, eps, softcap = (
            self._res.norms[lane.resource],
            self._config.norm_eps,
            self._config.final_softcap,
        )
        part = lane.ops.head(self._x, wanted, norm, eps, weight, softcap)
        vocab = self._config.vocab_size
        if part.shape[1] == vocab:
            self._logits = part
            return
        if self._logits is None:  # at once: all slices and the whole would be twice the memory
            self._logits = large_floats((len(wanted), vocab))
        self._logits[:, first_row : first_row + part.shape[1]] = part

    def logits(self, rows: int) -> Logits:
        """The head's slices side by side."""
        if self._logits is None:
            return np.empty((rows, self._config.vocab_size), np.float32)
        return self._logits

    def _step(self, lane: Lane) -> Pass:
        """What the lane's ``Ops`` derive from the batch, once."""
        key = id(lane.ops)
        if key not in self._steps:
            self._steps[key] = lane.ops.begin(split_batch(self._batch, lane.ops))
        return self._steps[key]
