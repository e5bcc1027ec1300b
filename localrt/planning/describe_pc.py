"""Describes the PC to plan for: this one, or one described in a line of text.

``"RTX 4060, 32GB DDR5-5600, 8 cores, NVMe"``: parts come in any order, and missing parts are
assumed typical. A preset is a named line of this kind. This module has the rates of memory and
disks by kind; ``gpus.py`` has GPUs. If memory is not named, the kind usual with the named processor
or GPU is assumed. This PC is measured once; callers that must not put load on it use saved rates.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from localrt import system
from localrt.common.cores import default_threads
from localrt.common.errors import OptionError, reason_of
from localrt.common.files import private_folder
from localrt.common.formatting import parse_size
from localrt.common.option_names import option
from localrt.common.settings import Settings
from localrt.models.weight_files import files_nbytes
from localrt.offload import hardware
from localrt.offload.account import Budgets
from localrt.offload.memory import memory_state, ram_budget
from localrt.planning.gpus import (
    DEFAULT_GPU,
    OTHERS,
    GpuModel,
    find_gpu,
    measured_profile,
    other_gpu,
    parse_bandwidth,
    parse_gpu,
)
from localrt.planning.machine import MachineProfile, OtherGpu, typical_machine
from localrt.planning.measure import known_machine, machine_profile
from localrt.quant.cpu.abi import best_isa
from localrt.quant.cuda.gpu_cache import known_rates

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

# The share of the memory modules' rate that plain reading reaches.
_MEMORY_REACHED = 0.8
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
    "apple": r"""(?=apple|i?mac|M[1-9])(?:apple\s*)?
        (?:i?mac(?:book)?\s*(?:air|pro|mini|studio)?\s*)?
        (?:M(?P<generation>[1-9])(?:\s*(?P<more>pro|max|ultra))?)?""",
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
    4: r"i3([89]|1[0-4])[13]\d\d[fkt]*|i[57][67]\d{3}(k|hq)?|i5([89]|10)3\d\dh|i[57]8[256]\d[05]u"
    r"|i[57]10[25]10u|i[57]1[01][34568]5g\d|ryzen3\d{4}\w*|ryzen[57][23][57]00u|ryzen57520u",
    6: r"i5([89]|1[01])[456]\d0[fkt]*|i512[456]00[ft]*|i78([78]50h|700k?)|i7(9|10)750h|i31215u"
    r"|i511[245]\d0h|ryzen5\d{4}\w*|ryzenai5340",
    8: r"i7(9|1[01])700[fkt]*|i7(1087[05]|11800)h|i9(9|11)900[fkst]*|i9(9880h|[19]\d?980hk)"
    r"|i5(124|134)[25]0h|ryzen7\d{4}\w*|ryzen9([4568]9[08]0h[sx]|[78]94[05]hs)|ryzenai7350"
    r"|ultra[579]2\d[268]v",
    10: r"i910900[fkx]*|i512600kf?|i51[34]400[ft]*|i[57]1[23][3-6]5u|i712650h|i51[34]450hx"
    r"|ultra5225f?|ryzenai9365",
    12: r"i712700[fkt]*|i51[23]500h|i[57]1[23][46]0p|ultra[57]1[2356]5u|ryzen9[3-9]900x?(3d)?"
    r"|ryzen97845hx|ryzenai9hx37[05]",
    14: r"i5(1[34][56]00)[fkt]*|i71[23]700h|i91[23]900hk?|i51[34]500hx|i713650hx"
    r"|ultra5(1[23]5h|225h|235|245(kf?|hx)?)",
    16: r"i713700[fkt]*|i912900[fkst]*|i7(12[68]50|12800|13700|14650)hx|i9129\d0hx|ultra9[12]85h"
    r"|ultra7(1[56]|2[56])5h|ryzen9[3-9]950x(3d)?|ryzen9([78]94[05]|9955)hx(3d)?|ryzenaimax\+?395",
    20: r"i714700\w*|i713850hx|ultra7(265[fk]*|2[56]5hx)",
    24: r"i91[34]9[08]0\w*|ultra9(285k?|2[78]5hx)",
}
# GB/s that the CPU cores of Apple's chips reach, by generation; larger chips reach twice that.
_APPLE_GB_S = {"1": 60, "2": 90, "3": 90, "4": 108, "5": 135}
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
# RAM left to the desktop and other programs (maximum, and share); the share of free GPU memory to
# use, and the desktop's use of GPU memory.
_DESKTOP_BYTES, _DESKTOP_SHARE = 4_000_000_000, 0.25
_GPU_SHARE, _GPU_DESKTOP, _GPU_WINDOWS = 0.92, 800_000_000, 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Pc:
    """A described PC; ``sources`` tells for each figure whether it was given or is typical."""

    gpu: GpuModel | None = None
    ram_bytes: int = 16_000_000_000
    ram_bytes_s: float = field(default_factory=lambda: typical_machine().ram_bytes_s)
    cores: int = 8
    ssd_bytes_s: float = field(default_factory=lambda: typical_machine().ssd_bytes_s)
    sources: Mapping[str, str] = field(default_factory=dict)
    new_memory: bool | None = None
    """Whether the named processor is as recent as DDR5; None if none was named."""
    windows: bool = system.IS_WINDOWS
    other_gpu: OtherGpu | None = None
    """A named GPU that only llama.cpp can use."""

    @property
    def ram_budget(self) -> int:
        """Bytes of RAM that the desktop leaves free."""
        return self.ram_bytes - min(_DESKTOP_BYTES, int(_DESKTOP_SHARE * self.ram_bytes))

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


def beside_desktop(gpu: GpuModel, *, windows: bool = system.IS_WINDOWS) -> int:
    """Return the bytes of a GPU's memory that a desktop leaves free; a made-up GPU has none."""
    if gpu.reached == 1.0:
        return gpu.vram_bytes
    taken = max(_GPU_WINDOWS if windows else _GPU_DESKTOP, (1 - _GPU_SHARE) * gpu.vram_bytes)
    return gpu.vram_bytes - int(taken)


