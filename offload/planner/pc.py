"""A whole PC from a line of words: ``"RTX 4060, 32GB DDR5-5600, 8 cores, NVMe"``.

Parts come in any order, and what is left out is typical. A preset is such a line with a name. It
knows figures of kinds of memory and disks, not of makers; cards are ``cards.py``'s.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from localrt.errors import OptionError
from localrt.formatting import parse_size
from localrt.offload.planner.cards import Card, parse_bandwidth, parse_card
from localrt.offload.planner.machine import MachineProfile, typical_machine

__all__ = ["PRESETS", "Pc", "parse_memory_speed", "parse_pc"]

PRESETS: Mapping[str, str] = MappingProxyType(
    {
        "office-laptop": "16GB DDR4-3200, 4 cores, NVMe",
        "gaming-laptop": "RTX 4060 Laptop, 16GB DDR5-5600, 8 cores, NVMe",
        "old-gaming-pc": "GTX 1660, 16GB DDR4-2666, 6 cores, SATA SSD",
        "gaming-pc": "RTX 4060, 32GB DDR5-5600, 8 cores, NVMe",
        "large-pc": "RTX 4090, 64GB DDR5-6000, 16 cores, NVMe Gen4",
    }
)
"""PCs by name, as ``parse_pc`` reads them."""

# Of what memory modules can do, plain reading reaches about this much.
_MEMORY_REACHED = 0.8
_TRANSFER_BYTES = 8  # of a channel
_USUAL_TRANSFERS = {"3": 1600, "4": 3200, "5": 5600}  # millions a second
_MEMORY = re.compile(r"(?:LP)?DDR(?P<kind>[345])X?(?:[- ]?(?P<rate>\d{4,5}))?", re.IGNORECASE)
_SIZE = re.compile(
    r"(?:(?P<count>\d)\s*x\s*)?(?P<size>\d+(?:\.\d+)?\s*GI?B)\b(?!/s)", re.IGNORECASE
)
_RATE = re.compile(r"\d+(?:\.\d+)?\s*[MG]B/s", re.IGNORECASE)
_CORES = re.compile(
    r"\b(?:(?P<count>\d+)\s*-?|(?P<word>dual|quad|hexa|octa)[- ]?)\s*cores?\b", re.IGNORECASE
)
_CORE_WORDS = {"dual": 2, "quad": 4, "hexa": 6, "octa": 8}
_CHANNELS = re.compile(r"(?P<count>\d|single|dual|quad)[- ]channels?", re.IGNORECASE)
_CHANNEL_WORDS = {"single": 1, "dual": 2, "quad": 4}
_NO_CARD = re.compile(r"(no|without)( an?)? (card|gpu|graphics card)", re.IGNORECASE)
# Bytes per second that large reads reach, by the words of a kind; the first that fits counts.
_DISKS = (
    (r"gen\s*5|pcie\s*5", 10e9),
    (r"gen\s*4|pcie\s*4", 5e9),
    (r"nvme|m\.2", 3e9),
    (r"sata|ssd", 0.5e9),
    (r"hdd|hard", 0.15e9),
)
# Left to the desktop and other programs, of RAM and of the card's memory.
_DESKTOP_BYTES, _DESKTOP_SHARE = 4_000_000_000, 0.25
_CARD_SHARE = 0.92


@dataclass(frozen=True, slots=True, kw_only=True)
class Pc:
    """Bytes and bytes per second; ``sources`` says of a figure if it was given or is typical."""

    card: Card | None = None
    ram_bytes: int = 16_000_000_000
    ram_bytes_s: float = field(default_factory=lambda: typical_machine().ram_bytes_s)
    cores: int = 8
    ssd_bytes_s: float = field(default_factory=lambda: typical_machine().ssd_bytes_s)
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def ram_budget(self) -> int:
        """Bytes of RAM that the desktop leaves."""
        return self.ram_bytes - min(_DESKTOP_BYTES, int(_DESKTOP_SHARE * self.ram_bytes))

    @property
    def vram_budget(self) -> int:
        """Bytes of the card's memory that the desktop leaves."""
        return 0 if self.card is None else int(_CARD_SHARE * self.card.vram_bytes)

    def machine(self) -> MachineProfile:
        """Its processor, memory and disk; the card is put in by who plans."""
        typical = typical_machine(
            ram_bytes_s=self.ram_bytes_s, cores=self.cores, ssd_bytes_s=self.ssd_bytes_s
        )
        return replace(typical, name="that PC", sources={**typical.sources, **self.sources})


