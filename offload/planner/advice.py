"""What would help most: each change is planned and replayed, and those that pay are named.

More RAM, a faster disk, more GPU memory, a smaller format, smaller keys and values. It judges by
tokens per second alone, and knows nothing of guessing ahead: what that gains only running tells.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from localrt.common.formatting import format_bytes
from localrt.offload.planner.plan import Change, Plan, PlanRequest
from localrt.offload.planner.search import predicted_rate
from localrt.offload.shapes import ModelShape, aligned
from localrt.quant.formats import FORMATS

# Below this a change is not worth a line.
_LEAST_GAIN = 1.05
_MOST_LINES = 5
_LAYERS = ("attention", "mlp", "expert")
_TABLE = FORMATS["int8-g32"]
_SMALLEST_FORMAT = "int4-g128"


def helpful_changes(plan: Plan) -> tuple[Change, ...]:
    """The changes that make the plan faster, best first."""
    now = plan.prediction.tok_s
    found = [
        Change(what, tok_s, tok_s / now, option)
        for what, tok_s, option in _changes(plan)
        if tok_s > _LEAST_GAIN * now
    ]
    return tuple(sorted(found, key=lambda each: each.gain, reverse=True)[:_MOST_LINES])


def in_format(shape: ModelShape, format: str, *, always: bool = False) -> ModelShape:
    """The model with every matrix that takes more bits packed in ``format``: an estimate.

    With ``always`` those that take fewer bits too.
    """
    target = FORMATS[format]
    units = []
    for unit in shape.units:
        elements = shape.vocab * shape.hidden if unit.kind == "embedding" else unit.macs
        size = aligned(round(elements * target.bits_per_weight / 8))
        changes = elements and (always or size < unit.nbytes)
        units.append(replace(unit, nbytes=size, format=format) if changes else unit)
    return replace(shape, units=tuple(units))


def in_bits(shape: ModelShape, bits: float, format: str) -> ModelShape:
    """The model with ``bits`` for each weight of its layers, mostly in ``format``: an estimate.

    Embedding and head take eight bits if they have more, as quantizing leaves them.
    """
    units = []
    for unit in shape.units:
        elements, width, name = unit.macs, bits, format
        if unit.kind not in _LAYERS:
            width, name = _TABLE.bits_per_weight, _TABLE.name
        if unit.name == "embedding":
            elements = shape.vocab * shape.hidden
        size = aligned(round(elements * width / 8))
        changed = elements and size < unit.nbytes
        units.append(replace(unit, nbytes=size, format=name) if changed else unit)
    return replace(shape, units=tuple(units))


def layer_bits(shape: ModelShape) -> float:
    """Bits per weight of the layers."""
    units = [unit for unit in shape.units if unit.kind in _LAYERS]
    return 8 * sum(unit.nbytes for unit in units) / sum(unit.macs for unit in units)


def _changes(plan: Plan) -> Iterator[tuple[str, float, tuple[str, str] | None]]:
    """(what is changed, tokens per second, the option that does it)."""

    def rate(changed: PlanRequest) -> float:
        return predicted_rate(changed, like=plan.placement)

    request, budgets = plan.request, plan.request.budgets
    machine = request.machine
    moved = plan.prediction.nbytes["ssd"]
    if moved:
        on_ssd = sum(
            unit.nbytes
            for unit in request.shape.units
            if unit.use and plan.placement.where[unit.name].read
        )
        for more in dict.fromkeys((_round(on_ssd / 4), _round(1.05 * on_ssd + 64e6))):
            bigger = replace(budgets, ram=budgets.ram + more)
            yield f"{format_bytes(more)} more RAM", rate(replace(request, budgets=bigger)), None
        faster = replace(machine, ssd_bytes_s=2 * machine.ssd_bytes_s)
        yield "a disk twice as fast", rate(replace(request, machine=faster)), None
    if request.uses_gpu:
        assert machine.link_bytes_s is not None, "a GPU has a link"
        bigger = replace(budgets, vram=budgets.vram + (4 << 30))
        yield "4 GB more GPU memory", rate(replace(request, budgets=bigger)), None
        faster = replace(machine, link_bytes_s=2 * machine.link_bytes_s)
        yield "a link twice as fast", rate(replace(request, machine=faster)), None
    small = in_format(request.shape, _SMALLEST_FORMAT)
    if small.pass_nbytes < 0.95 * request.shape.pass_nbytes:
        option = ("format", _SMALLEST_FORMAT)
        yield f"weights in {_SMALLEST_FORMAT}", rate(replace(request, shape=small)), option
    if request.kv_format == "bf16":
        faster_kv = rate(replace(request, kv_format="int8"))
        yield "keys and values in int8", faster_kv, ("kv_format", "int8")


def _round(nbytes: float) -> int:
    """To two digits, upwards: people buy round numbers."""
    step = 10 ** max(6, len(str(int(nbytes))) - 2)
    return int(-(-nbytes // step) * step)
