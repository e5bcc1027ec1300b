"""Predicts a model's speed: ``estimate`` in milliseconds, ``find_forecast`` with a full search.

An estimate uses rules and usual ring sizes, and assumes that a pass lasts as long as its busiest
resource works. Its rates are within a quarter of a replay's, mostly within a tenth. It is used for
tables of many models, for choosing among files, and for the gain of a change relative to the plan.
The plan of a model that is not on this machine has the estimate's placement and rate, as in tables.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

from localrt.common.formatting import format_bytes
from localrt.offload.account import PREFILL_ROWS, placed_account
from localrt.offload.placement import Placement, Where
from localrt.offload.shapes import ModelShape
from localrt.planning.forecast import Forecast, PlanRequest, Prediction
from localrt.planning.search import (
    Rooms,
    Solution,
    Times,
    best_placement,
    best_rows,
    prepare,
    quick_solutions,
    rows_choices,
    split_solutions,
)
from localrt.planning.simulate import RESOURCES, simulate
from localrt.planning.solve import Counts, Problem, bound
from localrt.planning.verdict import PROMPT_TOKENS, Expected

EVEN_EXPERTS = "experts are taken to be chosen evenly: a cache that follows the text reads less"
"""The note on the plan of every mixture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Estimate(Times):
    """An estimated solution, with the rows of a prompt's pass."""

    request: PlanRequest
    rooms: Rooms
    rows: int
    solution: Solution


def estimate(request: PlanRequest) -> Expected | None:
    """Estimate the best plan for ``request``; None if nothing fits."""
    request = request.with_usable_gpu()
    found = _estimated(request)
    if found is None and request.uses_gpu:
        found = _estimated(request.without_gpu())
    return None if found is None else _expected(found)


def _estimated(request: PlanRequest) -> _Estimate | None:
    """Find the best of a few solutions, without a replay; None if nothing fits."""
    found: dict[int, _Estimate] = {}
    for most in rows_choices(request):
        placed, rooms, rows = prepare(request, most)
        costs = placed.costs()
        whole = quick_solutions(costs, rooms, _expert_times(placed.shape))
        tried = (
            _Estimate(
                request=placed,
                rooms=rooms,
                rows=rows,
                solution=each,
                pass_s=_seconds(each.problem, each.counts),
                prompt_s=_prompt_seconds(each, rows) / rows if placed.uses_gpu else 0.0,
            )
            for each in chain(whole, split_solutions(costs, rooms) if request.splits else ())
        )
        if (best := min(tried, key=lambda each: each.seconds, default=None)) is not None:
            found[most] = best
    return found.get(best_rows(found))


def _expected(estimate: _Estimate) -> Expected:
    request, solution = estimate.request, estimate.solution
    placed = [
        (where, count * group.nbytes, group.use)
        for group, places in zip(solution.problem.classes, solution.counts, strict=True)
        for where, count in places.items()
    ]
    return Expected(
        tok_s=request.sequences / estimate.pass_s,
        prefill_tok_s=PREFILL_ROWS / _prompt_seconds(solution, PREFILL_ROWS),
        nbytes=sum(nbytes for _, nbytes, _ in placed),
        needed=round(sum(nbytes * use for _, nbytes, use in placed)),
        read=round(sum(nbytes * use for where, nbytes, use in placed if where.read)),
        copied=round(sum(nbytes * use for where, nbytes, use in placed if where.copied)),
        on_gpu=sum(nbytes for where, nbytes, _ in placed if where is Where.VRAM),
        by_cpu=round(sum(nbytes * use for where, nbytes, use in placed if where is Where.RAM)),
        thinks=request.thinks,
        gpu_unused=request.gpu_unused,
    )


def whole_nbytes(shape: ModelShape) -> int:
    """Return the packed bytes of a whole model, including experts that are not listed."""
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
    """Return how many experts each listed expert represents; 1 if all are listed."""
    if shape.experts is None:
        return 1
    listed = len(shape.routed) / len({unit.layer for unit in shape.routed})
    return round(shape.experts.count / listed)


