"""What a mixture's expert takes on each device of a machine, for the hybrid scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from localrt.offload.experts.assignment import ExpertCosts
from localrt.offload.placement import PlacedUnit
from localrt.offload.planner.costs import Costs

__all__ = ["expert_costs"]


@dataclass(frozen=True, slots=True)
class _Seconds:
    """See ``assignment.Seconds``."""

    costs: Costs
    unit: PlacedUnit
    on_gpu: bool

    def at(self, rows: int, /) -> float:
        """Seconds for one expert with ``rows`` rows."""
        return self.costs.compute(self.unit, on_gpu=self.on_gpu, rows=rows)


def expert_costs(costs: Costs) -> ExpertCosts | None:
    """Of the largest expert on ``costs``' machine; None without experts, or without a GPU.

    What copying takes from the CPU's kernels is what both read of the same memory.
    """
    experts = [unit for unit in costs.shape.units if unit.kind == "expert"]
    machine = costs.machine
    if not experts or machine.gpu is None or machine.link_bytes_s is None:
        return None
    largest = max(experts, key=lambda unit: unit.nbytes)
    return ExpertCosts(
        cpu=_Seconds(costs, largest, False),
        gpu=_Seconds(costs, largest, True),
        fetch=costs.copy(largest.nbytes),
        link_load=min(0.5, machine.link_bytes_s / machine.ram_bytes_s),
    )
