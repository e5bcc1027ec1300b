"""Placement search within budgets, alternatives if nothing fits, and changes that would help.

The fixed parts are subtracted from the budgets; the rest is placed (``solve.py``). The times of a
placement are first a formula's: that is all that tables of many models use. The plan of a model on
this machine has the times of a replay (``simulate.py``). A request that cannot fit is refused with
alternatives, each checked to fit. The gain of a change (more RAM, a faster disk, fewer bits) is the
ratio of two estimates, applied to the plan's speed; changes that gain little are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import TypeAlias

from localrt.common.errors import MemoryBudgetError, OptionError
from localrt.common.formatting import format_bytes
from localrt.common.option_names import option
from localrt.offload.account import (
    PREFILL_ROWS,
    SMALLEST_CONTEXT,
    activation_nbytes,
    fitting_rows,
    gpu_rows_choices,
    gpu_scratch_nbytes,
    kv_buffer_nbytes,
    kv_tail_nbytes,
    placed_account,
    shorter_contexts,
)
from localrt.offload.placement import Placement, Where
from localrt.offload.shapes import ModelShape
from localrt.planning.costs import RESOURCES, Costs, PassTime
from localrt.planning.forecast import (
    PROMPT_TOKENS,
    READING_TOK_S,
    Change,
    Forecast,
    PlannedContext,
    PlanRequest,
    Prediction,
)
from localrt.planning.models import in_format
from localrt.planning.simulate import simulate
from localrt.planning.solve import Problems, Rooms, Solution, split_solutions

EVEN_EXPERTS = "experts are taken to be chosen evenly: a cache that follows the text reads less"
"""The note on the plan of every mixture."""

Try: TypeAlias = tuple[str, PlanRequest, tuple[str, str] | None]
"""A change to try: what it is, the changed request, and the option that does it."""

_LEAST_GAIN = 1.05  # the smallest speedup that is reported
_NEARLY = 1.1  # up to this multiple of the minimum counts as nearly minimal


def fits(request: PlanRequest) -> bool:
    """Whether a plan exists; faster than finding the best one."""
    if request.uses_gpu and fits(request.without_gpu()):
        return True
    request, rooms, _ = _prepared(request)
    if _can_place(request, rooms):
        return True
    if not request.kv_on_ssd or request.uses_gpu:
        return False
    return _can_place(request, _with_kv_on_ssd(request, rooms, request.shape.layers))


def _can_place(request: PlanRequest, rooms: Rooms) -> bool:
    return rooms.ram > 0 and rooms.vram >= 0 and Problems(request.costs(), rooms).fits()


def find_solution(request: PlanRequest) -> Solution | None:
    """Return the solution that takes least time by the formulas; None if nothing fits."""
    found, choices = list[Solution](), [PREFILL_ROWS]
    if request.uses_gpu:
        sizes, most = request.shape.sizes, request.most_prefill_rows
        choices = [*gpu_rows_choices(sizes, request.budgets, most), PREFILL_ROWS]
    for most in choices:
        placed, rooms, rows = _prepared(request, most)
        costs, splits = placed.costs(), request.splits
        best = best_solution(costs, rooms, rows, splits=splits)
        if best is None and request.kv_on_ssd and not request.uses_gpu and request.shape.on_ssd:
            layers = _layers_on_ssd(placed, rooms)
            rooms = _with_kv_on_ssd(placed, rooms, layers)
            best = best_solution(costs, rooms, rows, splits=splits)
        if best is not None:
            found.append(best)
    return _of_fewest_rows(found) if found else None


def best_solution(costs: Costs, rooms: Rooms, rows: int, *, splits: bool = True) -> Solution | None:
    """Return the best solution for prompts' passes of ``rows`` rows; None if nothing fits."""
    if rooms.ram <= 0 or rooms.vram < 0:
        return None
    found = Problems(costs, rooms, rows, expert_times(costs.shape)).solutions()
    found += split_solutions(costs, rooms, rows) if splits else ()
    return min(found, key=lambda each: each.seconds, default=None)


