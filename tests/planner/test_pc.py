"""A PC from a line of words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from localrt.common.errors import OptionError
from localrt.common.settings import Settings
from localrt.offload import hardware
from localrt.offload.hardware import GpuFacts
from localrt.planning.describe_pc import PRESETS, parse_memory_speed, parse_pc
from localrt.planning.forecast import PlanRequest, other_gpu_line
from localrt.planning.machine import GPUS, beside_desktop, parse_gpu
from localrt.planning.measure import Hardware, planned_hardware
from localrt.planning.search import make_forecast
from tests.mutations import is_line
from tests.planner.models import published

SEEDS = [
    ("pc", "RTX 4060 Ti 16GB, 2x16GB DDR5-5600 dual channel, Ryzen 7 5800X, NVMe Gen4"),
    ("pc", "office-laptop, no GPU, 8 cores, SATA SSD 500MB/s"),
    ("ram", "1.5 GiB"),
    ("gpu", "virtual:8GB@12GB/s,256GB/s,20TFLOPS"),
    ("gpu_memory", "8G"),
    ("link", "12GB/s"),
    ("ssd", "900 MB/s"),
    ("ram_speed", "DDR4-3200"),
]
_SHAPE = published("llama-3.2-1b")


def planned(**given: str) -> None:
    """Plan a small model for a described PC, with this changed."""
    wanted = Hardware(**{"pc": "gaming-pc", **given})
    found, budgets, _ = planned_hardware(wanted, Settings.from_environment({}))
    make_forecast(PlanRequest(shape=_SHAPE, machine=found, budgets=budgets, ctx=1024))


def test_parts_in_any_order() -> None:
    pc = parse_pc("RTX 4060 Ti 16GB, 32GB DDR5-5600, 8 cores, NVMe")
    assert pc.gpu == GPUS["RTX 4060 Ti 16GB"]
    assert (pc.ram_bytes, pc.cores) == (32_000_000_000, 8)
    assert pc.ram_bytes_s == pytest.approx(0.8 * 89.6e9)
    assert pc == parse_pc("NVMe, 8-core CPU, DDR5-5600 32 GB, rtx 4060 ti 16gb")
    assert pc.sources == {
        "ram_bytes": "given",
        "ram_bytes_s": "typical",
        "cores": "given",
        "ssd_bytes_s": "typical",
    }
    assert parse_pc("2x16GB DDR4 single channel").ram_bytes_s == pytest.approx(0.8 * 25.6e9)
    assert parse_pc("Ryzen 7 with 6 cores").cores == 6


def test_apple() -> None:
    with pytest.raises(OptionError, match=r"^'MacBook Air M2': Apple's GPUs are not planned$"):
        parse_pc("MacBook Air M2, 16GB")
    with pytest.raises(OptionError, match="Apple's GPUs are not planned"):
        parse_gpu("Mac mini M4 Pro")
    assert parse_pc("16GB, M.2 NVMe") == parse_pc("16GB, NVMe")


@pytest.mark.parametrize(
    ("disk", "rate", "source"),
    [
        ("NVMe", 3e9, "typical"),
        ("1TB SATA SSD", 0.5e9, "typical"),
        ("NVMe 3.5GB/s", 3.5e9, "given"),
    ],
)
def test_disks(disk: str, rate: float, source: str) -> None:
    pc = parse_pc(f"16GB, {disk}")
    assert (pc.ssd_bytes_s, pc.sources["ssd_bytes_s"]) == (rate, source)
    assert pc.ram_bytes == 16_000_000_000


def test_presets() -> None:
    for name, parts in PRESETS.items():
        assert parse_pc(name) == parse_pc(parts)
    pc = parse_pc("gaming-pc, 64GB, no card")
    assert (pc.ram_bytes, pc.gpu) == (64_000_000_000, None)
    assert pc.ram_bytes_s == parse_pc("gaming-pc").ram_bytes_s


def test_desktop_memory() -> None:
    pc = replace(parse_pc("gaming-pc"), windows=False)
    assert pc.ram_budget == 27_200_000_000
    assert parse_pc("8GB").ram_budget == 6_800_000_000
    assert (8 << 30) - pc.vram_budget == 800_000_000
    assert (8 << 30) - parse_pc("gaming-pc, Windows 11").vram_budget == 1_000_000_000
    assert replace(parse_pc("RTX 4090"), windows=False).vram_budget == pytest.approx(
        0.92 * (24 << 30)
    )
    virtual = parse_gpu("virtual:8GB@12GB/s,256GB/s,20TFLOPS")
    assert beside_desktop(virtual) == 8_000_000_000
    assert parse_pc("8GB").vram_budget == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("my PC", "gaming-pc"),
        ("2x RTX 3090", "'2x RTX 3090': localrt uses one GPU"),
        ("RTX 3090, RTX 3060", "'RTX 3060' is a second GPU"),
        ("DDR4-0000", "'-0000' is no part"),
        pytest.param("9" * 5000 + " cores", "'999.* is no part", id="digits of cores"),
    ],
)
def test_unknown_parts(text: str, words: str) -> None:
    with pytest.raises(OptionError, match=words) as caught:
        parse_pc(text)
    assert is_line(str(caught.value))


@pytest.mark.parametrize(
    ("cores", "names"),
    [
        (10, "i9-10900X, i5-13400F, i5-12600K, i7-1355U, i7-12650H, Ryzen AI 9 365"),
        (12, "i7-12700K, i5-13500H, i7-1260P, Ryzen 9 5900X, Ryzen 9 7900X3D, Ryzen AI 9 HX 370"),
        (16, "Ryzen 9 7950X, Ryzen 9 9950X3D, i9-12900K, Core Ultra 7 155H, Ryzen 9 7945HX"),
        (20, "i7-14700K, i7-14700HX, Core Ultra 7 265K"),
    ],
)
def test_cores_of_processors(cores: int, names: str) -> None:
    for name in names.split(", "):
        pc = parse_pc(f"32GB {name} NVMe")
        assert (pc.cores, pc.sources["cores"]) == (cores, "given"), name
    assert parse_pc("Ryzen 7").sources["cores"] == "typical"
    assert parse_pc("i7-99999, 6 cores").cores == 6


DDR4, DDR5 = "DDR4-3200", "DDR5-5600"


@pytest.mark.parametrize(
    ("text", "gpu", "cores", "memory"),
    [
        ("RTX 4060, 32GB, NVMe", "RTX 4060 8GB", 8, DDR5),
        ("RTX 3060", "RTX 3060 12GB", 8, DDR4),
        ("RTX 2070, Ryzen 5 7600X, 6 cores", "RTX 2070 8GB", 6, DDR5),
        ("Core Ultra 7 155H", None, 16, DDR5),
        ("GTX 1080 Ti", None, 8, DDR4),
    ],
)
def test_typical_pcs(text: str, gpu: str | None, cores: int, memory: str) -> None:
    pc = parse_pc(text)
    assert (pc.gpu and pc.gpu.name) == gpu
    assert pc.cores == cores
    assert pc.ram_bytes_s == pytest.approx(parse_memory_speed(memory), rel=0.01)


@pytest.mark.parametrize("gpu", ["RX 7800 XT", "Intel UHD Graphics 770"])
def test_other_gpus(gpu: str) -> None:
    settings = Settings.from_environment({})
    for wanted in (Hardware(pc=f"{gpu}, 32GB"), Hardware(pc="32GB", gpu=gpu)):
        found, _, _ = planned_hardware(wanted, settings)
        assert found.gpu is None
        line = f"{gpu}: llama.cpp can use it. localrt's own kernels"
        assert other_gpu_line(found).startswith(line)


@pytest.mark.parametrize(
    ("here", "others", "expected"),
    [
        ((), (GpuFacts("AMD Radeon RX 7600", 8 << 30, 6 << 30),), 0.92 * (6 << 30)),
        ((GpuFacts("NVIDIA GeForce GTX 1080", 8 << 30, 7 << 30),), (), 0.92 * (7 << 30)),
        ((), (GpuFacts("Apple M4"),), None),
    ],
)
def test_other_gpu_of_this_pc(
    quiet_machine: None,
    monkeypatch: pytest.MonkeyPatch,
    here: tuple[GpuFacts, ...],
    others: tuple[GpuFacts, ...],
    expected: float | None,
) -> None:
    monkeypatch.setattr(hardware, "gpus", lambda: here)
    monkeypatch.setattr(hardware, "other_gpus", lambda: others)
    found, _, _ = planned_hardware(Hardware(), Settings.from_environment())
    assert found.gpu is None
    assert found.other_gpu is not None
    assert found.other_gpu.name == (*here, *others)[0].name
    assert found.other_gpu.room_bytes == (expected and int(expected))
