"""The result of ``localrt.plan``: a forecast, helpful changes, and the commands to type.

It reads a model's shape, not its weights. A model that is not on this machine is planned for the
file that would be downloaded. Other sizes of the weights are compared too: their speeds are
estimated, their losses were measured by ``localrt quantize --bits``.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable, Mapping
from contextlib import closing
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
from localrt.models.checkpoints import StoreCheckpoint, open_checkpoint
from localrt.models.vision.cost import SIDE, picture_cost
from localrt.offload.account import Budgets
from localrt.offload.shapes import ModelShape
from localrt.offload.store.pack import fingerprint
from localrt.planning.advice import (
    LEAST_GAIN,
    helpful_changes,
    in_bits,
    largest_contexts,
    layer_bits,
    make_forecast,
)
from localrt.planning.describe_pc import Hardware, planned_hardware, with_formats
from localrt.planning.forecast import (
    Change,
    Forecast,
    PlannedPicture,
    PlannedPlace,
    PlannedSize,
    PlanRequest,
)
from localrt.planning.machine import MachineProfile
from localrt.planning.mix import MIX_FORMATS, LossTable, known_losses
from localrt.planning.models import find_model, has_weights, hub_ref, known_model_of, shape_of
from localrt.planning.predict import estimate
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
from localrt.planning.verdict import Expected
from localrt.quant.cpu.abi import find_library
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.cpu.vision import NativeVision
from localrt.quant.formats import FORMATS, pack
from localrt.quant.ops.kv_formats import KvFormat

_LEAST_BITS = 2.7  # all matrices in the smallest format
_USUAL_BITS = 4.5
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
    changes, sizes = helpful_changes(forecast) if advise else (), tuple[PlannedSize, ...]()
    if advise and offer is not None:
        changes += other_files(offer, file, forecast.request, forecast.tok_s)
    elif advise and format is None:
        sizes = other_sizes(forecast, path, settings)
    runs = weights or not looks_like_path(name)
    if runs and (sizes or not weights):  # sizes in bits, or other files, replace changes of format
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
        estimated=forecast.estimated,
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
        sizes=tuple(
            replace(each, command=command("quantize", name, {"bits": f"{each.bits:.1f}"}))
            for each in sizes
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


# -- other sizes of the weights --------------------------------------------------------------------


def other_sizes(plan: Forecast, path: Path, settings: Settings) -> tuple[PlannedSize, ...]:
    """Return the current size of the model at ``path``, then smaller sizes that are faster: the
    usual size, and the largest that fit in memory and in GPU memory.

    Empty if its weights are already in the best place, or if it is a quantized copy.
    """
    best: PlannedPlace = "gpu" if plan.request.uses_gpu else "memory"
    here, now = _place(plan.expected), estimate(plan.request)
    if here == best or now is None:
        return ()
    table = None
    try:
        with closing(open_checkpoint(path)) as checkpoint:
            if isinstance(checkpoint, StoreCheckpoint) and checkpoint.manifest.quantization:
                return ()
            table = known_losses(settings.data_dir / "losses", fingerprint(checkpoint))
    except LocalrtError:  # a config without weights
        pass
    scale, bits = plan.tok_s / now.tok_s, layer_bits(plan.request.shape)
    least = _LEAST_BITS if table is None else table.least_bits

    def size(tenths: int) -> PlannedSize | None:
        return _size(plan, tenths / 10, table, scale)

    found: list[PlannedSize | None] = []
    if bits > _USUAL_BITS + 0.2 >= least:
        found.append(_size(plan, _USUAL_BITS, table, scale))
    for place in ("memory", "gpu") if here == "streamed" else ("gpu",):
        if place == "gpu" and best != "gpu":
            continue
        low, high = int(10 * least + 0.99), int(10 * bits)  # ``high`` does not fit
        while low < high:
            middle = (low + high) // 2
            tried = size(middle)
            reached = tried is not None and tried.place in (place, best)
            low, high = (middle + 1, high) if reached else (low, middle)
        tried = size(low - 1)
        if tried is not None and tried.bits >= least and tried.place in (place, best):
            found.append(tried)
    sizes = [each for each in dict.fromkeys(found) if each is not None]
    faster = [each for each in sizes if each.tok_s > LEAST_GAIN * plan.tok_s]
    own = PlannedSize(bits, plan.weight_bytes, plan.tok_s, here, loss=0.0)
    return (own, *faster) if faster else ()


def _size(plan: Forecast, bits: float, table: LossTable | None, scale: float) -> PlannedSize | None:
    format_ = min(MIX_FORMATS, key=lambda name: abs(FORMATS[name].bits_per_weight - bits))
    shape = in_bits(plan.request.shape, bits, format_)
    expected = estimate(replace(plan.request, shape=shape))
    if expected is None:
        return None
    loss = None if table is None else table.loss(bits)
    return PlannedSize(bits, shape.nbytes, scale * expected.tok_s, _place(expected), loss)


def _place(expected: Expected) -> PlannedPlace:
    """Return where the weights for a token are."""
    if expected.read or expected.copied:
        return "streamed"
    return "gpu" if expected.whole_on_gpu else "memory"
