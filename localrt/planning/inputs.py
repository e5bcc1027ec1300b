"""What a plan is made with: the model's shape, the machine, real or imagined, the budgets.

Figures that are not given come from this machine or a card's table, and are labelled so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localrt.errors import (
    CheckpointError,
    ModelNotFoundError,
    OptionError,
    UnsupportedModelError,
)
from localrt.settings import Settings

if TYPE_CHECKING:
    from localrt.offload.planner import Budgets, MachineProfile, ModelShape

__all__ = ["Inputs", "PlanTarget", "read_draft", "read_inputs"]

_CONFIG = "config.json"
_WEIGHTS = (".safetensors", ".gguf")
_LEAST_SAMPLE = 64 << 20
# Of a card's free memory, what is left to the desktop.
_VRAM_SHARE = 0.92


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTarget:
    """A model and the hardware to plan for, as a person writes them; None is this machine's."""

    model: str
    format: str | None = None
    ram: str | None = None
    gpu_memory: str | None = None
    gpu: str | None = None
    link: str | None = None
    ssd: str | None = None
    remeasure: bool = False
    revision: str | None = None
    offline: bool | None = None


@dataclass(frozen=True, slots=True)
class Inputs:
    """``hypothetical`` names the figures that are not this machine's."""

    shape: ModelShape
    machine: MachineProfile
    budgets: Budgets
    hypothetical: tuple[str, ...]
    notes: tuple[str, ...]


def read_inputs(args: PlanTarget) -> Inputs:
    """What a plan of the target needs.

    Raises:
        OptionError: a size, bandwidth, card or format that cannot be read.
        LocalrtError: no such model, or one that cannot be planned.
    """
    from localrt.offload.planner.cards import parse_bandwidth

    settings = Settings.from_environment()
    ssd = None if args.ssd is None else parse_bandwidth(args.ssd)
    link = None if args.link is None else parse_bandwidth(args.link)
    path = _find(args.model, settings, args)
    shape = _shape(path, args.format)
    notes: list[str] = []
    machine = _machine(path, settings, shape, ssd, args.remeasure, notes)
    machine, vram, imagined = _with_gpu(machine, args, link)
    budgets, more = _budgets(args, machine, vram)
    given = ("--ssd",) if ssd is not None else ()
    return Inputs(shape, machine, budgets, (*given, *imagined, *more), tuple(notes))


def read_draft(args: PlanTarget) -> ModelShape:
    """The shape of a draft, as it was published.

    Raises:
        LocalrtError: no such model, or one that cannot be planned.
    """
    settings = Settings.from_environment()
    return _shape(_find(args.model, settings, args), None)


# -- the model -----------------------------------------------------------------------------------


def _find(model: str, settings: Settings, args: PlanTarget) -> Path:
    """The model on this machine; of a hub model that is not here, its config alone."""
    from localrt.hub import resolve
    from localrt.hub.names import looks_like_path, parse_hub_ref

    try:
        return resolve(
            model,
            settings=settings,
            revision=args.revision,
            offline=args.offline,
            download=False,
        ).path
    except ModelNotFoundError:
        ref = None if looks_like_path(model) else parse_hub_ref(model)
        if ref is None or ref.variant is not None:
            raise
        offline = settings.offline if args.offline is None else args.offline
        found = _cached_config(settings, ref.repo)
        if found is None and not offline:
            found = _download_config(settings, ref.repo, args.revision or ref.revision)
        if found is None:
            raise
        return found


def _cached_config(settings: Settings, repo: str) -> Path | None:
    from localrt.hub.cache import CachedRepo

    cached = CachedRepo(settings.hub_cache, repo)
    for commit in reversed(cached.commits()):
        path = cached.snapshot(commit) / _CONFIG
        if path.is_file():
            return path
    return None


def _download_config(settings: Settings, repo: str, revision: str | None) -> Path | None:
    """The config of a repository that has one: a few kilobytes, no weights."""
    from localrt.hub.remote import list_repo
    from localrt.hub.transfer import download

    remote = list_repo(repo, revision, settings)
    if _CONFIG not in remote.files:
        return None
    cached = download(remote, [_CONFIG], revision=revision, settings=settings)
    return cached.snapshot(remote.commit) / _CONFIG


def _shape(path: Path, format: str | None) -> ModelShape:
    from localrt.models.checkpoints import open_checkpoint
    from localrt.offload.planner import shape_from_checkpoint, shape_from_config
    from localrt.offload.planner.advice import in_format
    from localrt.quant.formats import FORMATS

    if format is not None and format not in FORMATS:
        raise OptionError(f"format must be one of {', '.join(FORMATS)}, is {format!r}")
    config = path if path.name == _CONFIG else path / _CONFIG
    if config.is_file() and not _has_weights(config.parent):
        return shape_from_config(_read_config(config), name=_name_of(config), format=format)
    try:
        checkpoint = open_checkpoint(path)
        try:
            shape = shape_from_checkpoint(checkpoint)
        finally:
            checkpoint.close()
    except UnsupportedModelError:
        # Its config may be known where its weights are not.
        if not config.is_file():
            raise
        return shape_from_config(_read_config(config), name=_name_of(config), format=format)
    return shape if format is None else in_format(shape, format, always=True)


