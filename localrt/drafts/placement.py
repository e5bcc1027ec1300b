"""The placement of a draft model beside its target: on the GPU, in RAM, or nowhere, by one rule.

``plan_pair`` is arithmetic on two models' sizes and a machine, for ``localrt plan``.
``place_draft`` asks it for two files on this machine's GPU, before either is loaded. While a model
runs, the tuner measures what drafting gains, and stops it if that is nothing.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from localrt.common.errors import OptionError, UnsupportedModelError
from localrt.common.formatting import format_bytes, format_rate, join_lines
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
from localrt.planning.simulate import simulate
from localrt.quant.choose import make_ops
from localrt.quant.cpu.abi import find_library
from localrt.speculative.acceptance import FIRST_CHOICE, expected_tokens

Place = Literal["draft on GPU", "draft on CPU", "no draft"]

DRAFT_CTX, DRAFT_NODES = 2048, 128
"""A draft's default context: tokens of history plus draft tokens."""
# Chosen, not measured: forecasts are of a chain, and a draft in RAM must leave so much of the
# target's speed without it.
_CHAIN = 4
_SLOWDOWN = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPlan:
    """Where ``draft`` is beside its target, and ``why``, in one sentence.

    ``plan`` is the target's beside the draft, which takes ``vram`` and ``ram`` bytes for a context
    of ``draft_ctx`` tokens. Rates are tokens per second: ``plain_tok_s`` of the target alone,
    ``tok_s`` with drafts of which first choices are accepted with probability ``acceptance``. For
    a pass that brings ``tokens_per_pass``, the target takes ``verify_s`` and the draft ``draft_s``.
    """

    draft: ModelShape
    draft_ctx: int
    place: Place
    why: str
    plan: Forecast
    plain_tok_s: float
    acceptance: float
    assumed: bool
    vram: int = 0
    ram: int = 0
    tok_s: float = 0.0
    tokens_per_pass: float = 1.0
    verify_s: float = 0.0
    draft_s: float = 0.0

    def report(self) -> str:
        """Return the choice and the forecast, in two lines."""
        lines = [f"With {self.draft.name} as its draft: {self.why}"]
        if self.place != "no draft":
            share = f"{100 * self.acceptance:.0f} % ({'assumed' if self.assumed else 'given'})"
            rates = f"{format_rate(self.tok_s)} tok/s, {format_rate(self.plain_tok_s)} without it"
            lines.append(
                f"  {rates}, if {share} of its first choices are right: "
                f"{self.tokens_per_pass:.2f} tokens per pass of {1e3 * self.verify_s:.1f} ms and "
                f"drafts of {1e3 * self.draft_s:.1f} ms"
            )
        return join_lines(lines)

    def to_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        names = (
            *("draft_ctx", "place", "why", "tok_s", "plain_tok_s", "tokens_per_pass"),
            *("verify_s", "draft_s", "acceptance"),
        )
        return {
            "draft": self.draft.name,
            **{name: getattr(self, name) for name in names},
            "acceptance_source": "assumed" if self.assumed else "given",
            "draft_vram_bytes": self.vram,
            "draft_ram_bytes": self.ram,
        }


def plan_pair(
    target: PlanRequest,
    draft: ModelShape,
    *,
    acceptance: float | None = None,
    draft_ctx: int | None = None,
    draft_vram: int | None = None,
) -> PairPlan | None:
    """Place the draft beside the target within ``target``'s budgets, and forecast the speed.

    The draft has a context of ``draft_ctx`` tokens and takes ``draft_vram`` bytes on a GPU (None:
    estimated from its shape). Returns None if the target does not fit even alone.

    Raises:
        OptionError: ``acceptance`` is not from 0 to 1.
    """
    share = FIRST_CHOICE if acceptance is None else acceptance
    if not 0.0 <= share <= 1.0:
        raise OptionError(f"acceptance must be from 0 to 1, is {share}")
    alone = find_forecast(target)
    if alone is None:
        return None
    ctx = draft_ctx or min(min(target.ctx, DRAFT_CTX) + DRAFT_NODES, draft.context_length)
    ram = draft_nbytes(draft, ctx, target.kv_format)
    vram = ram if draft_vram is None else draft_vram
    place, why, plan = _place(alone, ram, vram)
    found = PairPlan(
        draft=draft,
        draft_ctx=ctx,
        place=place,
        why=why,
        plan=plan,
        plain_tok_s=alone.tok_s,
        tok_s=alone.tok_s,
        acceptance=share,
        assumed=acceptance is None,
    )
    if place == "no draft":
        return found
    on_gpu = place == "draft on GPU"
    found = replace(found, vram=vram) if on_gpu else replace(found, ram=ram)
    return _with_forecast(found, target)


