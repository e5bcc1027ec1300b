"""A plan for one model, one machine and its budgets; what cannot fit is refused with ways out."""

from __future__ import annotations

from dataclasses import replace

from localrt.errors import OptionError
from localrt.offload.planner.advice import helpful_changes
from localrt.offload.planner.plan import Plan, PlanRequest
from localrt.offload.planner.refusal import refusal
from localrt.offload.planner.search import find_plan

__all__ = ["make_plan"]


def make_plan(request: PlanRequest, *, exact: bool = True, advise: bool = False) -> Plan:
    """The best plan for ``request``.

    Without ``exact`` units are placed by rules, in tens of milliseconds; ``advise`` plans several
    variations to say what would help.

    Raises:
        MemoryBudgetError: it cannot fit; says what does.
        OptionError: a ``kv_format`` that latents are not kept in.
    """
    if request.kv_format == "int4" and any(layer.latent for layer in request.shape.kv):
        raise OptionError(
            f"kv_format int4 is not for latent attention ({request.shape.architecture}), whose "
            "cache is small as it is: use bf16 or int8"
        )
    plan = find_plan(request, exact=exact)
    if plan is None:
        raise refusal(request)
    return replace(plan, changes=helpful_changes(plan)) if advise else plan
