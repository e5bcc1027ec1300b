"""The result of ``localrt.plan``: a forecast, changes that would help, commands to type, and pages.

It reads a model's shape, not its weights. A model that is not on this machine is planned for the
file that would be downloaded. ``Plan.report`` has the verdict, the command to type, and possible
improvements; ``details``, all tables; ``to_dict``, the same facts for programs.
"""

from __future__ import annotations

import textwrap
import timeit
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np

from localrt import system
from localrt.common.errors import HubError, LocalrtError
from localrt.common.formatting import (
    format_bytes,
    format_count,
    format_rate,
    format_seconds,
    indented,
    join_lines,
)
from localrt.common.option_names import on_command_line
from localrt.common.settings import DEFAULT_CONTEXT, Settings
from localrt.common.speeds import known_speed
from localrt.hub import resolve
from localrt.hub.names import HubRef, looks_like_path, repo_thinks
from localrt.hub.resolving import FileChoice, ResolvedModel, offer_of
from localrt.models.vision.cost import SIDE, picture_cost
from localrt.offload.account import Budgets, Tier
from localrt.offload.placement import PlacedUnit, Where
from localrt.offload.shapes import ModelShape
from localrt.planning.costs import Resource
from localrt.planning.forecast import (
    PROMPT_TOKENS,
    READING_TOK_S,
    Change,
    Forecast,
    PlannedPicture,
    PlanRequest,
    figures,
    gpu_room,
    meanings,
    other_gpu_line,
    placed_shape,
    speed,
)
from localrt.planning.machine import MachineProfile
from localrt.planning.measure import Hardware, planned_hardware, with_formats
from localrt.planning.models import find_model, has_weights, hub_ref, known_model_of, shape_of
from localrt.planning.recommend import (
    FILE,
    as_published,
    only,
    other_files,
    recommend_on,
    sized,
    usual_offer,
)
from localrt.planning.search import (
    EVEN_EXPERTS,
    Try,
    helpful_changes,
    largest_contexts,
    make_forecast,
    usual_changes,
)
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
    runs, changes = weights or not looks_like_path(name), list[Try]()
    if advise:
        changes += usual_changes(forecast)
        if runs and not weights:  # other files replace changes of format
            changes = [each for each in changes if each[2] is None or each[2][0] != "format"]
        if offer is not None:
            changes += other_files(offer, file, forecast.request)
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
            for each in helpful_changes(forecast, changes)
        ),
        contexts=tuple(
            replace(each, command=command("chat", name, {**options, "ctx": each.tokens}))
            for each in (largest_contexts(forecast) if advise else ())
        ),
    )


def _chosen_file(
    offer: FileChoice,
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
) -> FileChoice | None:
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


# -- all tables ------------------------------------------------------------------------------------

_PLACES = {
    Where.VRAM: "in GPU memory, computed there",
    Where.LINK: "in RAM, copied to the GPU for each token",
    Where.SSD_LINK: "on the SSD, read and copied to the GPU for each token",
    Where.RAM: "in RAM, computed by the CPU",
    Where.SSD: "on the SSD, read for each token, computed by the CPU",
}
_RESOURCES: dict[Resource, str] = {"ssd": "disk", "link": "link", "cpu": "CPU", "gpu": "GPU"}
_TABLES = {"inputs": "inputs of each layer", "ngrams": "table of hashed n-grams"}
_KINDS = {
    "embedding": "embedding",
    "attention": "attention",
    "mlp": "MLPs",
    "expert": "experts",
    "head": "output head",
}
_KV_PLACES = {"ram": "in RAM", "vram": "in GPU memory", "ssd": "on the SSD"}


def one_line(plan: Forecast) -> str:
    """Return the rate, the ceiling and the bottleneck as one line."""
    prediction = plan.prediction
    ceiling = speed(prediction.ceiling_tok_s)
    return (
        f"{speed(prediction.tok_s)} predicted, {ceiling} at most with this placement; "
        f"the {_RESOURCES[prediction.bottleneck]} is the bottleneck"
    )


def explain(plan: Forecast) -> str:
    """Return the whole plan as text."""
    text = join_lines(_lines(plan))
    return "\n".join([text, "", *meanings(text)])


def hypothetical_line(options: Sequence[str]) -> str:
    """Return a line about the hypothetical PC described by ``options``."""
    rest = "what you did not give is this machine's, or the GPU's usual figure"
    if "--pc" in options:
        rest = "what you did not say of it is typical, and nothing was measured on it"
    return f"A hypothetical PC ({', '.join(options)}): {rest}."


