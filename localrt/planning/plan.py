"""``localrt.plan``: where a model would live and how fast it would be, before anything is loaded.

It reads a model's shape, not its weights. What decides is ``localrt.offload.planner``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from localrt.errors import OptionError
from localrt.offload.planner import Plan, PlanRequest, make_plan
from localrt.offload.planner.explain import explain
from localrt.option_names import option
from localrt.planning.inputs import (
    Hardware,
    find_model,
    hypothetical,
    planned_machine,
    shape_of,
)
from localrt.planning.sizes import other_sizes
from localrt.settings import Settings

__all__ = ["Plan", "plan"]

_DEFAULT_CTX = 4096
_KV_FORMATS = ("bf16", "int8", "int4")


def plan(
    model: str | Path,
    *,
    ctx: int | None = None,
    format: str | None = None,
    kv_format: Literal["bf16", "int8", "int4"] = "bf16",
    batch: int = 1,
    kv_on_ssd: bool = False,
    ram: str | int | None = None,
    gpu_memory: str | int | None = None,
    gpu: str | None = None,
    link: str | None = None,
    ssd: str | None = None,
    pc: str | None = None,
    ram_speed: str | None = None,
    cores: int | None = None,
    advise: bool = True,
    remeasure: bool = False,
    revision: str | None = None,
    offline: bool | None = None,
) -> Plan:
    """Plan ``model`` for this machine, or for one that is described.

    Nothing is loaded or downloaded, but for the config of a hub model that is not here. A machine
    that was never measured is measured first, which takes seconds: call it from a thread.

    Args:
        model: as ``load`` takes it, or a ``config.json`` (or its folder) without weights.
        ctx: context in tokens; None is 4096, or the model's own if that is less.
        format: plan as if packed in this format, such as ``"int4-g32"``.
        kv_format: how keys and values are kept.
        batch: sequences at once.
        kv_on_ssd: let keys and values that do not fit be read from the disk.
        ram, gpu_memory: sizes to use, such as ``"32GB"``; None: what this machine has.
        gpu: a card by name, or ``virtual:8GB@12GB/s,...``.
        link, ssd: rates such as ``"12GB/s"``.
        pc: a whole PC, ``"RTX 4060, 32GB DDR5-5600, 8 cores, NVMe"`` or a preset's name such as
            ``"gaming-pc"``, instead of this machine; what it does not say is typical.
        ram_speed: of the RAM, ``"DDR5-5600"`` or a rate such as ``"60GB/s"``.
        cores: of the processor.
        advise: plan variations too, to say what would help and what smaller weights would do; takes
            about as long again.
        remeasure: measure this machine again.
        revision: branch, tag or commit of a hub model.
        offline: never use the network; None follows the environment.

    Raises:
        MemoryBudgetError: it cannot fit, not even streamed; says what would do.
        LocalrtError: no such model, or an option that cannot be used.
    """
    for name, value in (("ctx", 1 if ctx is None else ctx), ("batch", batch)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(f"{name} must be an integer of at least 1, is {value!r}")
    if kv_format not in _KV_FORMATS:
        raise OptionError(
            f"{option('kv_format')} must be {', '.join(_KV_FORMATS)}, is {kv_format!r}"
        )
    settings = Settings.from_environment()
    wanted = Hardware(
        ram=ram,
        gpu_memory=gpu_memory,
        gpu=gpu,
        link=link,
        ssd=ssd,
        pc=pc,
        ram_speed=ram_speed,
        cores=cores,
    )
    path = find_model(str(model), settings, revision=revision, offline=offline)
    shape = shape_of(path, format)
    machine, budgets, note = planned_machine(path, settings, shape, wanted, remeasure=remeasure)
    request = PlanRequest(
        shape=shape,
        machine=machine,
        budgets=budgets,
        ctx=ctx or min(_DEFAULT_CTX, shape.context_length),
        sequences=batch,
        kv_format=kv_format,
        kv_on_ssd=kv_on_ssd,
    )
    found = make_plan(request, advise=advise)
    notes = (note, *found.notes) if note else found.notes
    sizes = other_sizes(found, path, settings) if advise and format is None else ()
    found = replace(found, notes=notes, hypothetical=hypothetical(wanted), sizes=sizes)
    return replace(found, report=explain(found))
