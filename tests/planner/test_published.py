"""Forecasts beside speeds that were measured: by users with other engines, and on an H100."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.command import RESULTS
from benchmarks.gpu.loaded import LARGE
from benchmarks.published import PUBLISHED, Published, forecast
from localrt.common.settings import Settings
from localrt.offload.placement import Placement, Where
from localrt.offload.shapes import ModelShape
from localrt.planning.costs import Costs
from localrt.planning.machine import GpuProfile, KernelRate, MachineProfile
from localrt.planning.shapes import shape_from_config
from localrt.planning.simulate import simulate

NEAR = 0.25


@pytest.mark.parametrize(
    "published", PUBLISHED, ids=lambda each: f"{each.model}, {each.pc}, {each.tok_s}"
)
def test_published(published: Published) -> None:
    found = forecast(published, Settings.from_environment({}))
    assert found.tok_s == pytest.approx(published.tok_s, rel=0.4 if published.apart else NEAR)


# -- an H100 held to 8 GB --------------------------------------------------------------------------

SLOW = "..C..C..C..L..C..C..C..C..C..L..C..C..C."
"""Where each MLP of the 14B was at 12 GB/s: over the link, on the CPU, or in the GPU's memory."""


def measured(row: str) -> float:
    """Tokens per second of ``scripts/gpu_check``."""
    record = json.loads(Path(RESULTS, "gpu_check.json").read_text(encoding="utf-8"))
    (found,) = (each for each in record["results"] if each["name"] == f"loaded {row}")
    return float(found["values"]["decode_tok_s"])


def h100(link: float) -> MachineProfile:
    """What it and its 16 cores were found to do: an MLP took the CPU 1.97 ms at either link, and
    a unit's kernels the time with which the resident rows are right.
    """
    gpu = GpuProfile(
        name="H100",
        vram_bytes=8_000_000_000,
        bytes_s=2.165e12,
        flops=6e14,
        call_s=2.5e-5,
        busy_link=1.0,
        busy_cpu=1.0,
    )
    return MachineProfile(
        name="H100",
        ssd_bytes_s=2e9,
        ram_bytes_s=300e9,
        kernels={"int4-g32": KernelRate((1,), (0.5625 / 76e9,))},
        attention=KernelRate((1,), (4e-12,)),
        threads=16,
        gpu=gpu,
        link_bytes_s=link,
    )


def shape(name: str, kind: str) -> ModelShape:
    config: dict[str, Any] = {**LARGE[name].config, "model_type": kind}
    return shape_from_config(config, name=name, format="int4-g32")


def resident(model: ModelShape) -> Placement:
    where = dict.fromkeys((unit.name for unit in model.units), Where.VRAM)
    return Placement(where=where, kv=("vram",) * model.layers)


def dense(model: ModelShape, sequence: str) -> Placement:
    kinds = {".": Where.VRAM, "L": Where.LINK, "C": Where.RAM}
    mlps = {f"layers.{n}.mlp": kinds[kind] for n, kind in enumerate(sequence)}
    ring = max(unit.nbytes for unit in model.units if unit.kind == "mlp") * 5 // 4
    return Placement(
        where={**resident(model).where, **mlps}, kv=("vram",) * model.layers, vram_ring=ring
    )


def mixture(model: ModelShape) -> Placement:
    """A third of the experts in the GPU's memory."""
    experts = {
        unit.name: Where.VRAM if number % 3 == 0 else Where.RAM
        for number, unit in enumerate(model.routed)
    }
    return Placement(where={**resident(model).where, **experts}, kv=("vram",) * model.layers)


@pytest.mark.parametrize(
    ("row", "link", "sequence"),
    [
        # The row of 49 GB/s is left out: it is of a pipeline whose threads waited for each copy.
        ("14B, at 12 GB/s", 12e9, SLOW),
        ("14B, resident", 49e9, ""),
    ],
)
def test_h100_dense(row: str, link: float, sequence: str) -> None:
    model = shape("14B", "qwen3")
    placement = dense(model, sequence) if sequence else resident(model)
    found = simulate(Costs(shape=model, machine=h100(link), held=512), placement)
    assert 1 / found.seconds == pytest.approx(measured(row), rel=NEAR)


@pytest.mark.parametrize(
    ("row", "hits"),
    [
        # With the share of experts that were on the GPU. The row of 12 GB/s is left out: filling
        # the cache delayed copies that experts waited for. None are waited for now.
        ("30B-A3B, compiled", 0.9976),
        ("30B-A3B, resident", None),
    ],
)
def test_h100_mixture(row: str, hits: float | None) -> None:
    model = shape("30B-A3B", "qwen3_moe")
    machine = h100(49.06e9)
    machine = replace(machine, recorded_s=machine.shared_s)  # it was launched twice a layer then
    costs = Costs(shape=model, machine=machine, held=512, expert_hits=hits)
    found = simulate(costs, resident(model) if hits is None else mixture(model), passes=20)
    assert 1 / found.seconds == pytest.approx(measured(row), rel=NEAR)
