"""What to expect of a model before it is loaded, in a second and without measuring: ``preview``.

``localrt.plan`` answers the same at length, and measures the machine for it. Here rates are those
that were measured before, else a typical desktop's, and a model that is not on this machine is
judged by its size or its config. No weight is read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localrt.errors import LocalrtError, MemoryBudgetError, ModelNotFoundError
from localrt.settings import Settings

if TYPE_CHECKING:
    from localrt.offload.planner import MachineProfile, ModelShape

__all__ = ["Preview", "preview", "preview_size"]

_CONFIG = "config.json"
_CTX = 4096
_SMALLEST_CTX = 512
_ASIDE = 200 << 20  # what the process and a conversation take beside the weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """``fits``: all weights stay where they are computed, ``place`` is ``"RAM"`` or ``"card"``.

    Else ``read_bytes`` come from the disk for each token, and ``copied_bytes`` over the link.
    ``tok_s`` is None where nobody can tell. ``assumed``: rates are not this machine's. ``problem``
    says why it cannot run.
    """

    fits: bool
    place: str = "RAM"
    weight_bytes: int
    read_bytes: int = 0
    copied_bytes: int = 0
    tok_s: float | None = None
    assumed: bool = False
    problem: str = ""

    def __str__(self) -> str:
        """``"streams 410 MB per token, about 6 tok/s"``."""
        from localrt.formatting import format_bytes

        if self.problem:
            return self.problem
        rate = ""
        if self.tok_s:
            rate = (
                f", about {self.tok_s:.2g} tok/s"
                if self.tok_s < 10
                else (f", about {self.tok_s:.0f} tok/s")
            )
            rate += " on a typical machine" if self.assumed else ""
        if self.fits:
            return f"fits {'on the card' if self.place == 'card' else 'in RAM'}{rate}"
        if self.read_bytes:
            return f"streams {format_bytes(self.read_bytes)} per token{rate}"
        return f"copies {format_bytes(self.copied_bytes)} per token to the card{rate}"


def preview(
    model: str | Path,
    *,
    ram: str | int | None = None,
    gpu_memory: str | int | None = None,
    ctx: int | None = None,
    kv_format: str | None = None,
    device: str = "auto",
    engine: str = "auto",
    settings: Settings | None = None,
) -> Preview:
    """Of a model on this machine, or of a hub model whose config is; the network is not asked.

    The options are those of ``load``. Takes up to a second: call it from a thread.

    Raises:
        ModelNotFoundError: neither the model nor its config is here.
        LocalrtError: it cannot be read, or an option cannot be used.
    """
    from localrt.formatting import parse_size
    from localrt.offload.memory.process import ram_budget
    from localrt.offload.planner import Budgets, make_plan

    settings = settings or Settings.from_environment()
    path = _find(str(model), settings)
    budget = ram_budget(None if ram is None else parse_size(ram))
    if engine == "llamacpp":
        return _whole(_size(path), budget)
    shape = _shape(path)
    if shape is None:  # an architecture that llama.cpp runs, if it is installed
        return _whole(_size(path), budget)
    machine, vram = _machine(path, settings, device, gpu_memory)
    budgets = Budgets(ram=budget, vram=vram)
    held = ctx or min(_CTX, shape.context_length)
    while True:
        try:
            plan = make_plan(
                shape,
                machine,
                budgets,
                ctx=held,
                kv_format=kv_format or "bf16",  # type: ignore[arg-type]
                solver="greedy",
            )
            break
        except MemoryBudgetError as error:
            if ctx is None and held > _SMALLEST_CTX:  # loading takes what fits
                held //= 2
                continue
            return Preview(fits=False, weight_bytes=shape.nbytes, problem=f"does not fit: {error}")
    moved = plan.prediction.nbytes
    read, copied = round(moved.get("ssd", 0)), round(moved.get("link", 0))
    return Preview(
        fits=not read and not copied,
        place="card" if vram and any(w.on_gpu for w in plan.placement.where.values()) else "RAM",
        weight_bytes=shape.nbytes,
        read_bytes=read,
        copied_bytes=copied,
        tok_s=plan.prediction.tok_s,
        assumed=machine.sources.get("kernels") != "measured",
    )


def preview_size(nbytes: int, *, ram: str | int | None = None) -> Preview:
    """Of a dense model of which nothing but its files' size is known."""
    from localrt.formatting import parse_size
    from localrt.offload.memory.process import ram_budget

    settings = Settings.from_environment()
    found = _whole(nbytes, ram_budget(None if ram is None else parse_size(ram)))
    if not found.problem:
        return found
    from localrt.offload.planner.known_machine import known_machine

    machine = known_machine(settings.cache_dir)
    read = nbytes + _ASIDE - ram_budget(None if ram is None else parse_size(ram))
    rate = None if machine is None else machine.ssd_bytes_s / read
    return Preview(fits=False, weight_bytes=nbytes, read_bytes=read, tok_s=rate)


