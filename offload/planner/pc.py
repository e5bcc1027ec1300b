"""A whole PC from a line of words: ``"RTX 4060, 32GB DDR5-5600, 8 cores, NVMe"``.

Parts come in any order, and what is left out is typical. A preset is such a line with a name. It
knows figures of kinds of memory and disks; cards are ``cards.py``'s. Memory that is not named is
of the kind that processors and cards of that year came with.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from localrt.common.errors import OptionError
from localrt.common.formatting import parse_size
from localrt.offload.planner.cards import Card, other_gpu, parse_bandwidth, parse_card
from localrt.offload.planner.machine import MachineProfile, typical_machine

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
# A processor's series, and its generation. What it has of cores, where they are not given.
_INTEL = re.compile(
    r"\b(?:core\s*)?i(?P<tier>[3579])[- ]?(?P<generation>\d{1,2})\d{3}", re.IGNORECASE
)
_ULTRA = re.compile(r"\bultra\s*(?P<tier>[579])\b", re.IGNORECASE)
_RYZEN = re.compile(
    r"\bryzen\s*(?:ai\s*)?(?P<tier>[3579])?\D{0,8}(?P<generation>\d)?\d{2,3}", re.IGNORECASE
)
_TIER_CORES = {"3": 4, "5": 6, "7": 8, "9": 12}
_APPLE = re.compile(r"\bM(?P<generation>[1-9])\b(?:\s*(?P<more>pro|max|ultra))?", re.IGNORECASE)
# GB/s that the cores of Apple's chips reach, by generation; of the larger ones twice that.
_APPLE_GB_S = {"1": 60, "2": 90, "3": 90, "4": 108, "5": 135}
_NEW_MEMORY = "DDR5-5600"  # with cards from the RTX 40 on, and with processors of their years
_NEW_CARD = re.compile(r"\b(?:RTX )?[45]0[5-9]0\b")
_NEW_OTHER = re.compile(r"\bRX ?[79]\d{3}|\barc B", re.IGNORECASE)
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
    new_memory: bool | None = None
    """Whether the processor that was named came with DDR5; None where none was."""

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
    new = pc.card is not None and _NEW_CARD.search(pc.card.name)
    if "ram_bytes_s" not in pc.sources and (pc.new_memory or (pc.new_memory is None and new)):
        pc = replace(pc, ram_bytes_s=parse_memory_speed(_NEW_MEMORY))
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
    if (known := _with_processor(pc, part)) is not None:
        return known
    if any(re.search(rf"\b(?:{words})", part, re.IGNORECASE) for words, _ in _DISKS):
        return _with_disk(pc, part)
    if apple := _APPLE.search(part):
        rate = 1e9 * _APPLE_GB_S.get(apple["generation"], 135) * (2 if apple["more"] else 1)
        pc = _given(replace(pc, card=None, ram_bytes_s=rate), ram_bytes_s="typical")
        return _with_memory(pc, part, _SIZE.search(part), None)
    if other_gpu(part):  # who plans says so
        return replace(pc, card=None, new_memory=pc.new_memory or bool(_NEW_OTHER.search(part)))
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


def _with_processor(pc: Pc, part: str) -> Pc | None:
    """``pc`` with a processor's cores, and whether it came with DDR5; None where none is named."""
    found = _INTEL.search(part) or _ULTRA.search(part) or _RYZEN.search(part)
    if found is None:
        return None
    named = found.groupdict()
    # Intel's 13th generation, Ryzen 6000 of laptops and 7000, and all that were renamed since.
    first = 13 if found.re is _INTEL else 6
    new = (
        found.re is _ULTRA or "ai" in part.lower().split() or int(named["generation"] or 9) >= first
    )
    cores = pc.cores if pc.sources.get("cores") else _TIER_CORES[named["tier"] or "7"]
    return replace(pc, cores=cores, new_memory=new)


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
