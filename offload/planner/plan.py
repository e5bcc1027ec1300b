"""The planner's answer for one model, one machine and its budgets: ``make_plan``.

It accounts the fixed parts, searches placements, and predicts what a pass takes by replaying it.
What cannot fit fails here, with numbers and ways out, before a byte of weights is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from localrt.errors import OptionError
from localrt.formatting import format_bytes
from localrt.offload.placement import Placement
from localrt.offload.planner.budgets import (
    KV_BUFFER_BYTES,
    Budgets,
    activation_nbytes,
    fitting_prefill_rows,
)
from localrt.offload.planner.candidates import Candidate, Rooms, best_candidate, can_place
from localrt.offload.planner.costs import Costs
from localrt.offload.planner.machine import MachineProfile
from localrt.offload.planner.memory_table import MemoryPart, memory_table
from localrt.offload.planner.shapes import KvFormat, ModelShape
from localrt.offload.planner.simulate import Resource, Simulation, simulate

__all__ = [
    "Advice",
    "Plan",
    "PlanRequest",
    "Prediction",
    "context_plans",
    "find_plan",
    "fits",
    "make_plan",
    "predicted_rate",
]

# A conversation in its first minutes: what most tokens see.
_USUAL_HELD = 512
_FIRST_CONTEXT = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the plan will do; rates in tokens per second, bytes per pass.

    ``ceiling_tok_s`` is what this placement allows with perfect overlap, ``bottleneck`` the
    resource behind it. ``tok_s`` holds for ``held`` tokens in the cache, ``full_context_tok_s``
    for all. ``waits`` is the time of a pass that computing stood still, by what it waited for.
    """

    tok_s: float
    ceiling_tok_s: float
    bottleneck: Resource
    efficiency: float
    prefill_tok_s: float
    held: int
    full_context_tok_s: float
    nbytes: Mapping[str, float]
    busy: Mapping[Resource, float]
    waits: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A change, what it needs, and the rate that planning with it gives."""

    change: str
    tok_s: float
    gain: float

    @property
    def text(self) -> str:
        """One line."""
        return f"{self.change}: {self.tok_s:.3g} tok/s ({self.gain:.2g}x)"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What is planned for. ``prefill_rows`` is the most rows of a pass, ``sequences`` the batch."""

    shape: ModelShape
    machine: MachineProfile
    budgets: Budgets
    ctx: int
    rows: int = 1
    sequences: int = 1
    prefill_rows: int = 512
    kv_format: KvFormat = "bf16"
    held: int | None = None
    kv_on_ssd: bool = False

    def __post_init__(self) -> None:
        for name in ("ctx", "rows", "sequences", "prefill_rows"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} must be at least 1, is {getattr(self, name)}")

    @property
    def held_tokens(self) -> int:
        """Tokens in the cache that the prediction is for."""
        return min(self.ctx, _USUAL_HELD if self.held is None else self.held)

    @property
    def uses_gpu(self) -> bool:
        """Whether there is a card, and memory of it to use."""
        return self.machine.gpu is not None and self.budgets.vram > 0

    def without_gpu(self) -> PlanRequest:
        """The same with nothing but the processor."""
        budgets = replace(self.budgets, vram=0)
        return replace(self, machine=self.machine.without_gpu(), budgets=budgets)

    def costs(
        self,
        *,
        rows: int | None = None,
        held: int | None = None,
        expert_hits: float | None = None,
    ) -> Costs:
        """Seconds of a pass."""
        return Costs(
            shape=self.shape,
            machine=self.machine,
            rows=max(self.rows, self.sequences) if rows is None else rows,
            held=self.held_tokens if held is None else held,
            sequences=self.sequences,
            kv_format=self.kv_format,
            expert_hits=expert_hits,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A placement with its prediction, its accounts, advice and notes."""

    request: PlanRequest
    placement: Placement
    prediction: Prediction
    memory: tuple[MemoryPart, ...]
    simulation: Simulation = field(repr=False)
    advice: tuple[Advice, ...] = ()
    notes: tuple[str, ...] = ()

    def for_weights_and_caches(self) -> int:
        """Bytes that the other parts of the plan leave of the RAM."""
        fixed = sum(
            part.nbytes
            for part in self.memory
            if part.tier == "ram" and part.what not in ("weights", "keys and values")
        )
        return self.request.budgets.ram - fixed

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON. A mixture's experts are counted by place, not listed."""
        shape, request = self.request.shape, self.request
        where: dict[str, str] = {}
        experts: dict[str, int] = {}
        for unit in shape.units:
            place = self.placement.where[unit.name].value
            if unit.kind == "expert":
                experts[place] = experts.get(place, 0) + 1
            else:
                where[unit.name] = place
        return {
            "model": {
                "name": shape.name,
                "architecture": shape.architecture,
                "parameters": shape.parameters,
                "active_parameters": shape.active_parameters,
                "weight_bytes": shape.nbytes,
                "pass_bytes": round(shape.pass_nbytes),
                "layers": shape.layers,
                "experts": None if shape.experts is None else asdict(shape.experts),
            },
            "ctx": request.ctx,
            "sequences": request.sequences,
            "kv_format": request.kv_format,
            "machine": request.machine.to_dict(),
            "budgets": asdict(request.budgets),
            "placement": {
                "units": where,
                "experts": experts,
                "kv": list(self.placement.kv),
                "ram_ring": self.placement.ram_ring,
                "vram_ring": self.placement.vram_ring,
                "prefill_rows": self.placement.prefill_rows,
            },
            "prediction": asdict(self.prediction),
            "memory": [asdict(part) for part in self.memory],
            "advice": [asdict(advice) for advice in self.advice],
            "notes": list(self.notes),
        }


def make_plan(
    shape: ModelShape,
    machine: MachineProfile,
    budgets: Budgets,
    *,
    ctx: int,
    rows: int = 1,
    sequences: int = 1,
    prefill_rows: int = 512,
    kv_format: KvFormat = "bf16",
    held: int | None = None,
    kv_on_ssd: bool = False,
    solver: Literal["auto", "greedy"] = "auto",
    advise: bool = False,
) -> Plan:
    """Place ``shape`` on ``machine`` within ``budgets``, for a context of ``ctx`` tokens.

    ``rows`` is those of one pass (more than one: a drafted tree); ``sequences`` a batch, each with
    its own cache. ``prefill_rows`` is the most rows of a prompt's pass: a tight budget takes fewer.
    ``held`` is how many tokens the prediction assumes in the cache. ``kv_on_ssd`` lets the keys and
    values of as few layers as needed live on the SSD where they do not fit. ``solver="greedy"``
    answers in tens of milliseconds; ``advise`` plans several variations to say what would help.

    Raises:
        MemoryBudgetError: it cannot fit; says what does.
        OptionError: a number below one, or a ``kv_format`` that latents are not kept in.
    """
    if kv_format == "int4" and any(layer.latent for layer in shape.kv):
        raise OptionError(
            f"kv_format int4 is not for latent attention ({shape.architecture}), whose cache is "
            "small as it is: use bf16 or int8"
        )
    request = PlanRequest(
        shape=shape,
        machine=machine,
        budgets=budgets,
        ctx=ctx,
        rows=rows,
        sequences=sequences,
        prefill_rows=prefill_rows,
        kv_format=kv_format,
        held=held,
        kv_on_ssd=kv_on_ssd,
    )
    plan = find_plan(request, exact=solver == "auto")
    if plan is None:
        from localrt.offload.planner.refusal import refusal

        raise refusal(request)
    if advise:
        from localrt.offload.planner.advice import advice_for

        plan = replace(plan, advice=advice_for(plan))
    return plan


def context_plans(request: PlanRequest, *, exact: bool = False) -> Iterator[tuple[int, Plan]]:
    """(context, plan) for contexts that double up to the request's.

    A short conversation leaves the room of a long one's cache to weights: start with the first
    plan, and go over to the next when the cache outgrows it.
    """
    ctx = min(_FIRST_CONTEXT, request.ctx)
    while True:
        plan = find_plan(replace(request, ctx=ctx), exact=exact)
        if plan is not None:
            yield ctx, plan
        if ctx >= request.ctx:
            return
        ctx = min(2 * ctx, request.ctx)


def fits(request: PlanRequest) -> bool:
    """Whether there is a plan; sooner known than found."""
    if request.uses_gpu and fits(request.without_gpu()):
        return True
    request, rooms, _ = _prepare(request)
    if can_place(request.costs(), rooms):
        return True
    if not request.kv_on_ssd or request.uses_gpu:
        return False
    return can_place(request.costs(), replace(rooms, kv_ssd=frozenset(range(request.shape.layers))))


def predicted_rate(request: PlanRequest, *, like: Placement | None = None) -> float:
    """Tokens per second of the best plan by rules, 0 where nothing fits; nothing more is told.

    A mixture takes over the rings of ``like``: there are too many experts to try many.
    """
    request, rooms, prefill_rows = _prepare(request)
    if like is not None and request.shape.experts is not None:
        costs = request.costs()
        best = best_candidate(costs, rooms, prefill_rows=prefill_rows, exact=False, rings=like)
    else:
        best = _search(request, rooms, prefill_rows, False, [])
    if best is None:
        return 0.0
    return request.sequences / simulate(request.costs(), best.placement).seconds


def find_plan(request: PlanRequest, *, exact: bool = True) -> Plan | None:
    """The best plan, or None where nothing fits."""
    notes: list[str] = list(request.shape.notes)
    request, rooms, prefill_rows = _prepare(request)
    best = _search(request, rooms, prefill_rows, exact, notes)
    if best is not None:
        return _finish(request, best, notes)
    if not request.uses_gpu:
        return None
    plan = find_plan(request.without_gpu(), exact=exact)
    if plan is None:
        return None
    note = f"{format_bytes(request.budgets.vram)} of GPU memory are too little to be of use"
    return replace(plan, notes=(*plan.notes, note))


def _search(
    request: PlanRequest, rooms: Rooms, prefill_rows: int, exact: bool, notes: list[str]
) -> Candidate | None:
    """With as few layers' keys and values on the SSD as it takes."""
    if rooms.ram <= 0 or rooms.vram < 0:
        return None
    best = best_candidate(
        request.costs(), rooms, prefill_rows=prefill_rows, exact=exact, notes=notes
    )
    if best is not None or not request.kv_on_ssd or request.uses_gpu:
        return best
    low, high = 0, request.shape.layers
    while high - low > 1:
        middle = (low + high) // 2
        enough = can_place(request.costs(), _with_kv_on_ssd(rooms, middle))
        low, high = (low, middle) if enough else (middle, high)
    notes.append(f"keys and values of {high} layers live on the SSD: they do not fit in RAM")
    return best_candidate(
        request.costs(),
        _with_kv_on_ssd(rooms, high),
        prefill_rows=prefill_rows,
        exact=exact,
        notes=notes,
    )


def _with_kv_on_ssd(rooms: Rooms, layers: int) -> Rooms:
    """Keys and values of the first layers on the SSD, and the buffer that they are read through."""
    return replace(rooms, ram=rooms.ram - KV_BUFFER_BYTES, kv_ssd=frozenset(range(layers)))


def _prepare(request: PlanRequest) -> tuple[PlanRequest, Rooms, int]:
    """The request without a card that it may not use, the rooms, and the rows of a pass."""
    if not request.uses_gpu:
        request = replace(request, machine=request.machine.without_gpu())
    prefill_rows = fitting_prefill_rows(
        request.shape, request.budgets.ram, max(request.prefill_rows, request.rows)
    )
    return request, _rooms(request, prefill_rows), prefill_rows


def _rooms(request: PlanRequest, prefill_rows: int) -> Rooms:
    """What the fixed parts leave."""
    shape, budgets = request.shape, request.budgets
    rows = max(prefill_rows, request.rows, request.sequences)
    activations = activation_nbytes(shape, rows)
    small = sum(unit.nbytes for unit in shape.units if unit.kind == "norm")
    ram = budgets.ram - budgets.process_bytes(shape) - budgets.scratch - activations - small
    vram = 0
    if request.uses_gpu:
        vram = budgets.vram - budgets.context_bytes() - activations - small
    return Rooms(ram=ram, vram=vram, kv=_kv_nbytes(request))


def _kv_nbytes(request: PlanRequest) -> tuple[int, ...]:
    """Of each layer, for all sequences at the full context."""
    sizes = request.shape.kv_nbytes(request.kv_format, request.ctx)
    return tuple(request.sequences * size for size in sizes)


def _finish(request: PlanRequest, best: Candidate, notes: list[str]) -> Plan:
    """The final replay, and those for prompts and the full context."""
    placement = best.placement
    steady = simulate(request.costs(), placement, keep_tasks=2)
    full = simulate(request.costs(held=request.ctx), placement)
    prompt = simulate(
        request.costs(
            rows=placement.prefill_rows,
            held=max(0, min(request.ctx, 512) - placement.prefill_rows) // 2,
        ),
        placement,
        passes=2,
        warm_up=1,
    )
    tokens = request.sequences
    busy = steady.busy
    slowest: Resource = "gpu" if busy["gpu"] > busy["cpu"] else "cpu"
    if max(busy["ssd"], busy["link"]) > steady.chain:
        slowest = "ssd" if busy["ssd"] >= busy["link"] else "link"
    prediction = Prediction(
        tok_s=tokens / steady.seconds,
        ceiling_tok_s=tokens / steady.bound,
        bottleneck=slowest,
        efficiency=steady.efficiency,
        prefill_tok_s=placement.prefill_rows / prompt.seconds,
        held=request.held_tokens,
        full_context_tok_s=tokens / full.seconds,
        nbytes=dict(steady.nbytes),
        busy=dict(busy),
        waits=dict(steady.waits),
    )
    if request.shape.experts is not None:
        notes.append(
            "experts are taken to be chosen evenly: a cache that follows the text reads less"
        )
    if placement.prefill_rows < request.prefill_rows:
        notes.append(f"prompts go {placement.prefill_rows} tokens at a time, to fit the budget")
    return Plan(
        request=request,
        placement=placement,
        prediction=prediction,
        memory=memory_table(
            request.shape,
            request.budgets,
            placement,
            kv=_kv_nbytes(request),
            rows=max(placement.prefill_rows, request.rows, request.sequences),
        ),
        simulation=steady,
        notes=tuple(notes),
    )
