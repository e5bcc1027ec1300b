"""A sparse layer on the CPU: what is in memory is computed while what is not is on its way.

Once the router has chosen, reads of absent experts begin; those at hand are computed, then each
absent one as it arrives. The layer adds their results in a fixed order: the sum is bit for bit what
it would be with everything in memory. It knows neither what is kept nor how it is read.
"""

from __future__ import annotations

from collections.abc import Sequence

from localrt.models.layers.moe import Routed, RoutingWatch
from localrt.models.layers.parts import Check, PassState
from localrt.offload.device.clock import Clock
from localrt.offload.experts.memory import ExpertMemory
from localrt.quant.ops.protocol import Array, Ops


class CpuExperts:
    """Runs sparse layers on the CPU. See ``Experts``.

    The CPU's time is the caller's task on ``clock``, which pauses while an expert is waited for.
    ``hits`` and ``uses`` count the experts that were in memory when a layer asked for them, and all
    that were asked for.
    """

    hostless = False

    def __init__(self, memory: ExpertMemory, ops: Ops, clock: Clock) -> None:
        self.watch: RoutingWatch | None = None
        self.hits = self.uses = 0
        self.memory = memory
        self.ops = ops
        self.clock = clock

    def begin(self, routed: Routed, state: PassState) -> _Turn:
        """Reads of what is absent begin."""
        try:
            return _Turn(self, routed, state.check)
        except BaseException:
            self.memory.pool(routed.place).done(routed.place)
            raise


class _Turn:
    """See ``Turn``."""

    def __init__(self, experts: CpuExperts, routed: Routed, check: Check | None) -> None:
        self._experts, self._routed, self._check = experts, routed, check
        self._pool = experts.memory.pool(routed.place)
        self._wanted = wanted = self._pool.demand(routed.place, routed.routing)
        experts.hits += len(wanted.present)
        experts.uses += len(wanted.present) + len(wanted.absent)

    def slots(self) -> Array:
        """What is at hand, then what comes."""
        pool, routed, wanted = self._pool, self._routed, self._wanted
        slots = self._experts.ops.expert_slots(routed.rows, routed.routing)
        if wanted.present:
            self._compute(slots, wanted.present)
        for expert in wanted.absent:
            with self._experts.clock.pause("cpu", f"layers.{routed.layer}.mlp"):
                pool.arrive(routed.place, expert, self._check)
            self._compute(slots, [expert])
        return slots

    def end(self) -> None:
        """What is on its way comes all the same; what failed is asked for when it is needed."""
        self._pool.done(self._routed.place)

    def _compute(self, slots: Array, experts: Sequence[int]) -> None:
        routed = self._routed
        table = self._pool.cache.tables[routed.place]
        self._experts.ops.run_experts(
            routed.rows, routed.routing, table, routed.spec, slots, experts
        )
        self._pool.computed(routed.place, experts)
