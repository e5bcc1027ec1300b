"""Formats a plan as text: a summary (``page``), and all tables (``explain``).

The page has the verdict, the command to type, and possible improvements. ``Plan.to_dict`` has the
same facts for programs.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence

from localrt.common.formatting import format_bytes, format_count, format_rate, format_seconds, table
from localrt.offload.account import Budgets, Tier
from localrt.offload.placement import PlacedUnit, Where
from localrt.offload.shapes import ModelShape
from localrt.planning.forecast import (
    Forecast,
    PlannedPicture,
    PlanRequest,
    placed_shape,
)
from localrt.planning.machine import MachineProfile
from localrt.planning.predict import EVEN_EXPERTS
from localrt.planning.simulate import Resource
from localrt.planning.verdict import PROMPT_TOKENS, READING_TOK_S, meanings, part_of, speed

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
    text = "\n".join(_lines(plan))
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


def figures(machine: MachineProfile) -> Iterator[str]:
    """Yield the rates of a plan, and whether each was measured, given or typical: ``"RAM 31 GB/s
    (measured)"``.
    """

    def figure(text: str, name: str) -> str:
        return f"{text} ({machine.sources.get(name, 'typical')})"

    def rate(what: str, name: str, value: float) -> str:
        return figure(f"{what} {format_bytes(value)}/s", name)

    yield rate("disk", "ssd_bytes_s", machine.ssd_bytes_s)
    yield rate("RAM", "ram_bytes_s", machine.ram_bytes_s)
    yield figure(f"{machine.threads} cores", "cores")
    yield figure("speed of the cores", "kernels")
    if machine.gpu is not None and machine.link_bytes_s is not None:
        yield f"{machine.gpu.name} with {rate('memory at', 'gpu', machine.gpu.bytes_s)}"
        yield rate("link to it", "link_bytes_s", machine.link_bytes_s)


def other_gpu_line(machine: MachineProfile, request: PlanRequest | None = None) -> str:
    """Return what llama.cpp can do with a GPU that localrt's kernels cannot use; empty without one.

    No rate is given that does not follow from a known one: reading weights once for each token.
    """
    gpu, text, rate = machine.other_gpu, "", None
    if gpu is None:
        return ""
    if request is not None:
        shape, room = request.shape, gpu.room_bytes
        needed = shape.nbytes + sum(shape.kv_nbytes(request.kv_format, request.ctx))
        share = 1.0 if room is None else min(1.0, room / needed)
        if room is not None:
            what = "all of the model fits" if share == 1 else f"{part_of(room, needed)} fit"
            text = f": {what} its memory"
        if gpu.bytes_s and needed < request.budgets.ram + (room or 0):
            seconds = share / gpu.bytes_s + (1 - share) / machine.ram_bytes_s
            rate = 1 / (shape.pass_nbytes * seconds)
    if rate is not None and gpu.bytes_s is not None:
        known = f"by its maker's {format_bytes(gpu.bytes_s)}/s"
        text += f"{',' if text else ':'} at most about {speed(rate)} {known}"
    return (
        f"{gpu.name}: llama.cpp can use it{text}. localrt's own kernels need an NVIDIA GPU, from "
        "GTX 16 or RTX 20 on; `localrt doctor` has the command that builds it"
    )


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
        yield "  GPU and CPU compute each MLP at once, by rows of it"
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
        yield _picture(plan.picture)
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
    text = "\n".join(_page_lines(plan))
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
        yield f"A{_picture(plan.picture)[1:]}."
    if plan.command:
        yield ""
        yield "To run it there, type" if plan.hypothetical else "To run it, type"
        yield f"  {plan.command}"
    if plan.contexts:
        yield ""
        yield "Longest conversation"
        yield from _indented(_contexts(plan))
    if gains := _gains(plan):
        yield ""
        yield "What would make it faster"
        yield from _indented(gains, "rr")
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


def gpu_room(machine: MachineProfile, budgets: Budgets) -> str:
    """Return ``", 7.8 of 8.6 GB of GPU memory"``; empty if none is used."""
    if machine.gpu is None or not budgets.vram:
        return ""
    return f", {part_of(budgets.vram, machine.gpu.vram_bytes)} of GPU memory"


def _prompt(plan: Forecast) -> str:
    wait = format_seconds(plan.expected.wait_s)
    return f"A page of text ({PROMPT_TOKENS} tokens) is read in {wait}"


def _picture(picture: PlannedPicture) -> str:
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


def _indented(rows: list[tuple[str, ...]], align: str = "r") -> Iterator[str]:
    """Yield the rows as indented columns without headers."""
    blank = ("",) * len(rows[0])
    for line in table(rows, blank, align).split("\n")[1:]:
        yield f"  {line}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent="  ", break_long_words=False)
