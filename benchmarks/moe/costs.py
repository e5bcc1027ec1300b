"""What a mixture's layers take on a machine with a card: from configs alone.

The shapes are the published ones; rates of the CPU are those measured on this machine (or given),
the card's are its maker's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localrt.offload.experts.assignment import ExpertCosts
from localrt.offload.placement import PlacedUnit
from localrt.offload.planner.config_shapes import shape_from_config
from localrt.offload.planner.costs import Costs
from localrt.offload.planner.machine import MachineProfile

__all__ = ["CONFIGS", "LayerCosts", "layer_costs", "published_config"]

_FOLDER = Path(__file__).parent / "configs"

CONFIGS: Mapping[str, str] = {
    "mixtral": "mixtral",
    "deepseek-v2-lite": "deepseek-v2-lite",
    "qwen2-57b": "qwen2-57b",
    "qwen3-30b": "qwen3-30b-a3b",
}
"""Names of shapes, and of the ``config.json`` that they are published in."""


def published_config(file: str) -> dict[str, Any]:
    """The ``config.json`` of that name."""
    config: dict[str, Any] = json.loads((_FOLDER / f"{file}.json").read_text(encoding="utf-8"))
    return config


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """Seconds of a pass of some rows. ``between`` is a layer up to its router, on the GPU.

    ``shared`` is its shared experts, which the GPU computes once the router has chosen;
    ``crossing`` takes a layer's activations from one device to the other, ``once`` is the pass's
    beside its layers.
    """

    experts: ExpertCosts
    between: float
    shared: float
    crossing: float
    once: float


class _Measured:
    """An expert's seconds by its rows."""

    def __init__(self, costs: Costs, unit: PlacedUnit, *, on_gpu: bool) -> None:
        self._costs, self._unit, self._on_gpu = costs, unit, on_gpu
        self._known: dict[int, float] = {}

    def at(self, rows: int, /) -> float:
        if rows not in self._known:
            found = self._costs.compute(self._unit, on_gpu=self._on_gpu, rows=rows)
            self._known[rows] = found
        return self._known[rows]


def layer_costs(
    name: str, machine: MachineProfile, *, rows: int, held: int, format: str
) -> LayerCosts:
    """Of a pass of ``rows`` rows with ``held`` tokens before it; the machine has a GPU."""
    shape = shape_from_config(published_config(CONFIGS[name]), name=name, format=format)
    costs = Costs(shape, machine, rows=rows, held=held)
    expert = next(unit for unit in shape.units if unit.kind == "expert")
    layer = {unit.kind: unit for unit in shape.units if unit.layer == expert.layer}
    assert shape.experts is not None, "a mixture"
    assert machine.gpu is not None, "a machine with a GPU"
    assert machine.link_bytes_s is not None, "a machine with a GPU"
    cpu = _Measured(costs, expert, on_gpu=False)
    seen = max(1, round(rows * shape.experts.used / shape.experts.count))
    # What copies take from the CPU is memory's bandwidth: as far as its kernels wait for that.
    waiting = min(1.0, expert.nbytes / machine.ram_bytes_s / cpu.at(seen))
    load = min(0.9, machine.link_bytes_s / machine.ram_bytes_s) * waiting
    # The unit with the router has the shared experts too, if any.
    router = machine.gpu.call_s
    shared = max(0.0, costs.gpu(layer["mlp"]) - router)
    heads = [unit for unit in shape.units if unit.kind == "head"]
    return LayerCosts(
        experts=ExpertCosts(
            cpu=cpu,
            gpu=_Measured(costs, expert, on_gpu=True),
            fetch=costs.copy(expert.nbytes),
            link_load=load,
        ),
        between=costs.gpu(layer["attention"]) + router,
        shared=shared,
        crossing=costs.crossing(),
        once=costs.per_pass() + sum(costs.gpu(unit) for unit in heads),
    )