def _of_fewest_rows(found: Sequence[Solution]) -> Solution:
    """Choose the most rows of a prompt's pass from the solutions with each.

    More rows make prefill faster, but take memory from weights. The result has the fewest rows with
    nearly the fastest prefill, among those with nearly the least total time and time of a token.
    """
    least = _NEARLY * min(each.seconds for each in found)
    token = _NEARLY * min(each.token.seconds for each in found)
    able = [each for each in found if each.seconds <= least and each.token.seconds <= token]
    able = able or [found[-1]]
    quickest = _NEARLY * min(each.prompt_s for each in able)
    return min((e for e in able if e.prompt_s <= quickest), key=lambda each: each.rows)


def _layers_on_ssd(request: PlanRequest, rooms: Rooms) -> int:
    """Return the fewest layers whose KV caches have to be on the SSD."""
    low, high = 0, len(request.shape.on_ssd)
    while high - low > 1:
        middle = (low + high) // 2
        enough = _can_place(request, _with_kv_on_ssd(request, rooms, middle))
        low, high = (low, middle) if enough else (middle, high)
    return high


def _with_kv_on_ssd(request: PlanRequest, rooms: Rooms, layers: int) -> Rooms:
    """Move the KV caches of the first ``layers`` to the SSD, except those that layers share, and
    subtract the RAM that they still need.
    """
    shape, kv_format = request.shape, request.kv_format
    kept = {layer.reads for layer in shape.kv} | {
        number for number, layer in enumerate(shape.kv) if layer.reads is not None
    }
    buffers = kv_buffer_nbytes(shape, kv_format, request.ctx)
    tails = request.sequences * kv_tail_nbytes(shape, kv_format, layers)
    on_ssd = frozenset(shape.on_ssd[:layers]) - kept
    return replace(rooms, ram=rooms.ram - buffers - tails, kv_ssd=on_ssd)


def _prepared(request: PlanRequest, longest: int = PREFILL_ROWS) -> tuple[PlanRequest, Rooms, int]:
    """Return the request without a GPU that is not used, the bytes left by the fixed parts, and the
    rows of a prompt's pass, at most ``longest``.
    """
    if not request.uses_gpu:
        request = replace(request, machine=request.machine.without_gpu())
    shape, budgets = request.shape, request.budgets
    most = max(min(request.most_prefill_rows, longest), request.rows)
    prefill_rows = most
    if most <= PREFILL_ROWS or not request.uses_gpu:
        prefill_rows = fitting_rows(shape.sizes, budgets.ram, most)
    rows = max(prefill_rows, request.rows, request.sequences)
    activations = activation_nbytes(shape.sizes, rows)
    small = sum(unit.nbytes for unit in shape.units if unit.kind == "norm")
    process = budgets.process_bytes(shape.sizes.vocab)
    ram = budgets.ram - process - budgets.scratch - activations - small
    vram = 0
    if request.uses_gpu:
        scratch = gpu_scratch_nbytes(shape.sizes, rows)
        vram = budgets.vram - budgets.context_bytes() - scratch - small
    # KV caches of all sequences at the full context.
    sizes = shape.kv_nbytes(request.kv_format, request.ctx)
    kv = tuple(request.sequences * size for size in sizes)
    return request, Rooms(ram=ram, vram=vram, kv=kv), prefill_rows


def expert_times(shape: ModelShape) -> int:
    """Return how many experts each listed expert represents; 1 if all are listed."""
    if shape.experts is None:
        return 1
    listed = len(shape.routed) / len({unit.layer for unit in shape.routed})
    return round(shape.experts.count / listed)


def whole_nbytes(shape: ModelShape) -> int:
    """Return the packed bytes of a whole model, including experts that are not listed."""
    times = expert_times(shape)
    return sum(unit.nbytes * (times if unit.kind == "expert" else 1) for unit in shape.units)


# -- forecasts -------------------------------------------------------------------------------------


def estimate(request: PlanRequest) -> Prediction | None:
    """Return the speed of the best placement by formulas, in milliseconds; None if nothing fits."""
    request = request.with_usable_gpu()
    found = find_solution(request)
    if found is None and request.uses_gpu:
        found = find_solution(request := request.without_gpu())
    return None if found is None else _estimated(request, found)


