"""Describes the PC to plan for: this one, or one given as a line of words.

``"RTX 4060, 32GB DDR5-5600, 8 cores, NVMe"``: parts come in any order, and missing parts are
assumed typical. A preset is a named line of this kind. This module has the rates of memory and
disks by kind; ``gpus.py`` has GPUs. Memory that is not named is of the kind usual with the named
processor or GPU. This PC is measured once; callers that must not load it use saved rates.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from localrt.common.cores import default_threads
from localrt.common.errors import OptionError
from localrt.common.files import private_folder
from localrt.common.formatting import parse_size
from localrt.common.option_names import option
from localrt.common.settings import Settings
from localrt.offload import hardware
from localrt.offload.account import Budgets
from localrt.offload.memory import memory_state, ram_budget
from localrt.offload.planner.gpus import (
    DEFAULT_GPU,
    GpuModel,
    find_gpu,
    measured_profile,
    other_gpu,
    parse_bandwidth,
    parse_gpu,
)
from localrt.offload.planner.machine import MachineProfile, typical_machine
from localrt.offload.planner.measure import known_machine, machine_profile
from localrt.quant.cpu.abi import best_isa
from localrt.quant.cuda.gpu_file import known_rates

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

# Plain reading reaches about this share of the memory modules' rate.
_MEMORY_REACHED = 0.8
_TRANSFER_BYTES = 8  # per channel
_USUAL_TRANSFERS = {"3": 1600, "4": 3200, "5": 5600}  # millions per second
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
# A processor's series and generation. Its tier gives the cores if they are not given.
_INTEL = re.compile(
    r"\b(?:core\s*)?i(?P<tier>[3579])[- ]?(?P<generation>\d{1,2})\d{3}", re.IGNORECASE
)
_ULTRA = re.compile(r"\bultra\s*(?P<tier>[579])\b", re.IGNORECASE)
_RYZEN = re.compile(
    r"\bryzen\s*(?:ai\s*)?(?P<tier>[3579])?\D{0,8}(?P<generation>\d)?\d{2,3}", re.IGNORECASE
)
_TIER_CORES = {"3": 4, "5": 6, "7": 8, "9": 12}
_APPLE = re.compile(r"\bM(?P<generation>[1-9])\b(?:\s*(?P<more>pro|max|ultra))?", re.IGNORECASE)
# GB/s that the CPU cores of Apple's chips reach, by generation; larger chips reach twice that.
_APPLE_GB_S = {"1": 60, "2": 90, "3": 90, "4": 108, "5": 135}
_NEW_MEMORY = "DDR5-5600"  # with RTX 40 GPUs and later, and with processors as recent
_NEW_GPU = re.compile(r"\b(?:RTX )?[45]0[5-9]0\b")
_NEW_OTHER = re.compile(r"\bRX ?[79]\d{3}|\barc B", re.IGNORECASE)
_NO_GPU = re.compile(r"(no|without)( an?)? (card|gpu|graphics card)", re.IGNORECASE)
# Bytes per second that large reads reach, by kind of disk; the first pattern that matches counts.
_DISKS = (
    (r"gen\s*5|pcie\s*5", 10e9),
    (r"gen\s*4|pcie\s*4", 5e9),
    (r"nvme|m\.2", 3e9),
    (r"sata|ssd", 0.5e9),
    (r"hdd|hard", 0.15e9),
)
# RAM left to the desktop and other programs (at most, and its share); the GPU's share to use.
_DESKTOP_BYTES, _DESKTOP_SHARE = 4_000_000_000, 0.25
_GPU_SHARE = 0.92


@dataclass(frozen=True, slots=True, kw_only=True)
class Pc:
    """A described PC; ``sources`` says of each figure whether it was given or is typical."""

    gpu: GpuModel | None = None
    ram_bytes: int = 16_000_000_000
    ram_bytes_s: float = field(default_factory=lambda: typical_machine().ram_bytes_s)
    cores: int = 8
    ssd_bytes_s: float = field(default_factory=lambda: typical_machine().ssd_bytes_s)
    sources: Mapping[str, str] = field(default_factory=dict)
    new_memory: bool | None = None
    """Whether the named processor is as recent as DDR5; None if none was named."""

    @property
    def ram_budget(self) -> int:
        """Bytes of RAM that the desktop leaves free."""
        return self.ram_bytes - min(_DESKTOP_BYTES, int(_DESKTOP_SHARE * self.ram_bytes))

    @property
    def vram_budget(self) -> int:
        """Bytes of GPU memory that the desktop leaves free."""
        return 0 if self.gpu is None else int(_GPU_SHARE * self.gpu.vram_bytes)

    def machine(self) -> MachineProfile:
        """Return the profile of its processor, memory and disk; the planner adds the GPU."""
        typical = typical_machine(
            ram_bytes_s=self.ram_bytes_s, cores=self.cores, ssd_bytes_s=self.ssd_bytes_s
        )
        return replace(typical, name="that PC", sources={**typical.sources, **self.sources})


def parse_pc(text: str) -> Pc:
    """Parse a line of parts, or a preset's name followed by parts that replace the preset's.

    Raises:
        OptionError: a part is not understood.
    """
    first, _, rest = text.partition(",")
    preset = PRESETS.get(first.strip().lower())
    pc = Pc()
    for part in [*preset.split(","), *rest.split(",")] if preset else text.split(","):
        if part.strip():
            pc = _with_part(pc, part.strip())
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
        return _memory_rate(found, 2)
    try:
        return parse_bandwidth(text)
    except OptionError as error:
        raise OptionError(
            f"{text!r} is not a speed of RAM: write it like DDR5-5600 or 60GB/s"
        ) from error


def _with_part(pc: Pc, part: str) -> Pc:
    """Return ``pc`` changed by one part of the description."""
    if cores := _CORES.search(part):
        count = int(cores["count"] or _CORE_WORDS[cores["word"].lower()])
        return _given(replace(pc, cores=max(1, count)), cores="given")
    if _NO_GPU.fullmatch(part):
        return replace(pc, gpu=None)
    if (known := _with_processor(pc, part)) is not None:
        return known
    if any(re.search(rf"\b(?:{words})", part, re.IGNORECASE) for words, _ in _DISKS):
        return _with_disk(pc, part)
    if apple := _APPLE.search(part):
        rate = 1e9 * _APPLE_GB_S.get(apple["generation"], 135) * (2 if apple["more"] else 1)
        pc = _given(replace(pc, gpu=None, ram_bytes_s=rate), ram_bytes_s="typical")
        return _with_memory(pc, part, _SIZE.search(part), None)
    if other_gpu(part):  # the plan notes it
        return replace(pc, gpu=None, new_memory=pc.new_memory or bool(_NEW_OTHER.search(part)))
    size, memory = _SIZE.search(part), _MEMORY.search(part)
    if memory or (
        size and not re.sub(r"\b(of|ram|memory)\b", "", _rest(part, size), flags=re.I).strip()
    ):
        return _with_memory(pc, part, size, memory)
    try:
        return replace(pc, gpu=parse_gpu(part))
    except OptionError as error:
        raise OptionError(
            f"{part!r} is no part of a PC that is known: {_how(part, error)}"
        ) from error


def _with_processor(pc: Pc, part: str) -> Pc | None:
    """Return ``pc`` with the cores and age of a named processor; None if none is named."""
    found = _INTEL.search(part) or _ULTRA.search(part) or _RYZEN.search(part)
    if found is None:
        return None
    named = found.groupdict()
    # DDR5: Intel from the 13th generation, Ryzen from 6000 (laptops) and 7000, and newer names.
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
        # The modules were given, but the reached share of their rate is typical.
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


# -- this PC, or the one that was described --------------------------------------------------------

_LEAST_SAMPLE = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The hardware to plan for, as a person writes it; None means this machine's."""

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
        """The given options that describe another machine than this one."""
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

    @property
    def left_out(self) -> str:
        """A line about a named GPU that cannot be used; empty if there is none."""
        parts = [self.gpu or "", *(self.pc or "").split(",")]
        return next(filter(None, map(other_gpu, parts)), "")


