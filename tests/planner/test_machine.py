"""Machines: rates between measurements, JSON, cards, and measuring this one once."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from localrt.common.errors import OptionError
from localrt.offload.placement import PlacedUnit
from localrt.offload.planner import measure
from localrt.offload.planner.cards import (
    CARDS,
    find_card,
    measured_profile,
    parse_bandwidth,
    parse_card,
)
from localrt.offload.planner.costs import Costs, expert_costs
from localrt.offload.planner.machine import KernelRate, MachineProfile, typical_machine
from localrt.offload.planner.measure import measure_machine
from localrt.offload.reading.disk_speed import DiskProfile
from tests.planner.models import RATE, machine, shape


def test_rates_lie_between_what_was_measured() -> None:
    rate = KernelRate((1, 4, 64), (1e-11, 2e-11, 8e-11))
    assert rate.at(1) == 1e-11
    assert rate.at(4) == 2e-11
    assert 1e-11 < rate.at(2) < 2e-11
    assert rate.at(128) == pytest.approx(16e-11)
    with pytest.raises(ValueError, match="ascend"):
        KernelRate((4, 1), (1.0, 1.0))


def test_a_format_that_was_not_measured_follows_from_its_bits() -> None:
    profile = typical_machine()
    four, eight = profile.kernel("nf4").at(1), profile.kernel("int8-g32").at(1)
    assert profile.kernel("q4_k").at(1) == profile.kernels["q4_k"].at(1)
    assert four == pytest.approx(profile.kernels["int4-g32"].at(1) * 4.25 / 4.5, rel=0.01)
    assert eight > 1.7 * four
    assert profile.kernel("nf4").at(512) == pytest.approx(profile.kernel("q4_k").at(512))


def test_a_slower_processor_takes_so_many_times_as_long() -> None:
    before = typical_machine()
    after = before.with_cpu(1.5)
    for name in before.kernels:
        assert after.kernel(name).at(7) == pytest.approx(1.5 * before.kernel(name).at(7))
    assert after.attention.at(1) == pytest.approx(1.5 * before.attention.at(1))
    assert after.ssd_bytes_s == before.ssd_bytes_s


@pytest.mark.parametrize("profile", [machine(), machine(gpu=True), typical_machine()])
def test_a_profile_can_be_written_as_json(profile: MachineProfile) -> None:
    values = json.loads(json.dumps(profile.to_dict()))
    assert values["ssd_bytes_s"] == profile.ssd_bytes_s
    assert values["kernels"].keys() == profile.kernels.keys()


def test_cards_are_found_by_what_drivers_call_them() -> None:
    assert find_card("NVIDIA GeForce RTX 4060") == CARDS["RTX 4060 8GB"]
    assert find_card("NVIDIA GeForce RTX 4060 Laptop GPU") == CARDS["RTX 4060 Laptop 8GB"]
    assert find_card("rtx 3060 12GB") == CARDS["RTX 3060 12GB"]
    assert find_card("Tesla T4") == CARDS["T4 16GB"]
    assert find_card("3060") == CARDS["RTX 3060 12GB"]
    assert find_card("RTX 4060 Ti 16 GB") == CARDS["RTX 4060 Ti 16GB"]
    assert find_card("rtx4070ti super") == CARDS["RTX 4070 Ti Super 16GB"]
    assert find_card("4070M") == find_card("RTX 4070 Mobile") == CARDS["RTX 4070 Laptop 8GB"]
    # A driver says the memory beside the name.
    assert find_card("NVIDIA GeForce RTX 5060 Ti", 8 << 30) == CARDS["RTX 5060 Ti 8GB"]
    assert find_card("NVIDIA GeForce RTX 5060 Ti") == CARDS["RTX 5060 Ti 16GB"]
    for other in ("NVIDIA GeForce RTX 4090 Ti", "RTX 4050 SUPER", "RTX 9999", "H200", ""):
        assert find_card(other) is None
    assert find_card("RTX 4060 16GB") is None
    for name, card in CARDS.items():
        assert find_card(name) == card


def test_a_card_can_be_made_up() -> None:
    card = parse_card("virtual:8GB@12GB/s,256GB/s,20TFLOPS")
    assert card.vram_bytes == 8_000_000_000
    assert card.link_bytes_s == 12e9
    assert card.profile.bytes_s == 256e9
    assert card.profile.flops == 20e12
    assert card.profile.call_s == 0
    for bad in ("virtual:8GB", "virtual:8GB@12GB,1GB/s,1TFLOPS", "virtual:1GB@1GB/s,1GB/s,fast"):
        with pytest.raises(OptionError):
            parse_card(bad)
    with pytest.raises(OptionError, match="from GTX 1630 to RTX 5090"):
        parse_card("Voodoo 2")
    with pytest.raises(OptionError, match=r"did you mean .*RTX 4060"):
        parse_card("RTX 4065")


def test_bandwidths() -> None:
    assert parse_bandwidth("12GB/s") == 12e9
    assert parse_bandwidth("900 MB/s") == 900e6
    for bad in ("12GB", "GB/s", "12/s/s", "12GB/h", "-1GB/s"):
        with pytest.raises(OptionError):
            parse_bandwidth(bad)


@dataclass
class _Disk:
    read_bytes_s: float = 2e9
    cpu_s_per_byte: float = 1e-10


def test_measuring_is_done_once_for_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("localrt.quant.cpu.ops")
    calls: list[str] = []
    monkeypatch.setattr(measure, "DEFAULT_FORMATS", ("q8_0",))
    monkeypatch.setattr(measure, "_BUDGET_S", 0.0)
    monkeypatch.setattr(measure, "is_busy", lambda: False)
    real = measure.measure_kernel
    monkeypatch.setattr(
        measure,
        "measure_kernel",
        lambda ops, name, size: calls.append(name) or real(ops, name, size),
    )

    def disk(folder: Path) -> _Disk:
        calls.append("disk")
        return _Disk()

    def profile(identity: str = "cpu", **options: object) -> MachineProfile:
        return measure_machine(
            tmp_path,
            cache=tmp_path / "c",
            disk_speed=disk,
            identity=[identity],
            working_set=8 << 20,
            **options,
        )  # type: ignore[arg-type]

    first = profile()
    assert calls == ["q8_0", "disk"]
    assert first.ssd_bytes_s == 2e9
    assert first.kernels["q8_0"].at(1) > 0
    assert first.attention.at(1) > 0
    assert first.ram_bytes_s > 1e8
    assert first.sources["kernels"] == "measured"
    assert profile() == first
    assert calls == ["q8_0", "disk"]
    profile(formats=["q8_0", "int4-g32", "no such format"])  # only what is missing
    assert calls == ["q8_0", "disk", "int4-g32"]
    profile("another cpu")
    assert calls[3:] == ["q8_0", "disk"]
    profile("another cpu", remeasure=True)
    assert calls[5:] == ["q8_0", "disk"]
    (tmp_path / "c" / "machine.json").write_text("{damaged")
    profile("another cpu")
    assert calls[7:] == ["q8_0", "disk"]
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["machine.json"]


@pytest.mark.parametrize(
    ("later", "busy"),
    [
        ("cpu  180 0 10 910 100 0 0 0 80 0", True),  # a guest's ticks are its user's, too
        ("cpu  110 0 10 990 100 0 0 0 0 0", False),
        ("cpu  110 0 10 910 180 0 0 0 0 0", False),  # waiting for a disk
        ("cpu  110 0 10 900 100 0 0 80 0 0", True),  # another machine has the core
        ("cpu  100 0 10 900 100 0 0 0 0 0", False),  # no tick since
    ],
)
def test_linux_says_without_a_package_whether_it_is_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: str, busy: bool
) -> None:
    stat = tmp_path / "proc" / "stat"
    stat.parent.mkdir()
    stat.write_text("cpu  100 0 10 900 100 0 0 0 0 0\ncpu0 1 2 3 4\n", encoding="ascii")
    monkeypatch.setattr(time, "sleep", lambda _: stat.write_text(later, encoding="ascii"))
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert measure.is_busy(tmp_path) == busy


def test_rates_of_a_busy_machine_are_marked_and_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("localrt.quant.cpu.ops")
    monkeypatch.setattr(measure, "DEFAULT_FORMATS", ("q8_0",))
    monkeypatch.setattr(measure, "_BUDGET_S", 0.0)

    def source(*, busy: bool) -> str:
        monkeypatch.setattr(measure, "is_busy", lambda: busy)
        found = measure_machine(
            tmp_path,
            cache=tmp_path,
            disk_speed=lambda _: _Disk(),  # type: ignore[arg-type,return-value]
            identity=["cpu"],
            working_set=8 << 20,
        )
        return found.sources["kernels"]

    assert source(busy=True) == source(busy=True) == "measured while busy"
    assert source(busy=False) == source(busy=True) == "measured"


def test_a_models_own_files_tell_a_disks_speed_better_than_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("localrt.quant.cpu.ops")
    monkeypatch.setattr(measure, "DEFAULT_FORMATS", ("q8_0",))
    monkeypatch.setattr(measure, "_BUDGET_S", 0.0)
    monkeypatch.setattr(measure, "is_busy", lambda: False)

    def speed(*, disk: float, sample: bool) -> float:
        return measure_machine(
            tmp_path,
            cache=tmp_path,
            disk_speed=lambda _: replace(DiskProfile.assumed(), read_bytes_s=disk),
            identity=["cpu"],
            working_set=8 << 20,
            sample=sample,
        ).ssd_bytes_s

    assert speed(disk=1e9, sample=True) == speed(disk=2e9, sample=True) == 1e9
    assert speed(disk=3e9, sample=False) == speed(disk=4e9, sample=True) == 3e9


def test_a_measured_card_is_planned_with_what_was_measured() -> None:
    unit, expert = (
        PlacedUnit(name="a", kind=kind, nbytes=1 << 18, macs=2_000_000, format="int4-g32")
        for kind in ("mlp", "expert")
    )
    model = shape(layers=1, experts=8)
    here = replace(machine(gpu=True), gpu=measured_profile("card", 8 << 30, RATE))
    costs = Costs(shape=model, machine=here)
    # A unit is five launches.
    assert costs.gpu(unit, 512) == pytest.approx(5 * 2e-6 + 2e6 * 8e-11)
    assert costs.gpu(unit, 1) == pytest.approx(5 * 2e-6 + 2e6 * 2e-12)
    assert costs.gpu(expert, 256) == pytest.approx(5 * 2e-6 + 2e6 * 4 * 9e-12)
    assert costs.gpu(replace(unit, format="q4_k"), 512) == costs.gpu(unit, 512)  # the nearest
    hybrid, ruled = expert_costs(costs), expert_costs(Costs(shape=model, machine=machine(gpu=True)))
    assert hybrid is not None
    assert ruled is not None
    assert hybrid.fetch == pytest.approx(ruled.fetch / 0.8)
    assert hybrid.link_load == pytest.approx(0.3)
    assert ruled.link_load == pytest.approx(12 / 30)