def find_forecast(request: PlanRequest) -> Forecast | None:
    """Return the best plan, or None if nothing fits.

    The times of a model whose file is not here (``request.quantization``) are the formulas', as in
    tables of models; others are a replay's.
    """
    solution = find_solution(request)
    if solution is None:
        plan = find_forecast(request.without_gpu()) if request.uses_gpu else None
        if plan is None:
            return None
        note = f"{format_bytes(request.budgets.vram)} of GPU memory are too little to be of use"
        return replace(plan, notes=(*plan.notes, note))
    if not request.uses_gpu:
        request = replace(request, machine=request.machine.without_gpu())
    shape, placement = request.shape, solution.placement()
    notes = list(filter(None, (request.note, *shape.notes)))
    if layers := placement.kv.count("ssd"):
        notes.append(f"keys and values of {layers} layers live on the SSD: they do not fit in RAM")
    if shape.experts is not None:
        notes.append(EVEN_EXPERTS)
    if placement.prefill_rows < min(PREFILL_ROWS, request.most_prefill_rows):
        notes.append(f"prompts go {placement.prefill_rows} tokens at a time, to fit the budget")
    return Forecast(
        request=request,
        placement=placement,
        prediction=(
            _estimated(request, solution, whole=True)
            if request.quantization
            else _replayed(request, solution, placement)
        ),
        memory=placed_account(
            shape,
            request.budgets,
            placement,
            ctx=request.ctx,
            kv_format=request.kv_format,
            sequences=request.sequences,
            rows=max(placement.prefill_rows, request.rows, request.sequences),
        ),
        notes=tuple(notes),
    )


def _estimated(request: PlanRequest, solution: Solution, *, whole: bool = False) -> Prediction:
    """Return the formulas' times; ``whole``: also those with a full context."""
    rows = solution.rows
    page = solution.prompt(PREFILL_ROWS)
    return _predicted(
        request,
        solution,
        token=solution.token,
        full=solution.with_held(request.ctx) if whole else None,
        prefill_tok_s=rows / (page if rows == PREFILL_ROWS else solution.prompt(rows)),
        page_s=page * PROMPT_TOKENS / PREFILL_ROWS,
    )


def _replayed(request: PlanRequest, solution: Solution, placement: Placement) -> Prediction:
    """Replay a token, prompts, and a token at the full context."""

    def prompt_seconds(rows: int) -> float:
        held = max(0, min(request.ctx, 512) - rows) // 2
        costs = request.costs(rows=rows, held=held)
        return simulate(costs, placement, passes=2, warm_up=1).seconds

    rows = placement.prefill_rows
    prompt, page_rows = prompt_seconds(rows), min(PROMPT_TOKENS, rows)
    page = prompt if page_rows == rows else prompt_seconds(page_rows)
    return _predicted(
        request,
        solution,
        token=simulate(request.costs(), placement),
        full=simulate(request.costs(held=request.ctx), placement),
        prefill_tok_s=rows / prompt,
        page_s=page * PROMPT_TOKENS / page_rows,
    )


def _predicted(
    request: PlanRequest,
    solution: Solution,
    *,
    token: PassTime,
    full: PassTime | None,
    prefill_tok_s: float,
    page_s: float,
) -> Prediction:
    placed = [
        (where, count * group.nbytes, group.use)
        for group, places in zip(solution.problem.classes, solution.counts, strict=True)
        for where, count in places.items()
    ]
    return Prediction(
        tok_s=request.sequences / token.seconds,
        ceiling_tok_s=request.sequences / token.bound,
        bottleneck=max(RESOURCES, key=lambda name: token.busy[name]),
        efficiency=token.efficiency,
        prefill_tok_s=prefill_tok_s,
        page_s=page_s,
        held=request.held_tokens,
        full_context_tok_s=None if full is None else request.sequences / full.seconds,
        nbytes=token.nbytes,
        busy=token.busy,
        waits=token.waits,
        pass_s=token.seconds,
        weights=sum(nbytes for _, nbytes, _ in placed),
        needed=round(sum(nbytes * use for _, nbytes, use in placed)),
        on_gpu=sum(nbytes for where, nbytes, _ in placed if where is Where.VRAM),
        by_cpu=round(sum(nbytes * use for where, nbytes, use in placed if where is Where.RAM)),
        thinks=request.thinks,
        gpu_unused=request.gpu_unused,
    )


# -- refusals and advice ---------------------------------------------------------------------------