def parse_pc(text: str) -> Pc:
    """Parse a line of parts, or a preset's name followed by parts that replace the preset's.

    Raises:
        OptionError: a word is unknown, or a part is named twice.
    """
    preset = re.match(rf"\s*({'|'.join(PRESETS)})(?![\w-])", text, re.IGNORECASE)
    pc = Pc()
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
    found = _MEMORY.fullmatch(text.strip())
    if found is not None:
        return _memory_rate(found[0], 2)
    try:
        return parse_bandwidth(text)
    except OptionError as error:
        raise OptionError(
            f"{text!r:.80} is not a speed of RAM: write it like DDR5-5600 or 60GB/s"
        ) from error


def _parts(text: str) -> dict[str, re.Match[str]]:
    """Return the parts of a description by their kind."""
    found: dict[str, re.Match[str]] = {}
    at = 0
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
        kind = "gpu" if kind in ("no_gpu", "apple") else kind
        if kind in found and kind != "filler":
            raise OptionError(f"{part[0]!r} is a second {_NAMES.get(kind, kind)}: name one")
        found[kind] = part
    return found


def _with_parts(pc: Pc, text: str) -> Pc:
    """Return ``pc`` changed by the parts of a description."""
    parts = _parts(text)
    if gpu := parts.get("gpu"):
        pc = replace(pc, gpu=parse_gpu(gpu[0].strip()) if gpu.lastgroup == "gpu" else None)
        if gpu["generation"]:
            rate = 1e9 * _APPLE_GB_S.get(gpu["generation"], 135) * (2 if gpu["more"] else 1)
            pc = _given(replace(pc, ram_bytes_s=rate), ram_bytes_s="typical")
    if other := parts.get("other") or (gpu if gpu and gpu.lastgroup == "apple" else None):
        new = pc.new_memory or bool(_NEW_OTHER.search(other[0]))
        pc = replace(pc, gpu=pc.gpu if gpu else None, new_memory=new, other_gpu=other_gpu(other[0]))
    if processor := parts.get("processor"):
        pc = _with_processor(pc, processor)
    if cores := parts.get("cores"):
        count = int(cores["count"] or _COUNTS[cores["word"].lower()])
        pc = _given(replace(pc, cores=max(1, count)), cores="given")
    if disk := parts.get("disk"):
        rate = next(r for words, r in _DISKS if re.search(words, disk[0], re.IGNORECASE))
        if given := _RATE.search(disk[0]):
            rate = parse_bandwidth(given[0])
        source = "given" if given else "typical"
        pc = _given(replace(pc, ssd_bytes_s=rate), ssd_bytes_s=source)
    if ram := parts.get("ram"):
        nbytes = int(ram["modules"] or 1) * parse_size(ram["size"])
        pc = _given(replace(pc, ram_bytes=nbytes), ram_bytes="given")
    if memory := parts.get("memory"):
        count = 2
        if channels := parts.get("channels"):
            count = int(channels["number"] or _COUNTS[channels["channel_word"].lower()])
        # The modules are given, but the share of their rate that is reached is typical.
        pc = _given(replace(pc, ram_bytes_s=_memory_rate(memory[0], count)), ram_bytes_s="typical")
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
    for cores, known in _PROCESSOR_CORES.items():
        if re.fullmatch(known, name):
            return _given(replace(pc, cores=cores, new_memory=new), cores="given")
    pc = replace(pc, cores=_TIER_CORES[tier], new_memory=new)
    return _given(pc, cores="typical")


