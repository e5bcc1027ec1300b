"""What a published config means by a key that it leaves out, by the family that it names.

The values are those of transformers' config classes, which exporters rely on: a config that says
nothing of its window has one. ``architectures/defaults.json`` has a line for each ``model_type`` of
a text model, and which of them an architecture means. GGUF files are written out in full.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["with_default_values"]

_FILE = Path(__file__).with_name("architectures") / "defaults.json"
_SAME = (
    # One thing by several names: the default of one does not hold beside another
    ("num_experts", "num_local_experts", "moe_num_experts", "n_routed_experts"),
    ("num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k_experts"),
    ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    ("n_group", "num_expert_group"),
    ("norm_topk_prob", "moe_renormalize"),
    ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
    ("intermediate_size", "block_ff_dim"),
    ("rope_scaling", "rope_parameters"),
    ("layers_block_type", "layer_types", "hybrid_override_pattern"),
)


def with_default_values(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """``config`` and, for keys that are not in it, its family's defaults; null is a value."""
    table = _table()
    family = str(config.get("model_type"))
    if not isinstance(table.get(family), Mapping):
        family = str(table.get(architecture))
    defaults = dict(table.get(family) or {})
    for names in _SAME:
        if any(config.get(name) is not None for name in names):
            for name in names:
                defaults.pop(name, None)
    return {**defaults, **config}


@cache
def _table() -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return found
