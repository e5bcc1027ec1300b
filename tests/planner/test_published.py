"""Forecasts beside speeds that users measured with other engines.

Nothing runs: forecasts are plans, from the GPU vendor's figures and those of a typical processor.
They are not tuned to the published speeds. Facts that a source does not name are marked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
from localrt.quant.ops.kv_formats import KvFormat

NEAR = 0.25


@dataclass(frozen=True, slots=True)
class Published:
    """``tok_s`` of ``model`` (by its short name) on ``pc``, as ``--pc`` takes it.

    ``held`` tokens of ``ctx`` were in the cache. Empty fields were not named. ``apart`` explains a
    forecast that differs by more than a quarter.
    """

    model: str
    tok_s: float
    pc: str
    engine: str = ""
    source: str = ""
    file: str = "Q4_K_M"
    ram_speed: str | None = None
    ctx: int = DEFAULT_CONTEXT
    held: int | None = None
    kv_format: KvFormat = "bf16"
    apart: str = ""


def _rtx_2080(model: str, tok_s: float, thread: int, **more: Any) -> Published:
    """An i9-10900X with four channels of DDR4-3200, assumed to reach 80 % of peak."""
    pc, source = "RTX 2080 8GB, 62GB, 10 cores", f"AlexsJones/llmfit#{thread}"
    return Published(model, tok_s, pc, "llama.cpp", source, ram_speed="82GB/s", **more)


_RTX_3060 = "RTX 3060 12GB, 32GB", "llama.cpp", "thecodacus/llama.cpp#5"
_LAYERS = "it had 16 of 40 layers on the GPU; ours are more, and some are copied"
_LAPTOP = "a laptop's clocks and the kind of its RAM were not named"
_UNNAMED = "neither the GPU of 8 GB nor the kind of RAM was named"
# Bits per weight; other files have their published size.
_BITS = {"Q4_K_M": 4.9, "Q4_K_S": 4.6, "IQ4_XS": 4.3, "IQ3_S": 3.5, "IQ3_K_R4": 3.5}


def _rtx_4060_ti(tok_s: float, engine: str, file: str, **more: Any) -> Published:
    return Published("qwen3.5:35b", tok_s, "RTX 4060 Ti 8GB, 32GB", engine, "", file, **more)


def _held(tokens: int) -> dict[str, Any]:
    return {"ctx": tokens, "held": tokens, "kv_format": "int4"}


PUBLISHED: tuple[Published, ...] = (
    _rtx_2080("qwen3:4b", 110.6, 773),
    _rtx_2080("llama3.1:8b", 71.9, 773),
    _rtx_2080("qwen3:8b", 69.3, 773),
    _rtx_2080("gemma3:12b", 26.1, 774),
    _rtx_2080("qwen3:14b", 16.9, 774),
    _rtx_2080("qwen2.5:14b", 20.8, 778),
    _rtx_2080("mistral-small3.2:24b", 5.2, 775, apart=_LAYERS),
    _rtx_2080("gpt-oss:20b", 36.4, 775, file="MXFP4"),
    _rtx_2080("qwen3:30b", 36.7, 755),
    Published("qwen3.5:9b", 56, "RTX 3070 8GB, 32GB", "llama.cpp", "localllm.in, 2026", ctx=16_384),
    Published("qwen3.5:35b", 42, *_RTX_3060),
    Published("glm-4.7-flash:30b", 32, *_RTX_3060),
    _rtx_4060_ti(57.6, "ik_llama.cpp", "IQ3_K_R4", **_held(16_384)),
    _rtx_4060_ti(55.6, "ik_llama.cpp", "IQ3_K_R4", **_held(163_840)),
    _rtx_4060_ti(41.6, "llama.cpp", "Q4_K_S"),
    Published(
        "qwen3.5:35b",
        45.0,
        "RTX 4060 Laptop 8GB, 48GB",
        "FreeToken's fork",
        "FlashML-org/FreeToken#179",
        "IQ3_S",
        apart=_LAPTOP,
    ),
    Published("gpt-oss:120b", 25.6, f"{DEFAULT_GPU}, 96GB", file="MXFP4", apart=_UNNAMED),
    Published(
        "qwen3.5:27b",
        4.2,
        "RTX 5060 Laptop 8GB, 32GB",
        "llama.cpp",
        "sudoingX/qwen38-mtp#45",
        "IQ4_XS",
        ctx=65_536,
        kv_format="int4",
    ),
)
"""Decode speeds at one token per pass."""


def forecast(published: Published, settings: Settings) -> Forecast:
    """Our plan for the PC of ``published``; facts not named are those of a typical PC. As in other
    engines, a layer's MLP is computed by one device, and no graph has layers of both.
    """
    wanted = Hardware(pc=published.pc, ram_speed=published.ram_speed)
    machine, budgets, _ = planned_hardware(wanted, settings)
    known = find_known(published.model)
    assert known is not None, "it is in the table"
    bits = _BITS.get(published.file)
    format = "int4-g32" if bits else None
    shape = shape_from_config(known.config(), name=known.name, format=format)
    if bits:
        shape = sized(shape, published.file, round(known.parameters * 1e9 * bits / 8))
    request = PlanRequest(
        shape=shape,
        machine=replace(machine, recorded_s=machine.shared_s),
        budgets=budgets,
        ctx=published.ctx,
        held=published.held,
        kv_format=published.kv_format,
        splits=False,
    )
    return make_forecast(request)


@pytest.mark.parametrize(
    "published", PUBLISHED, ids=lambda each: f"{each.model}, {each.pc}, {each.tok_s}"
)
def test_published(published: Published) -> None:
    found = forecast(published, Settings.from_environment({}))
    assert found.tok_s == pytest.approx(published.tok_s, rel=0.4 if published.apart else NEAR)
