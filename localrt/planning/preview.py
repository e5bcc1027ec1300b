"""Estimates a model's speed without measuring, before loading (``preview``) and after
(``outlook``).

``localrt.plan`` gives more details, and measures the machine first. Here rates are those measured
earlier, else a typical desktop's. A model that is not on this machine is judged by its size or
config; a loaded, streamed model by the plan it runs with; a resident model by the measured rates of
the machine. No weight is read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from localrt.common.errors import (
    MemoryBudgetError,
    OptionError,
    UnsupportedModelError,
    known_arguments,
)
from localrt.common.formatting import format_bytes, parse_size
from localrt.common.settings import DEFAULT_CONTEXT, Settings
from localrt.models.weight_files import files_nbytes
from localrt.offload.account import UNKNOWN_MODEL_NBYTES, longest_context
from localrt.offload.memory import ram_budget
from localrt.planning.advice import helpful_changes, make_forecast
from localrt.planning.forecast import Change, Forecast, PlanRequest, in_words
from localrt.planning.measure import (
    Hardware,
    budgets_of,
    gpu_here,
    known_machine,
    machine_on_device,
    with_gpu,
)
from localrt.planning.models import find_model, shape_of
from localrt.planning.search import fits
from localrt.quant.ops.kv_formats import parse_kv_format


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """``fits``: all weights are resident; ``place`` is then ``"RAM"`` or ``"GPU"``.

    Otherwise each token reads ``read_bytes`` from the disk and copies ``copied_bytes`` over the
    link. ``tok_s`` is None if unknown. ``assumed``: rates are not this machine's. ``verdict`` is
    the first line of ``localrt plan``, empty if unknown. ``problem`` is the reason why it cannot
    run.
    """

    fits: bool
    place: str = "RAM"
    weight_bytes: int
    read_bytes: int = 0
    copied_bytes: int = 0
    tok_s: float | None = None
    assumed: bool = False
    verdict: str = ""
    problem: str = ""

    def __str__(self) -> str:
        """Return one line such as ``"streams 410 MB per token, about 6 tok/s"``."""
        if self.problem:
            return self.problem
        text = in_words(
            fits=self.fits,
            read=self.read_bytes,
            copied=self.copied_bytes,
            tok_s=self.tok_s,
            where="on the GPU" if self.place == "GPU" else "in RAM",
        )
        return f"{text} on a typical machine" if self.assumed and self.tok_s else text


@known_arguments
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
    """Preview a model that is on this machine, or whose config is, without using the network.

    Options are those of ``load``. Takes up to a second: call it from a thread.

    Raises:
        ModelNotFoundError: neither the model nor its config is on this machine.
        LocalrtError: it cannot be read, or an option cannot be used.
    """
    settings = settings or Settings.from_environment()
    path = find_model(str(model), settings, offline=True)
    budget = ram_budget(None if ram is None else parse_size(ram))
    if engine == "llamacpp":
        return _whole(files_nbytes(path), budget)
    try:
        shape = shape_of(path)
    except UnsupportedModelError as error:
        if path.is_dir() and not any(path.glob("*.gguf")):
            return Preview(fits=False, weight_bytes=files_nbytes(path), problem=str(error))
        return _whole(files_nbytes(path), budget)  # llama.cpp may run it, if it is installed
    machine, vram = machine_on_device(path, settings, device, gpu_memory)
    budgets = budgets_of(machine, budget, vram)
    kept, held = (
        parse_kv_format(kv_format or "bf16"),
        ctx or min(DEFAULT_CONTEXT, shape.context_length),
    )
    asked = PlanRequest(shape=shape, machine=machine, budgets=budgets, ctx=held, kv_format=kept)
    if ctx is None:  # loading chooses a context that fits
        held = longest_context(held, lambda tokens: fits(replace(asked, ctx=tokens)))
        asked = replace(asked, ctx=held)
    try:
        plan = make_forecast(asked)
    except MemoryBudgetError as error:
        return Preview(
            fits=False, weight_bytes=shape.nbytes, problem=f"does not fit: {error.marked}"
        )
    return _of_plan(plan)


def preview_size(nbytes: int, *, ram: str | int | None = None) -> Preview:
    """Preview a dense model from the size of its files alone, in bytes.

    Raises:
        OptionError: ``nbytes`` is not a number of bytes.
    """
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 0:
        raise OptionError(f"nbytes must be a number of bytes, at least 0, is {nbytes!r:.80}")
    budget = ram_budget(None if ram is None else parse_size(ram))
    found = _whole(nbytes, budget)
    if found.fits:
        return found
    machine = known_machine(Settings.from_environment().cache_dir)
    read = nbytes + UNKNOWN_MODEL_NBYTES - budget
    rate = None if machine is None else machine.ssd_bytes_s / read
    return Preview(fits=False, weight_bytes=nbytes, read_bytes=read, tok_s=rate)


def _of_plan(plan: Forecast) -> Preview:
    on_gpu = plan.placement.uses_gpu
    return Preview(
        fits=plan.fits,
        place="GPU" if on_gpu else "RAM",
        weight_bytes=plan.weight_bytes,
        read_bytes=plan.read_bytes,
        copied_bytes=plan.copied_bytes,
        tok_s=plan.tok_s,
        assumed=plan.request.machine.sources.get("kernels") == "typical",
        verdict=str(plan.verdict),
    )


def _whole(nbytes: int, budget: int) -> Preview:
    """Preview a model that cannot be streamed: it either fits in memory or cannot run."""
    if nbytes + UNKNOWN_MODEL_NBYTES <= budget:
        return Preview(fits=True, weight_bytes=nbytes)
    return Preview(
        fits=False,
        weight_bytes=nbytes,
        problem=f"does not fit: {format_bytes(nbytes)} in {format_bytes(budget)} of RAM",
    )


@dataclass(frozen=True, slots=True)
class Outlook:
    """``ceiling_tok_s`` is the highest speed with this placement at one token per pass;
    ``token_bytes`` is the size of the weights for a token; ``changes`` would help, best first. None
    or empty if unknown.
    """

    ceiling_tok_s: float | None = None
    token_bytes: int | None = None
    changes: tuple[Change, ...] = ()


def streamed_outlook(plan: Forecast) -> Outlook:
    """Return the outlook of a streamed model, within the budgets that the user gave."""
    nbytes = round(plan.request.shape.pass_nbytes)
    return Outlook(plan.ceiling_tok_s, nbytes, helpful_changes(plan))


def resident_outlook(
    path: Path, *, ctx: int, format: str, device: str, ram: int | None, gpu_memory: int | None
) -> Outlook:
    """Return the outlook of a resident model.

    Raises:
        LocalrtError, OSError: its files were deleted, or the planner does not know it.
    """
    settings, shape = Settings.from_environment(), shape_of(path)
    nbytes = round(shape.pass_nbytes)
    machine = known_machine(settings.cache_dir, path)
    if machine is None or format in ("bf16", "f32"):
        return Outlook(token_bytes=nbytes)
    vram = 0
    if device.startswith("cuda"):
        here = gpu_here()
        if here is None:
            return Outlook(token_bytes=nbytes)
        # Count all of the GPU's memory, since this model already uses some of it.
        machine, _ = with_gpu(machine, Hardware(), settings.cache_dir)
        vram = gpu_memory or here[0].vram_bytes
    rate = machine.ram_bytes_s if machine.gpu is None else machine.gpu.bytes_s
    budgets = budgets_of(machine, ram_budget(ram), vram)
    ctx = min(ctx, DEFAULT_CONTEXT)
    request = PlanRequest(shape=shape, machine=machine, budgets=budgets, ctx=ctx)
    plan = make_forecast(request)
    ceiling = rate / nbytes if nbytes else None
    if ceiling and plan.fits:
        ceiling = min(ceiling, plan.ceiling_tok_s)  # computing takes time too
    return Outlook(ceiling, nbytes, helpful_changes(plan))
