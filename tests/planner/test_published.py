"""Forecasts beside speeds that users measured with other engines (``docs/planner.md``).

Nothing runs: forecasts are plans, from the GPU vendor's figures and those of a typical processor.
They are not tuned to the published speeds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from localrt.common.settings import DEFAULT_CONTEXT, Settings
from localrt.hub.names import find_known
from localrt.planning.forecast import Forecast, PlanRequest
from localrt.planning.machine import DEFAULT_GPU
from localrt.planning.measure import Hardware, planned_hardware
from localrt.planning.models import shape_from_config
from localrt.planning.recommend import sized
from localrt.planning.search import make_forecast

NEAR, APART = 0.25, 0.4
# An i9-10900X with four channels of DDR4-3200, assumed to reach 80 % of peak.
RTX_2080 = "RTX 2080 8GB, 62GB, 10 cores"
RTX_3060, RTX_4060_TI = "RTX 3060 12GB, 32GB", "RTX 4060 Ti 8GB, 32GB"
# Bits per weight; other files have their published size.
BITS = {"Q4_K_M": 4.9, "Q4_K_S": 4.6, "IQ4_XS": 4.3, "IQ3_S": 3.5, "IQ3_K_R4": 3.5}


def held(tokens: int) -> dict[str, Any]:
    """So many tokens in the cache, of as many."""
    return {"ctx": tokens, "held": tokens, "kv_format": "int4"}


PUBLISHED: list[tuple[str, float, str, str, dict[str, Any]]] = [
    ("qwen3:4b", 110.6, RTX_2080, "Q4_K_M", {}),
    ("llama3.1:8b", 71.9, RTX_2080, "Q4_K_M", {}),
    ("qwen3:8b", 69.3, RTX_2080, "Q4_K_M", {}),
    ("gemma3:12b", 26.1, RTX_2080, "Q4_K_M", {}),
    ("qwen3:14b", 16.9, RTX_2080, "Q4_K_M", {}),
    ("qwen2.5:14b", 20.8, RTX_2080, "Q4_K_M", {}),
    ("gpt-oss:20b", 36.4, RTX_2080, "MXFP4", {}),
    ("qwen3:30b", 36.7, RTX_2080, "Q4_K_M", {}),
    ("qwen3.5:9b", 56, "RTX 3070 8GB, 32GB", "Q4_K_M", {"ctx": 16_384}),
    ("qwen3.5:35b", 42, RTX_3060, "Q4_K_M", {}),
    ("glm-4.7-flash:30b", 32, RTX_3060, "Q4_K_M", {}),
    ("qwen3.5:35b", 57.6, RTX_4060_TI, "IQ3_K_R4", held(16_384)),
    ("qwen3.5:35b", 55.6, RTX_4060_TI, "IQ3_K_R4", held(163_840)),
    ("qwen3.5:35b", 41.6, RTX_4060_TI, "Q4_K_S", {}),
    (
        *("qwen3.5:27b", 4.2, "RTX 5060 Laptop 8GB, 32GB", "IQ4_XS"),
        {"ctx": 65_536, "kv_format": "int4"},
    ),
    # It had 16 of 40 layers on the GPU; ours are more, and some are copied.
    ("mistral-small3.2:24b", 5.2, RTX_2080, "Q4_K_M", {"rel": APART}),
    # A laptop's clocks and the kind of its RAM were not named.
    ("qwen3.5:35b", 45.0, "RTX 4060 Laptop 8GB, 48GB", "IQ3_S", {"rel": APART}),
    # Neither the GPU of 8 GB nor the kind of RAM was named.
    ("gpt-oss:120b", 25.6, f"{DEFAULT_GPU}, 96GB", "MXFP4", {"rel": APART}),
]
"""Decode speeds at one token per pass: a model, tok/s, its PC as ``--pc`` takes it, its file."""


def forecast(model: str, pc: str, file: str, **options: Any) -> Forecast:
    """Our plan; facts not named are those of a typical PC. As in other engines, a layer's MLP is
    computed by one device, and no graph has layers of both.
    """
    wanted = Hardware(pc=pc, ram_speed="82GB/s" if pc == RTX_2080 else None)
    machine, budgets, _ = planned_hardware(wanted, Settings.from_environment({}))
    known = find_known(model)
    assert known is not None, "it is in the table"
    bits = BITS.get(file)
    format = "int4-g32" if bits else None
    shape = shape_from_config(known.config(), name=known.name, format=format)
    if bits:
        shape = sized(shape, file, round(known.parameters * 1e9 * bits / 8))
    request = PlanRequest(
        shape=shape,
        machine=replace(machine, recorded_s=machine.shared_s),
        budgets=budgets,
        splits=False,
        **{"ctx": DEFAULT_CONTEXT, **options},
    )
    return make_forecast(request)


@pytest.mark.parametrize(("model", "tok_s", "pc", "file", "options"), PUBLISHED)
def test_published(model: str, tok_s: float, pc: str, file: str, options: dict[str, Any]) -> None:
    rel = options.get("rel", NEAR)
    planned = {name: value for name, value in options.items() if name != "rel"}
    assert forecast(model, pc, file, **planned).tok_s == pytest.approx(tok_s, rel=rel)
