"""A sparse layer in a pass: what is in memory is computed while what is not is on its way.

The router chooses, reads of absent experts begin, shared experts and those at hand are computed,
and each absent one as it arrives. While that goes on, and only where it was measured to pay, some
of the next layer's are read on a guess. Slots are combined in a fixed order: the result is bit for
bit what it would be with everything in memory. It knows neither what is kept nor how it is read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from localrt.models.moe import Routed, SparseMlp
from localrt.offload.cards.clock import Clock, later
from localrt.offload.experts.foresight import Foresight, Measured
from localrt.offload.experts.memory import ExpertMemory
from localrt.offload.experts.pools import ExpertPools
from localrt.offload.experts.reader import Check
from localrt.offload.ring import Mark
from localrt.quant.ops.experts import Routing
from localrt.quant.ops.protocol import Array, Ops

__all__ = ["SparseStage"]


class SparseStage:
    """Runs sparse layers on the CPU. ``places`` are the layers' numbers among the sparse ones.

    ``part`` is a layer's where it is in memory. ``watch`` is told of every choice.
    """

    def __init__(
        self,
        memory: ExpertMemory | ExpertPools,
        places: dict[int, int],
        ops: Ops,
        clock: Clock,
        part: Callable[[int], SparseMlp | None] = lambda layer: None,
    ) -> None:
        self._memory = memory
        self._places = places
        self._ops = ops
        self._clock = clock
        self._hits = self._uses = 0
        self.watch: Callable[[int, Routing], None] | None = None
        self._layers = {place: layer for layer, place in places.items()}
        self._part = part
        self._waited_s, self._waits = 0.0, 0
        self._cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        self.foresight = Foresight(
            memory.layers,
            memory.count,
            memory.used,
            gate=self._gate,
            now=clock.now,
            measured=self._measured,
        )

    @property
    def proposals(self) -> tuple[int, int]:
        """Experts that were read on a guess, and those of them that were asked for."""
        return self._memory.proposals

    @property
    def hits_and_uses(self) -> tuple[int, int]:
        """Experts that were in memory when a layer asked for them, and all that were asked for."""
        return self._hits, self._uses

    def run(
        self, layer: int, part: SparseMlp, x: Array, mark: Mark, check: Check | None
    ) -> tuple[Array, Mark]:
        """``x`` (R, D) is there by ``mark``: the layer's sum (R, D), and when it is there."""
        ops, place = self._ops, self._places[layer]
        label = f"layers.{layer}.mlp"
        started = self._clock.begin("cpu")
        routed = part.route(ops, x)
        mark = self._clock.end("cpu", label, started, after=mark)
        if self.watch is not None:
            self.watch(place, routed.routing)
        ahead = self.foresight
        try:
            if place == 0:  # between passes
                self._memory.stage(ahead.most if ahead.sources.names else 0)
            wanted = self._memory.demand(place, routed.routing, mark)
            after, proposals = ahead.turn(place, routed.routing, x, self._memory.resident)
            if proposals:
                self._memory.propose(after, proposals)
            self._hits += len(wanted.present)
            self._uses += len(wanted.present) + len(wanted.absent)
            started = self._clock.begin("cpu")
            shared = part.shared_rows(ops, routed)
            slots = ops.expert_slots(routed.normed, routed.routing)
            self._compute(part, routed, slots, wanted.present)
            mark = self._clock.end("cpu", label, started, after=mark)
            self._memory.computed(place, wanted.present, mark)
            for expert in wanted.absent:
                there = self._arrive(place, expert, mark, check)
                started = self._clock.begin("cpu")
                self._compute(part, routed, slots, [expert])
                mark = self._clock.end(
                    "cpu",
                    f"layers.{layer}.expert.{expert}",
                    started,
                    after=later(mark, there),
                )
                self._memory.computed(place, [expert], mark)
        except BaseException:
            self._memory.abandon(place)
            raise
        self._memory.done(place)
        started = self._clock.begin("cpu")
        out = ops.combine_experts(slots, routed.routing, shared)
        return out, self._clock.end("cpu", label, started, after=mark)

    def _arrive(self, place: int, expert: int, mark: Mark, check: Check | None) -> Mark:
        """Wait for an absent expert; how long is kept count of."""
        began = time.perf_counter()
        there = self._memory.arrive(place, expert, mark, check)
        if isinstance(there, float) and isinstance(mark, float):
            self._waited_s += max(0.0, there - mark)
        else:
            self._waited_s += time.perf_counter() - began
        self._waits += 1
        return there

    def _gate(self, place: int, x: Array) -> Routing | None:
        """What a later layer would choose if nothing came between."""
        part = self._part(self._layers[place])
        if part is None:
            return None
        return self._ops.norm_route(x, part.router, part.spec.router)[1]

    def _measured(self) -> Measured:
        reading = self._memory.reading
        return Measured(
            busy_s=reading.busy_s,
            loads=reading.loads,
            saved_s=self._waited_s,
            misses=self._waits,
            cpu_s=reading.cpu_s / self._cores,
        )

    def _compute(
        self, part: SparseMlp, routed: Routed, slots: Array, experts: Sequence[int]
    ) -> None:
        if len(experts):
            self._ops.run_experts(
                routed.normed, routed.routing, part.table, part.spec.expert, slots, experts
            )