def planned_hardware(
    wanted: Hardware,
    settings: Settings,
    *,
    path: Path | None = None,
    formats: Iterable[str] = (),
    remeasure: bool = False,
) -> tuple[MachineProfile, Budgets, str]:
    """Return the machine to plan for, its budgets, and a note for the user.

    The machine is this one or ``wanted.pc``, changed by the other options of ``wanted``. ``path``
    is the model, whose disk is used; ``formats`` are those of its weights.

    Raises:
        OptionError: a description that is not understood.
    """
    ram = None if wanted.ram is None else parse_size(wanted.ram)
    if wanted.pc is not None:
        pc, vram, note = parse_pc(wanted.pc), 0, ""
        machine = _as_wanted(pc.machine(), wanted)
        if wanted.gpu is None and pc.gpu is not None:
            memory = wanted.gpu_memory or pc.vram_budget
            wanted = replace(wanted, gpu=pc.gpu.name, gpu_memory=memory)
        if wanted.gpu is not None or wanted.gpu_memory is not None:
            machine, vram = with_gpu(machine, replace(wanted, gpu=wanted.gpu or DEFAULT_GPU))
        source = "given" if ram else pc.sources.get("ram_bytes", "typical")
        ram = ram or pc.ram_budget
    else:
        own = path if wanted.ssd is None else None
        machine, note = machine_here(settings, own, formats, remeasure=remeasure)
        machine, vram = with_gpu(_as_wanted(machine, wanted), wanted, settings.cache_dir)
        source, ram = ("given", ram) if ram else ("measured", ram_budget(None))
    machine = _with_source(machine, ram_bytes=source)
    return machine, budgets_of(machine, ram, vram), note or wanted.left_out


