"""Parser of a PC described in words: ``"RTX 4060, 32GB DDR5-5600, 8 cores, NVMe"``.

Parts come in any order, and missing parts are assumed typical. A preset is a named line of this
kind. Here are the rates of memory and disks by kind; ``machine.py`` has GPUs. If memory is not
named, it is of the kind usual with the named processor or GPU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from localrt import system
from localrt.common.errors import OptionError
from localrt.common.formatting import parse_size
from localrt.offload.memory import share_for_models
from localrt.planning.machine import (
    OTHERS,
    GpuModel,
    MachineProfile,
    OtherGpu,
    beside_desktop,
    find_gpu,
    other_gpu,
    parse_bandwidth,
    parse_gpu,
    refuse_apple,
    typical_machine,
)

PRESETS: Mapping[str, str] = {
    "office-laptop": "16GB DDR4-3200, 4 cores, NVMe",
    "gaming-laptop": "RTX 4060 Laptop, 16GB DDR5-5600, 8 cores, NVMe",
    "gaming-pc": "RTX 4060, 32GB DDR5-5600, 8 cores, NVMe",
}
"""PCs by name, as ``parse_pc`` reads them."""

_MEMORY_REACHED = 0.8  # the share of the memory modules' rate that plain reading reaches
_TRANSFER_BYTES = 8  # per channel
_USUAL_TRANSFERS = {"3": 1600, "4": 3200, "5": 5600}  # millions per second
_MEMORY = re.compile(r"(?:LP)?DDR(?P<kind>[345])X?(?:[- ]?(?P<rate>[1-9]\d{3,4}))?", re.IGNORECASE)
_RATE = re.compile(r"\d+(?:\.\d+)?\s*[MG]B/s", re.IGNORECASE)
_SIZE = r"\d+(?:\.\d+)?\s*GI?B(?!/s)"
_COUNTS = {"single": 1, "dual": 2, "quad": 4, "hexa": 6, "octa": 8}
_DISK_WORDS = r"(?:(?:PCIe\s*)?gen\s*[345]|PCIe\s*[345](?:\.0)?|NVMe|M\.2|SATA|SSD|HDD|hard)(?!\w)"
# Patterns of the parts of a description.
_PARTS = {
    "no_gpu": r"(?:no|without)(?:\s+an?)?\s+(?:card|gpu|graphics\s+card)",
    "cores": r"(?:(?P<count>\d{1,4})\s*-?|(?P<word>dual|quad|hexa|octa)[-\s]?)\s*cores?",
    "channels": r"(?:(?P<number>[1-9])|(?P<channel_word>single|dual|quad))[-\s]channels?",
    "memory": _MEMORY.pattern + r"(?:\s*(?:MHz|MT/s))?",
    "disk": rf"""(?:(?:\d{{3,4}}\s*GB|\d+(?:\.\d+)?\s*TB|{_RATE.pattern})\s+)?{_DISK_WORDS}
        (?:[-\s]*(?:{_DISK_WORDS}|disks?|drives?|{_RATE.pattern}))*""",
    "processor": r"""(?:(?:intel|amd)\s+)?(?:
        (?:core\s+)?i(?P<intel>[3579])(?:[-\s]?(?P<model>\d{4,5})\w*)?
        |(?P<ultra>(?:core\s+)?ultra\s*(?P<ultra_tier>[579])(?:\s*\d{3}\w*)?)
        |ryzen\s*(?P<ai>ai\s*)?(?:max\+?\s*)?(?P<ryzen>[3579])?(?:\s*pro)?
        (?:\s*(?:HX\s*)?(?P<series>\d)\d{2,3}\w*)?)""",
    "windows": r"windows(?:\s*1[01])?",
    "other": rf"""(?:(?:nvidia|geforce|amd|intel)\s+)*(?:{OTHERS})\w*
        (?:\s+(?:RX|XTX?|GRE|Ti|Pro|Plus|Xe|Graphics|[AB]?\d{{3,4}}[MSX]?)(?!\w))*
        (?:\s+(?:[1-9]|1\d|2[04])\s*GB(?=\s*(?:,|$)))?""",
    "gpu": rf"""(?:(?P<gpus>\d{{1,4}})\s*x\s*)?(?:(?:nvidia|geforce)\s+)*
        (?:virtual:[\w\s]+|(?:[RG]TX\s*|titan\s+)\w+|T4|MX\s*\d{{3}}|[2-5]0[5-9]0|16[356]0)M?
        (?:\s*(?:Ti|Super|D|laptop|mobile|max-q|notebook|GPU)(?!\w))*
        (?P<vram>\s*{_SIZE}(?!\s*(?:(?:of\s+)?(?:LP|DDR|RAM|memory))))?""",
    "ram": rf"(?:(?P<modules>[1-9])\s*x\s*)?(?P<size>{_SIZE})",
}
_FILLER = "with|and|of|an?|ram|memory|cpu|processor|gpu|card|intel|amd|nvidia|geforce"
_PART = re.compile(
    rf"(?:{'|'.join(f'(?P<{kind}>{words})' for kind, words in _PARTS.items())})(?!\w)"
    rf"|(?P<filler>[\s,;&+]+|(?:{_FILLER})(?!\w))",
    re.IGNORECASE | re.VERBOSE,
)
_NAMES = {"ram": "size of RAM", "memory": "kind of RAM", "gpu": "GPU", "other": "GPU"}
_TIER_CORES = {"3": 4, "5": 6, "7": 8, "9": 12}  # cores of processors not listed below
# Cores (of all kinds) by processor, without spaces and hyphens; the first match counts.
_PROCESSOR_CORES = {
    4: r"i3([89]|1[0-4])[13]\d\d[fkt]*|i[57][67]\d{3}(k|hq)?|i5([89]|10)3\d\dh"
    r"|i[57]8[256]\d[05]u|i[57]1[01][34568]5g\d|ryzen3\d{4}\w*",
    6: r"i5([89]|1[01])[456]\d0[fkt]*|i512[456]00[ft]*|i78([78]50h|700k?)|i7(9|10)750h"
    r"|ryzen5\d{4}\w*",
    8: r"i7(9|1[01])700[fkt]*|i7(1087[05]|11800)h|i9(9|11)900[fkst]*|i9(9880h|[19]\d?980hk)"
    r"|i5(124|134)[25]0h|ryzen7\d{4}\w*|ryzen9([4568]9[08]0h[sx]|[78]94[05]hs)|ryzenai7350"
    r"|ultra[579]2\d[268]v",
    10: r"i910900[fkx]*|i512600kf?|i51[34]400[ft]*|i[57]1[23][3-6]5u|i712650h|ryzenai9365",
    12: r"i712700[fkt]*|i51[23]500h|i[57]1[23][46]0p|ryzen9[3-9]900x?(3d)?|ryzenai9hx37[05]",
    14: r"i5(1[34][56]00)[fkt]*|i71[23]700h|i91[23]900hk?"
    r"|ultra5(1[23]5h|225h|235|245(kf?|hx)?)",
    16: r"i713700[fkt]*|i912900[fkst]*|ultra9[12]85h|ultra7(1[56]|2[56])5h"
    r"|ryzen9[3-9]950x(3d)?|ryzen9([78]94[05]|9955)hx(3d)?|ryzenaimax\+?395",
    20: r"i714700\w*|ultra7(265[fk]*|2[56]5hx)",
    24: r"i91[34]9[08]0\w*|ultra9(285k?|2[78]5hx)",
}
_NEW_MEMORY = "DDR5-5600"  # with RTX 40 GPUs and later, and with processors as recent
_NEW_GPU = re.compile(r"\b(?:RTX )?[45]0[5-9]0\b")
_NEW_OTHER = re.compile(r"\bRX ?[79]\d{3}|\barc B", re.IGNORECASE)
# Bytes per second of large reads, by kind of disk; the first pattern that matches counts.
_DISKS = (
    (r"gen\s*5|pcie\s*5", 10e9),
    (r"gen\s*4|pcie\s*4", 5e9),
    (r"nvme|m\.2", 3e9),
    (r"sata|ssd", 0.5e9),
    (r"hdd|hard", 0.15e9),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pc:
    """A described PC; ``sources`` tells for each figure whether it was given or is typical.

    ``new_memory``: whether the named processor is as recent as DDR5; None if none was named.
    ``other_gpu``: a named GPU that only llama.cpp can use.
    """

    gpu: GpuModel | None = None
    ram_bytes: int = 16_000_000_000
    ram_bytes_s: float = field(default_factory=lambda: typical_machine().ram_bytes_s)
    cores: int = 8
    ssd_bytes_s: float = field(default_factory=lambda: typical_machine().ssd_bytes_s)
    sources: Mapping[str, str] = field(default_factory=dict)
    new_memory: bool | None = None
    windows: bool = system.IS_WINDOWS
    other_gpu: OtherGpu | None = None

    @property
    def ram_budget(self) -> int:
        """Bytes of RAM that the desktop leaves free."""
        return share_for_models(self.ram_bytes)

    @property
    def vram_budget(self) -> int:
        """Bytes of GPU memory that the desktop leaves free."""
        return 0 if self.gpu is None else beside_desktop(self.gpu, windows=self.windows)

    def machine(self) -> MachineProfile:
        """Return the profile of its processor, memory and disk; the planner adds the GPU."""
        typical = typical_machine(
            ram_bytes_s=self.ram_bytes_s, cores=self.cores, ssd_bytes_s=self.ssd_bytes_s
        )
        return replace(typical, name="that PC", sources={**typical.sources, **self.sources})


def parse_pc(text: str) -> Pc:
    """Parse a line of parts, or a preset's name followed by parts that replace the preset's.

    Raises:
        OptionError: a word is unknown, a part is named twice, or a computer is Apple's.
    """
    refuse_apple(text)
    pc = Pc()
    preset = re.match(rf"\s*({'|'.join(PRESETS)})(?![\w-])", text, re.IGNORECASE)
    if preset is not None:
        pc, text = _with_parts(pc, PRESETS[preset[1].lower()]), text[preset.end() :]
    pc = _with_parts(pc, text)
    new = pc.gpu is not None and _NEW_GPU.search(pc.gpu.name)
    if "ram_bytes_s" not in pc.sources and (pc.new_memory or (pc.new_memory is None and new)):
        pc = replace(pc, ram_bytes_s=parse_memory_speed(_NEW_MEMORY))
    return pc


def parse_memory_speed(text: str) -> float:
    """Parse ``"DDR5-5600"`` (two channels) or a rate such as ``"60GB/s"`` as bytes per second.

    Raises:
        OptionError: the text is neither.
    """
    if (found := _MEMORY.fullmatch(text.strip())) is not None:
        return _memory_rate(found, 2)
    try:
        return parse_bandwidth(text)
    except OptionError as error:
        text = f"{text!r:.80} is not a speed of RAM: write it like DDR5-5600 or 60GB/s"
        raise OptionError(text) from error


def _parts(text: str) -> dict[str, re.Match[str]]:
    """Return the parts of a description by their kind."""
    found, at = dict[str, re.Match[str]](), 0
    while at < len(text):
        part = _PART.match(text, at)
        if part is None:
            word = re.sub(r"^([^\s,]+).*", r"\1", text[at:], flags=re.DOTALL)
            raise OptionError(
                f"{word!r:.80} is no part of a PC that is known: write it like "
                f'"RTX 4060, 32GB DDR5-5600, 8 cores, NVMe", or begin with one of '
                f"{', '.join(PRESETS)}"
            )
        if part["vram"] and find_gpu(part[0]) is None:  # no GPU has this size, so it is RAM
            part = _PART.match(text, at, part.start("vram")) or part
        kind, at = part.lastgroup or "", part.end()
        if int(part["gpus"] or 1) > 1:
            raise OptionError(f"{part[0]!r:.80}: localrt uses one GPU, so name one")
        kind = "gpu" if kind == "no_gpu" else kind
        if kind in found and kind != "filler":
            raise OptionError(f"{part[0]!r} is a second {_NAMES.get(kind, kind)}: name one")
        found[kind] = part
    return found


def _with_parts(pc: Pc, text: str) -> Pc:
    """Return ``pc`` changed by the parts of a description."""
    parts = _parts(text)
    if gpu := parts.get("gpu"):
        pc = replace(pc, gpu=parse_gpu(gpu[0].strip()) if gpu.lastgroup == "gpu" else None)
    if other := parts.get("other"):
        new = pc.new_memory or bool(_NEW_OTHER.search(other[0]))
        pc = replace(pc, gpu=pc.gpu if gpu else None, new_memory=new, other_gpu=other_gpu(other[0]))
    if processor := parts.get("processor"):
        pc = _with_processor(pc, processor)
    if cores := parts.get("cores"):
        count = int(cores["count"] or _COUNTS[cores["word"].lower()])
        pc = _with(pc, "given", cores=max(1, count))
    if disk := parts.get("disk"):
        rate = next(r for words, r in _DISKS if re.search(words, disk[0], re.IGNORECASE))
        if given := _RATE.search(disk[0]):
            rate = parse_bandwidth(given[0])
        pc = _with(pc, "given" if given else "typical", ssd_bytes_s=rate)
    if ram := parts.get("ram"):
        pc = _with(pc, "given", ram_bytes=int(ram["modules"] or 1) * parse_size(ram["size"]))
    if memory := parts.get("memory"):
        count = 2
        if channels := parts.get("channels"):
            count = int(channels["number"] or _COUNTS[channels["channel_word"].lower()])
        # The modules are given, but the share of their rate that is reached is typical.
        pc = _with(pc, "typical", ram_bytes_s=_memory_rate(memory, count))
    return replace(pc, windows=pc.windows or "windows" in parts)


def _with_processor(pc: Pc, match: re.Match[str]) -> Pc:
    """Return ``pc`` with the cores and age of a named processor."""
    tier = match["intel"] or match["ultra_tier"] or match["ryzen"] or "7"
    model = match["model"] or "99"
    # DDR5: Intel from the 13th generation, Ryzen from 6000 (laptops) and 7000, and newer names.
    if match["intel"]:
        new = int(model[:2] if model[0] == "1" else model[0]) >= 13 or not match["model"]
    else:
        new = bool(match["ultra"] or match["ai"]) or int(match["series"] or 9) >= 6
    name = re.sub(r"[\s-]|intel|amd|core|pro", "", match[0].lower())
    cores = next((n for n, known in _PROCESSOR_CORES.items() if re.fullmatch(known, name)), None)
    pc = _with(pc, "given" if cores else "typical", cores=cores or _TIER_CORES[tier])
    return replace(pc, new_memory=new)


def _memory_rate(memory: re.Match[str], channels: int) -> float:
    transfers = int(memory["rate"] or _USUAL_TRANSFERS[memory["kind"]])
    return _MEMORY_REACHED * channels * _TRANSFER_BYTES * transfers * 1e6


def _with(pc: Pc, source: str, **figures: Any) -> Pc:
    return replace(pc, **figures, sources={**pc.sources, **dict.fromkeys(figures, source)})
