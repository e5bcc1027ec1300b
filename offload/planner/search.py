"""The search for a placement: the fixed parts are accounted, the rest is placed and replayed."""

from __future__ import annotations

from dataclasses import replace

from localrt.common.formatting import format_bytes
from localrt.offload.account import (
    PREFILL_ROWS,
    activation_nbytes,
    card_rows_choices,
    card_scratch_nbytes,
    fitting_rows,
    kv_buffer_nbytes,
    kv_tail_nbytes,
    placed_account,
)
from localrt.offload.placement import Placement
from localrt.offload.planner.candidates import Candidate, Rooms, best_candidate, can_place
from localrt.offload.planner.plan import Plan, PlanRequest, Prediction
from localrt.offload.planner.simulate import RESOURCES, simulate
from localrt.offload.planner.verdict import PROMPT_TOKENS

EVEN_EXPERTS = "experts are taken to be chosen evenly: a cache that follows the text reads less"
"""Said of every mixture."""

_NEARLY = 1.1  # times the least


def fits(request: PlanRequest) -> bool:
    """Whether there is a plan; sooner known than found."""
    if request.uses_gpu and fits(request.without_gpu()):
        return True
    request, rooms, _ = prepare(request)
    if can_place(request.costs(), rooms):
        return True
    if not request.kv_on_ssd or request.uses_gpu:
        return False
    return can_place(request.costs(), _with_kv_on_ssd(request, rooms, request.shape.layers))


def predicted_rate(request: PlanRequest, *, like: Placement | None = None) -> float:
    """Tokens per second of the best plan by rules, 0 where nothing fits; nothing more is told.

    Passes are as long as those of ``like``; a mixture takes over its rings too: there are too many
    experts to try many.
    """
    longest = PREFILL_ROWS if like is None else max(PREFILL_ROWS, like.prefill_rows)
    request, rooms, prefill_rows = prepare(request, longest)
    if like is not None and request.shape.experts is not None:
        costs = request.costs()
        best = best_candidate(costs, rooms, prefill_rows=prefill_rows, rings=like)
    else:
        best = _search(request, rooms, prefill_rows, [])
    if best is None:
        return 0.0
    return request.sequences / simulate(request.costs(), best.placement).seconds


def find_plan(request: PlanRequest) -> Plan | None:
    """The best plan, or None where nothing fits."""
    notes: list[str] = list(request.shape.notes)
    request, rooms, prefill_rows = prepare(request, _best_rows(request))
    best = _search(request, rooms, prefill_rows, notes)
    if best is not None:
        return _finish(request, best, notes)
    if not request.uses_gpu:
        return None
    plan = find_plan(request.without_gpu())
    if plan is None:
        return None
    note = f"{format_bytes(request.budgets.vram)} of GPU memory are too little to be of use"
    return replace(plan, notes=(*plan.notes, note))


def _best_rows(request: PlanRequest) -> int:
    """The most rows of a prompt's pass beside a card.

    More make prompts faster, and take memory from weights: the fewest with which prompts are nearly
    as fast as they can be without making all of it much slower.
    """
    if not request.uses_gpu:
        return PREFILL_ROWS
    most = request.most_prefill_rows
    longer = card_rows_choices(request.shape.pass_sizes, request.budgets, most)
    tried = ((rows, _search(*prepare(request, rows), [])) for rows in (*longer, PREFILL_ROWS))
    found = {rows: each for rows, each in tried if each is not None}
    least = _NEARLY * min((each.seconds for each in found.values()), default=0.0)
    able = {rows: each.prompt_s for rows, each in found.items() if each.seconds <= least}
    quickest = _NEARLY * min(able.values(), default=0.0)
    return min((rows for rows, each in able.items() if each <= quickest), default=PREFILL_ROWS)


def _search(
    request: PlanRequest, rooms: Rooms, prefill_rows: int, notes: list[str]
) -> Candidate | None:
    """With as few layers' keys and values on the SSD as it takes."""
    if rooms.ram <= 0 or rooms.vram < 0:
        return None
    best = best_candidate(request.costs(), rooms, prefill_rows=prefill_rows)
    attending = request.shape.on_ssd
    if best is not None or not request.kv_on_ssd or request.uses_gpu or not attending:
        return best
    low, high = 0, len(attending)
    while high - low > 1:
        middle = (low + high) // 2
        enough = can_place(request.costs(), _with_kv_on_ssd(request, rooms, middle))
        low, high = (low, middle) if enough else (middle, high)
    notes.append(f"keys and values of {high} layers live on the SSD: they do not fit in RAM")
    return best_candidate(
        request.costs(),
        _with_kv_on_ssd(request, rooms, high),
        prefill_rows=prefill_rows,
    )


