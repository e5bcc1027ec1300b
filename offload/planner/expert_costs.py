"""What a mixture's experts take on a machine with a card: one for the scheduler, a layer by it."""

from __future__ import annotations

from functools import partial

from localrt.offload.experts.scheduler import ExpertCosts, Ready, schedule
from localrt.offload.planner.costs import Costs

__all__ = ["expert_costs", "layer_seconds"]


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
        cpu=partial(costs.cpu, largest),
        gpu=partial(costs.gpu, largest),
        fetch=costs.copy(largest.nbytes),
        link_load=min(0.5, machine.link_bytes_s / machine.ram_bytes_s),
    )


def layer_seconds(costs: Costs, hybrid: ExpertCosts, use: float) -> tuple[float, float]:
    """Seconds of an equal part of a layer's experts: with none of them on the card, and with all.

    The activations' ways to the CPU and back are in the former.
    """
    assert costs.shape.experts is not None, "they are of a mixture"
    share, rows = costs.touched(use)
    count = max(1, round(costs.shape.experts.count * share))
    way = costs.crossing()
    ready = Ready(cpu=way, cpu_back=way)
    none, all_of_them = (
        schedule([rows] * count, [there] * count, hybrid, ready).end for there in (False, True)
    )
    return none / count, all_of_them / count