def parse_pc(text: str) -> Pc:
    """The PC that a line of parts means, or a preset's name with parts that replace its own.

    Raises:
        OptionError: a part means nothing that is known.
    """
    first, _, rest = text.partition(",")
    preset = PRESETS.get(first.strip().lower())
    pc = Pc()
    for part in [*preset.split(","), *rest.split(",")] if preset else text.split(","):
        if part.strip():
            pc = _with_part(pc, part.strip())
    return pc


def parse_memory_speed(text: str) -> float:
    """Bytes per second of ``"DDR5-5600"`` (two channels), or of a rate such as ``"60GB/s"``.

    Raises:
        OptionError: neither.
    """
    found = _MEMORY.fullmatch(text.strip())
    if found is not None:
        return _memory_rate(found, 2)
    try:
        return parse_bandwidth(text)
    except OptionError as error:
        raise OptionError(
            f"{text!r} is not a speed of RAM: write it like DDR5-5600 or 60GB/s"
        ) from error


def _with_part(pc: Pc, part: str) -> Pc:
    """``pc`` with what one part says."""
    if cores := _CORES.search(part):
        count = int(cores["count"] or _CORE_WORDS[cores["word"].lower()])
        return _given(replace(pc, cores=max(1, count)), cores="given")
    if _NO_CARD.fullmatch(part):
        return replace(pc, card=None)
    if any(re.search(rf"\b(?:{words})", part, re.IGNORECASE) for words, _ in _DISKS):
        return _with_disk(pc, part)
    size, memory = _SIZE.search(part), _MEMORY.search(part)
    if memory or (
        size and not re.sub(r"\b(of|ram|memory)\b", "", _rest(part, size), flags=re.I).strip()
    ):
        return _with_memory(pc, part, size, memory)
    try:
        return replace(pc, card=parse_card(part))
    except OptionError as error:
        raise OptionError(
            f"{part!r} is no part of a PC that is known: {_how(part, error)}"
        ) from error


def _with_disk(pc: Pc, part: str) -> Pc:
    rate = _RATE.search(part)
    if rate is not None:
        return _given(replace(pc, ssd_bytes_s=parse_bandwidth(rate[0])), ssd_bytes_s="given")
    kind = next(rate for words, rate in _DISKS if re.search(words, part, re.IGNORECASE))
    return _given(replace(pc, ssd_bytes_s=kind), ssd_bytes_s="typical")


def _with_memory(pc: Pc, part: str, size: re.Match[str] | None, memory: re.Match[str] | None) -> Pc:
    if size is not None:
        nbytes = int(size["count"] or 1) * parse_size(size["size"])
        pc = _given(replace(pc, ram_bytes=nbytes), ram_bytes="given")
    channels = _CHANNELS.search(part)
    if memory is not None:
        word = "2" if channels is None else channels["count"].lower()
        rate = _memory_rate(memory, _CHANNEL_WORDS.get(word) or int(word))
        # The modules were given; how much of their rate is reached is typical.
        pc = _given(replace(pc, ram_bytes_s=rate), ram_bytes_s="typical")
    return pc


def _memory_rate(memory: re.Match[str], channels: int) -> float:
    transfers = int(memory["rate"] or _USUAL_TRANSFERS[memory["kind"]])
    return _MEMORY_REACHED * channels * _TRANSFER_BYTES * transfers * 1e6


def _rest(part: str, found: re.Match[str]) -> str:
    return part[: found.start()] + part[found.end() :]


def _given(pc: Pc, **sources: str) -> Pc:
    return replace(pc, sources={**pc.sources, **sources})


def _how(part: str, error: OptionError) -> str:
    if re.search(r"[gr]tx|arc|radeon|\brx\b|virtual:", part, re.IGNORECASE):
        return str(error)
    presets = ", ".join(PRESETS)
    return (
        f'write it like "RTX 4060, 32GB DDR5-5600, 8 cores, NVMe", or begin with one of {presets}'
    )
