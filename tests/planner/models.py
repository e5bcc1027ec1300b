"""Published configs, small shapes and machines to plan with."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from localrt.hub.names import find_known
from localrt.offload.account import Budgets
from localrt.offload.placement import PlacedUnit
from localrt.offload.shapes import ExpertShape, KvShape, ModelShape, PassSizes
from localrt.planning.forecast import Forecast, PlanRequest
from localrt.planning.machine import GpuProfile, KernelRate, MachineProfile
from localrt.planning.models import shape_from_config
from localrt.planning.search import make_forecast
from localrt.quant.cuda.gpu_cache import GpuRates
from localrt.quant.ops.attention import scratch_nbytes

_KNOWN = {
    "llama-3-70b": "llama3.3:70b",
    "qwen2.5-coder-1.5b": "qwen2.5-coder:1.5b",
    "qwen3-30b-a3b": "qwen3:30b",
    "gpt-oss-20b": "gpt-oss:20b",
    "gpt-oss-120b": "gpt-oss:120b",
    "lfm2-1.2b": "lfm2:1.2b",
    "llama-3.2-1b": "llama3.2:1b",
    "nemotron-3-nano-30b-a3b": "nemotron-3-nano:30b",
    "phi-4-mini": "phi4-mini:3.8b",
}


def _config(short_name: str) -> dict[str, Any]:
    """That which comes with localrt."""
    known = find_known(short_name)
    assert known is not None
    return dict(known.config())


_OTHERS = json.loads((Path(__file__).parents[1] / "data/configs.json").read_text("utf-8"))
CONFIGS: dict[str, dict[str, Any]] = {
    **{name: _config(short) for name, short in _KNOWN.items()},
    **_OTHERS,
}

MB = 1_000_000

RATE = GpuRates(
    products={"int4-g32": (2e-12, 3e-12, 9e-12, 6e-11, 8e-11, 2e-10)},
    memory_bytes_s=250e9,
    to_gpu_bytes_s=12e9,
    busy_link=0.8,
    busy_cpu=0.7,
    crossing_s=3e-5,
    replay_s=2e-6,
)
"""A measured GPU."""


@functools.cache
def published(name: str) -> ModelShape:
    """The shape of a published model."""
    return shape_from_config(CONFIGS[name], name=name)


def machine(*, gpu: bool = False, ssd: float = 1e9, link: float = 12e9) -> MachineProfile:
    """A small desktop; with ``gpu`` a GPU of 256 GB/s."""
    rate = KernelRate((1, 64, 512), (2.5e-11, 2e-10, 1.4e-9))
    gpu_profile = GpuProfile(name="gpu", vram_bytes=8 << 30, bytes_s=256e9, flops=20e12, call_s=0.0)
    return MachineProfile(
        name="test machine",
        ssd_bytes_s=ssd,
        ram_bytes_s=30e9,
        kernels={"int4-g32": rate},
        attention=KernelRate((1, 64), (4e-11, 1e-11)),
        threads=2,
        gpu=gpu_profile if gpu else None,
        link_bytes_s=link if gpu else None,
    )


def shape(
    *,
    layers: int = 4,
    attention: int = 4096 * 500,
    mlp: int = 4096 * 2000,
    head: int = 2,
    experts: int = 0,
    used: int = 2,
    kv: int = 64,
) -> ModelShape:
    """A model of the given bytes per unit, all of them int4."""

    def unit(name: str, kind: Any, nbytes: int, layer: int | None = None) -> PlacedUnit:
        use = 0.0 if kind == "embedding" else used / experts if kind == "expert" else 1.0
        macs = 0 if kind in ("embedding", "norm") else nbytes * 16 // 9
        return PlacedUnit(
            name=name, kind=kind, nbytes=nbytes, macs=macs, format="int4-g32", layer=layer, use=use
        )

    units = [unit("embedding", "embedding", 4096 * 1000)]
    for layer in range(layers):
        units.append(unit(f"layers.{layer}.attention", "attention", attention, layer))
        units.append(unit(f"layers.{layer}.mlp", "mlp", mlp, layer))
        units += [
            unit(f"layers.{layer}.expert.{n}", "expert", mlp // 2, layer) for n in range(experts)
        ]
    units.append(unit("norm", "norm", 4096))
    units += [unit(f"head.{n}", "head", 4096 * 700) for n in range(head)]
    inner = mlp // 2 * 16 // 9 // 1536
    return ModelShape(
        name="test model",
        architecture="llama",
        units=tuple(units),
        sizes=PassSizes(
            hidden=512,
            inner=1024,
            vocab=4000,
            parts=2 * layers + 1,
            experts_used=used if experts else 0,
            expert_inner=inner if experts else 0,
            split_nbytes=scratch_nbytes(2, kv, 4096),
        ),
        context_length=4096,
        kv=(KvShape(groups=2, width=kv, macs=4 * kv),) * layers,
        parameters=sum(unit.macs for unit in units),
        experts=ExpertShape(count=experts, used=used, inner=inner) if experts else None,
    )


def planned(
    shape: ModelShape, machine: MachineProfile, budgets: Budgets, **options: Any
) -> Forecast:
    """``make_plan``, with a request of these parts."""
    request = PlanRequest(shape=shape, machine=machine, budgets=budgets, **options)
    return make_forecast(request)