def _lines(plan: Forecast) -> Iterator[str]:
    request, shape = plan.request, plan.request.shape
    if plan.hypothetical:
        yield hypothetical_line(plan.hypothetical)
        yield ""
    yield f"{shape.name}: {_model(shape)}"
    yield from _machine(request)
    yield ""
    yield "Where the weights are"
    yield from _placement(plan)
    tiers: tuple[tuple[Tier, str], ...] = (("ram", "RAM"), ("vram", "GPU memory"))
    for tier, name in tiers:
        parts = [part for part in plan.memory.parts if part.tier == tier]
        if parts:
            budget = request.budgets.ram if tier == "ram" else request.budgets.vram
            total = format_bytes(plan.memory.total(tier))
            yield ""
            yield f"{name}: {total} of {format_bytes(budget)}"
            width = max(len(part.what) for part in parts)
            for part in parts:
                yield f"  {part.what:<{width}}  {format_bytes(part.nbytes):>7}"
    yield ""
    yield "Prediction"
    yield from (f"  {line}" for line in _prediction(plan))
    if plan.changes:
        yield ""
        yield "What would help most"
        for change in plan.changes:
            yield f"  {speed(change.tok_s):>9} ({change.gain:.2g}x)  {change.what}"
    if plan.notes:
        yield ""
        yield "Notes"
        yield from (f"  {note}" for note in plan.notes)


def _model(shape: ModelShape) -> str:
    text = f"{shape.parameters / 1e9:.3g} B parameters"
    if shape.experts is not None:
        text += (
            f", {shape.active_parameters / 1e9:.3g} B for a token "
            f"({shape.experts.used} of {shape.experts.count} experts)"
        )
    return (
        f"{text}, {shape.layers} layers, {format_bytes(shape.nbytes)} packed; "
        f"a token needs {format_bytes(shape.pass_nbytes)} of it"
    )


def _machine(request: PlanRequest) -> Iterator[str]:
    machine = request.machine
    yield f"{machine.name}: {', '.join(figures(machine))}"
    batch = f", {request.sequences} sequences at once" if request.sequences > 1 else ""
    yield f"context {request.ctx} tokens, keys and values in {request.kv_format}{batch}"


def _placement(plan: Forecast) -> Iterator[str]:
    units: dict[Where, list[PlacedUnit]] = {}
    for unit in placed_shape(plan).units:
        where = plan.placement.where[unit.name]
        if unit.kind == "embedding" and where.read:
            table = _TABLES.get(unit.name, "embedding")
            yield f"  {format_bytes(unit.nbytes):>7}  on the SSD, read row by row  (the {table})"
            continue
        units.setdefault(where, []).append(unit)
    for where in Where:
        here = units.get(where, [])
        if any(unit.kind != "norm" for unit in here):
            size = format_bytes(sum(unit.nbytes for unit in here))
            what = ", ".join(_parts(placed_shape(plan), here))
            yield f"  {size:>7}  {_PLACES[where]}  ({what})"
    if plan.placement.split:
        yield "  GPU and CPU compute each MLP at once, by rows of it (no card has run this yet)"
    places = zip(plan.request.shape.kv, plan.placement.kv, strict=True)
    kv = Counter(place for layer, place in places if layer.width or layer.states)
    if set(kv) - {"ram"}:
        yield "  keys and values: " + ", ".join(
            f"{count} layers {_KV_PLACES[place]}" for place, count in kv.items()
        )


def _parts(shape: ModelShape, units: Sequence[PlacedUnit]) -> Iterator[str]:
    """Yield descriptions of ``units``: ``"attention of 12 of 28 layers"``."""
    for kind, name in _KINDS.items():
        here = [unit for unit in units if unit.kind == kind]
        if not here:
            continue
        all_of_it = [unit for unit in shape.units if unit.kind == kind]
        if len(here) == len(all_of_it):
            yield name
        elif any(unit.only for unit in here):
            share = sum(u.nbytes for u in here) / sum(u.nbytes for u in all_of_it)
            yield f"{100 * share:.0f} % of each MLP"
        elif kind in ("attention", "mlp"):
            layers, whole = (len({u.layer for u in each}) for each in (here, all_of_it))
            yield f"{name} of {layers} of {whole} layers"
        else:
            share = sum(u.nbytes for u in here) / sum(u.nbytes for u in all_of_it)
            yield f"{name}: {100 * share:.0f} %"


def _prediction(plan: Forecast) -> Iterator[str]:
    prediction = plan.prediction
    yield one_line(plan)
    if plan.measured_tok_s is not None:
        yield f"{speed(plan.measured_tok_s)} measured, when it last ran on this machine"
    shares = {name: plan.busy_share(name) for name in prediction.busy}
    busy = ", ".join(
        f"{_RESOURCES[name]} {share:.0%}" for name, share in shares.items() if share > 0.0005
    ).replace("%", " %")
    yield f"busy in the {_milliseconds(prediction.pass_s)} of a pass: {busy}"
    ways = {"ssd": "read from the SSD", "link": "copied to the GPU"}
    ways |= {"ram": "computed by the CPU", "vram": "computed by the GPU"}
    yield "bytes of a pass: " + ", ".join(
        f"{format_bytes(prediction.nbytes[way])} {text}"
        for way, text in ways.items()
        if prediction.nbytes[way]
    )
    waits = [
        f"{_milliseconds(value)} for the {'disk' if name == 'ssd' else name}"
        if name != "crossing"
        else f"{_milliseconds(value)} for activations to cross"
        for name, value in prediction.waits.items()
        if value > 0.005 * prediction.pass_s
    ]
    if waits:
        yield f"computing waits {', '.join(waits)}"
    yield (
        f"a page of text ({PROMPT_TOKENS} tokens) is read in {format_seconds(prediction.page_s)}, "
        f"long prompts at {format_rate(prediction.prefill_tok_s)} tok/s, "
        f"{plan.placement.prefill_rows} tokens a pass"
    )
    yield from _long_passes(plan)
    if plan.picture is not None:
        yield _picture_line(plan.picture)
    if prediction.full_context_tok_s is not None:
        yield (
            f"with {prediction.held} tokens held; with all {plan.request.ctx}: "
            f"{format_rate(prediction.full_context_tok_s)} tok/s"
        )