def _has_weights(folder: Path) -> bool:
    return any(entry.suffix in _WEIGHTS for entry in folder.iterdir())


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


# -- the machine ---------------------------------------------------------------------------------


def _machine(
    path: Path,
    settings: Settings,
    shape: ModelShape,
    ssd: float | None,
    remeasure: bool,
    notes: list[str],
) -> MachineProfile:
    """This machine, with the disk that was given, or the one that the model lies on."""
    from localrt.offload.planner.machine import typical_machine
    from localrt.quant.ops.native.abi import best_isa

    formats = {unit.format for unit in shape.units}
    if best_isa() is None:
        notes.append("the CPU kernels are not compiled: a typical desktop's rates are assumed")
        return typical_machine() if ssd is None else _with_disk(typical_machine(), ssd)
    if ssd is None and _large_enough(path):
        from localrt.machine.measuring import machine_profile

        return machine_profile(path, settings, formats=formats, remeasure=remeasure)[1]
    return _measure(settings, formats, ssd, remeasure)


def _large_enough(path: Path) -> bool:
    """Whether the model's own files can tell the speed of their disk."""
    files = [path] if path.is_file() else list(path.iterdir())
    return sum(each.stat().st_size for each in files if each.is_file()) >= _LEAST_SAMPLE


def _measure(
    settings: Settings, formats: set[str], ssd: float | None, remeasure: bool
) -> MachineProfile:
    """The kernels of this machine; its disk by a file of our own, in the cache folder."""
    from localrt.machine import hardware
    from localrt.offload.planner.measure import measure_machine
    from localrt.version import __version__

    settings.cache_dir.mkdir(parents=True, exist_ok=True)
    if ssd is None:
        ssd = hardware.measure_disk_read(settings.cache_dir).read_bytes_s
        source = "measured"
    else:
        source = "given"
    cpu = hardware.probe().cpu
    machine = measure_machine(
        settings.cache_dir,
        cache=settings.cache_dir,
        disk_speed=None,
        identity=[cpu.name, *cpu.features, str(cpu.usable_cores), __version__],
        formats=formats,
        remeasure=remeasure,
    )
    return _with_disk(machine, ssd, source)


def _with_disk(machine: MachineProfile, ssd: float, source: str = "given") -> MachineProfile:
    sources = {**machine.sources, "ssd_bytes_s": source}
    return replace(machine, ssd_bytes_s=ssd, sources=sources)


def _with_gpu(
    machine: MachineProfile, args: PlanTarget, link: float | None
) -> tuple[MachineProfile, int, tuple[str, ...]]:
    """The machine with its card or the one asked for, GPU memory to use, what is imagined."""
    from localrt.formatting import parse_size
    from localrt.machine import hardware
    from localrt.offload.planner.cards import DEFAULT_CARD, find_card, parse_card

    asked = None if args.gpu_memory is None else parse_size(args.gpu_memory)
    here = hardware.gpus()
    imagined: list[str] = []
    if args.gpu is not None:
        card = parse_card(args.gpu)
        vram = asked or card.vram_bytes
        source, imagined = args.gpu, ["--gpu"]
    elif here:
        card = find_card(here[0].name) or parse_card(DEFAULT_CARD)
        free = here[0].free_bytes or here[0].memory_bytes or card.vram_bytes
        card = replace(card, name=here[0].name, vram_bytes=here[0].memory_bytes or free)
        vram = min(int(_VRAM_SHARE * free), asked or free)
        source = "the card's table"
    elif asked is not None or link is not None:
        card = parse_card(DEFAULT_CARD)
        vram = asked or card.vram_bytes
        card = replace(card, vram_bytes=max(vram, card.vram_bytes))
        source, imagined = f"taken from {DEFAULT_CARD}", ["--gpu-memory" if asked else "--link"]
    else:
        return machine, 0, ()
    if link is not None:
        imagined = list(dict.fromkeys([*imagined, "--link"]))
    if vram > card.vram_bytes:
        raise OptionError(
            f"--gpu-memory {args.gpu_memory} is more than {card.name} has: "
            f"{card.vram_bytes / 1e9:.3g} GB"
        )
    sources = {
        **machine.sources,
        "gpu": source,
        "link_bytes_s": "given" if link is not None else source,
    }
    machine = replace(
        machine, gpu=card.profile, link_bytes_s=link or card.link_bytes_s, sources=sources
    )
    return machine, vram, tuple(imagined)


def _budgets(
    args: PlanTarget, machine: MachineProfile, vram: int
) -> tuple[Budgets, tuple[str, ...]]:
    from localrt.formatting import parse_size
    from localrt.offload.memory.process import ram_budget
    from localrt.offload.memory.state import memory_state
    from localrt.offload.planner import Budgets

    context = 0 if machine.gpu is not None and machine.gpu.call_s == 0 else None
    if args.ram is None:
        return Budgets(ram=ram_budget(None), vram=vram, cuda_context=context), ()
    ram = parse_size(args.ram)
    more = ("--ram",) if ram > memory_state().total else ()
    return Budgets(ram=ram, vram=vram, cuda_context=context), more
