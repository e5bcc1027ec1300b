"""Graphics cards: one that was measured, and those that may not be here, for what-if plans.

A small table of real cards with their makers' figures; the link is what pinned copies reach of it,
about four fifths of the wire. A made-up one is written ``virtual:8GB@12GB/s,256GB/s,20TFLOPS``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from localrt.errors import OptionError
from localrt.formatting import parse_size
from localrt.offload.planner.machine import GpuProfile, KernelRate
from localrt.quant.ops.cuda.rates import ROWS, CardRates

__all__ = [
    "CARDS",
    "DEFAULT_CARD",
    "Card",
    "find_card",
    "measured_profile",
    "parse_bandwidth",
    "parse_card",
]

_VIRTUAL = re.compile(r"virtual:(?P<size>[^@]+)@(?P<link>[^,]+),(?P<memory>[^,]+),(?P<flops>[^,]+)")
_FLOPS = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*([GTP])(?:FLOPS?|OPS?)", re.IGNORECASE)
_SCALE = {"G": 1e9, "T": 1e12, "P": 1e15}
# Kernels reach about this much of a card's memory bandwidth.
_REACHED = 0.85
# A dense layer's step is ten, and the layer two units.
_UNIT_LAUNCHES = 5

_PCIE3_X16 = _PCIE4_X8 = 12.5e9
_PCIE4_X16 = _PCIE5_X8 = 25e9


@dataclass(frozen=True, slots=True)
class Card:
    """A card by its maker's figures: bytes, bytes per second, and dense operations per second on
    16-bit numbers with float32 sums, which GeForce cards do at half the rate of float16 sums.
    """

    name: str
    vram_bytes: int
    link_bytes_s: float
    bytes_s: float
    flops: float
    reached: float = _REACHED

    @property
    def profile(self) -> GpuProfile:
        """What kernels reach of it."""
        virtual = self.reached == 1.0
        return GpuProfile(
            name=self.name,
            vram_bytes=self.vram_bytes,
            bytes_s=self.reached * self.bytes_s,
            flops=self.reached * self.flops,
            call_s=0.0 if virtual else 1e-5,
        )


def _card(name: str, gib: int, link: float, gb_s: float, tflops: float) -> Card:
    return Card(name, gib << 30, link, gb_s * 1e9, tflops * 1e12)


CARDS: Mapping[str, Card] = MappingProxyType(
    {
        card.name: card
        for card in (
            _card("RTX 3050 8GB", 8, _PCIE4_X8, 224, 18),
            _card("RTX 3060 12GB", 12, _PCIE4_X16, 360, 25),
            _card("RTX 3060 Laptop 6GB", 6, _PCIE4_X8, 336, 21),
            _card("RTX 3070 8GB", 8, _PCIE4_X16, 448, 40),
            _card("RTX 4060 8GB", 8, _PCIE4_X8, 272, 30),
            _card("RTX 4060 Laptop 8GB", 8, _PCIE4_X8, 256, 29),
            _card("RTX 4070 12GB", 12, _PCIE4_X16, 504, 58),
            _card("RTX 5060 8GB", 8, _PCIE5_X8, 448, 38),
            _card("RTX A2000 6GB", 6, _PCIE4_X16, 288, 32),
            _card("T4 16GB", 16, _PCIE3_X16, 320, 65),
            _card("Arc A750 8GB", 8, _PCIE4_X16, 512, 110),
        )
    }
)
"""Cards by name."""

DEFAULT_CARD = "RTX 4060 8GB"


def measured_profile(name: str, vram_bytes: int, rates: CardRates) -> GpuProfile:
    """A card of this machine by what was measured on it."""
    return GpuProfile(
        name=name,
        vram_bytes=vram_bytes,
        bytes_s=rates.memory_bytes_s,
        flops=rates.flops,
        call_s=_UNIT_LAUNCHES * rates.replay_s,
        kernels={name: KernelRate(ROWS, seconds) for name, seconds in rates.products.items()},
        busy_link=rates.busy_link,
        busy_cpu=rates.busy_cpu,
    )


def find_card(name: str) -> Card | None:
    """The card that a name means, however a driver or a person writes it: None if none is close."""
    wanted = _words(name)
    best: tuple[int, Card] | None = None
    for card in CARDS.values():
        model = [word for word in _words(card.name) if not word.endswith("gb")]
        if all(word in wanted for word in model):
            sizes = [word for word in wanted if re.fullmatch(r"\d+gb", word)]
            fits = not sizes or sizes[0] in _words(card.name)
            if fits and (best is None or len(model) > best[0]):
                best = len(model), card
    return None if best is None else best[1]


def parse_card(text: str) -> Card:
    """A card of the table by its name, or ``virtual:SIZE@LINK,MEMORY,ARITHMETIC``.

    ``virtual:NAME`` is the card of the table too.

    Raises:
        OptionError: neither.
    """
    if text.startswith("virtual:") and "@" in text:
        match = _VIRTUAL.fullmatch(text)
        if match is None:
            raise OptionError(
                f"{text!r} is not a card: write it like virtual:8GB@12GB/s,256GB/s,20TFLOPS"
            )
        return Card(
            text,
            parse_size(match["size"]),
            parse_bandwidth(match["link"]),
            parse_bandwidth(match["memory"]),
            _parse_flops(match["flops"]),
            reached=1.0,
        )
    card = find_card(text.removeprefix("virtual:"))
    if card is None:
        raise OptionError(
            f"no card {text!r} in the table: one of {', '.join(CARDS)}, "
            "or virtual:8GB@12GB/s,256GB/s,20TFLOPS"
        )
    return card


def parse_bandwidth(text: str) -> float:
    """Bytes per second of ``"12GB/s"``, ``"900 MB/s"``.

    Raises:
        OptionError: not a bandwidth.
    """
    size, slash, second = text.strip().rpartition("/")
    if not slash or second.strip().lower() not in ("s", "sec"):
        raise OptionError(f"{text!r} is not a bandwidth: write it like 12GB/s or 900MB/s")
    try:
        return float(parse_size(size))
    except OptionError as error:
        raise OptionError(
            f"{text!r} is not a bandwidth: write it like 12GB/s or 900MB/s"
        ) from error


def _parse_flops(text: str) -> float:
    match = _FLOPS.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise OptionError(f"{text!r} is not a rate of arithmetic: write it like 20TFLOPS")
    return float(match[1]) * _SCALE[match[2].upper()]


def _words(name: str) -> list[str]:
    """Lower-case words, numbers joined to their unit: "RTX 4060 Ti" never means "RTX 4060"."""
    text = re.sub(r"(\d)\s+gb\b", r"\1gb", name.lower())
    words = re.findall(r"[a-z0-9]+", text)
    skipped = {"nvidia", "geforce", "gpu", "intel", "tesla", "graphics"}
    words = [word for word in words if word not in skipped]
    # "ti" and "super" make another card.
    return [
        word + words[at + 1] if at + 1 < len(words) and words[at + 1] in ("ti", "super") else word
        for at, word in enumerate(words)
        if word not in ("ti", "super")
    ]