def _memory_rate(memory: str, channels: int) -> float:
    found = _MEMORY.match(memory)
    assert found is not None, "it was found before"
    transfers = int(found["rate"] or _USUAL_TRANSFERS[found["kind"]])
    return _MEMORY_REACHED * channels * _TRANSFER_BYTES * transfers * 1e6


def _given(pc: Pc, **sources: str) -> Pc:
    return replace(pc, sources={**pc.sources, **sources})


# -- this PC or the described one --------------------------------------------------------

_LEAST_SAMPLE = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The hardware to plan for, as written by the user; None means this machine's."""

    ram: str | int | None = None
    gpu_memory: str | int | None = None
    gpu: str | None = None
    link: str | None = None
    ssd: str | None = None
    pc: str | None = None
    ram_speed: str | None = None
    cores: int | None = None

    @property
    def hypothetical(self) -> tuple[str, ...]:
        """The given options that describe a machine other than this one."""
        imagined = {
            "--pc": self.pc is not None,
            "--ram-speed": self.ram_speed is not None,
            "--cores": self.cores is not None,
            "--ssd": self.ssd is not None,
            "--gpu": self.gpu is not None,
            "--gpu-memory": self.gpu is None and self.gpu_memory is not None and not gpu_here(),
            "--link": self.link is not None,
            "--ram": self.ram is not None
            and not self.pc
            and parse_size(self.ram) > memory_state().total,
        }
        return tuple(name for name, is_so in imagined.items() if is_so)


