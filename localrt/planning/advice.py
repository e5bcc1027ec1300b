"""What bounds a loaded model, and what would help most: ``Model.advise()``.

For a streamed model it asks the planner for variations of the plan that the model runs by; for one
that is all in memory it compares with what was measured of the machine, if anything was. Nothing is
measured here, and no weight is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from localrt.errors import LocalrtError
from localrt.settings import Settings

if TYPE_CHECKING:
    from localrt.loading.parts import LoadedModel
    from localrt.offload.planner import Budgets, MachineProfile, ModelShape, Plan

__all__ = ["Change", "Outlook", "outlook"]

_CTX = 4096


@dataclass(frozen=True, slots=True)
class Change:
    """One thing to change (``"54 MB more RAM"``), and the tokens per second that planning with it
    gives: ``gain`` times what it gives without.
    """

    what: str
    tok_s: float
    gain: float


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
    from localrt.offload.planner.advice import advice_for

    plan: Plan | None = getattr(parts.engine, "plan", None)
    try:
        if plan is not None:
            ceiling = plan.prediction.ceiling_tok_s
            return Outlook(
                ceiling, round(plan.request.shape.pass_nbytes), _changes(advice_for(plan))
            )
        return _resident(parts, ram, gpu_memory, settings or Settings.from_environment())
    except (LocalrtError, OSError):  # its files have gone, or the planner does not know it
        return Outlook()


def _resident(
    parts: LoadedModel, ram: int | None, gpu_memory: int | None, settings: Settings
) -> Outlook:
    from localrt.offload.planner import make_plan
    from localrt.offload.planner.advice import advice_for
    from localrt.offload.planner.known_machine import known_machine

    shape = _shape(parts.path)
    nbytes = round(shape.pass_nbytes)
    machine = known_machine(settings.cache_dir, parts.path)
    if machine is None or parts.engine.info.format in ("bf16", "f32"):
        return Outlook(token_bytes=nbytes)
    placed = _on_card(machine, parts, gpu_memory)
    if placed is None:
        return Outlook(token_bytes=nbytes)
    machine, vram = placed
    rate = machine.ram_bytes_s if machine.gpu is None else machine.gpu.bytes_s
    ctx = min(parts.ctx, _CTX)
    plan = make_plan(shape, machine, _budgets(ram, vram), ctx=ctx, solver="greedy")
    return Outlook(rate / nbytes if nbytes else None, nbytes, _changes(advice_for(plan)))


def _changes(advice: tuple[object, ...]) -> tuple[Change, ...]:
    return tuple(
        Change(each.change, each.tok_s, each.gain)  # type: ignore[attr-defined]
        for each in advice
    )


def _shape(path: Path) -> ModelShape:
    from localrt.models.checkpoints import open_checkpoint
    from localrt.offload.planner import shape_from_checkpoint

    checkpoint = open_checkpoint(path)
    try:
        return shape_from_checkpoint(checkpoint)
    finally:
        checkpoint.close()


def _on_card(
    machine: MachineProfile, parts: LoadedModel, gpu_memory: int | None
) -> tuple[MachineProfile, int] | None:
    """The machine with the card that the model is on and bytes of its memory; None: unknown."""
    from dataclasses import replace

    if not parts.engine.info.device.startswith("cuda"):
        return machine, 0
    from localrt.machine import hardware
    from localrt.offload.planner.cards import find_card

    here = hardware.gpus()
    card = find_card(here[0].name) if here else None
    if card is None:
        return None
    machine = replace(machine, gpu=card.profile, link_bytes_s=card.link_bytes_s)
    return machine, gpu_memory or here[0].memory_bytes or card.vram_bytes


def _budgets(ram: int | None, vram: int) -> Budgets:
    from localrt.offload.memory.process import ram_budget
    from localrt.offload.planner import Budgets

    return Budgets(ram=ram_budget(ram), vram=vram)
