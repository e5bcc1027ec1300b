"""What bounds a loaded model, and what would help most: ``Model.advise()``.

For a streamed model it asks the planner for variations of the plan that the model runs by; for one
that is all in memory it compares with what was measured of the machine, if anything was. Nothing is
measured here, and no weight is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from localrt.common.errors import LocalrtError
from localrt.common.settings import Settings
from localrt.offload.memory.process import ram_budget
from localrt.offload.planner import make_plan
from localrt.offload.planner.advice import helpful_changes
from localrt.offload.planner.measure import known_machine
from localrt.offload.planner.plan import Change, PlanRequest
from localrt.planning.inputs import Hardware, budgets_of, card_here, with_card
from localrt.planning.models import shape_of

if TYPE_CHECKING:
    from localrt.loading.parts import LoadedModel

_CTX = 4096


@dataclass(frozen=True, slots=True)
class Outlook:
    """``ceiling_tok_s`` is what this placement allows at most, a token a pass; ``token_bytes`` what
    a token needs of the weights; ``changes`` pay, best first. None and empty where not known.
    """

    ceiling_tok_s: float | None = None
    token_bytes: int | None = None
    changes: tuple[Change, ...] = ()


def outlook(
    parts: LoadedModel,
    *,
    ram: int | None,
    gpu_memory: int | None,
    settings: Settings | None = None,
) -> Outlook:
    """Of a loaded model, within the budgets that the user gave."""
    plan = parts.engine.plan
    try:
        if plan is not None:
            nbytes = round(plan.request.shape.pass_nbytes)
            return Outlook(plan.ceiling_tok_s, nbytes, helpful_changes(plan))
        return _resident(parts, ram, gpu_memory, settings or Settings.from_environment())
    except (LocalrtError, OSError):  # its files have gone, or the planner does not know it
        return Outlook()


def _resident(
    parts: LoadedModel, ram: int | None, gpu_memory: int | None, settings: Settings
) -> Outlook:
    shape = shape_of(parts.path)
    nbytes = round(shape.pass_nbytes)
    machine = known_machine(settings.cache_dir, parts.path)
    if machine is None or parts.engine.info.format in ("bf16", "f32"):
        return Outlook(token_bytes=nbytes)
    vram = 0
    if parts.engine.info.device.startswith("cuda"):
        here = card_here()
        if here is None:
            return Outlook(token_bytes=nbytes)
        # Of the whole card: the model that is asked about has taken its part already.
        machine, _ = with_card(machine, Hardware(), settings.cache_dir)
        vram = gpu_memory or here[0].vram_bytes
    rate = machine.ram_bytes_s if machine.gpu is None else machine.gpu.bytes_s
    budgets = budgets_of(machine, ram_budget(ram), vram)
    ctx = min(parts.ctx, _CTX)
    request = PlanRequest(shape=shape, machine=machine, budgets=budgets, ctx=ctx)
    plan = make_plan(request)
    ceiling = rate / nbytes if nbytes else None
    if ceiling and plan.fits:
        ceiling = min(ceiling, plan.ceiling_tok_s)  # computing takes its time too
    return Outlook(ceiling, nbytes, helpful_changes(plan))
