"""What a mixture's layers take on a machine with a card, for ``moe_cache.py``: from configs alone.

The shapes are the published ones; rates of the CPU are those measured on this machine (or given),
the card's are its maker's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from localrt.offload.experts.assignment import ExpertCosts
from localrt.offload.placement import PlacedUnit
from localrt.offload.planner.config_shapes import shape_from_config
from localrt.offload.planner.costs import Costs
from localrt.offload.planner.machine import MachineProfile

__all__ = ["CONFIGS", "LayerCosts", "layer_costs"]

_COMMON = {"max_position_embeddings": 32768, "tie_word_embeddings": False}

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "mixtral": _COMMON
    | {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "deepseek-v2-lite": _COMMON
    | {
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "vocab_size": 102400,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
    },
    "qwen2-57b": _COMMON
    | {
        "model_type": "qwen2_moe",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "moe_intermediate_size": 2560,
        "shared_expert_intermediate_size": 20480,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 151936,
        "num_experts": 64,
        "num_experts_per_tok": 8,
    },
    "qwen3-30b": _COMMON
    | {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
}


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
    shape = shape_from_config(CONFIGS[name], name=name, format=format)
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
