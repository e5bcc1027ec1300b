"""What every plan is made of beside the model: the machine with its card, and the budgets.

``localrt.plan`` measures the machine once; ``preview`` and ``Model.advise`` take what is known of
it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from localrt.common.errors import OptionError
from localrt.common.files import private_folder
from localrt.common.formatting import parse_size
from localrt.common.option_names import option
from localrt.common.settings import Settings
from localrt.machine import hardware
from localrt.machine.measuring import fingerprint, machine_profile
from localrt.offload.memory.process import ram_budget
from localrt.offload.memory.state import memory_state
from localrt.offload.planner import Budgets, MachineProfile, ModelShape
from localrt.offload.planner.cards import (
    DEFAULT_CARD,
    Card,
    find_card,
    measured_profile,
    other_gpu,
    parse_bandwidth,
    parse_card,
)
from localrt.offload.planner.machine import typical_machine
from localrt.offload.planner.measure import known_machine, measure_machine
from localrt.offload.planner.pc import parse_memory_speed, parse_pc
from localrt.offload.reading.disk_speed import DiskProfile
from localrt.quant.cpu.abi import best_isa
from localrt.quant.cuda.gpu_file import known_rates

_LEAST_SAMPLE = 64 << 20
# Of a card's free memory, what is left to the desktop.
_VRAM_SHARE = 0.92


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The hardware to plan for, as a person writes it; None is this machine's."""

    ram: str | int | None = None
    gpu_memory: str | int | None = None
    gpu: str | None = None
    link: str | None = None
    ssd: str | None = None
    pc: str | None = None
    ram_speed: str | None = None
    cores: int | None = None


# -- the machine ---------------------------------------------------------------------------------


def machine_of(
    path: Path,
    settings: Settings,
    shape: ModelShape,
    *,
    ssd: str | None = None,
    remeasure: bool = False,
) -> tuple[MachineProfile, str]:
    """This machine, measured if it never was, and a note on what is assumed (or ``""``).

    Its disk is the one that the model lies on, or ``ssd`` (``"3.5GB/s"``).
    """
    given = None if ssd is None else parse_bandwidth(ssd)
    formats = {unit.format for unit in shape.units}
    if given is None and best_isa() is not None and _large_enough(path):
        return machine_profile(path, settings, formats=formats, remeasure=remeasure)[1], ""
    machine, note = measured_here(settings, formats, remeasure=remeasure)
    return (machine if given is None else _with_disk(machine, given, "given")), note


def measured_here(
    settings: Settings, formats: Iterable[str] = (), *, remeasure: bool = False
) -> tuple[MachineProfile, str]:
    """The same without a model: the disk is that of localrt's cache, by a file of its own."""
    if best_isa() is None:
        note = "the CPU kernels are not compiled: a typical desktop's rates are assumed"
        return typical_machine(), note

    def disk(folder: Path) -> DiskProfile:
        read = hardware.measure_disk_read(folder).read_bytes_s
        return replace(DiskProfile.assumed(), read_bytes_s=read)

    try:
        private_folder(settings.cache_dir)
        machine = measure_machine(
            settings.cache_dir,
            cache=settings.cache_dir,
            disk_speed=disk,
            identity=fingerprint(),
            formats=formats,
            remeasure=remeasure,
            sample=True,
        )
    except OSError as error:  # nothing can be written there, or the disk is full
        note = (
            f"this machine cannot be measured ({error.strerror or error}): typical rates are used"
        )
        return typical_machine(), note
    return machine, ""


def unmeasured_machine(path: Path, settings: Settings) -> MachineProfile:
    """This machine as far as it was measured before, else a typical desktop."""
    return known_machine(settings.cache_dir, path) or typical_machine()


def _large_enough(path: Path) -> bool:
    """Whether the model's own files can tell the speed of their disk."""
    files = [path] if path.is_file() else list(path.iterdir())
    return sum(each.stat().st_size for each in files if each.is_file()) >= _LEAST_SAMPLE


