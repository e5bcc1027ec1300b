"""A plan for one model, one machine and its budgets; what cannot fit is refused with ways out.

Every way out that is named was planned and found to work. It is slow only where the answer is no.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from localrt.common.errors import MemoryBudgetError, OptionError
from localrt.common.formatting import format_bytes
from localrt.common.option_names import option
from localrt.offload.account import SMALLEST_CONTEXT, activation_nbytes, shorter_contexts
from localrt.offload.planner.advice import helpful_changes
from localrt.offload.planner.plan import Plan, PlanRequest
from localrt.offload.planner.search import find_plan, fits

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