def _with_kv_on_ssd(request: PlanRequest, rooms: Rooms, layers: int) -> Rooms:
    """Keys and values of the first layers on the SSD, as far as no other layer reads them; what
    they take of RAM nevertheless.
    """
    shape, kv_format = request.shape, request.kv_format
    kept = {layer.reads for layer in shape.kv} | {
        number for number, layer in enumerate(shape.kv) if layer.reads is not None
    }
    buffers = kv_buffer_nbytes(shape, kv_format, request.ctx)
    tails = request.sequences * kv_tail_nbytes(shape, kv_format, layers)
    on_ssd = frozenset(shape.on_ssd[:layers]) - kept
    return replace(rooms, ram=rooms.ram - buffers - tails, kv_ssd=on_ssd)


def prepare(request: PlanRequest, longest: int = PREFILL_ROWS) -> tuple[PlanRequest, Rooms, int]:
    """The request without a card that it may not use, what the fixed parts leave, and the rows of a
    pass, at most ``longest`` of a prompt.
    """
    if not request.uses_gpu:
        request = replace(request, machine=request.machine.without_gpu())
    shape, budgets = request.shape, request.budgets
    most = max(min(request.most_prefill_rows, longest), request.rows)
    prefill_rows = most
    if most <= PREFILL_ROWS or not request.uses_gpu:
        prefill_rows = fitting_rows(shape.pass_sizes, budgets.ram, most)
    rows = max(prefill_rows, request.rows, request.sequences)
    activations = activation_nbytes(shape.pass_sizes, rows)
    small = sum(unit.nbytes for unit in shape.units if unit.kind == "norm")
    ram = budgets.ram - budgets.process_bytes(shape.vocab) - budgets.scratch - activations - small
    vram = 0
    if request.uses_gpu:
        scratch = card_scratch_nbytes(shape.pass_sizes, rows)
        vram = budgets.vram - budgets.context_bytes() - scratch - small
    # Keys and values of all sequences at the full context.
    sizes = shape.kv_nbytes(request.kv_format, request.ctx)
    kv = tuple(request.sequences * size for size in sizes)
    return request, Rooms(ram=ram, vram=vram, kv=kv), prefill_rows


def _finish(request: PlanRequest, best: Candidate, notes: list[str]) -> Plan:
    """The final replay, and those for prompts and the full context."""
    placement = best.placement
    steady = simulate(request.costs(), placement, keep_tasks=2)
    full = simulate(request.costs(held=request.ctx), placement)

    def prompt_seconds(rows: int) -> float:
        """Of a pass of a prompt."""
        held = max(0, min(request.ctx, 512) - rows) // 2
        costs = request.costs(rows=rows, held=held)
        return simulate(costs, placement, passes=2, warm_up=1).seconds

    prompt = prompt_seconds(placement.prefill_rows)
    page_rows = min(PROMPT_TOKENS, placement.prefill_rows)
    page = prompt if page_rows == placement.prefill_rows else prompt_seconds(page_rows)
    tokens = request.sequences
    busy = steady.busy
    prediction = Prediction(
        tok_s=tokens / steady.seconds,
        ceiling_tok_s=tokens / steady.bound,
        bottleneck=max(RESOURCES, key=lambda name: busy[name]),
        efficiency=steady.efficiency,
        prefill_tok_s=placement.prefill_rows / prompt,
        page_s=page * PROMPT_TOKENS / page_rows,
        held=request.held_tokens,
        full_context_tok_s=tokens / full.seconds,
        nbytes=dict(steady.nbytes),
        busy=dict(busy),
        waits=dict(steady.waits),
    )
    if request.shape.experts is not None:
        notes.append(EVEN_EXPERTS)
    if placement.prefill_rows < min(PREFILL_ROWS, request.most_prefill_rows):
        notes.append(f"prompts go {placement.prefill_rows} tokens at a time, to fit the budget")
    return Plan(
        request=request,
        placement=placement,
        prediction=prediction,
        memory=placed_account(
            request.shape,
            request.budgets,
            placement,
            ctx=request.ctx,
            kv_format=request.kv_format,
            sequences=request.sequences,
            rows=max(placement.prefill_rows, request.rows, request.sequences),
        ),
        simulation=steady,
        notes=tuple(notes),
    )