def _whole(nbytes: int, budget: int) -> Preview:
    """Of a model that is in memory whole or not at all."""
    if nbytes + _ASIDE <= budget:
        return Preview(fits=True, weight_bytes=nbytes)
    from localrt.formatting import format_bytes

    return Preview(
        fits=False,
        weight_bytes=nbytes,
        problem=f"does not fit: {format_bytes(nbytes)} in {format_bytes(budget)} of RAM",
    )


def _find(model: str, settings: Settings) -> Path:
    """The model on this machine, or the config of one of the hub."""
    from localrt.hub import resolve
    from localrt.hub.cache import CachedRepo
    from localrt.hub.names import looks_like_path, parse_hub_ref

    try:
        return resolve(model, settings=settings, offline=True, download=False).path
    except ModelNotFoundError:
        ref = None if looks_like_path(model) else parse_hub_ref(model)
        if ref is None or ref.variant is not None:
            raise
        cached = CachedRepo(settings.hub_cache, ref.repo)
        for commit in reversed(cached.commits()):
            path = cached.snapshot(commit) / _CONFIG
            if path.is_file():
                return path
        raise


def _shape(path: Path) -> ModelShape | None:
    from localrt.errors import UnsupportedModelError
    from localrt.models.checkpoints import open_checkpoint
    from localrt.offload.planner import shape_from_checkpoint, shape_from_config

    if path.name == _CONFIG:
        try:
            values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return shape_from_config(values, name=path.parent.name)
        except (OSError, ValueError, AttributeError) as error:
            raise LocalrtError(f"{path} cannot be read: {error}") from error
    try:
        checkpoint = open_checkpoint(path)
        try:
            return shape_from_checkpoint(checkpoint)
        finally:
            checkpoint.close()
    except UnsupportedModelError:
        return None


def _size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(each.stat().st_size for each in path.iterdir() if each.is_file())


def _machine(
    path: Path, settings: Settings, device: str, gpu_memory: str | int | None
) -> tuple[MachineProfile, int]:
    """The machine as far as it is known, with the card that is there, and bytes of its memory."""
    from localrt.formatting import parse_size
    from localrt.machine import hardware
    from localrt.offload.planner.cards import find_card, parse_card
    from localrt.offload.planner.known_machine import known_machine
    from localrt.offload.planner.machine import typical_machine

    machine = known_machine(settings.cache_dir, path) or typical_machine()
    asked = None if gpu_memory is None else parse_size(gpu_memory)
    if device.startswith("virtual:"):
        name = device.removeprefix("virtual:")
        card = parse_card(device if "@" in name else name)
        vram = min(card.vram_bytes, asked or card.vram_bytes)
    elif device == "cpu" or not (hardware.probe().gpus):
        return machine, 0
    else:
        here = hardware.gpus()
        found = find_card(here[0].name) if here else None
        if found is None:
            return machine, 0
        card, free = found, here[0].free_bytes or here[0].memory_bytes or found.vram_bytes
        vram = min(free, asked or free)
    return replace(machine, gpu=card.profile, link_bytes_s=card.link_bytes_s), vram
