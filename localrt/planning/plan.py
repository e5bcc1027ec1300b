"""``localrt.plan``: where a model would live and how fast it would be, before anything is loaded.

It reads a model's shape, not its weights. What decides is ``localrt.offload.planner``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from localrt.errors import OptionError
from localrt.formatting import format_bytes
from localrt.planning.advice import Change

if TYPE_CHECKING:
    from localrt.offload import planner
    from localrt.planning.inputs import Inputs

__all__ = ["Plan", "plan"]

_DEFAULT_CTX = 4096
_KV_FORMATS = ("bf16", "int8", "int4")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to expect of a model on a machine.

    Sizes are in bytes, rates in tokens per second. ``fits`` is whether all weights stay where they
    are computed; else ``read_bytes`` come from the disk and ``copied_bytes`` over the link for each
    token. ``bottleneck`` is ``"ssd"``, ``"link"``, ``"cpu"`` or ``"gpu"``. ``changes`` would help,
    best first. ``hypothetical`` names what was given and is not this machine's. ``report`` is the
    text that ``localrt plan`` prints, ``details`` all numbers as plain values.
    """

    model: str
    fits: bool
    tok_s: float
    ceiling_tok_s: float
    prefill_tok_s: float
    bottleneck: str
    read_bytes: int
    copied_bytes: int
    weight_bytes: int
    ram_bytes: int
    vram_bytes: int
    ctx: int
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    hypothetical: tuple[str, ...]
    report: str
    details: dict[str, Any]

    def __str__(self) -> str:
        """``"streams 4.1 GB per token, about 6 tok/s"``."""
        rate = (
            f"about {self.tok_s:.2g} tok/s" if self.tok_s < 10 else f"about {self.tok_s:.0f} tok/s"
        )
        if self.fits:
            return f"fits in memory, {rate}"
        moved = self.read_bytes or self.copied_bytes
        verb = "streams" if self.read_bytes else "copies"
        return f"{verb} {format_bytes(moved)} per token, {rate}"


def plan(
    model: str | Path,
    *,
    ctx: int | None = None,
    format: str | None = None,
    kv_format: Literal["bf16", "int8", "int4"] = "bf16",
    batch: int = 1,
    kv_on_ssd: bool = False,
    ram: str | None = None,
    gpu_memory: str | None = None,
    gpu: str | None = None,
    link: str | None = None,
    ssd: str | None = None,
    advise: bool = True,
    remeasure: bool = False,
    revision: str | None = None,
    offline: bool | None = None,
) -> Plan:
    """Plan ``model`` for this machine, or for one that is described.

    Nothing is loaded or downloaded, but for the config of a hub model that is not here. A machine
    that was never measured is measured first, which takes seconds: call it from a thread.

    Args:
        model: as ``load`` takes it, or a ``config.json`` (or its folder) without weights.
        ctx: context in tokens; None is 4096, or the model's own if that is less.
        format: plan as if packed in this format, such as ``"int4-g64"``.
        kv_format: how keys and values are kept.
        batch: sequences at once.
        kv_on_ssd: let keys and values that do not fit be read from the disk.
        ram, gpu_memory: sizes to use, such as ``"32GB"``; None: what this machine has.
        gpu: a card by name, or ``virtual:8GB@12GB/s,...``.
        link, ssd: rates such as ``"12GB/s"``.
        advise: plan variations too, to say what would help; takes about as long again.
        remeasure: measure this machine again.
        revision: branch, tag or commit of a hub model.
        offline: never use the network; None follows the environment.

    Raises:
        MemoryBudgetError: it cannot fit, not even streamed; says what would do.
        LocalrtError: no such model, or an option that cannot be used.
    """
    from localrt.offload.planner import make_plan
    from localrt.planning.inputs import PlanTarget, read_inputs

    for name, value in (("ctx", 1 if ctx is None else ctx), ("batch", batch)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(f"{name} must be an integer of at least 1, is {value!r}")
    if kv_format not in _KV_FORMATS:
        raise OptionError(f"kv_format must be {', '.join(_KV_FORMATS)}, is {kv_format!r}")
    inputs = read_inputs(
        PlanTarget(
            model=str(model),
            format=format,
            ram=ram,
            gpu_memory=gpu_memory,
            gpu=gpu,
            link=link,
            ssd=ssd,
            remeasure=remeasure,
            revision=revision,
            offline=offline,
        )
    )
    found = make_plan(
        inputs.shape,
        inputs.machine,
        inputs.budgets,
        ctx=ctx or min(_DEFAULT_CTX, inputs.shape.context_length),
        sequences=batch,
        kv_format=kv_format,
        kv_on_ssd=kv_on_ssd,
        advise=advise,
    )
    return _public(found, inputs)


def _public(found: planner.Plan, inputs: Inputs) -> Plan:
    from localrt.offload.planner.explain import explain
    from localrt.offload.planner.memory_table import total_of

    prediction = found.prediction
    moved = {name: round(prediction.nbytes.get(name, 0)) for name in ("ssd", "link")}
    return Plan(
        model=found.request.shape.name,
        fits=not any(moved.values()),
        tok_s=prediction.tok_s,
        ceiling_tok_s=prediction.ceiling_tok_s,
        prefill_tok_s=prediction.prefill_tok_s,
        bottleneck=prediction.bottleneck,
        read_bytes=moved["ssd"],
        copied_bytes=moved["link"],
        weight_bytes=found.request.shape.nbytes,
        ram_bytes=total_of(found.memory, "ram"),
        vram_bytes=total_of(found.memory, "vram"),
        ctx=found.request.ctx,
        changes=tuple(Change(each.change, each.tok_s, each.gain) for each in found.advice),
        notes=(*inputs.notes, *found.notes),
        hypothetical=inputs.hypothetical,
        report=explain(found),
        details=found.to_dict(),
    )