_MOST_LINES = 5
_SMALLEST_FORMAT = "int4-g128"
_AS_FAST = 0.9  # share of the plan's speed, if that is below reading speed
_MEGABYTE = 1_000_000
_MOST_OPTIONS = 3


def make_forecast(request: PlanRequest) -> Forecast:
    """Return the best plan for ``request``.

    Raises:
        MemoryBudgetError: it cannot fit; the message has alternatives that would.
        OptionError: latent attention does not support the ``kv_format``.
    """
    if request.kv_format == "int4" and any(layer.latent for layer in request.shape.kv):
        raise OptionError(
            f"{option('kv_format', 'int4')} is not for latent attention "
            f"({request.shape.architecture}), whose "
            "cache is small as it is: use bf16 or int8"
        )
    request = request.with_usable_gpu()
    if request.gpu_unused:
        missing = request.shape.off_gpu
        note = f"the GPU is not used: this model needs localrt's own kernels, and {missing}"
        request = replace(request, shape=replace(request.shape, notes=(*request.shape.notes, note)))
    plan = find_forecast(request)
    if plan is None:
        raise _refusal(request)
    return plan


def _refusal(request: PlanRequest) -> MemoryBudgetError:
    """Return the error for a request that has no plan."""
    shape, budgets = request.shape, request.budgets
    kv = request.sequences * sum(shape.kv_nbytes(request.kv_format, request.ctx))
    largest = max(unit.nbytes for unit in shape.units if unit.use)
    parts = (
        f"process {format_bytes(budgets.process_bytes(shape.sizes.vocab))}",
        f"keys and values of {request.ctx} tokens {format_bytes(kv)}",
        f"activations {format_bytes(activation_nbytes(shape.sizes, 32))}",
        f"a ring for the largest unit {format_bytes(largest)}",
    )
    ways = "; or ".join(islice(_options(request), _MOST_OPTIONS)) or "use a smaller model"
    if request.ctx > shape.context_length:
        ways = f"its own context is {shape.context_length} tokens; {ways}"
    memory = f"{format_bytes(budgets.ram)} of RAM"
    if request.uses_gpu:
        memory += f" and {format_bytes(budgets.vram)} of GPU memory"
    return MemoryBudgetError(
        f"{shape.name} does not fit {memory}, even with its weights on the SSD "
        f"({', '.join(parts)}): {ways}"
    )


