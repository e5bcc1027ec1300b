"""``localrt.plan``: where a model would live and how fast it would be, before anything is loaded.

It reads a model's shape, not its weights. What decides is ``localrt.offload.planner``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from localrt.common.errors import HubError, OptionError, known_arguments
from localrt.common.option_names import option
from localrt.common.settings import Settings
from localrt.hub.known_models import repo_thinks
from localrt.hub.listing import expand_name
from localrt.hub.names import looks_like_path, parse_hub_ref
from localrt.hub.resolving import Offer, offer_of
from localrt.offload.planner import ModelShape, Plan, PlanRequest, make_plan
from localrt.offload.planner.estimate import estimate
from localrt.offload.planner.plan import Change
from localrt.offload.planner.verdict import Expected
from localrt.planning.commands import with_commands
from localrt.planning.contexts import largest_contexts
from localrt.planning.inputs import Hardware, hypothetical, planned_machine
from localrt.planning.models import find_model, has_weights, known_model_of, shape_of
from localrt.planning.published import published_of
from localrt.planning.recommending import (
    Recommendation,
    other_files,
    recommend_on,
    sized,
    usual_offer,
)
from localrt.planning.report import details, report
from localrt.planning.sizes import other_sizes

__all__ = ["Plan", "plan", "with_texts"]

_DEFAULT_CTX = 4096
_KV_FORMATS = ("bf16", "int8", "int4")


@known_arguments
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
    offer = None if format is not None else _offer(str(model), path, settings, offline)
    chosen = None
    if offer is not None:
        chosen = recommend_on(offer, machine, budgets, ram=ram, ctx=ctx)
    if offer is not None and chosen is not None:
        shape = _in_file(shape, offer, chosen)
        # A processor has rates of its own for the file's format.
        machine, budgets, note = planned_machine(path, settings, shape, wanted)
    request = PlanRequest(
        shape=shape,
        machine=machine,
        budgets=budgets,
        ctx=ctx or min(_DEFAULT_CTX, shape.context_length),
        sequences=batch,
        kv_format=kv_format,
        kv_on_ssd=kv_on_ssd,
    )
    if request.ctx > shape.context_length:
        note = (
            f"the context of {request.ctx} tokens is longer than the {shape.context_length} that "
            f"the model has: answers may degrade{f'. {note}' if note else ''}"
        )
    found = make_plan(request, advise=advise)
    if chosen is not None and (expected := estimate(request)) is not None:
        found = _as_estimated(found, expected)
    found = replace(
        found,
        notes=(note, *found.notes) if note else found.notes,
        hypothetical=hypothetical(wanted),
        thinks=repo_thinks(str(model)) or repo_thinks(expand_name(str(model), settings)),
        quantization="" if chosen is None else chosen.name,
    )
    if advise:
        others: tuple[Change, ...] = ()
        if offer is not None and chosen is not None:
            others = other_files(offer, chosen.name, found.request, found.tok_s)
        changes = sorted((*found.changes, *others), key=lambda each: -each.gain)
        sizes = other_sizes(found, path, settings) if format is None and offer is None else ()
        found = replace(
            found, changes=tuple(changes), sizes=sizes, contexts=largest_contexts(found)
        )
    name, weights = str(model), has_weights(path)
    if weights or not looks_like_path(name):
        found = with_commands(found, name, _given(found, wanted, ctx, format), weights=weights)
    return with_texts(found, name)


def with_texts(plan: Plan, name: str) -> Plan:
    """``plan`` of the model that the user calls ``name``, with its texts."""
    shape, gpu = plan.request.shape, plan.request.machine.gpu
    same_card = () if gpu is None else published_of(shape, gpu.name)
    return replace(
        plan,
        report=report(plan, name, same_card),
        details=details(plan, published_of(shape)),
    )


def _offer(model: str, path: Path, settings: Settings, offline: bool | None) -> Offer | None:
    """The files of a hub model of which only the config is here; None where there is no choice."""
    known = known_model_of(path, settings)
    if known is not None:
        return usual_offer(known)
    name = expand_name(model, settings)
    ref = None if has_weights(path) or looks_like_path(name) else parse_hub_ref(name)
    if ref is None or ref.variant is not None or (settings.offline if offline is None else offline):
        return None
    try:
        offer = offer_of(ref.repo, settings)
    except HubError:
        return None
    return offer if len(offer.sizes) > 1 and offer.config is not None else None


def _as_estimated(plan: Plan, expected: Expected) -> Plan:
    """``plan`` of a model that is not here with the figures that tables of models have."""
    was, scale = plan.prediction, expected.tok_s / plan.tok_s
    now = replace(
        was,
        tok_s=expected.tok_s,
        ceiling_tok_s=max(was.ceiling_tok_s, expected.tok_s),
        full_context_tok_s=scale * was.full_context_tok_s,
        page_s=expected.wait_s,
    )
    changes = tuple(replace(each, tok_s=each.gain * expected.tok_s) for each in plan.changes)
    return replace(plan, prediction=now, changes=changes)


def _in_file(shape: ModelShape, offer: Offer, chosen: Recommendation) -> ModelShape:
    """The model in the file that was chosen for it."""
    if len(offer.sizes) == 1:  # as it was published
        return shape
    shape = sized(shape, chosen.name, offer.sizes[chosen.name])
    return replace(shape, notes=(f"of its files {chosen.name} is planned: {chosen.reason}",))


def _given(plan: Plan, wanted: Hardware, ctx: int | None, format: str | None) -> dict[str, object]:
    """The options of ``load`` that it was planned with, as far as they are this machine's too."""
    options: dict[str, object] = {} if ctx is None else {"ctx": ctx}
    if plan.request.kv_format != "bf16":
        options["kv_format"] = plan.request.kv_format
    if not plan.hypothetical:
        given = {"ram": wanted.ram, "gpu_memory": wanted.gpu_memory}
        options |= {name: value for name, value in given.items() if value is not None}
    return options
