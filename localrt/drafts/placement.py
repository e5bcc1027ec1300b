"""The placement of a draft model beside its target: on the GPU, in RAM, or nowhere, by one rule.

``find_place`` is arithmetic on two models' sizes and a machine. ``place_draft`` asks it for two
files on this machine's GPU, before either is loaded. While a model runs, the tuner measures what
drafting gains, and stops it if that is nothing.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from localrt.common.errors import UnsupportedModelError
from localrt.common.formatting import format_bytes, format_rate
from localrt.common.settings import Settings
from localrt.drafts.model_draft import DraftPlace
from localrt.loading.gpu import OpenGpu, open_gpu
from localrt.loading.options import LoadOptions
from localrt.models.checkpoints import Checkpoint, open_checkpoint
from localrt.models.registry import read_config
from localrt.offload.account import (
    FIRST_CONTEXT,
    GROWTH_NBYTES,
    MARGIN_NBYTES,
    Budgets,
    draft_nbytes,
    longest_context,
    resident_account,
)
from localrt.offload.memory import current_rss, ram_budget
from localrt.offload.shapes import ModelShape, shape_from_checkpoint
from localrt.planning.forecast import Forecast, PlanRequest
from localrt.planning.measure import machine_profile
from localrt.planning.search import find_forecast
from localrt.quant.choose import make_ops
from localrt.quant.cpu.abi import find_library

Place = Literal["draft on GPU", "draft on CPU", "no draft"]

DRAFT_CTX, DRAFT_NODES = 2048, 128
"""A draft's default context: tokens of history plus draft tokens."""
_SLOWDOWN = 0.9  # chosen, not measured: a draft in RAM must leave this share of the target's speed


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a draft is beside its target, and ``why``, in one sentence.

    ``forecast`` is the target's beside the draft, which takes ``nbytes`` there: of a GPU's memory
    or of RAM.
    """

    place: Place
    why: str
    forecast: Forecast
    nbytes: int = 0


def find_place(target: PlanRequest, ram: int, vram: int) -> Placement | None:
    """Return the place of a draft that needs ``ram`` bytes of RAM or ``vram`` bytes of a GPU.

    It is on the GPU if both models are there whole. Else it is in RAM, if the target then keeps
    nine tenths of its speed, or its weights are read from the disk anyway: passes that wait for
    the disk verify drafts for free. Else it is not used. Returns None if the target does not fit
    even alone.
    """
    alone, budgets = find_forecast(target), target.budgets
    if alone is None:
        return None
    if target.uses_gpu and vram <= budgets.vram - budgets.context_bytes():
        less = replace(budgets, vram=budgets.vram - vram)
        beside = find_forecast(replace(target, budgets=less))
        if beside is not None and _whole_on_gpu(beside):
            return Placement("draft on GPU", "both models fit on the GPU", beside, vram)
    need = f"the draft needs {format_bytes(ram)}"
    if ram >= budgets.ram:
        why = f"{need}, and {format_bytes(budgets.ram)} of RAM may be used"
        return Placement("no draft", why, alone)
    beside = find_forecast(replace(target, budgets=budgets.less(ram)))
    if beside is None:
        return Placement("no draft", f"{need} of RAM, beside which the model does not fit", alone)
    if alone.read_bytes:
        why = "the draft is in RAM: passes of a model on the disk verify drafts while they wait"
        return Placement("draft on CPU", why, beside, ram)
    if beside.tok_s >= _SLOWDOWN * alone.tok_s:
        why = "the draft is in RAM, where it takes no speed from the model"
        return Placement("draft on CPU", why, beside, ram)
    speeds = f"from {format_rate(alone.tok_s)} to {format_rate(beside.tok_s)} tok/s"
    return Placement("no draft", f"{need} of RAM, which would slow the model {speeds}", alone)


def _whole_on_gpu(plan: Forecast) -> bool:
    """Whether the GPU holds and computes all of the model but its embedding, which stays in RAM."""
    where = plan.placement.where.items()
    return plan.fits and all(at.on_gpu for name, at in where if name != "embedding")


def place_draft(
    target: Path, draft: Path, name: str, options: LoadOptions, settings: Settings
) -> DraftPlace | None:
    """Choose where the draft at ``draft`` is placed; None without a GPU that could hold it.

    Raises:
        CheckpointError: a file cannot be read.
        OptionError: the GPU does not exist.
    """
    if options.engine == "llamacpp" or options.format is not None or options.device == "cpu":
        return None
    with closing(open_checkpoint(target)) as ours, closing(open_checkpoint(draft)) as theirs:
        try:
            opened = _open_gpu(ours, options)
            if opened is None or opened.gpu is None:
                return None
            try:
                return _place_files(ours, theirs, opened, name, options, settings)
            finally:
                opened.gpu.close()
        except UnsupportedModelError:
            return None  # loading reports the reason


def _open_gpu(target: Checkpoint, options: LoadOptions) -> OpenGpu | None:
    """Open the GPU of ``options``; None if the target cannot be placed on it."""
    ops = make_ops(
        read_config(target).memory,
        device=options.device,
        kv_format=options.kv_format,
        activations=options.activations,
        threads=options.threads,
    )
    if ops.name != "cuda" or not find_library():
        return None
    return open_gpu(
        ops, threads=options.threads, gpu_memory=options.gpu_memory, kv_format=options.kv_format
    )


def _place_files(
    target: Checkpoint,
    draft: Checkpoint,
    opened: OpenGpu,
    name: str,
    options: LoadOptions,
    settings: Settings,
) -> DraftPlace:
    """Return the load options of both models."""
    ours, theirs = shape_from_checkpoint(target), shape_from_checkpoint(draft)
    formats = {unit.format for shape in (ours, theirs) for unit in shape.units}
    _, machine = machine_profile(target.path, settings, formats=formats)
    ctx = _draft_context(draft, theirs, opened, options)
    request = PlanRequest(
        shape=ours,
        machine=opened.on(machine),
        budgets=Budgets(
            ram=ram_budget(options.ram),
            process=current_rss() + GROWTH_NBYTES + MARGIN_NBYTES,
            vram=opened.capacity,
            cuda_context=0,
        ),
        ctx=min(options.ctx or FIRST_CONTEXT, FIRST_CONTEXT, ours.context_length),
        kv_format=options.kv_format or "bf16",  # type: ignore[arg-type]
    )
    found = find_place(
        request,
        draft_nbytes(theirs, ctx, request.kv_format),
        _draft_vram(draft, theirs, opened, ctx),
    )
    if found is None:  # not even the target fits, which loading will report
        return DraftPlace(alone=options)
    if found.place == "no draft":
        return DraftPlace(alone=options, note=f"draft {name} is not used: {found.why}")
    on_gpu = found.place == "draft on GPU"
    drafting = replace(request, shape=theirs, ctx=ctx)
    forecast = find_forecast(drafting if on_gpu else drafting.without_gpu())
    assert forecast is not None, "the memory holds the draft"
    place = DraftPlace(
        alone=options,
        target=options,
        draft=replace(options, device="cpu", gpu_memory=None),
        line=f"draft {name}: {found.why}",
        level_share=found.forecast.tok_s / forecast.tok_s,
    )
    if not on_gpu:
        return place
    return replace(
        place,
        target=replace(options, gpu_memory=opened.capacity - found.nbytes + opened.beside),
        draft=replace(options, gpu_memory=found.nbytes, ctx=ctx),
        cache_room=sum(theirs.kv_nbytes("bf16", ctx)),
    )


def _draft_context(
    draft: Checkpoint, shape: ModelShape, opened: OpenGpu, options: LoadOptions
) -> int:
    """Return the draft's context: the target's requested one, or the longest that fits the GPU."""
    ctx = min((options.ctx or DRAFT_CTX) + DRAFT_NODES, shape.context_length)
    return longest_context(ctx, lambda n: _draft_vram(draft, shape, opened, n) <= opened.capacity)


def _draft_vram(draft: Checkpoint, shape: ModelShape, opened: OpenGpu, ctx: int) -> int:
    """Return the bytes of GPU memory that the draft takes with a context of ``ctx``."""
    assert opened.gpu is not None, "there is a GPU"
    if opened.gpu.ops.name == "native":
        return draft_nbytes(shape, ctx)
    return resident_account(draft, read_config(draft), opened.gpu.ops, ctx).total()
