"""Finds the best plan, or alternatives if nothing fits, and changes that would make it faster.

A request that cannot fit is refused with alternatives, each checked to fit; only then is planning
slow. The gain of a change (more RAM, a faster disk, a smaller format, fewer bits) is the ratio of
two estimates, applied to the plan's speed; changes that gain little are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from localrt.common.errors import MemoryBudgetError, OptionError
from localrt.common.formatting import format_bytes
from localrt.common.option_names import option
from localrt.offload.account import SMALLEST_CONTEXT, activation_nbytes, shorter_contexts
from localrt.offload.shapes import ModelShape, aligned
from localrt.planning.forecast import READING_TOK_S, Change, Forecast, PlannedContext, PlanRequest
from localrt.planning.search import estimate, find_forecast, fits
from localrt.quant.formats import FORMATS

LEAST_GAIN = 1.05
"""The smallest speedup that is reported."""

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


def helpful_changes(plan: Forecast) -> tuple[Change, ...]:
    """Return the changes that make the plan faster, best first."""
    now = estimate(plan.request)
    if now is None:
        return ()
    found = []
    for what, changed, named in _changes(plan):
        expected = estimate(changed)
        gain = 0.0 if expected is None else expected.tok_s / now.tok_s
        if gain > LEAST_GAIN:
            found.append(Change(what, gain * plan.tok_s, gain, named))
    return tuple(sorted(found, key=lambda each: each.gain, reverse=True)[:_MOST_LINES])


def _changes(plan: Forecast) -> Iterator[tuple[str, PlanRequest, tuple[str, str] | None]]:
    """Yield changes to try: (description, changed request, option that does it)."""
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
        tried = PlannedContext(tokens, scale * expected.tok_s, whole=tokens == whole)
        largest = largest or tried
        if tried.tok_s >= enough:
            return (largest,) if tried is largest else (largest, tried)
    return () if largest is None else (largest,)


# -- other weights ---------------------------------------------------------------------------------


def in_format(shape: ModelShape, format: str, *, always: bool = False) -> ModelShape:
    """Estimate the shape with every larger matrix packed in ``format``.

    With ``always``, matrices with fewer bits are repacked too.
    """
    target = FORMATS[format]
    units = []
    for unit in shape.units:
        elements = shape.sizes.vocab * shape.sizes.hidden if unit.kind == "embedding" else unit.macs
        size = aligned(round(elements * target.bits_per_weight / 8))
        changes = elements and (always or size < unit.nbytes)
        units.append(replace(unit, nbytes=size, format=format) if changes else unit)
    return replace(shape, units=tuple(units))