def planned_hardware(
    hardware: Hardware,
    settings: Settings,
    *,
    path: Path | None = None,
    formats: Iterable[str] = (),
    remeasure: bool = False,
) -> tuple[MachineProfile, Budgets, str]:
    """Return the machine to plan for, its budgets, and a note for the user.

    The machine is this one or ``hardware.pc``, changed by the other options of ``hardware``.
    ``path`` is the model, whose disk is used; ``formats`` are those of its weights.

    Raises:
        OptionError: a description is invalid.
    """
    ram = None if hardware.ram is None else parse_size(hardware.ram)
    if hardware.pc is not None:
        pc, vram, note = parse_pc(hardware.pc), 0, ""
        other = pc.other_gpu
        machine = _as_wanted(pc.machine(), hardware)
        if hardware.gpu is None and pc.gpu is not None:
            memory = hardware.gpu_memory or pc.vram_budget
            hardware = replace(hardware, gpu=pc.gpu.name, gpu_memory=memory)
        if hardware.gpu is not None or hardware.gpu_memory is not None:
            machine, vram = with_gpu(machine, replace(hardware, gpu=hardware.gpu or DEFAULT_GPU))
        source = "given" if ram else pc.sources.get("ram_bytes", "typical")
        ram = ram or pc.ram_budget
    else:
        own = path if hardware.ssd is None else None
        machine, note = machine_here(settings, own, formats, remeasure=remeasure)
        machine, vram = with_gpu(_as_wanted(machine, hardware), hardware, settings.cache_dir)
        source, ram = ("given", ram) if ram else ("measured", ram_budget(None))
        other = _other_here() if hardware.gpu is None and machine.gpu is None else None
    machine = _with_source(machine, ram_bytes=source)
    if machine.gpu is None and (other := other_gpu(hardware.gpu or "") or other):
        room = other.room_bytes and int(_GPU_SHARE * other.room_bytes)
        machine = replace(machine, other_gpu=replace(other, room_bytes=room))
    return machine, budgets_of(machine, ram, vram), note


def with_formats(
    machine: MachineProfile,
    formats: Iterable[str],
    hardware: Hardware,
    settings: Settings,
    path: Path,
) -> MachineProfile:
    """Add the rates of more ``formats`` to a result of ``planned_hardware``."""
    if hardware.pc is not None:
        return machine
    here, _ = machine_here(settings, path if hardware.ssd is None else None, formats)
    return replace(machine, kernels=_as_wanted(here, hardware).kernels)


def machine_here(
    settings: Settings,
    path: Path | None = None,
    formats: Iterable[str] = (),
    *,
    remeasure: bool = False,
) -> tuple[MachineProfile, str]:
    """Return this machine, measured if necessary, and a note on assumed rates (or ``""``).

    Its disk is that of the model at ``path``, else that of localrt's cache.
    """
    cores = default_threads()
    typical = _with_source(typical_machine().with_cores(cores), cores="measured")
    if best_isa() is None:
        return typical, "the CPU kernels are not compiled: a typical desktop's rates are assumed"
    own = path is not None and files_nbytes(path) >= _LEAST_SAMPLE
    folder = path if path is not None and own else settings.cache_dir
    try:
        private_folder(settings.cache_dir)
        _, machine = machine_profile(
            folder, settings, formats=formats, remeasure=remeasure, sample=not own
        )
    except OSError as error:  # the folder cannot be written, or the disk is full
        problem = reason_of(error)
        return typical, f"this machine cannot be measured ({problem}): typical rates are used"
    return machine, ""


def machine_on_device(
    path: Path, settings: Settings, device: str, gpu_memory: str | int | None
) -> tuple[MachineProfile, int]:
    """Return this machine's saved rates, else a typical desktop's with as many cores, with the GPU
    of ``device``, and that GPU's memory budget.
    """
    machine = known_machine(settings.cache_dir, path)
    machine = machine or typical_machine().with_cores(default_threads())
    if device == "cpu" or gpu_here() is None:
        return machine, 0
    return with_gpu(machine, Hardware(gpu_memory=gpu_memory), settings.cache_dir)


def _as_wanted(machine: MachineProfile, hardware: Hardware) -> MachineProfile:
    """Return ``machine`` with the given disk, RAM speed and cores."""
    if hardware.ssd is not None:
        machine = replace(machine, ssd_bytes_s=parse_bandwidth(hardware.ssd))
        machine = _with_source(machine, ssd_bytes_s="given")
    if hardware.ram_speed is not None:
        machine = machine.with_ram_speed(parse_memory_speed(hardware.ram_speed))
        machine = _with_source(machine, ram_bytes_s="given")
    if hardware.cores is not None:
        if hardware.cores < 1:
            raise OptionError(f"{option('cores')} must be at least 1, is {hardware.cores}")
        machine = _with_source(machine.with_cores(hardware.cores), cores="given")
    return machine


