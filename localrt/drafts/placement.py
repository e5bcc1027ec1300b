"""Chooses where a draft model goes: on the GPU, in RAM, or nowhere.

Each candidate reserves the draft's memory and plans the target with the rest. The gain from
drafting is forecast from a single acceptance rate; while a model runs, the tuner measures it, and
stops drafting if that is slower.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from heapq import heappop, heappush
from typing import Literal

from localrt.common.errors import OptionError
from localrt.common.formatting import format_bytes, format_rate, table
from localrt.offload.account import draft_nbytes
from localrt.offload.shapes import ModelShape
from localrt.planning.costs import Costs
from localrt.planning.forecast import Forecast, PlanRequest
from localrt.planning.search import find_forecast
from localrt.planning.simulate import simulate

ACCEPTANCE = 0.7
"""The assumed acceptance rate of a draft's first choices, if unknown; it is higher for code, lower
for prose.
"""

Place = Literal["draft on GPU", "draft on CPU", "no draft"]

DRAFT_CTX, DRAFT_NODES = 2048, 128
"""A draft's default context: tokens of history plus draft tokens."""

# Numbers of draft tokens; costs of more than 64 rows would count only one row of the head.
_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 63)
_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16)
_PLANNED_ROWS = (1, 6, 24)
_AS_GOOD = 0.98  # the first placement that reaches this share of the best speed is chosen
_CHOOSE_S = 4e-9  # CPU seconds per logit for choosing the likeliest tokens
_TOKEN_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PairCandidate:
    """One placement. ``plan`` is the target's plan; None if it does not fit, for the reason
    ``problem``.

    Rates are tokens per second: ``plain_tok_s`` without drafting, ``tok_s`` with or without,
    whichever is faster. For the best tree (``draft_tokens`` in ``levels``) the target takes
    ``verify_s`` and the draft ``draft_s``. The draft takes ``vram`` and ``ram`` bytes.
    """

    place: Place
    plan: Forecast | None = None
    problem: str = ""
    tok_s: float = 0.0
    plain_tok_s: float = 0.0
    draft_tokens: int = 0
    levels: int = 0
    tokens_per_pass: float = 1.0
    verify_s: float = 0.0
    draft_s: float = 0.0
    vram: int = 0
    ram: int = 0

    def words(self) -> str:
        """Return the placement in words, with the problem if it does not work."""
        on_gpu = self.plan is not None and self.plan.placement.uses_gpu
        if self.problem:
            return f"{self.place}: {self.problem}"
        if self.place == "draft on GPU":
            target = "on the rest of it and on the CPU" if on_gpu else "on the CPU"
            return f"the draft on the GPU, the target {target}"
        if self.place == "draft on CPU":
            return f"the draft on the CPU, the target on the {'GPU' if on_gpu else 'CPU, too'}"
        return "no draft"


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPlan:
    """All placements of ``draft`` and its target, in a fixed order, and the best of them."""

    draft: ModelShape
    draft_ctx: int
    acceptance: float
    assumed: bool
    candidates: tuple[PairCandidate, ...]
    best: PairCandidate

    def why(self) -> str:
        """Return the choice and its reason, in one line."""
        best = self.best
        others = [
            each.words() + ("" if each.plan is None else f" {format_rate(each.tok_s)}")
            for each in self.candidates
            if each is not best
        ]
        drafted = f" with {best.draft_tokens} draft tokens per pass" if best.draft_tokens else ""
        forecast = f"{format_rate(best.tok_s)} tok/s forecast{drafted} ({'; '.join(others)})"
        return f"{best.words()}: {forecast}"

    def table(self) -> list[str]:
        """Return a line per placement with the times of a pass; the best is marked."""
        headers = ("tok/s", "pass", "drafting", "draft tokens", "tokens/pass", "")
        rows = []
        for each in self.candidates:
            cells = ["-"] * 5
            if each.plan is not None:
                cells = [format_rate(each.tok_s), f"{1e3 * each.verify_s:.1f} ms", "-", "-", "1.00"]
            if each.draft_tokens:
                cells[2:4] = f"{1e3 * each.draft_s:.1f} ms", str(each.draft_tokens)
                cells[4] = f"{each.tokens_per_pass:.2f}"
            rows.append((*cells, each.words() + ("  (best)" if each is self.best else "")))
        return [
            f"With {self.draft.name} as its draft, of whose first choices "
            f"{100 * self.acceptance:.0f} % are right ({'assumed' if self.assumed else 'given'})",
            *(f"  {line}".rstrip() for line in table(rows, headers, "rrrrr").splitlines()),
        ]

    def to_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        names = (
            *("place", "problem", "tok_s", "plain_tok_s", "draft_tokens", "levels"),
            *("tokens_per_pass", "verify_s", "draft_s"),
        )
        return {
            "draft": self.draft.name,
            "draft_ctx": self.draft_ctx,
            "acceptance": self.acceptance,
            "acceptance_source": "assumed" if self.assumed else "given",
            "best": self.best.place,
            "why": self.why(),
            "candidates": [
                {name: getattr(each, name) for name in names}
                | {"words": each.words(), "fits": each.plan is not None}
                | {"draft_vram_bytes": each.vram, "draft_ram_bytes": each.ram}
                for each in self.candidates
            ],
        }


