"""A plan for one model, one machine and its budgets: ``make_plan``.

The fixed parts are accounted, the rest is placed and replayed. What cannot fit is refused with ways
out, each of which was planned and found to work: it is slow only where the answer is no. What would
help (more RAM, a faster disk, a smaller format) is planned and replayed too, and named if it pays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from localrt.common.errors import MemoryBudgetError, OptionError
from localrt.common.formatting import format_bytes
from localrt.common.option_names import option
from localrt.offload.account import (
    PREFILL_ROWS,
    SMALLEST_CONTEXT,
    activation_nbytes,
    card_rows_choices,
    card_scratch_nbytes,
    fitting_rows,
    kv_buffer_nbytes,
    kv_tail_nbytes,
    placed_account,
    shorter_contexts,
)
from localrt.offload.placement import Placement
from localrt.offload.planner.candidates import Candidate, Rooms, best_candidate, can_place
from localrt.offload.planner.plan import Change, Plan, PlanRequest, Prediction
from localrt.offload.planner.simulate import RESOURCES, simulate
from localrt.offload.planner.verdict import PROMPT_TOKENS
from localrt.offload.shapes import ModelShape, aligned
from localrt.quant.formats import FORMATS

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


# Below this a change is not worth a line.
_LEAST_GAIN = 1.05
_MOST_LINES = 5
_LAYERS = ("attention", "mlp", "expert")
_TABLE = FORMATS["int8-g32"]
_SMALLEST_FORMAT = "int4-g128"


def helpful_changes(plan: Plan) -> tuple[Change, ...]:
    """The changes that make the plan faster, best first."""
    now = plan.prediction.tok_s
    found = [
        Change(what, tok_s, tok_s / now, option)
        for what, tok_s, option in _changes(plan)
        if tok_s > _LEAST_GAIN * now
    ]
    return tuple(sorted(found, key=lambda each: each.gain, reverse=True)[:_MOST_LINES])


def in_format(shape: ModelShape, format: str, *, always: bool = False) -> ModelShape:
    """The model with every matrix that takes more bits packed in ``format``: an estimate.

    With ``always`` those that take fewer bits too.
    """
    target = FORMATS[format]
    units = []
    for unit in shape.units:
        elements = shape.vocab * shape.hidden if unit.kind == "embedding" else unit.macs
        size = aligned(round(elements * target.bits_per_weight / 8))
        changes = elements and (always or size < unit.nbytes)
        units.append(replace(unit, nbytes=size, format=format) if changes else unit)
    return replace(shape, units=tuple(units))


def in_bits(shape: ModelShape, bits: float, format: str) -> ModelShape:
    """The model with ``bits`` for each weight of its layers, mostly in ``format``: an estimate.

    Embedding and head take eight bits if they have more, as quantizing leaves them.
    """
    units = []
    for unit in shape.units:
        elements, width, name = unit.macs, bits, format
        if unit.kind not in _LAYERS:
            width, name = _TABLE.bits_per_weight, _TABLE.name
        if unit.name == "embedding":
            elements = shape.vocab * shape.hidden
        size = aligned(round(elements * width / 8))
        changed = elements and size < unit.nbytes
        units.append(replace(unit, nbytes=size, format=name) if changed else unit)
    return replace(shape, units=tuple(units))


def layer_bits(shape: ModelShape) -> float:
    """Bits per weight of the layers."""
    units = [unit for unit in shape.units if unit.kind in _LAYERS]
    return 8 * sum(unit.nbytes for unit in units) / sum(unit.macs for unit in units)


def _changes(plan: Plan) -> Iterator[tuple[str, float, tuple[str, str] | None]]:
    """(what is changed, tokens per second, the option that does it)."""

    def rate(changed: PlanRequest) -> float:
        return predicted_rate(changed, like=plan.placement)

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
            yield f"{format_bytes(more)} more RAM", rate(replace(request, budgets=bigger)), None
        faster = replace(machine, ssd_bytes_s=2 * machine.ssd_bytes_s)
        yield "a disk twice as fast", rate(replace(request, machine=faster)), None
    if request.uses_gpu:
        assert machine.link_bytes_s is not None, "a GPU has a link"
        bigger = replace(budgets, vram=budgets.vram + (4 << 30))
        yield "4 GB more GPU memory", rate(replace(request, budgets=bigger)), None
        faster = replace(machine, link_bytes_s=2 * machine.link_bytes_s)
        yield "a link twice as fast", rate(replace(request, machine=faster)), None
    small = in_format(request.shape, _SMALLEST_FORMAT)
    if small.pass_nbytes < 0.95 * request.shape.pass_nbytes:
        option = ("format", _SMALLEST_FORMAT)
        yield f"weights in {_SMALLEST_FORMAT}", rate(replace(request, shape=small)), option
    if request.kv_format == "bf16":
        faster_kv = rate(replace(request, kv_format="int8"))
        yield "keys and values in int8", faster_kv, ("kv_format", "int8")


def _round(nbytes: float) -> int:
    """To two digits, upwards: people buy round numbers."""
    step = 10 ** max(6, len(str(int(nbytes))) - 2)
    return int(-(-nbytes // step) * step)


_MEGABYTE = 1_000_000
_MOST_OPTIONS = 3


def make_plan(request: PlanRequest, *, advise: bool = False) -> Plan:
    """The best plan for ``request``.

    ``advise`` plans several variations to say what would help.

    Raises:
        MemoryBudgetError: it cannot fit; says what does.
        OptionError: a ``kv_format`` that latents are not kept in.
    """
    if request.kv_format == "int4" and any(layer.latent for layer in request.shape.kv):
        raise OptionError(
            f"{option('kv_format', 'int4')} is not for latent attention "
            f"({request.shape.architecture}), whose "
            "cache is small as it is: use bf16 or int8"
        )
    if request.uses_gpu and (missing := request.shape.off_card):
        note = f"the GPU is not used: this model needs localrt's own kernels, and {missing}"
        shape = replace(request.shape, notes=(*request.shape.notes, note))
        request = replace(request.without_gpu(), shape=shape)
    plan = find_plan(request)
    if plan is None:
        raise _refusal(request)
    return replace(plan, changes=helpful_changes(plan)) if advise else plan


def _refusal(request: PlanRequest) -> MemoryBudgetError:
    """The error for a request that has no plan."""
    shape, budgets = request.shape, request.budgets
    kv = request.sequences * sum(shape.kv_nbytes(request.kv_format, request.ctx))
    largest = max(unit.nbytes for unit in shape.units if unit.use)
    parts = (
        f"process {format_bytes(budgets.process_bytes(shape.vocab))}",
        f"keys and values of {request.ctx} tokens {format_bytes(kv)}",
        f"activations {format_bytes(activation_nbytes(shape.pass_sizes, 32))}",
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
    """The smallest RAM budget that works, in whole megabytes; None if no RAM is enough."""
    high = 2 * (
        request.shape.nbytes
        + request.sequences * sum(request.shape.kv_nbytes(request.kv_format, request.ctx))
        + request.budgets.process_bytes(request.shape.vocab)
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
    if request.ctx > trained:  # no more than the model has is of use
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
