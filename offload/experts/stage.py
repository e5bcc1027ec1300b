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

from localrt.models.moe import Routed, RoutingWatch, SparseMlp
from localrt.models.timing import Clock, Mark
from localrt.offload.cards.clock import later
from localrt.offload.experts.memory import ExpertMemory
from localrt.offload.experts.prefetch import Measured, Prefetcher
from localrt.offload.pipeline.lane import StreamedState
from localrt.quant.ops.experts import Routing
from localrt.quant.ops.protocol import Array, Ops

__all__ = ["SparseStage"]


class SparseStage:
    """Runs sparse layers on the CPU. See ``Experts``.

    ``router`` gives a sparse layer's part where it is in memory.
    """

    def __init__(
        self,
        memory: ExpertMemory,
        ops: Ops,
        clock: Clock,
        router: Callable[[int], SparseMlp | None] = lambda place: None,
    ) -> None:
        self.watch: RoutingWatch | None = None
        self._memory = memory
        self._ops = ops
        self._clock = clock
        self._router = router
        self._hits = self._uses = 0
        self._waited_s, self._waits = 0.0, 0
        self._cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        self.prefetcher = Prefetcher(
            memory.layers, gate=self._gate, now=clock.now, measured=self._measured
        )

    @property
    def proposals(self) -> tuple[int, int]:
        """Experts that were read on a guess, and those of them that were asked for."""
        return self._memory.proposals

    @property
    def hits_and_uses(self) -> tuple[int, int]:
        """Experts that were in memory when a layer asked for them, and all that were asked for."""
        return self._hits, self._uses

    def run(self, part: SparseMlp, state: StreamedState) -> Array:
        """See ``Experts``."""
        ops, clock, place = self._ops, self._clock, part.place
        memory, pool = self._memory, self._memory.pool(place)
        label = f"layers.{part.layer}.mlp"
        started = clock.begin("cpu")
        routed = part.route(ops, state.x)
        state.mark = clock.end("cpu", label, started, after=state.mark)
        ahead = self.prefetcher
        try:
            if place == 0:  # between passes
                memory.stage(ahead.most if ahead.on else 0)
            wanted = pool.demand(place, routed.routing, state.mark)
            after, proposals = ahead.turn(place, routed.routing, state.x, memory.resident)
            if proposals:
                memory.pool(after).propose(after, proposals)
            self._hits += len(wanted.present)
            self._uses += len(wanted.present) + len(wanted.absent)
            started = clock.begin("cpu")
            shared = part.shared_rows(ops, routed)
            slots = ops.expert_slots(routed.normed, routed.routing)
            self._compute(part, routed, slots, wanted.present)
            state.mark = clock.end("cpu", label, started, after=state.mark)
            pool.computed(place, wanted.present, state.mark)
            for expert in wanted.absent:
                there = self._arrive(place, expert, state)
                started = clock.begin("cpu")
                self._compute(part, routed, slots, [expert])
                name = f"layers.{part.layer}.expert.{expert}"
                state.mark = clock.end("cpu", name, started, after=later(state.mark, there))
                pool.computed(place, [expert], state.mark)
        finally:
            # What is on its way comes all the same; what failed is asked for when it is needed.
            pool.done(place)
        started = clock.begin("cpu")
        out = ops.combine_experts(slots, routed.routing, shared)
        state.mark = clock.end("cpu", label, started, after=state.mark)
        return out

    def _arrive(self, place: int, expert: int, state: StreamedState) -> Mark:
        """Wait for an absent expert; how long is kept count of."""
        began = time.perf_counter()
        there = self._memory.pool(place).arrive(place, expert, state.mark, state.check)
        if isinstance(there, float) and isinstance(state.mark, float):
            self._waited_s += max(0.0, there - state.mark)
        else:
            self._waited_s += time.perf_counter() - began
        self._waits += 1
        return there

    def _gate(self, place: int, x: Array) -> Routing | None:
        """What a later layer would choose if nothing came between."""
        part = self._router(place)
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
            table, spec = self._memory.tables[part.place], part.spec.expert
            self._ops.run_experts(routed.normed, routed.routing, table, spec, slots, experts)
