"""The result of ``localrt.plan``: a forecast, helpful changes, and the commands to type.

It reads a model's shape, not its weights. A model that is not on this machine is planned for the
file that would be downloaded.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np

from localrt import system
from localrt.common.errors import HubError, LocalrtError
from localrt.common.option_names import on_command_line
from localrt.common.settings import DEFAULT_CONTEXT, Settings
from localrt.common.speeds import known_speed
from localrt.hub import resolve
from localrt.hub.known_models import repo_thinks
from localrt.hub.names import HubRef, looks_like_path
from localrt.hub.resolving import Offer, ResolvedModel, offer_of
from localrt.models.vision.cost import SIDE, picture_cost
from localrt.offload.account import Budgets
from localrt.offload.shapes import ModelShape
from localrt.planning.advice import (
    helpful_changes,
    largest_contexts,
    make_forecast,
)
from localrt.planning.forecast import (
    Change,
    Forecast,
    PlannedPicture,
    PlanRequest,
)
from localrt.planning.machine import MachineProfile
from localrt.planning.measure import Hardware, planned_hardware, with_formats
from localrt.planning.models import find_model, has_weights, hub_ref, known_model_of, shape_of
from localrt.planning.recommending import (
    FILE,
    as_published,
    only,
    other_files,
    recommend_on,
    sized,
    usual_offer,
)
from localrt.planning.report import explain, other_gpu_line, page
from localrt.quant.cpu.abi import find_library
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.cpu.vision import NativeVision
from localrt.quant.formats import FORMATS, pack
from localrt.quant.ops.kv_formats import KvFormat

_MANY_ROWS = 512  # rows of a vision encoder's products


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Forecast):
    """A forecast that can be printed; see ``Forecast`` for its numbers."""

    @property
    def report(self) -> str:
        """The output of ``localrt plan``."""
        return page(self)

    @property
    def details(self) -> str:
        """The output of ``localrt plan --details``: all tables."""
        return explain(self)


def plan_model(
    name: str,
    hardware: Hardware,
    draft_of: Callable[[Path, bool], tuple[str, str] | None],
    *,
    ctx: int | None,
    format: str | None,
    kv_format: KvFormat,
    batch: int,
    kv_on_ssd: bool,
    advise: bool,
    remeasure: bool,
    revision: str | None,
    offline: bool | None,
) -> Plan:
    """Plan for ``hardware``, with the options of ``localrt.plan``.

    ``draft_of`` returns, for the model at a path, streamed or not, the name of its draft and a line
    about it.
    """
    settings = Settings.from_environment()
    path = find_model(name, settings, revision=revision, offline=offline, any_file=True)
    ref, weights = hub_ref(name, settings), has_weights(path)
    shape = shape_of(path, format, ctx)
    machine, budgets, note = planned_hardware(
        hardware, settings, path=path, formats=_formats(shape), remeasure=remeasure
    )
    offer, file = None if format is not None else _offer(ref, path, settings, offline), ""
    if offer is not None:
        shape, file = _chosen_file(
            offer, ref.variant if ref else None, shape, machine, budgets, ctx
        )
        machine = with_formats(machine, _formats(shape), hardware, settings, path)
    if ctx is not None and ctx > shape.context_length:
        note = (
            f"the context of {ctx} tokens is longer than the {shape.context_length} that "
            f"the model has: answers may degrade{f'. {note}' if note else ''}"
        )
    forecast = make_forecast(
        PlanRequest(
            shape=shape,
            machine=machine,
            budgets=budgets,
            ctx=ctx or min(DEFAULT_CONTEXT, shape.context_length),
            sequences=batch,
            kv_format=kv_format,
            kv_on_ssd=kv_on_ssd,
            called="" if looks_like_path(name) else name,
            thinks=repo_thinks(name) or (ref is not None and repo_thinks(ref.repo)),
            quantization=file,
            hypothetical=hardware.hypothetical,
            note=note,
        )
    )
    notes, draft, picture = list(forecast.notes), "", None
    if line := other_gpu_line(machine, forecast.request):
        notes.insert(0, line)
    if weights:
        if (drafts := draft_of(path, not forecast.fits)) is not None:
            draft, line = drafts
            gpu = [w.on_gpu for n, w in forecast.placement.where.items() if n != "embedding"]
            if any(gpu) and not all(gpu):  # ``auto`` takes no memory from weights on a GPU
                draft, line = "", f"{line}, on a GPU only if you name it as the draft ({draft})"
            notes.append(line)
        resolved = resolve(name, settings=settings, revision=revision, download=False)
        try:
            picture = _picture(forecast, resolved)
        except LocalrtError as error:
            notes.append(f"pictures are refused: {error}")
    changes = helpful_changes(forecast) if advise else ()
    if advise and offer is not None:
        changes += other_files(offer, file, forecast.request, forecast.tok_s)
    runs = weights or not looks_like_path(name)
    if runs and not weights:  # other files replace changes of format
        changes = tuple(each for each in changes if (each.option or ("",))[0] != "format")
    # The plan's ``load`` options, except those that describe another PC.
    here = not forecast.hypothetical
    options: dict[str, object] = {
        "ctx": ctx,
        "kv_format": None if kv_format == "bf16" else kv_format,
    }
    options |= {"ram": hardware.ram, "gpu_memory": hardware.gpu_memory} if here else {}
    options = {each: value for each, value in options.items() if value is not None}
    command = partial(_command, runs=runs)
    return Plan(
        request=forecast.request,
        placement=forecast.placement,
        prediction=forecast.prediction,
        memory=forecast.memory,
        measured_tok_s=known_speed(settings.data_dir, path.name) if here else None,
        notes=tuple(notes),
        draft=draft,
        picture=picture,
        command=command("chat", name, options),
        changes=tuple(
            replace(each, command=command(*_to_type(each, name, options)))
            for each in sorted(changes, key=lambda each: -each.gain)
        ),
        contexts=tuple(
            replace(each, command=command("chat", name, {**options, "ctx": each.tokens}))
            for each in (largest_contexts(forecast) if advise else ())
        ),
    )


def _chosen_file(
    offer: Offer,
    variant: str | None,
    shape: ModelShape,
    machine: MachineProfile,
    budgets: Budgets,
    ctx: int | None,
) -> tuple[ModelShape, str]:
    """Return the shape and name of the planned file of ``offer`` (``variant`` if named)."""
    candidates = only(offer, variant) if variant else offer
    chosen = recommend_on(candidates, machine, budgets, ctx=ctx)
    file, why = chosen.name, f"planned for its file {chosen.name}: {chosen.reason}"
    if variant:
        why = f"{variant} was not looked up on the hub: its size is an estimate"
    if as_published(candidates):
        return (replace(shape, notes=(*shape.notes, why)) if variant else shape), file
    return replace(sized(shape, file, candidates.sizes[file]), notes=(why,)), file


def _picture(plan: Forecast, model: ResolvedModel) -> PlannedPicture | None:
    """Return the cost of a picture for vision models: passes of the vision encoder and of the
    picture's tokens.

    Raises:
        LocalrtError: the model does not accept pictures.
    """
    cost = picture_cost(model.path, () if model.extras is None else model.extras.projectors)
    if cost is None:
        return None
    machine, on_gpu = plan.request.machine, False
    if plan.placement.uses_gpu and (gpu := machine.gpu) is not None and machine.link_bytes_s:
        on_gpu = True
        encoder = 2 * cost.products / (gpu.attention_flops or gpu.flops)
        # The weights are copied for each picture.
        encoder += cost.encoder_bytes / machine.link_bytes_s
    else:
        rate = machine.kernel("f16").at(_MANY_ROWS) / _MANY_ROWS
        encoder = cost.products * rate * _encoder_slowness()
    seconds = encoder + cost.tokens / plan.prefill_tok_s
    return PlannedPicture(SIDE, cost.tokens, seconds, cost.room_bytes, on_gpu=on_gpu)


@cache
def _encoder_slowness() -> float:
    """Time of a vision encoder's products relative to a decoder's of the same size; measured,
    since it depends on the instruction set.
    """
    if find_library() is None:
        return 1.0
    ops, shape = NativeOps(), (1024, 1024)
    weight = ops.weight(shape, [pack(np.full(shape, 0.01, np.float32), FORMATS["f16"], name="w")])
    x, out = np.ones((_MANY_ROWS, 1024), np.float32), np.empty((_MANY_ROWS, 1024), np.float32)
    encoder = NativeVision(ops)
    as_encoder, as_decoder = (
        min(timeit.repeat(call, number=1, repeat=9))
        for call in (lambda: encoder.linear(x, weight), lambda: ops.linear(x, weight, out))
    )
    return as_encoder / as_decoder


def _command(command: str, model: str, options: Mapping[str, object], *, runs: bool) -> str:
    """Return a command line such as ``"localrt chat model.gguf --ctx 8192"``; empty if the model
    does not run here, or no command is needed.
    """
    if not (runs and command):
        return ""
    words = ["localrt", command, system.quote(model)]
    return " ".join(words + [on_command_line(name, value) for name, value in options.items()])


def _to_type(
    change: Change, model: str, options: Mapping[str, object]
) -> tuple[str, str, Mapping[str, object]]:
    """Return the command, model and options of a change; no command for a change of hardware."""
    if change.option is None:
        return "", model, {}
    name, value = change.option
    if name == FILE:
        return "chat", value, options
    if name == "format":
        return "quantize", model, {name: value}
    return "chat", model, {**options, name: value}


def _formats(shape: ModelShape) -> set[str]:
    return {unit.format for unit in shape.units}


def _offer(
    ref: HubRef | None, path: Path, settings: Settings, offline: bool | None
) -> Offer | None:
    """Return the files of a hub model without local weights; None if there is nothing to choose."""
    known = known_model_of(path, settings)
    if known is not None:
        return usual_offer(known)
    if ref is None or ref.variant is not None or has_weights(path):
        return None
    if settings.offline if offline is None else offline:
        return None
    try:
        offer = offer_of(ref.repo, settings)
    except HubError:
        return None
    return offer if len(offer.sizes) > 1 and offer.config is not None else None
