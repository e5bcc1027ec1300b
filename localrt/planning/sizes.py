"""What other sizes of a model's weights would do: how fast they are, and what they lose.

For a model that is larger than memory: as it is, four and a half bits, what would fit memory, and
what would fit the card.
Speeds are planned. Losses are those that a calibration measured (``localrt quantize --bits``);
where there was none they are not known.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

from localrt.common.errors import LocalrtError
from localrt.common.settings import Settings
from localrt.models.checkpoints import StoreCheckpoint, open_checkpoint
from localrt.offload.placement import PlacedUnit, Where
from localrt.offload.planner import Plan, make_plan
from localrt.offload.planner.advice import in_bits, layer_bits
from localrt.offload.planner.plan import PlannedPlace, PlannedSize
from localrt.offload.store.pack import fingerprint
from localrt.quant.formats import FORMATS
from localrt.quantize.mix import MIX_FORMATS, LossTable, known_losses

_LEAST_BITS = 2.7  # all matrices in the smallest format
_USUAL_BITS = 4.5
_STEP = 0.1
_TRIES = 12
_LEAST_GAIN = 1.05  # times as fast: less is not worth a line


def other_sizes(plan: Plan, path: Path, settings: Settings) -> tuple[PlannedSize, ...]:
    """Sizes of the model at ``path`` beside the one of ``plan``, which comes first.

    None of a model that lies best as it is, or that is a quantized copy already.
    """
    goals = [goal for goal in ("memory", "card") if _misses(plan, goal)]
    if not goals:
        return ()
    table = None
    try:
        with closing(open_checkpoint(path)) as checkpoint:
            if isinstance(checkpoint, StoreCheckpoint) and checkpoint.manifest.quantization:
                return ()
            table = known_losses(settings.data_dir / "losses", fingerprint(checkpoint))
    except LocalrtError:  # a config without weights
        pass
    bits = layer_bits(plan.request.shape)
    now = PlannedSize(bits, plan.weight_bytes, plan.tok_s, _place(plan), loss=0.0)
    least = _LEAST_BITS if table is None else table.least_bits
    found: list[PlannedSize] = []
    if bits > _USUAL_BITS + 2 * _STEP >= least:
        found.append(_size(plan, _USUAL_BITS, table)[1])
    for goal in goals:
        tried = (_size(plan, tenth, table) for tenth in _tenths(plan, goal, bits, least))
        size = next((size for smaller, size in tried if not _misses(smaller, goal)), None)
        if size is not None and size not in found:
            found.append(size)
    faster = [size for size in found if size.tok_s > _LEAST_GAIN * plan.tok_s]
    return (now, *faster) if faster else ()


def _tenths(plan: Plan, goal: str, bits: float, least: float) -> list[float]:
    """Bits to try, from what may just reach the goal on."""
    used = [unit for unit in plan.request.shape.units if unit.use]
    kept = sum(unit.nbytes for unit in used if not _is_away(plan, unit, goal))
    guess = bits * kept / sum(unit.nbytes for unit in used) + 4 * _STEP
    most = int(min(guess, bits - _STEP) / _STEP)
    lowest = max(most - _TRIES, int(least / _STEP - 1e-6))
    return [round(number * _STEP, 1) for number in range(most, lowest, -1)]


def _size(plan: Plan, bits: float, table: LossTable | None) -> tuple[Plan, PlannedSize]:
    format_ = min(MIX_FORMATS, key=lambda name: abs(FORMATS[name].bits_per_weight - bits))
    shape = in_bits(plan.request.shape, bits, format_)
    found = make_plan(replace(plan.request, shape=shape))
    loss = None if table is None else table.loss(bits)
    return found, PlannedSize(bits, found.weight_bytes, found.tok_s, _place(found), loss)


def _place(plan: Plan) -> PlannedPlace:
    """The best of the goals that is reached."""
    if _misses(plan, "memory"):
        return "streamed"
    return "card" if plan.request.uses_gpu and not _misses(plan, "card") else "memory"


def _misses(plan: Plan, goal: str) -> bool:
    """Whether weights that a token needs are read or copied for it; or are not on the card that
    there is.
    """
    if goal == "card" and not plan.request.uses_gpu:
        return False
    return any(_is_away(plan, unit, goal) for unit in plan.request.shape.units if unit.use)


def _is_away(plan: Plan, unit: PlacedUnit, goal: str) -> bool:
    where = plan.placement.where[unit.name]
    if unit.kind == "norm":
        return False
    return where is not Where.VRAM if goal == "card" else where.read or where.copied
