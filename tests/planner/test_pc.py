"""A PC from a line of words."""

from __future__ import annotations

import pytest

from localrt.errors import OptionError
from localrt.offload.planner.cards import CARDS
from localrt.offload.planner.pc import PRESETS, Pc, parse_memory_speed, parse_pc


def test_parts_in_any_order() -> None:
    pc = parse_pc("RTX 4060 Ti 16GB, 32GB DDR5-5600, 8 cores, NVMe")
    assert pc.card == CARDS["RTX 4060 Ti 16GB"]
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
    assert parse_pc("2x16GB DDR4").ram_bytes == 32_000_000_000
    assert parse_pc("LPDDR5X-7500").ram_bytes_s == pytest.approx(0.8 * 120e9)
    assert parse_pc("Ryzen 7 with 6 cores").cores == 6


def test_what_is_left_out_is_typical() -> None:
    assert parse_pc("") == Pc()
    assert parse_pc("32GB").card is None
    assert parse_pc("16GB").ram_bytes_s == Pc().ram_bytes_s


@pytest.mark.parametrize(
    ("disk", "rate", "source"),
    [
        ("NVMe", 3e9, "typical"),
        ("NVMe Gen4", 5e9, "typical"),
        ("1TB SATA SSD", 0.5e9, "typical"),
        ("HDD", 0.15e9, "typical"),
        ("NVMe 3.5GB/s", 3.5e9, "given"),
    ],
)
def test_disks(disk: str, rate: float, source: str) -> None:
    pc = parse_pc(f"16GB, {disk}")
    assert (pc.ssd_bytes_s, pc.sources["ssd_bytes_s"]) == (rate, source)
    assert pc.ram_bytes == 16_000_000_000


def test_presets_and_parts_that_replace_theirs() -> None:
    for name, parts in PRESETS.items():
        assert parse_pc(name) == parse_pc(parts)
    pc = parse_pc("gaming-pc, 64GB, no card")
    assert (pc.ram_bytes, pc.card) == (64_000_000_000, None)
    assert pc.ram_bytes_s == parse_pc("gaming-pc").ram_bytes_s


def test_the_desktop_keeps_its_part() -> None:
    pc = parse_pc("gaming-pc")
    assert pc.ram_budget == 28_000_000_000
    assert parse_pc("8GB").ram_budget == 6_000_000_000
    assert 0.9 * (8 << 30) < pc.vram_budget < 8 << 30
    assert parse_pc("8GB").vram_budget == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Ryzen 7 5800X, 32GB", "8 cores"),
        ("RTX 9999", "from GTX 1660"),
        ("RTX 4065", "did you mean"),
        ("my PC", "gaming-pc"),
    ],
)
def test_what_means_nothing_is_named(text: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        parse_pc(text)


def test_speeds_of_memory() -> None:
    assert parse_memory_speed("60GB/s") == 60e9
    assert parse_memory_speed("DDR4-3200") == pytest.approx(0.8 * 51.2e9)
    with pytest.raises(OptionError, match="DDR5-5600"):
        parse_memory_speed("DDR6")


def test_more_cores_read_prompts_faster_and_memory_sets_the_pace_of_answers() -> None:
    few, many = (parse_pc(f"DDR5-5600, {cores} cores").machine() for cores in (6, 24))
    slow = parse_pc("DDR4-2400, 24 cores").machine()
    assert few.kernel("q4_k").at(512) > 3 * many.kernel("q4_k").at(512)
    assert few.kernel("q4_k").at(1) == many.kernel("q4_k").at(1)
    assert slow.kernel("q4_k").at(1) > 2 * many.kernel("q4_k").at(1)
    assert slow.kernel("q4_k").at(512) == many.kernel("q4_k").at(512)
