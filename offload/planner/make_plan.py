"""A plan for one model, one machine and its budgets; what cannot fit is refused with ways out."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from localrt.errors import OptionError
from localrt.offload.account import PREFILL_ROWS, Budgets
from localrt.offload.planner.advice import helpful_changes
from localrt.offload.planner.machine import MachineProfile
from localrt.offload.planner.plan import Plan, PlanRequest
from localrt.offload.planner.refusal import refusal
from localrt.offload.planner.search import find_plan
from localrt.offload.shapes import KvFormat, ModelShape

__all__ = ["make_plan"]


def make_plan(
    shape: ModelShape,
    machine: MachineProfile,
    budgets: Budgets,
    *,
    ctx: int,
    rows: int = 1,
    sequences: int = 1,
    prefill_rows: int = PREFILL_ROWS,
    kv_format: KvFormat = "bf16",
    held: int | None = None,
    kv_on_ssd: bool = False,
    solver: Literal["auto", "greedy"] = "auto",
    advise: bool = False,
) -> Plan:
    """Place ``shape`` on ``machine`` within ``budgets``, for a context of ``ctx`` tokens.

    ``rows`` is those of one pass (more than one: a drafted tree); ``sequences`` a batch, each with
    its own cache. ``prefill_rows`` is the most rows of a prompt's pass: a tight budget takes fewer.
    ``held`` is how many tokens the prediction assumes in the cache. ``kv_on_ssd`` lets the keys and
    values of as few layers as needed live on the SSD where they do not fit. ``solver="greedy"``
    answers in tens of milliseconds; ``advise`` plans several variations to say what would help.

    Raises:
        MemoryBudgetError: it cannot fit; says what does.
        OptionError: a number below one, or a ``kv_format`` that latents are not kept in.
    """
    if kv_format == "int4" and any(layer.latent for layer in shape.kv):
        raise OptionError(
            f"kv_format int4 is not for latent attention ({shape.architecture}), whose cache is "
            "small as it is: use bf16 or int8"
        )
    request = PlanRequest(
        shape=shape,
        machine=machine,
        budgets=budgets,
        ctx=ctx,
        rows=rows,
        sequences=sequences,
        prefill_rows=prefill_rows,
        kv_format=kv_format,
        held=held,
        kv_on_ssd=kv_on_ssd,
    )
    plan = find_plan(request, exact=solver == "auto")
    if plan is None:
        raise refusal(request)
    if advise:
        plan = replace(plan, changes=helpful_changes(plan))
    return plan