def plan_pair(
    target: PlanRequest,
    draft: ModelShape,
    *,
    acceptance: float | None = None,
    draft_ctx: int | None = None,
    draft_vram: int | None = None,
) -> PairPlan | None:
    """Forecast each placement of target and draft within ``target``'s budgets; choose the best.

    The draft has a context of ``draft_ctx`` tokens and takes ``draft_vram`` bytes on a GPU (None:
    estimated from its shape). Returns None if the target does not fit even alone.

    Raises:
        OptionError: ``acceptance`` is not from 0 to 1.
    """
    share = ACCEPTANCE if acceptance is None else acceptance
    if not 0.0 <= share <= 1.0:
        raise OptionError(f"acceptance must be from 0 to 1, is {share}")
    ctx = draft_ctx or min(min(target.ctx, DRAFT_CTX) + DRAFT_NODES, draft.context_length)
    ram, budgets = draft_nbytes(draft, ctx, target.kv_format), target.budgets
    vram = ram if draft_vram is None else draft_vram
    free = budgets.vram - budgets.context_bytes()
    found = []
    if target.uses_gpu:
        beside = replace(budgets, vram=budgets.vram - vram) if vram <= free else None
        empty = PairCandidate(place="draft on GPU", vram=vram)
        room = f"the GPU has {format_bytes(max(0, free))}"
        found.append((empty, beside, f"it needs {format_bytes(vram)} and {room}"))
    empty, beside = PairCandidate(place="draft on CPU", ram=ram), None
    if ram < budgets.ram:
        beside = budgets.less(ram)
    room = f"{format_bytes(budgets.ram)} of RAM may be used"
    found.append((empty, beside, f"it needs {format_bytes(ram)} and {room}"))
    found.append((PairCandidate(place="no draft"), budgets, ""))
    candidates = tuple(
        replace(empty, problem=problem)
        if beside is None
        else _forecast(empty, replace(target, budgets=beside), draft, share, ctx)
        for empty, beside, problem in found
    )
    most = max(each.tok_s for each in candidates)
    best = next(each for each in candidates if each.tok_s >= _AS_GOOD * most)
    if best.plan is None:
        return None
    return PairPlan(
        draft=draft,
        draft_ctx=ctx,
        acceptance=share,
        assumed=acceptance is None,
        candidates=candidates,
        best=best,
    )


def _forecast(
    empty: PairCandidate, target: PlanRequest, draft: ModelShape, acceptance: float, ctx: int
) -> PairCandidate:
    """Find the target's best plan in the remaining memory, and the best tree if it pays off."""
    best = replace(empty, problem="the target does not fit")
    drafted, on_gpu = empty.place != "no draft", empty.place == "draft on GPU"
    level_s = cache(partial(_level_s, draft, target, ctx, on_gpu=on_gpu))
    for rows in _PLANNED_ROWS if drafted else (1,):
        plan = find_forecast(replace(target, rows=rows))
        if plan is None:
            continue
        verify = cache(partial(_pass_s, plan))
        plain = 1 / verify(1)
        found = replace(empty, plan=plan, verify_s=verify(1), tok_s=plain, plain_tok_s=plain)
        for draft_tokens, levels, tokens in _trees(acceptance) if drafted else ():
            verify_s = verify(1 + draft_tokens)
            # The draft runs one pass for the root, and one per level that has children.
            draft_s = level_s(1) + (levels - 1) * level_s(-(-draft_tokens // levels))
            tok_s = tokens / (verify_s + draft_s)
            if tok_s > found.tok_s:
                found = replace(
                    found,
                    tok_s=tok_s,
                    draft_tokens=draft_tokens,
                    levels=levels,
                    tokens_per_pass=tokens,
                    verify_s=verify_s,
                    draft_s=draft_s,
                )
        best = max(best, found, key=lambda each: each.tok_s)
    return best


def _pass_s(plan: Forecast, rows: int) -> float:
    """Return the seconds of a pass of ``rows`` rows under the plan's placement."""
    return simulate(plan.request.costs(rows=rows), plan.placement, passes=2, warm_up=2).seconds


def _level_s(draft: ModelShape, target: PlanRequest, ctx: int, rows: int, *, on_gpu: bool) -> float:
    """Return the seconds of a resident draft's pass over ``rows`` nodes and choosing children.

    For a draft on a GPU, only token ids and logits cross the link.
    """
    machine, logits = target.machine, draft.sizes.vocab * rows
    costs = Costs(draft, machine, rows=rows, held=min(target.held_tokens, ctx))
    seconds = sum(costs.compute(unit, on_gpu=on_gpu) for unit in draft.units)
    if on_gpu:
        seconds += 2 * machine.link_latency_s + costs.copy(_TOKEN_BYTES * rows + 4.0 * logits)
    return seconds + _CHOOSE_S * logits


@cache
def _trees(acceptance: float) -> tuple[tuple[int, int, float], ...]:
    """Return the likeliest trees: draft tokens, levels, expected tokens per pass (target included).

    A draft's first choice is accepted with probability ``acceptance`` at every position, its second
    with the same share of the rest, and so on. Trees grow by the likeliest remaining node.
    """
    found = []
    for depth in _DEPTHS:
        waiting, tokens, levels = [(-acceptance, 1)], 1.0, 0
        for draft_tokens in range(1, _SIZES[-1] + 1):
            chance, level = heappop(waiting)
            tokens, levels = tokens - chance, max(levels, level)
            heappush(waiting, (chance * (1 - acceptance), level))
            if level < depth:
                heappush(waiting, (chance * acceptance, level + 1))
            if draft_tokens in _SIZES:
                found.append((draft_tokens, levels, tokens))
    return tuple(found)