def _prompt_seconds(solution: Solution, rows: int) -> float:
    """Return the seconds of a prompt's pass: the CPU computes its units, or the GPU if faster."""
    costs, problem = solution.costs, solution.problem
    many = costs.of_rows(rows)
    units = {unit.name: unit for unit in costs.shape.units}
    read = copied = by_cpu = crossing = by_gpu = stays = 0.0
    for group, places in zip(problem.classes, solution.counts, strict=True):
        unit, share, each = units[group.names[0]], group.use, rows
        movable = group.kind == "mlp" and group.nbytes <= solution.vram.nbytes
        if group.kind == "expert":
            share, each = many.touched(unit.use)
            movable = bool(problem.link_bytes_s)
        for where, count in places.items():
            used = count * share
            read += used * group.nbytes * where.read
            copied += used * group.nbytes * where.copied
            if where.on_gpu:
                stays += used * many.gpu(unit, each)
            elif movable:
                by_cpu += used * many.cpu(unit, each)
                by_gpu += used * many.gpu(unit, each)
                crossing += used * group.nbytes
            else:
                stays += used * many.cpu(unit, each)
    disk, link = read / problem.ssd_bytes_s, problem.link_bytes_s
    ways = [max(disk, copied / link if link else 0.0, stays + by_cpu)]
    if crossing:
        ways.append(max(disk, (copied + crossing) / link, stays + by_gpu))
    return min(ways) + costs.per_pass()


# -- by replay -------------------------------------------------------------------------------------


def find_forecast(request: PlanRequest) -> Forecast | None:
    """Return the best plan, or None if nothing fits."""
    notes = tuple(filter(None, (request.note, *request.shape.notes)))
    if request.quantization and (found := _estimated(request)) is not None:
        placement = found.solution.placement(found.rooms, found.rows)
        return _planned(found.request, placement, notes, _expected(found))
    placed, best, more = best_placement(request)
    if best is not None:
        return _planned(placed, best.placement, (*notes, *more))
    if not request.uses_gpu:
        return None
    plan = find_forecast(request.without_gpu())
    if plan is None:
        return None
    note = f"{format_bytes(request.budgets.vram)} of GPU memory are too little to be of use"
    return replace(plan, notes=(*plan.notes, note))


def _planned(
    request: PlanRequest,
    placement: Placement,
    notes: tuple[str, ...],
    estimated: Expected | None = None,
) -> Forecast:
    shape = request.shape
    if shape.experts is not None:
        notes = (*notes, EVEN_EXPERTS)
    if placement.prefill_rows < min(PREFILL_ROWS, request.most_prefill_rows):
        note = f"prompts go {placement.prefill_rows} tokens at a time, to fit the budget"
        notes = (*notes, note)
    return Forecast(
        request=request,
        placement=placement,
        prediction=_predicted(request, placement, estimated),
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
        estimated=estimated,
    )


def _predicted(
    request: PlanRequest, placement: Placement, estimated: Expected | None
) -> Prediction:
    """Predict from replays of a token, of prompts, and of a token at the full context. Rates that
    are already ``estimated`` are kept; the replay then only gives each resource's share of the
    pass.
    """
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
    tokens, busy, nbytes, times = request.sequences, steady.busy, dict(steady.nbytes), 1.0
    page_s = page * PROMPT_TOKENS / page_rows
    if estimated is not None:
        times, page_s = tokens / estimated.tok_s / steady.seconds, estimated.wait_s
        nbytes |= {"ssd": estimated.read, "link": estimated.copied}
    return Prediction(
        tok_s=tokens / (times * steady.seconds),
        ceiling_tok_s=tokens / min(steady.bound, times * steady.seconds),
        bottleneck=max(RESOURCES, key=lambda name: busy[name]),
        efficiency=steady.efficiency,
        prefill_tok_s=placement.prefill_rows / prompt,
        page_s=page_s,
        held=request.held_tokens,
        full_context_tok_s=tokens / (times * full.seconds),
        nbytes=nbytes,
        busy={name: times * seconds for name, seconds in busy.items()},
        waits={name: times * seconds for name, seconds in steady.waits.items()},
        pass_s=times * steady.seconds,
    )