def _place(alone: Forecast, ram: int, vram: int) -> tuple[Place, str, Forecast]:
    """Return the place of a draft that needs so many bytes, why, and the target's plan beside it.

    It is on the GPU if both models are there whole. Else it is in RAM, if the target then keeps
    nine tenths of its speed, or its weights are read from the disk anyway: passes that wait for
    the disk verify drafts for free. Else it is not used.
    """
    target, budgets = alone.request, alone.request.budgets
    if target.uses_gpu and vram <= budgets.vram - budgets.context_bytes():
        less = replace(budgets, vram=budgets.vram - vram)
        beside = find_forecast(replace(target, budgets=less))
        if beside is not None and _whole_on_gpu(beside):
            return "draft on GPU", "both models fit on the GPU", beside
    need = f"the draft needs {format_bytes(ram)}"
    if ram >= budgets.ram:
        why = f"{need}, and {format_bytes(budgets.ram)} of RAM may be used"
        return "no draft", why, alone
    beside = find_forecast(replace(target, budgets=budgets.less(ram)))
    if beside is None:
        return "no draft", f"{need} of RAM, beside which the model does not fit", alone
    if alone.read_bytes:
        why = "the draft is in RAM: passes of a model on the disk verify drafts while they wait"
        return "draft on CPU", why, beside
    if beside.tok_s >= _SLOWDOWN * alone.tok_s:
        return "draft on CPU", "the draft is in RAM, where it takes no speed from the model", beside
    speeds = f"from {format_rate(alone.tok_s)} to {format_rate(beside.tok_s)} tok/s"
    return "no draft", f"{need} of RAM, which would slow the model {speeds}", alone


def _whole_on_gpu(plan: Forecast) -> bool:
    """Whether the GPU holds and computes all of the model but its embedding, which stays in RAM."""
    where = plan.placement.where.items()
    return plan.fits and all(at.on_gpu for name, at in where if name != "embedding")


def _with_forecast(pair: PairPlan, target: PlanRequest) -> PairPlan:
    """Return ``pair`` with the speed of drafting a chain of ``_CHAIN`` tokens for every pass."""
    plan, budgets = pair.plan, target.budgets
    own = replace(target, shape=pair.draft, ctx=pair.draft_ctx, rows=1)
    draft = find_forecast(own if pair.vram else own.without_gpu())
    assert draft is not None, f"{format_bytes(budgets.ram)} hold the draft"
    costs = plan.request.costs(rows=1 + _CHAIN)
    verify_s = simulate(costs, plan.placement, passes=2, warm_up=2).seconds
    draft_s = _CHAIN / draft.tok_s
    tokens = 1 + expected_tokens(pair.acceptance, _CHAIN, _CHAIN)
    return replace(
        pair,
        tok_s=max(plan.tok_s, tokens / (verify_s + draft_s)),
        tokens_per_pass=tokens,
        verify_s=verify_s,
        draft_s=draft_s,
    )


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
    pair = plan_pair(
        PlanRequest(
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
        ),
        theirs,
        draft_ctx=ctx,
        draft_vram=_draft_vram(draft, theirs, opened, ctx),
    )
    if pair is None:  # not even the target fits, which loading will report
        return DraftPlace(alone=options)
    if pair.place == "no draft":
        return DraftPlace(alone=options, note=f"draft {name} is not used: {pair.why}")
    own = replace(
        options, engine="native", kv_format=None, activations=None, gpu_memory=None, pass_rows=1
    )
    place = DraftPlace(
        alone=options,
        target=options,
        draft=replace(own, device="cpu"),
        line=f"draft {name}: {pair.why}",
        level_share=pair.draft_s / _CHAIN * pair.plan.tok_s,
    )
    if pair.place == "draft on CPU":
        return place
    return replace(
        place,
        target=replace(options, gpu_memory=opened.capacity - pair.vram + opened.beside),
        draft=replace(own, gpu_memory=pair.vram, ctx=ctx),
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