def _long_passes(plan: Forecast) -> Iterator[str]:
    """Yield how passes of many rows are computed differently."""
    placement, shape = plan.placement, placed_shape(plan)
    if not placement.gpu_rows:
        return
    what, moved = "MLPs", [unit for unit in shape.units if unit.name in placement.crossing]
    if shape.experts is not None:
        what, moved = "experts", [u for u in shape.routed if not placement.where[u.name].on_gpu]
    if moved:
        size = format_bytes(sum(unit.nbytes for unit in moved))
        yield (
            f"from {placement.gpu_rows} tokens a pass on, the CPU's {what} ({size}) are copied "
            "to the GPU and computed there"
        )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


# -- the page --------------------------------------------------------------------------------------

_WIDTH = 100
_MOST_GAINS = 5
_MOST_NOTES = 2


def page(plan: Forecast) -> str:
    """Return the plan in about twenty lines."""
    text = join_lines(_page_lines(plan))
    more = "Where the weights go, and where the time: add --details"
    return "\n".join([text, "", *meanings(text), "", more])


def _page_lines(plan: Forecast) -> Iterator[str]:
    shape, called = plan.request.shape, plan.request.called
    yield str(plan.verdict)
    yield ""
    if plan.hypothetical:
        yield from _wrapped(hypothetical_line(plan.hypothetical))
    size = f"{format_bytes(shape.nbytes)} of weights"
    kind = f" in {plan.quantization}" if plan.quantization else ""
    yield f"{called or shape.name}: {format_count(shape.parameters)} parameters, {size}{kind}"
    yield from _wrapped(f"Forecast from {', '.join(figures(plan.request.machine))}, {_room(plan)}")
    yield f"{_prompt(plan)}."
    if plan.picture is not None:
        yield f"A{_picture_line(plan.picture)[1:]}."
    if plan.command:
        yield ""
        yield "To run it there, type" if plan.hypothetical else "To run it, type"
        yield f"  {plan.command}"
    if plan.contexts:
        yield ""
        yield "Longest conversation"
        yield from indented(_contexts(plan), "r")
    if gains := _gains(plan):
        yield ""
        yield "What would make it faster"
        yield from indented(gains, "rr")
    notes = [note for note in plan.notes if note != EVEN_EXPERTS][:_MOST_NOTES]
    if notes:
        yield ""
        for note in notes:
            yield from _wrapped(f"Note: {note}")


def _room(plan: Forecast) -> str:
    budgets = plan.request.budgets
    source = plan.request.machine.sources.get("ram_bytes", "typical")
    text = f"{format_bytes(budgets.ram)} of RAM to use ({source})"
    return text + gpu_room(plan.request.machine, budgets)


def _prompt(plan: Forecast) -> str:
    wait = format_seconds(plan.prediction.page_s)
    return f"A page of text ({PROMPT_TOKENS} tokens) is read in {wait}"


def _picture_line(picture: PlannedPicture) -> str:
    return (
        f"a picture ({picture.side} x {picture.side} pixels) has {picture.tokens} tokens and is "
        f"seen in {format_seconds(picture.seconds)}, with {format_bytes(picture.nbytes)} of "
        f"{'GPU memory' if picture.on_gpu else 'RAM'}"
    )


def _contexts(plan: Forecast) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for number, each in enumerate(plan.contexts):
        why = "all that the model has" if each.whole else "the most that fits"
        if number:
            why = "the most at reading speed"
            if plan.tok_s < READING_TOK_S:
                why = "the most that does not slow it down"
        rows.append(
            (
                f"{each.tokens:,} tokens",
                why,
                f"{speed(each.tok_s)} when full",
                _shown(each.command, plan),
            )
        )
    return rows


def _gains(plan: Forecast) -> list[tuple[str, ...]]:
    """Return rows for the best changes."""
    return [
        (speed(each.tok_s), f"{each.gain:.1f}x", each.what, _shown(each.command, plan))
        for each in plan.changes[:_MOST_GAINS]
    ]


def _shown(command: str, plan: Forecast) -> str:
    """Shorten a command to ``add --option`` if it only adds an option to the plan's command."""
    if plan.command and command.startswith(f"{plan.command} --"):
        return f"add {command.removeprefix(plan.command).strip()}"
    return command


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent="  ", break_long_words=False)