def _with_disk(machine: MachineProfile, ssd: float, source: str) -> MachineProfile:
    return _with_source(replace(machine, ssd_bytes_s=ssd), ssd_bytes_s=source)


def _with_source(machine: MachineProfile, **sources: str) -> MachineProfile:
    return replace(machine, sources={**machine.sources, **sources})


# -- the card ------------------------------------------------------------------------------------


def card_here() -> tuple[Card, int] | None:
    """This machine's first card with its table's rates, and bytes of its memory that are free.

    None where there is no card.
    """
    here = hardware.gpus()
    if not here:
        return None
    card = find_card(here[0].name, here[0].memory_bytes) or parse_card(DEFAULT_CARD)
    free = here[0].free_bytes or here[0].memory_bytes or card.vram_bytes
    return replace(card, name=here[0].name, vram_bytes=here[0].memory_bytes or free), free


def planned_machine(
    path: Path, settings: Settings, shape: ModelShape, wanted: Hardware, *, remeasure: bool = False
) -> tuple[MachineProfile, Budgets, str]:
    """What to plan for: this machine or ``wanted.pc``, with all else of ``wanted``; and a note.

    Raises:
        OptionError: a description that means nothing.
    """
    if wanted.pc is not None:
        return (*_that_pc(wanted.pc, wanted), left_out(wanted))
    machine, note = machine_of(path, settings, shape, ssd=wanted.ssd, remeasure=remeasure)
    return (*_this_machine(machine, settings, wanted), note or left_out(wanted))


def left_out(wanted: Hardware) -> str:
    """A line about a GPU that was named and cannot be used; empty without one."""
    parts = [wanted.gpu or "", *(wanted.pc or "").split(",")]
    return next(filter(None, map(other_gpu, parts)), "")


def known_hardware(settings: Settings, wanted: Hardware) -> tuple[MachineProfile, Budgets]:
    """The same without a model.

    Raises:
        OptionError: a description that means nothing.
    """
    if wanted.pc is not None:
        return _that_pc(wanted.pc, wanted)
    machine, _ = measured_here(settings)
    if wanted.ssd is not None:
        machine = _with_disk(machine, parse_bandwidth(wanted.ssd), "given")
    if machine.sources.get("cores") != "measured":
        cores = hardware.probe().cpu.usable_cores
        machine = _with_source(machine.with_cores(cores), cores="measured")
    return _this_machine(machine, settings, wanted)


def _this_machine(
    machine: MachineProfile, settings: Settings, wanted: Hardware
) -> tuple[MachineProfile, Budgets]:
    ram = None if wanted.ram is None else parse_size(wanted.ram)
    machine, vram = with_card(_with_processor(machine, wanted), wanted, settings.cache_dir)
    # A plan is for this process only where its memory is.
    machine = _with_source(machine, ram_bytes="given" if ram else "measured")
    return machine, budgets_of(machine, ram or ram_budget(None), vram)


def _that_pc(text: str, wanted: Hardware) -> tuple[MachineProfile, Budgets]:
    ram = None if wanted.ram is None else parse_size(wanted.ram)
    pc, card = parse_pc(text), wanted
    machine = pc.machine()
    if wanted.ssd is not None:
        machine = _with_disk(machine, parse_bandwidth(wanted.ssd), "given")
    machine, vram = _with_processor(machine, wanted), 0
    if wanted.gpu is None and pc.card is not None:
        memory = wanted.gpu_memory or pc.vram_budget
        card = replace(wanted, gpu=pc.card.name, gpu_memory=memory)
    if card.gpu is not None or card.gpu_memory is not None:
        machine, vram = with_card(machine, replace(card, gpu=card.gpu or DEFAULT_CARD))
    if ram is not None:
        machine = _with_source(machine, ram_bytes="given")
    return machine, budgets_of(machine, ram or pc.ram_budget, vram)


