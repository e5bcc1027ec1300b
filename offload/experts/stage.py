"""A sparse layer in a pass: what is in memory is computed while what is not is on its way.

The router chooses, reads of absent experts begin, shared experts and those at hand are computed,
and each absent one as it arrives. Slots are combined in a fixed order: the result is bit for bit
what it would be with everything in memory. It knows neither what is kept nor how it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from localrt.models.moe import Routed, SparseMlp
from localrt.offload.clock import Clock, later
from localrt.offload.experts.memory import ExpertMemory
from localrt.offload.experts.reader import Check
from localrt.offload.ring import Mark
from localrt.quant.ops.experts import Routing
from localrt.quant.ops.protocol import Array, Ops

__all__ = ["SparseStage"]


class SparseStage:
    """Runs sparse layers on the CPU. ``places`` are the layers' numbers among the sparse ones.

    ``watch`` is told of every choice.
    """

    def __init__(
        self, memory: ExpertMemory, places: dict[int, int], ops: Ops, clock: Clock
    ) -> None:
        self._memory = memory
        self._places = places
        self._ops = ops
        self._clock = clock
        self._hits = self._uses = 0
        self.watch: Callable[[int, Routing], None] | None = None

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
        try:
            wanted = self._memory.demand(place, routed.routing, mark)
            self._hits += len(wanted.present)
            self._uses += len(wanted.present) + len(wanted.absent)
            started = self._clock.begin("cpu")
            shared = part.shared_rows(ops, routed)
            slots = ops.expert_slots(routed.normed, routed.routing)
            self._compute(part, routed, slots, wanted.present)
            mark = self._clock.end("cpu", label, started, after=mark)
            self._memory.computed(place, wanted.present, mark)
            for expert in wanted.absent:
                there = self._memory.arrive(place, expert, mark, check)
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

    def _compute(
        self, part: SparseMlp, routed: Routed, slots: Array, experts: Sequence[int]
    ) -> None:
        if len(experts):
            self._ops.run_experts(
                routed.normed, routed.routing, part.table, part.spec.expert, slots, experts
            )
