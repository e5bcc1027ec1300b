"""A sparse layer in a pass: what is in memory is computed while what is not is on its way.

The router chooses, reads of absent experts begin, shared experts and those at hand are computed,
and each absent one as it arrives. Slots are combined in a fixed order: the result is bit for bit
what it would be with everything in memory. It knows neither what is kept nor how it is read.
"""

from __future__ import annotations

from collections.abc import Sequence

from localrt.models.layers.moe import Routed, RoutingWatch, SparseMlp
from localrt.models.timing import Clock
from localrt.offload.cards.clock import later
from localrt.offload.experts.memory import ExpertMemory
from localrt.offload.pipeline.lane import StreamedState
from localrt.quant.ops.protocol import Array, Ops

__all__ = ["SparseStage"]


class SparseStage:
    """Runs sparse layers on the CPU. See ``Experts``.

    ``hits`` and ``uses`` count the experts that were in memory when a layer asked for them, and all
    that were asked for.
    """

    hostless = False

    def __init__(self, memory: ExpertMemory, ops: Ops, clock: Clock) -> None:
        self.watch: RoutingWatch | None = None
        self.hits = self.uses = 0
        self._memory = memory
        self._ops = ops
        self._clock = clock

    def run(self, part: SparseMlp, state: StreamedState) -> Array:
        """See ``Experts``."""
        ops, clock, place = self._ops, self._clock, part.place
        pool = self._memory.pool(place)
        label = f"layers.{part.layer}.mlp"
        started = clock.begin("cpu")
        routed = part.route(ops, state.x)
        state.mark = clock.end("cpu", label, started, after=state.mark)
        try:
            wanted = pool.demand(place, routed.routing, state.mark)
            self.hits += len(wanted.present)
            self.uses += len(wanted.present) + len(wanted.absent)
            started = clock.begin("cpu")
            shared = part.shared_rows(ops, routed)
            slots = ops.expert_slots(routed.rows, routed.routing)
            self._compute(part, routed, slots, wanted.present)
            state.mark = clock.end("cpu", label, started, after=state.mark)
            pool.computed(place, wanted.present, state.mark)
            for expert in wanted.absent:
                there = pool.arrive(place, expert, state.mark, state.check)
                started = clock.begin("cpu")
                self._compute(part, routed, slots, [expert])
                name = f"layers.{part.layer}.expert.{expert}"
                state.mark = clock.end("cpu", name, started, after=later(state.mark, there))
                pool.computed(place, [expert], state.mark)
        finally:
            # What is on its way comes all the same; what failed is asked for when it is needed.
            pool.done(place)
        started = clock.begin("cpu")
        out = part.combine(ops, slots, routed.routing, shared)
        state.mark = clock.end("cpu", label, started, after=state.mark)
        return out

    def _compute(
        self, part: SparseMlp, routed: Routed, slots: Array, experts: Sequence[int]
    ) -> None:
        if len(experts):
            table = self._memory.pool(part.place).cache.tables[part.place]
            spec = part.spec.expert
            self._ops.run_experts(routed.rows, routed.routing, table, spec, slots, experts)