def _with_source(machine: MachineProfile, **sources: str) -> MachineProfile:
    return replace(machine, sources={**machine.sources, **sources})


def gpu_here() -> tuple[GpuModel, int] | None:
    """Return this machine's first GPU with the table's rates, and its free bytes of memory.

    None if there is no GPU.
    """
    here = hardware.gpus()
    if not here or other_gpu(here[0].name):
        return None
    gpu = find_gpu(here[0].name, here[0].memory_bytes) or parse_gpu(DEFAULT_GPU)
    free = here[0].free_bytes or here[0].memory_bytes or gpu.vram_bytes
    return replace(gpu, name=here[0].name, vram_bytes=here[0].memory_bytes or free), free


def _other_here() -> OtherGpu | None:
    """Return this machine's first GPU that only llama.cpp can use; its room is what is free."""
    for each in (*hardware.gpus(), *hardware.other_gpus()):
        found = other_gpu(each.name, each.memory_bytes) or OtherGpu(name=each.name)
        return replace(found, room_bytes=each.free_bytes or each.memory_bytes)
    return None


def with_gpu(
    machine: MachineProfile, hardware: Hardware, cache: Path | None = None
) -> tuple[MachineProfile, int]:
    """Return ``machine`` with the named GPU, else this machine's, and the GPU's memory budget.

    This machine's GPU has the rates saved in ``cache``, else those of the table. If there is no
    GPU, but GPU memory or a link is given, the default GPU is assumed.

    Raises:
        OptionError: an unknown GPU, or more memory than it has.
    """
    asked = None if hardware.gpu_memory is None else parse_size(hardware.gpu_memory)
    link = None if hardware.link is None else parse_bandwidth(hardware.link)
    here = gpu_here() if hardware.gpu is None else None
    source, rates = "typical", None
    if hardware.gpu is not None and other_gpu(hardware.gpu):
        return machine, 0
    if here is not None:
        gpu, free = here
        vram = min(int(_GPU_SHARE * free), asked or free)
        rates = None if cache is None else known_rates(cache, gpu.name)
    elif hardware.gpu is not None or asked is not None or link is not None:
        gpu = parse_gpu(hardware.gpu or DEFAULT_GPU)
        source = "given" if gpu.reached == 1.0 else source
        vram = asked or beside_desktop(gpu)
        if hardware.gpu is None:
            gpu = replace(gpu, vram_bytes=max(vram, gpu.vram_bytes))
    else:
        return machine, 0
    if vram > gpu.vram_bytes:
        raise OptionError(
            f"{option('gpu_memory', hardware.gpu_memory)} is more than {gpu.name} has: "
            f"{gpu.vram_bytes / 1e9:.3g} GB"
        )
    profile, rate, latency = gpu.profile, gpu.link_bytes_s, machine.link_latency_s
    if rates is not None:
        profile = measured_profile(gpu.name, gpu.vram_bytes, rates)
        rate, latency, source = rates.to_gpu_bytes_s, rates.crossing_s, "measured"
    machine = replace(machine, gpu=profile, link_bytes_s=link or rate, link_latency_s=latency)
    return _with_source(machine, gpu=source, link_bytes_s="given" if link else source), vram


def budgets_of(machine: MachineProfile, ram: int, vram: int) -> Budgets:
    """Return budgets of ``ram`` bytes for the whole process and ``vram`` bytes of GPU memory."""
    # A virtual GPU needs no driver: it calls no kernels.
    context = 0 if machine.gpu is not None and machine.gpu.call_s == 0 else None
    return Budgets(ram=ram, vram=vram, cuda_context=context)
