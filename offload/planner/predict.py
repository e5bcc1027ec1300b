"""Predicts a model's speed: ``estimate`` in milliseconds, ``find_plan`` with a full search.

An estimate solves by rules for usual rings, and assumes that a pass lasts as long as its busiest
resource works. Its rates are within a quarter of a replay's, mostly within a tenth. It serves for
tables of many models, for choosing among files, and for the gain of a change relative to the plan.
The plan of a model that is not on this machine shows the estimate, as tables do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from localrt.common.formatting import format_bytes
from localrt.offload.account import PREFILL_ROWS, placed_account
from localrt.offload.placement import Where
from localrt.offload.planner.costs import Costs
from localrt.offload.planner.plan import Plan, PlanRequest, Prediction
from localrt.offload.planner.search import (
    Candidate,
    best_placement,
    costs_of_rows,
    prepare,
    quick_solutions,
)
from localrt.offload.planner.shapes import shape_from_config
from localrt.offload.planner.simulate import RESOURCES, simulate
from localrt.offload.planner.solve import Counts, Problem, bound
from localrt.offload.planner.verdict import PROMPT_TOKENS, Expected
from localrt.offload.shapes import Experts, ModelShape

EVEN_EXPERTS = "experts are taken to be chosen evenly: a cache that follows the text reads less"
"""The note on the plan of every mixture."""

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_USED = ("num_experts_per_tok", "top_k_experts")


def outline(config: Mapping[str, Any], *, name: str, format: str | None = None) -> ModelShape:
    """Return a model's shape quickly: a mixture's lists only as many experts as a token uses.

    Only ``estimate`` and ``whole_nbytes`` count such a shape as the whole model.

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
    """Estimate the best plan for ``request``; None if nothing fits."""
    if request.uses_gpu and request.shape.off_gpu:
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
        on_gpu=sum(nbytes for where, nbytes, _ in placed if where is Where.VRAM),
        by_cpu=round(sum(nbytes * use for where, nbytes, use in placed if where is Where.RAM)),
        thinks=request.thinks,
    )


def whole_nbytes(shape: ModelShape) -> int:
    """Return the packed bytes of a whole model, from its outline or its full shape."""
    times = _expert_times(shape)
    return sum(unit.nbytes * (times if unit.kind == "expert" else 1) for unit in shape.units)


def _seconds(problem: Problem, counts: Counts) -> float:
    """Return the seconds of a pass. An expert's read starts only after the router has chosen it, so
    its layer waits for the read.
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
    """Return how many experts each listed one stands for; 1 unless it is an outline."""
    if shape.experts is None:
        return 1
    listed = len(shape.routed) / len({unit.layer for unit in shape.routed})
    return round(shape.experts.count / listed)


def _prompt_seconds(costs: Costs, problem: Problem, counts: Counts) -> float:
    """Return the seconds of a prompt's pass: the CPU computes its units, or the GPU if faster."""
    many = costs_of_rows(costs, PREFILL_ROWS)
    units = {unit.name: unit for unit in costs.shape.units}
    read = copied = by_cpu = crossing = by_gpu = stays = 0.0
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
                by_gpu += used * many.gpu(unit, rows)
                crossing += used * group.nbytes
            else:
                stays += used * many.cpu(unit, rows)
    disk, link = read / problem.ssd_bytes_s, problem.link_bytes_s
    ways = [max(disk, copied / link if link else 0.0, stays + by_cpu)]
    if crossing:
        ways.append(max(disk, (copied + crossing) / link, stays + by_gpu))
    return min(ways) + costs.per_pass()


# -- at length -------------------------------------------------------------------------------------


def find_plan(request: PlanRequest) -> Plan | None:
    """Return the best plan, or None if nothing fits."""
    notes = tuple(filter(None, (request.note, *request.shape.notes)))
    placed, best, more = best_placement(request)
    if best is not None:
        return _planned(placed, best, (*notes, *more))
    if not request.uses_gpu:
        return None
    plan = find_plan(request.without_gpu())
    if plan is None:
        return None
    note = f"{format_bytes(request.budgets.vram)} of GPU memory are too little to be of use"
    return replace(plan, notes=(*plan.notes, note))


def _planned(request: PlanRequest, best: Candidate, notes: tuple[str, ...]) -> Plan:
    shape, placement = request.shape, best.placement
    if shape.experts is not None:
        notes = (*notes, EVEN_EXPERTS)
    if placement.prefill_rows < min(PREFILL_ROWS, request.most_prefill_rows):
        note = f"prompts go {placement.prefill_rows} tokens at a time, to fit the budget"
        notes = (*notes, note)
    return Plan(
        request=request,
        placement=placement,
        prediction=_predicted(request, best),
        memory=placed_account(
            shape,
            request.budgets,
            placement,
            ctx=request.ctx,
            kv_format=request.kv_format,
            sequences=request.sequences,
            rows=max(placement.prefill_rows, request.rows, request.sequences),
        ),
        notes=notes,
    )


def _predicted(request: PlanRequest, best: Candidate) -> Prediction:
    """Predict from replays of a token, of prompts, and of a token at the full context."""
    placement = best.placement
    steady = simulate(request.costs(), placement)
    full = simulate(request.costs(held=request.ctx), placement)

    def prompt_seconds(rows: int) -> float:
        """Return the seconds of a prompt's pass."""
        held = max(0, min(request.ctx, 512) - rows) // 2
        costs = request.costs(rows=rows, held=held)
        return simulate(costs, placement, passes=2, warm_up=1).seconds

    prompt = prompt_seconds(placement.prefill_rows)
    page_rows = min(PROMPT_TOKENS, placement.prefill_rows)
    page = prompt if page_rows == placement.prefill_rows else prompt_seconds(page_rows)
    tokens, busy = request.sequences, steady.busy
    tok_s, page_s = tokens / steady.seconds, page * PROMPT_TOKENS / page_rows
    full_tok_s, ceiling = tokens / full.seconds, tokens / steady.bound
    if request.quantization and (expected := estimate(request)) is not None:
        full_tok_s *= expected.tok_s / tok_s
        tok_s, page_s, ceiling = expected.tok_s, expected.wait_s, max(ceiling, expected.tok_s)
    return Prediction(
        tok_s=tok_s,
        ceiling_tok_s=ceiling,
        bottleneck=max(RESOURCES, key=lambda name: busy[name]),
        efficiency=steady.efficiency,
        prefill_tok_s=placement.prefill_rows / prompt,
        page_s=page_s,
        held=request.held_tokens,
        full_context_tok_s=full_tok_s,
        nbytes=dict(steady.nbytes),
        busy=dict(busy),
        waits=dict(steady.waits),
        pass_s=steady.seconds,
    )