def _with_processor(machine: MachineProfile, wanted: Hardware) -> MachineProfile:
    """``machine`` with the speed of RAM and the cores that were given."""
    given: dict[str, str] = {}
    if wanted.ram_speed is not None:
        machine = machine.with_ram_speed(parse_memory_speed(wanted.ram_speed))
        given["ram_bytes_s"] = "given"
    if wanted.cores is not None:
        if wanted.cores < 1:
            raise OptionError(f"{option('cores')} must be at least 1, is {wanted.cores}")
        machine = machine.with_cores(wanted.cores)
        given["cores"] = "given"
    return _with_source(machine, **given)


def with_card(
    machine: MachineProfile, wanted: Hardware, cache: Path | None = None
) -> tuple[MachineProfile, int]:
    """The machine with the card that was named, else its own, and bytes of the card's memory.

    Its own card has the rates that ``cache`` knows from loading, else those of its table. Without a
    card, memory or a link that was named belongs to a usual card of 8 GB.

    Raises:
        OptionError: no such card, or more memory than it has.
    """
    asked = None if wanted.gpu_memory is None else parse_size(wanted.gpu_memory)
    link = None if wanted.link is None else parse_bandwidth(wanted.link)
    here = card_here() if wanted.gpu is None else None
    if wanted.gpu is not None and other_gpu(wanted.gpu):
        return machine, 0
    if wanted.gpu is not None:
        card, source = parse_card(wanted.gpu), "typical"
        source = "given" if card.reached == 1.0 else source
        vram = asked or card.vram_bytes
    elif here is not None:
        (card, free), source = here, "typical"
        vram = min(int(_VRAM_SHARE * free), asked or free)
    elif asked is not None or link is not None:
        card, source = parse_card(DEFAULT_CARD), "typical"
        vram = asked or card.vram_bytes
        card = replace(card, vram_bytes=max(vram, card.vram_bytes))
    else:
        return machine, 0
    if vram > card.vram_bytes:
        raise OptionError(
            f"{option('gpu_memory', wanted.gpu_memory)} is more than {card.name} has: "
            f"{card.vram_bytes / 1e9:.3g} GB"
        )
    profile, rate, latency = card.profile, card.link_bytes_s, machine.link_latency_s
    rates = None if here is None or cache is None else known_rates(cache, card.name)
    if rates is not None:
        profile = measured_profile(card.name, card.vram_bytes, rates)
        rate, latency, source = rates.to_card_bytes_s, rates.crossing_s, "measured"
    given = "given" if link is not None else source
    machine = replace(
        machine,
        gpu=profile,
        link_bytes_s=link or rate,
        link_latency_s=latency,
        sources={**machine.sources, "gpu": source, "link_bytes_s": given},
    )
    return machine, vram


def budgets_of(machine: MachineProfile, ram: int, vram: int) -> Budgets:
    """``ram`` bytes for the whole process, ``vram`` of the card's memory."""
    # A virtual card needs no driver: it calls no kernels.
    context = 0 if machine.gpu is not None and machine.gpu.call_s == 0 else None
    return Budgets(ram=ram, vram=vram, cuda_context=context)


def hypothetical(wanted: Hardware) -> tuple[str, ...]:
    """The options of ``wanted`` that describe another machine than this one."""
    imagined = {
        "--pc": wanted.pc is not None,
        "--ram-speed": wanted.ram_speed is not None,
        "--cores": wanted.cores is not None,
        "--ssd": wanted.ssd is not None,
        "--gpu": wanted.gpu is not None,
        "--gpu-memory": wanted.gpu is None and wanted.gpu_memory is not None and not card_here(),
        "--link": wanted.link is not None,
        "--ram": wanted.ram is not None
        and not wanted.pc
        and parse_size(wanted.ram) > memory_state().total,
    }
    return tuple(name for name, is_so in imagined.items() if is_so)
