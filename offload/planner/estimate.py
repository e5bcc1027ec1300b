"""About how fast a model would be, in milliseconds: counts by rules for usual rings, no replay.

For tables of many models, and to choose among many files. A pass is taken to last as long as its
busiest resource works: rates are within a quarter of those of ``make_plan``, mostly within a tenth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from localrt.offload.account import PREFILL_ROWS
from localrt.offload.placement import Where
from localrt.offload.planner.candidates import costs_of_rows, quick_solutions
from localrt.offload.planner.config_shapes import shape_from_config
from localrt.offload.planner.costs import Costs
from localrt.offload.planner.plan import PlanRequest
from localrt.offload.planner.rules import Counts, Problem, bound
from localrt.offload.planner.search import prepare
from localrt.offload.planner.verdict import Expected
from localrt.offload.shapes import Experts, ModelShape

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_USED = ("num_experts_per_tok", "top_k_experts")


def outline(config: Mapping[str, Any], *, name: str, format: str | None = None) -> ModelShape:
    """The shape of a model, quickly: of a mixture it lists as many experts as a token uses.

    Only ``estimate`` takes such a shape for the whole.

    Raises:
        UnsupportedModelError, CheckpointError: as ``shape_from_config``.
    """
    key = next((key for key in _COUNTS if key in config), None)
    used = next((int(config[each]) for each in _USED if each in config), 0)
    if key is None or not used:
        return shape_from_config(config, name=name, format=format)
    count = int(config[key])
    few = shape_from_config({**config, key: used}, name=name, format=format)
    units = tuple(
        replace(unit, use=used / count) if unit.kind == "expert" else unit for unit in few.units
    )
    assert few.experts is not None, "it is a mixture"
    experts = Experts(count=count, used=used, inner=few.experts.inner)
    return replace(few, units=units, experts=experts)


def estimate(request: PlanRequest) -> Expected | None:
    """Of the best plan for ``request``; None where nothing fits."""
    if request.uses_gpu and request.shape.off_card:
        found = estimate(request.without_gpu())
        return found and replace(found, gpu_unused=True)
    request, rooms, _ = prepare(request)
    costs = request.costs()
    solved = [
        (_seconds(problem, counts), problem, counts)
        for problem, counts in quick_solutions(costs, rooms, _expert_times(request.shape))
    ]
    if not solved:
        return estimate(request.without_gpu()) if request.uses_gpu else None
    seconds, problem, counts = min(solved, key=lambda each: each[0])
    placed = [
        (where, count * group.nbytes, group.use)
        for group, places in zip(problem.classes, counts, strict=True)
        for where, count in places.items()
    ]
    return Expected(
        tok_s=request.sequences / seconds,
        prefill_tok_s=PREFILL_ROWS / _prompt_seconds(costs, problem, counts),
        nbytes=sum(nbytes for _, nbytes, _ in placed),
        needed=round(sum(nbytes * use for _, nbytes, use in placed)),
        read=round(sum(nbytes * use for where, nbytes, use in placed if where.read)),
        copied=round(sum(nbytes * use for where, nbytes, use in placed if where.copied)),
        on_card=sum(nbytes for where, nbytes, _ in placed if where is Where.VRAM),
        by_cpu=round(sum(nbytes * use for where, nbytes, use in placed if where is Where.RAM)),
    )


def whole_nbytes(shape: ModelShape) -> int:
    """Packed bytes of all units of an outline, or of a whole shape."""
    times = _expert_times(shape)
    return sum(unit.nbytes * (times if unit.kind == "expert" else 1) for unit in shape.units)


def _seconds(problem: Problem, counts: Counts) -> float:
    """Of a pass. What is read of a mixture's experts is known once the router has chosen, and its
    layer then waits.
    """
    late = sum(
        count * group.use * group.nbytes
        for group, places in zip(problem.classes, counts, strict=True)
        for where, count in places.items()
        if group.kind == "expert" and where.read
    )
    if not late:
        return bound(problem, counts)
    ahead = [
        {} if group.kind == "expert" else places
        for group, places in zip(problem.classes, counts, strict=True)
    ]
    computed = replace(problem, ssd_bytes_s=float("inf"))
    read = bound(problem, ahead)
    return late / problem.ssd_bytes_s + max(bound(computed, counts), read)


def _expert_times(shape: ModelShape) -> int:
    """How many experts stand for each that is listed: of an outline."""
    if shape.experts is None:
        return 1
    listed = len(shape.routed) / len({unit.layer for unit in shape.routed})
    return round(shape.experts.count / listed)


def _prompt_seconds(costs: Costs, problem: Problem, counts: Counts) -> float:
    """Of a prompt's pass, with what the CPU has computed by it, or copied to the card for it."""
    many = costs_of_rows(costs, PREFILL_ROWS)
    units = {unit.name: unit for unit in costs.shape.units}
    read = copied = by_cpu = crossing = by_card = stays = 0.0
    for group, places in zip(problem.classes, counts, strict=True):
        unit, share, rows = units[group.names[0]], group.use, PREFILL_ROWS
        if group.kind == "expert":
            share, rows = many.touched(unit.use)
        for where, count in places.items():
            used = count * share
            read += used * group.nbytes * where.read
            copied += used * group.nbytes * where.copied
            if where.on_gpu:
                stays += used * many.gpu(unit, rows)
            elif problem.link_bytes_s and group.kind in ("mlp", "expert"):
                by_cpu += used * many.cpu(unit, rows)
                by_card += used * many.gpu(unit, rows)
                crossing += used * group.nbytes
            else:
                stays += used * many.cpu(unit, rows)
    disk, link = read / problem.ssd_bytes_s, problem.link_bytes_s
    ways = [max(disk, copied / link if link else 0.0, stays + by_cpu)]
    if crossing:
        ways.append(max(disk, (copied + crossing) / link, stays + by_card))
    return min(ways) + costs.per_pass()