def least_ram(request: PlanRequest) -> int | None:
    """Return the smallest RAM budget that works, in whole megabytes; None if none does."""
    high = 2 * (
        request.shape.nbytes
        + request.sequences * sum(request.shape.kv_nbytes(request.kv_format, request.ctx))
        + request.budgets.process_bytes(request.shape.sizes.vocab)
        + (1 << 30)
    )
    if not fits(_with_ram(request, high)):
        return None
    low = 0
    while high - low > _MEGABYTE // 2:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(_with_ram(request, middle)) else (middle, high)
    return -(-high // _MEGABYTE) * _MEGABYTE


def _options(request: PlanRequest) -> Iterator[str]:
    trained = request.shape.context_length
    if request.ctx > trained:  # a longer context than the model's is useless
        own = replace(request, ctx=trained)
        if fits(own):
            yield f"all of it fits ({option('ctx', trained)})"
        else:
            yield from _options(own)
        return
    for ctx in shorter_contexts(request.ctx):
        if fits(replace(request, ctx=ctx)):
            yield f"a context of {ctx} tokens fits ({option('ctx', ctx)})"
            break
    for kv_format in ("int8", "int4"):
        smaller = replace(request, kv_format=kv_format)
        if request.kv_format == "bf16" and fits(smaller):
            yield f"keys and values in {kv_format} fit ({option('kv_format', kv_format)})"
            break
    if (least := least_ram(request)) is not None:
        megabytes = least // _MEGABYTE
        yield f"give it at least {megabytes} MB of RAM ({option('ram', f'{megabytes}MB')})"
    if request.sequences > 1 and fits(replace(request, sequences=1)):
        yield "one sequence at a time fits"
    if not request.kv_on_ssd and not request.uses_gpu and fits(replace(request, kv_on_ssd=True)):
        yield f"keys and values on the SSD fit ({option('kv_on_ssd')})"
    shorter = replace(request, ctx=min(request.ctx, SMALLEST_CONTEXT), kv_format="int8")
    if (least := least_ram(shorter)) is not None:
        yield (
            f"a context of {shorter.ctx} tokens with int8 keys and values fits "
            f"{least // _MEGABYTE} MB of RAM ({option('ctx', shorter.ctx)}, "
            f"{option('kv_format', 'int8')}, {option('ram', f'{least // _MEGABYTE}MB')})"
        )


def _with_ram(request: PlanRequest, ram: int) -> PlanRequest:
    return replace(request, budgets=replace(request.budgets, ram=ram))


# -- helpful changes -------------------------------------------------------------------------------


def helpful_changes(plan: Forecast, tries: Iterable[Try] | None = None) -> tuple[Change, ...]:
    """Return the changes that make the plan faster, best first; by default of ``usual_changes``."""
    now = estimate(plan.request)
    if now is None:
        return ()
    found = []
    for what, changed, named in usual_changes(plan) if tries is None else tries:
        expected = estimate(changed)
        gain = 0.0 if expected is None else expected.tok_s / now.tok_s
        if gain > _LEAST_GAIN:
            found.append(Change(what, gain * plan.tok_s, gain, named))
    return tuple(sorted(found, key=lambda each: each.gain, reverse=True)[:_MOST_LINES])


def usual_changes(plan: Forecast) -> Iterator[Try]:
    """Yield changes of the machine, of the weights' format, and of the keys and values."""
    request, budgets = plan.request, plan.request.budgets
    machine = request.machine
    moved = plan.prediction.nbytes["ssd"]
    if moved:
        on_ssd = sum(
            unit.nbytes
            for unit in request.shape.units
            if unit.use and plan.placement.where[unit.name].read
        )
        for more in dict.fromkeys((_round(on_ssd / 4), _round(1.05 * on_ssd + 64e6))):
            bigger = replace(budgets, ram=budgets.ram + more)
            yield f"{format_bytes(more)} more RAM", replace(request, budgets=bigger), None
        faster = replace(machine, ssd_bytes_s=2 * machine.ssd_bytes_s)
        yield "a disk twice as fast", replace(request, machine=faster), None
    if request.uses_gpu:
        assert machine.link_bytes_s is not None, "a GPU has a link"
        bigger = replace(budgets, vram=budgets.vram + (4 << 30))
        yield "4 GB more GPU memory", replace(request, budgets=bigger), None
        faster = replace(machine, link_bytes_s=2 * machine.link_bytes_s)
        yield "a link twice as fast", replace(request, machine=faster), None
    small = in_format(request.shape, _SMALLEST_FORMAT)
    if small.pass_nbytes < 0.95 * request.shape.pass_nbytes:
        named = ("format", _SMALLEST_FORMAT)
        yield f"weights in {_SMALLEST_FORMAT}", replace(request, shape=small), named
    if request.kv_format == "bf16":
        smaller = replace(request, kv_format="int8")
        yield "keys and values in int8", smaller, ("kv_format", "int8")


def _round(nbytes: float) -> int:
    """Round up to two digits: people buy round numbers."""
    step = 10 ** max(6, len(str(int(nbytes))) - 2)
    return int(-(-nbytes // step) * step)


def largest_contexts(plan: Forecast) -> tuple[PlannedContext, ...]:
    """Return the largest context that fits, and the largest that is also fast enough when full.

    Tries the model's context and its halves. Fast enough is reading speed, or 90 % of the plan's
    speed if that is less.
    """
    request = plan.request
    whole = request.shape.context_length
    now = estimate(request)
    scale = 1.0 if now is None else plan.tok_s / now.tok_s
    enough = min(READING_TOK_S, _AS_FAST * plan.tok_s)
    largest: PlannedContext | None = None
    for tokens in (whole, *shorter_contexts(whole)):
        expected = estimate(replace(request, ctx=tokens, held=tokens))
        if expected is None:
            continue
        nbytes = request.sequences * sum(request.shape.kv_nbytes(request.kv_format, tokens))
        rate = scale * expected.tok_s
        tried = PlannedContext(tokens, rate, whole=tokens == whole, nbytes=nbytes)
        largest = largest or tried
        if tried.tok_s >= enough:
            return (largest,) if tried is largest else (largest, tried)
    return () if largest is None else (largest,)
