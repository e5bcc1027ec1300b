"""Machines: rates between measurements, JSON, GPUs, and measuring this one once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from localrt.common.errors import OptionError
from localrt.offload.placement import PlacedUnit
from localrt.planning.costs import Costs, expert_costs
from localrt.planning.machine import (
    GPUS,
    KernelRate,
    find_gpu,
    measured_profile,
    parse_bandwidth,
    parse_gpu,
    typical_machine,
)
from localrt.quant.cuda.formats import product_instructions
from tests.planner.models import RATE, machine, shape


def test_kernel_rate() -> None:
    rate = KernelRate((1, 4, 64), (1e-11, 2e-11, 8e-11))
    assert rate.at(1) == 1e-11
    assert rate.at(4) == 2e-11
    assert 1e-11 < rate.at(2) < 2e-11
    assert rate.at(128) == pytest.approx(16e-11)
    with pytest.raises(ValueError, match="ascend"):
        KernelRate((4, 1), (1.0, 1.0))


def test_unmeasured_format() -> None:
    profile = typical_machine()
    four, eight = profile.kernel("nf4").at(1), profile.kernel("int8-g32").at(1)
    assert profile.kernel("q4_k").at(1) == profile.kernels["q4_k"].at(1)
    assert four == pytest.approx(profile.kernels["int4-g32"].at(1) * 4.25 / 4.5, rel=0.01)
    assert eight > 1.7 * four
    assert profile.kernel("nf4").at(512) == pytest.approx(profile.kernel("q4_k").at(512))


def test_with_cpu() -> None:
    before = typical_machine()
    after = before.with_cpu(1.5)
    for name in before.kernels:
        assert after.kernel(name).at(7) == pytest.approx(1.5 * before.kernel(name).at(7))
    assert after.attention.at(1) == pytest.approx(1.5 * before.attention.at(1))
    assert after.ssd_bytes_s == before.ssd_bytes_s


def test_find_gpu() -> None:
    assert find_gpu("NVIDIA GeForce RTX 4060") == GPUS["RTX 4060 8GB"]
    assert find_gpu("NVIDIA GeForce RTX 4060 Laptop GPU") == GPUS["RTX 4060 Laptop 8GB"]
    assert find_gpu("rtx 3060 12GB") == GPUS["RTX 3060 12GB"]
    assert find_gpu("Tesla T4") == GPUS["T4 16GB"]
    assert find_gpu("3060") == GPUS["RTX 3060 12GB"]
    assert find_gpu("RTX 4060 Ti 16 GB") == GPUS["RTX 4060 Ti 16GB"]
    assert find_gpu("rtx4070ti super") == GPUS["RTX 4070 Ti Super 16GB"]
    assert find_gpu("4070M") == find_gpu("RTX 4070 Mobile") == GPUS["RTX 4070 Laptop 8GB"]
    # A driver says the memory beside the name.
    assert find_gpu("NVIDIA GeForce RTX 5060 Ti", 8 << 30) == GPUS["RTX 5060 Ti 8GB"]
    assert find_gpu("NVIDIA GeForce RTX 5060 Ti") == GPUS["RTX 5060 Ti 16GB"]
    for other in ("NVIDIA GeForce RTX 4090 Ti", "RTX 4050 SUPER", "RTX 9999", "H200", ""):
        assert find_gpu(other) is None
    assert find_gpu("RTX 4060 16GB") is None
    for name, gpu in GPUS.items():
        for called in (name, f"NVIDIA GeForce {name} GPU", name.replace(" Laptop", " Mobile")):
            assert find_gpu(called) == gpu
        assert 2 << 30 <= gpu.vram_bytes <= 32 << 30
        assert 60e9 < gpu.bytes_s < 2e12


def test_virtual_gpu() -> None:
    gpu = parse_gpu("virtual:8GB@12GB/s,256GB/s,20TFLOPS")
    assert gpu.vram_bytes == 8_000_000_000
    assert gpu.link_bytes_s == 12e9
    assert gpu.profile.bytes_s == 256e9
    assert gpu.profile.flops == 20e12
    assert gpu.profile.call_s == 0
    for bad in ("virtual:8GB", "virtual:8GB@12GB,1GB/s,1TFLOPS", "virtual:1GB@1GB/s,1GB/s,fast"):
        with pytest.raises(OptionError):
            parse_gpu(bad)
    with pytest.raises(OptionError, match="from GTX 1630 to RTX 5090"):
        parse_gpu("Voodoo 2")
    with pytest.raises(OptionError, match=r"did you mean .*RTX 4060"):
        parse_gpu("RTX 4065")


def test_parse_bandwidth() -> None:
    assert parse_bandwidth("12GB/s") == 12e9
    assert parse_bandwidth("900 MB/s") == 900e6
    for bad in ("12GB", "GB/s", "12/s/s", "12GB/h", "-1GB/s"):
        with pytest.raises(OptionError):
            parse_bandwidth(bad)


def test_measured_gpu() -> None:
    unit, expert = (
        PlacedUnit(name="a", kind=kind, nbytes=1 << 18, macs=2_000_000, format="int4-g32")
        for kind in ("mlp", "expert")
    )
    model = shape(layers=1, experts=8)
    here = replace(machine(gpu=True), gpu=measured_profile("gpu", 8 << 30, RATE))
    costs = Costs(shape=model, machine=here)
    # A unit is five launches.
    assert costs.gpu(unit, 512) == pytest.approx(5 * 2e-6 + 2e6 * 8e-11)
    assert costs.gpu(unit, 1) == pytest.approx(5 * 2e-6 + 2e6 * 2e-12)
    assert costs.gpu(expert, 256) == pytest.approx(5 * 2e-6 / 8 + 2e6 * 4 * 9e-12)
    assert costs.gpu(replace(unit, format="q4_k"), 512) == costs.gpu(unit, 512)  # the nearest
    hybrid, ruled = expert_costs(costs), expert_costs(Costs(shape=model, machine=machine(gpu=True)))
    assert hybrid is not None
    assert ruled is not None
    assert hybrid.fetch == pytest.approx(ruled.fetch / 0.8)
    # The host starts a copy, and the CPU loses a share of the memory's bandwidth meanwhile.
    assert hybrid.slowdown == pytest.approx(2 * here.shared_s + 0.3 * hybrid.fetch)
    assert ruled.slowdown == pytest.approx(12 / 30 * ruled.fetch)


def prompt_costs(gpu: str, held: int = 0) -> Costs:
    """Of 512 rows, with this GPU of the table."""
    profile = replace(machine(gpu=True), gpu=GPUS[gpu].profile)
    return Costs(shape=shape(layers=1), machine=profile, rows=512, held=held)


def product_flops(gpu: str, format: str) -> float:
    """Operations per second of a large product of a prompt."""
    unit = PlacedUnit(name="a", kind="mlp", nbytes=1 << 30, macs=1 << 31, format=format)
    return 2 * 512 * unit.macs / prompt_costs(gpu).gpu(unit)


def test_prompts_take_the_instructions_of_a_format() -> None:
    """An RTX 4060 does 120e12 operations with 8 bits: 16 clocks of 26 instructions, half of them
    used. Its 16-bit products, which a GPU without 8-bit tensor cores has, reach 0.85 of 30e12.
    """
    mid = product_flops("RTX 4060 8GB", "q4_k")
    assert mid == pytest.approx(120e12 * 16 / 26 / 2, rel=0.01)
    for name in ("mxfp4", "q6_k", "iq2_xs"):
        times = product_instructions("q4_k") / product_instructions(name)
        assert product_flops("RTX 4060 8GB", name) == pytest.approx(times * mid, rel=0.01)
    assert product_flops("RTX 4060 8GB", "bf16") == pytest.approx(0.85 * 30e12, rel=0.01)
    # 16-bit operations of a T4 are as fast for its 8 bits as a GeForce's that does half as many.
    assert product_flops("T4 16GB", "q4_k") == pytest.approx(65 / 60 * mid, rel=0.01)
    assert product_flops("GTX 1660 Ti 6GB", "q4_k") < 0.85 * 5.4e12


def test_attention_of_prompts() -> None:
    costs, long = prompt_costs("RTX 4060 8GB"), prompt_costs("RTX 4060 8GB", held=8192)
    unit = PlacedUnit(name="a", kind="attention", nbytes=4096, macs=4096, format="q4_k", layer=0)
    macs = 512 * costs.shape.kv[0].held_macs(8192)
    added = long.gpu(unit) - costs.gpu(unit)
    assert added == pytest.approx(2 * macs / 15e12)
    # Products that are measured with 8 bits say nothing of 16-bit attention.
    rates = replace(RATE, products={"int4-g32": (2e-12, 3e-12, 9e-12, 5e-12, 2e-11, 7e-11)})
    assert rates.flops > 50e12
    assert measured_profile("RTX 4060", 8 << 30, rates).attention_flops == pytest.approx(15e12)
    assert measured_profile("H200", 1 << 30, rates).attention_flops == rates.flops / 2


def test_experts_of_a_layer_share_a_call() -> None:
    model = shape(layers=1, experts=8, used=2)
    expert = next(unit for unit in model.units if unit.kind == "expert")
    here = replace(machine(gpu=True), gpu=GPUS["RTX 4060 8GB"].profile)
    slow = Costs(shape=model, machine=replace(here, call_s=1.0))
    assert slow.cpu(expert) == pytest.approx(1 / 2, rel=0.01)
    prompt = Costs(shape=model, machine=slow.machine, rows=512)
    assert prompt.cpu(expert, 128) == pytest.approx(1 / 8, rel=0.05)
    dense = replace(expert, kind="mlp")
    assert slow.cpu(dense) == pytest.approx(1, rel=0.01)