def machine_here(
    settings: Settings,
    path: Path | None = None,
    formats: Iterable[str] = (),
    *,
    remeasure: bool = False,
) -> tuple[MachineProfile, str]:
    """Return this machine, measured if it never was, and a note on assumed rates (or ``""``).

    Its disk is that of the model at ``path``, else that of localrt's cache.
    """
    cores = default_threads()
    typical = _with_source(typical_machine().with_cores(cores), cores="measured")
    if best_isa() is None:
        return typical, "the CPU kernels are not compiled: a typical desktop's rates are assumed"
    own = path is not None and _large_enough(path)
    folder = path if path is not None and own else settings.cache_dir
    try:
        private_folder(settings.cache_dir)
        _, machine = machine_profile(
            folder, settings, formats=formats, remeasure=remeasure, sample=not own
        )
    except OSError as error:  # the folder cannot be written, or the disk is full
        problem = error.strerror or error
        return typical, f"this machine cannot be measured ({problem}): typical rates are used"
    return machine, ""


def unmeasured_machine(path: Path, settings: Settings) -> MachineProfile:
    """Return this machine's saved rates, else a typical desktop's."""
    return known_machine(settings.cache_dir, path) or typical_machine()


def machine_on_device(
    path: Path, settings: Settings, device: str, gpu_memory: str | int | None
) -> tuple[MachineProfile, int]:
    """Return ``unmeasured_machine`` with the GPU of ``device``, and that GPU's memory budget."""
    machine = unmeasured_machine(path, settings)
    if device == "cpu" or gpu_here() is None:
        return machine, 0
    return with_gpu(machine, Hardware(gpu_memory=gpu_memory), settings.cache_dir)


def _large_enough(path: Path) -> bool:
    """Whether the model's files are large enough to measure their disk with."""
    files = [path] if path.is_file() else list(path.iterdir())
    return sum(each.stat().st_size for each in files if each.is_file()) >= _LEAST_SAMPLE


def _as_wanted(machine: MachineProfile, wanted: Hardware) -> MachineProfile:
    """Return ``machine`` with the given disk, RAM speed and cores."""
    if wanted.ssd is not None:
        machine = replace(machine, ssd_bytes_s=parse_bandwidth(wanted.ssd))
        machine = _with_source(machine, ssd_bytes_s="given")
    if wanted.ram_speed is not None:
        machine = machine.with_ram_speed(parse_memory_speed(wanted.ram_speed))
        machine = _with_source(machine, ram_bytes_s="given")
    if wanted.cores is not None:
        if wanted.cores < 1:
            raise OptionError(f"{option('cores')} must be at least 1, is {wanted.cores}")
        machine = _with_source(machine.with_cores(wanted.cores), cores="given")
    return machine


def _with_source(machine: MachineProfile, **sources: str) -> MachineProfile:
    return replace(machine, sources={**machine.sources, **sources})


def gpu_here() -> tuple[GpuModel, int] | None:
    """Return this machine's first GPU with the table's rates, and its free bytes of memory.

    None if there is no GPU.
    """
    here = hardware.gpus()
    if not here:
        return None
    gpu = find_gpu(here[0].name, here[0].memory_bytes) or parse_gpu(DEFAULT_GPU)
    free = here[0].free_bytes or here[0].memory_bytes or gpu.vram_bytes
    return replace(gpu, name=here[0].name, vram_bytes=here[0].memory_bytes or free), free


def with_gpu(
    machine: MachineProfile, wanted: Hardware, cache: Path | None = None
) -> tuple[MachineProfile, int]:
    """Return ``machine`` with the named GPU, else this machine's, and the GPU's memory budget.

    This machine's GPU has the rates that ``cache`` saved, else those of the table. If there is no
    GPU, but GPU memory or a link is given, the default GPU is assumed.

    Raises:
        OptionError: an unknown GPU, or more memory than it has.
    """
    asked = None if wanted.gpu_memory is None else parse_size(wanted.gpu_memory)
    link = None if wanted.link is None else parse_bandwidth(wanted.link)
    here = gpu_here() if wanted.gpu is None else None
    source, rates = "typical", None
    if wanted.gpu is not None and other_gpu(wanted.gpu):
        return machine, 0
    if here is not None:
        gpu, free = here
        vram = min(int(_GPU_SHARE * free), asked or free)
        rates = None if cache is None else known_rates(cache, gpu.name)
    elif wanted.gpu is not None or asked is not None or link is not None:
        gpu = parse_gpu(wanted.gpu or DEFAULT_GPU)
        source = "given" if gpu.reached == 1.0 else source
        vram = asked or gpu.vram_bytes
        if wanted.gpu is None:
            gpu = replace(gpu, vram_bytes=max(vram, gpu.vram_bytes))
    else:
        return machine, 0
    if vram > gpu.vram_bytes:
        raise OptionError(
            f"{option('gpu_memory', wanted.gpu_memory)} is more than {gpu.name} has: "
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
