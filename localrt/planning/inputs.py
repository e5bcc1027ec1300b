"""What every plan is made of: the model's shape, the machine with its card, and the budgets.

A model is found on this machine or by its published config; no weight is read, and of a hub model
that is not here nothing but its config is downloaded. ``localrt.plan`` measures the machine once;
``preview`` and ``Model.advise`` take what is known of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from localrt.common.errors import (
    CheckpointError,
    ModelNotFoundError,
    OptionError,
    UnsupportedModelError,
)
from localrt.common.files import private_folder, write_text
from localrt.common.formatting import parse_size
from localrt.common.option_names import option
from localrt.common.settings import Settings
from localrt.hub import resolve
from localrt.hub.cache import CachedRepo
from localrt.hub.known_models import KNOWN_MODELS, KnownModel
from localrt.hub.listing import expand_name
from localrt.hub.names import looks_like_path, parse_hub_ref
from localrt.machine import hardware
from localrt.machine.measuring import fingerprint, machine_profile
from localrt.models.checkpoints import open_checkpoint
from localrt.offload.memory import memory_state, ram_budget
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
from localrt.offload.planner.config_shapes import shape_from_config
from localrt.offload.planner.machine import typical_machine
from localrt.offload.planner.measure import known_machine, measure_machine
from localrt.offload.planner.pc import parse_memory_speed, parse_pc
from localrt.offload.planner.search import in_format
from localrt.offload.reading.disk_speed import DiskProfile
from localrt.offload.shapes import shape_from_checkpoint
from localrt.quant.cpu.abi import best_isa
from localrt.quant.cuda.gpu_file import known_rates
from localrt.quant.formats import FORMATS

_CONFIG = "config.json"
_CONFIGS = "configs"  # below the cache folder
_WEIGHTS = (".safetensors", ".gguf")


def find_model(
    model: str,
    settings: Settings,
    *,
    revision: str | None = None,
    offline: bool | None = None,
) -> Path:
    """The model on this machine; of a hub model that is not here, its config alone.

    Short names need no network: their configs are known.

    Raises:
        ModelNotFoundError: neither is to be had.
    """
    offline = settings.offline if offline is None else offline
    try:
        return resolve(
            model, settings=settings, revision=revision, offline=offline, download=False
        ).path
    except ModelNotFoundError:
        name = expand_name(model, settings)
        known = next((each for each in KNOWN_MODELS if each.repo == name), None)
        if known is not None:
            return _known_config(settings, known)
        ref = None if looks_like_path(name) else parse_hub_ref(name)
        if ref is None or ref.variant is not None:
            raise
        found = _cached_config(settings, ref.repo)
        if found is None and not offline:
            found = _download_config(settings, ref.repo, revision or ref.revision)
        if found is None:
            raise
        return found


def known_model_of(path: Path, settings: Settings) -> KnownModel | None:
    """The model of the table of names whose config ``find_model`` made, for it is not here."""
    if path.name != _CONFIG or path.parent.parent != settings.cache_dir / _CONFIGS:
        return None
    return next((each for each in KNOWN_MODELS if _folder_of(each) == path.parent.name), None)


def shape_of(path: Path, format: str | None = None) -> ModelShape:
    """The shape of the model at ``path``, or of its config without weights, packed in ``format``.

    Raises:
        OptionError: no such format.
        UnsupportedModelError: the planner does not know the architecture.
        CheckpointError: a damaged file.
    """
    if format is not None and format not in FORMATS:
        raise OptionError(f"{option('format')} must be one of {', '.join(FORMATS)}, is {format!r}")
    config = path if path.name == _CONFIG else path / _CONFIG
    if config.is_file() and not has_weights(config.parent):
        return _shape_of_config(config, format)
    try:
        checkpoint = open_checkpoint(path)
    except UnsupportedModelError:
        # Its config may be known where its weights are not.
        if not config.is_file():
            raise
        return _shape_of_config(config, format)
    try:
        shape = shape_from_checkpoint(checkpoint)
        shape = replace(shape, notes=(*shape.notes, *checkpoint.notes))
    finally:
        checkpoint.close()
    return shape if format is None else in_format(shape, format, always=True)


def _known_config(settings: Settings, known: KnownModel) -> Path:
    """A file with the config that comes with localrt."""
    path = settings.cache_dir / _CONFIGS / _folder_of(known) / _CONFIG
    write_text(path, json.dumps(dict(known.config())), sync=False, folder=True)
    return path


def _folder_of(known: KnownModel) -> str:
    return known.name.replace(":", "-")


def _cached_config(settings: Settings, repo: str) -> Path | None:
    cached = CachedRepo(settings.hub_cache, repo)
    for commit in reversed(cached.commits()):
        path = cached.snapshot(commit) / _CONFIG
        if path.is_file():
            return path
    return None


def _download_config(settings: Settings, repo: str, revision: str | None) -> Path | None:
    """The config of a repository that has one: a few kilobytes, no weights."""
    from localrt.hub.download import (
        download,
        list_repo,  # these two import huggingface_hub
    )

    remote = list_repo(repo, revision, settings)
    if _CONFIG not in remote.files:
        return None
    cached = download(remote, [_CONFIG], revision=revision, settings=settings)
    return cached.snapshot(remote.commit) / _CONFIG


def has_weights(path: Path) -> bool:
    """Whether a model that was found is more than its config."""
    if path.is_file():
        return path.name != _CONFIG
    return any(entry.suffix in _WEIGHTS for entry in path.iterdir())


def _shape_of_config(config: Path, format: str | None) -> ModelShape:
    return shape_from_config(_read_config(config), name=_name_of(config), format=format)


def _read_config(path: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return values


def _name_of(config: Path) -> str:
    """The folder's name, or the repository's for one in the hub's cache."""
    parents = config.absolute().parents
    if len(parents) > 2 and parents[1].name == "snapshots":
        return parents[2].name.removeprefix("models--").replace("--", "/")
    return parents[0].name


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
        rate, latency, source = rates.to_gpu_bytes_s, rates.crossing_s, "measured"
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
