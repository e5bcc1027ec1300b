"""Where a target and its draft should lie on a machine with a card: four ways, costed and compared.

Dovetail has the draft in the card's memory and the CPU verify; the other way round the draft takes
the CPU; both may share the card as far as its memory reaches; or there is no draft. Each is planned
as the planner plans the target alone, within what the draft leaves, for passes of as many rows as
guesses are verified in. It knows numbers, not models: what is loaded is ``localrt``'s to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, lru_cache
from math import comb
from typing import Any, Literal

from localrt.common.errors import OptionError
from localrt.common.formatting import format_bytes, format_rate, table
from localrt.offload.account import draft_nbytes
from localrt.offload.planner.draft_costs import DraftCosts
from localrt.offload.planner.plan import Plan, PlanRequest
from localrt.offload.planner.search import find_plan
from localrt.offload.planner.simulate import simulate
from localrt.offload.shapes import ModelShape

PRIOR_ACCEPTANCE = 0.7
"""Of a draft that nothing was measured of: what the tuner assumes as well."""

_MOST_DETOURS = 12


class AcceptanceSource(StrEnum):
    """Where an acceptance comes from."""

    ASSUMED = "assumed"
    MEASURED = "measured"
    GIVEN = "given"


Way = Literal["draft on card", "draft on CPU", "both on card", "no draft"]

_WORDS: dict[Way, str] = {
    "draft on card": "the draft on the card, the target verified by the CPU",
    "both on card": "the draft on the card, the target on what is left of it and on the CPU",
    "draft on CPU": "the target on the card, the draft on the CPU",
    "no draft": "no draft",
}
_CPU_WORDS = "draft and target on the CPU"
# The head of more than 64 rows is counted as a prompt's, which has one row.
_GUESSES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 63)
_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16)
_PLANNED_ROWS = (1, 6, 24)
# A simpler way is taken where it is as good as the best: the order is that of ``_WORDS``.
_AS_GOOD = 0.98
# Somebody has asked for the draft. While its worth is assumed, it is left out only where it would
# not pay with this acceptance either: else nothing would ever be measured.
_HOPED = 0.95


@dataclass(frozen=True, slots=True)
class GuessedTree:
    """``tokens`` that a pass brings, its own included, and the ``levels`` of the drafted tree."""

    guesses: int
    levels: int
    tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRequest:
    """``target`` is planned for with the budgets of both.

    ``draft_ctx`` is the longest history in tokens that the draft sees; ``draft_vram`` the bytes
    that it takes on the card (None: by its shape). ``acceptance`` is the share of first choices
    that come true; one that is assumed leaves no draft out that may pay.
    """

    target: PlanRequest
    draft: ModelShape
    draft_ctx: int = 2048
    draft_vram: int | None = None
    acceptance: float = PRIOR_ACCEPTANCE
    source: AcceptanceSource = AcceptanceSource.ASSUMED

    def __post_init__(self) -> None:
        if not 0.0 <= self.acceptance <= 1.0:
            raise OptionError(f"acceptance must be from 0 to 1, is {self.acceptance}")
        if self.draft_ctx < 1:
            raise OptionError(f"draft_ctx must be at least 1, is {self.draft_ctx}")

    def taken(self, *, on_card: bool) -> int:
        """Bytes of the draft, on the card or in RAM."""
        if on_card and self.draft_vram is not None:
            return self.draft_vram
        return draft_nbytes(self.draft, self.draft_ctx, self.target.kv_format)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairCandidate:
    """One way, and what is expected of it; seconds of a pass and of its tree, tokens per second.

    ``plan`` is the target's; None where it does not fit, and ``problem`` says why. ``guesses`` and
    ``levels`` are the best tree's, ``plain_tok_s`` the rate while nothing is guessed, and
    ``hoped_tok_s`` that of a draft whose guesses nearly all come true.
    """

    way: Way
    plan: Plan | None = None
    problem: str = ""
    guesses: int = 0
    levels: int = 0
    tokens_per_pass: float = 1.0
    verify_s: float = 0.0
    draft_s: float = 0.0
    plain_tok_s: float = 0.0
    hoped_tok_s: float = 0.0
    draft_vram: int = 0
    draft_ram: int = 0

    @property
    def tok_s(self) -> float:
        """Expected tokens per second; 0 where it does not fit."""
        if self.plan is None:
            return 0.0
        return self.tokens_per_pass / (self.verify_s + self.draft_s)

    @property
    def level_s(self) -> float:
        """Seconds of one of the draft's levels."""
        return self.draft_s / self.levels if self.levels else 0.0

    def words(self) -> str:
        """The way in words."""
        alone = self.plan is not None and not self.plan.request.uses_gpu
        return _CPU_WORDS if self.way == "draft on CPU" and alone else _WORDS[self.way]

    def outcome(self) -> str:
        """The way in words, and why it does not work."""
        return self.words() if self.plan is not None else f"{self.words()}: {self.problem}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPlan:
    """All ways, in a fixed order, and the best of them."""

    request: PairRequest
    candidates: tuple[PairCandidate, ...]
    best: PairCandidate

    def way(self, name: Way) -> PairCandidate | None:
        """The candidate of that name; None where the machine has no such way."""
        return next((each for each in self.candidates if each.way == name), None)

    def line(self) -> str:
        """The choice and its reason, in one line."""
        best = self.best
        text = f"{best.words()}: {format_rate(best.tok_s)} tok/s forecast"
        if best.guesses:
            text += f" with {best.guesses} guesses a pass"
        others = [
            each.outcome() + ("" if each.plan is None else f" {format_rate(each.tok_s)}")
            for each in self.candidates
            if each is not best
        ]
        return f"{text} ({'; '.join(others)})" if others else text

    def against(self) -> str:
        """Why no draft is the best way, in few words."""
        fitting = [each for each in self.candidates if each.guesses and each.plan is not None]
        if not fitting:
            problems = dict.fromkeys(each.problem for each in self.candidates if each.problem)
            return "; ".join(problems)
        best = max(fitting, key=lambda each: each.tok_s)
        return (
            f"{format_rate(self.best.tok_s)} tok/s are forecast without it, "
            f"{format_rate(best.tok_s)} with {best.words()}"
        )

    def table(self) -> list[str]:
        """A line for each way, the best marked, with what a pass takes."""
        request = self.request
        headers = ("tok/s", "pass", "drafting", "guesses", "tokens/pass", "")
        rows = [
            (*_cells(each), each.outcome() + ("  (best)" if each is self.best else ""))
            for each in self.candidates
        ]
        return [
            f"With {request.draft.name} as its draft, of whose first choices "
            f"{100 * request.acceptance:.0f} % come true ({request.source})",
            *(f"  {line}".rstrip() for line in table(rows, headers, "rrrrr").splitlines()),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "draft": self.request.draft.name,
            "draft_ctx": self.request.draft_ctx,
            "acceptance": self.request.acceptance,
            "acceptance_source": str(self.request.source),
            "best": self.best.way,
            "why": self.line(),
            "candidates": [_as_dict(each) for each in self.candidates],
        }


def plan_pair(request: PairRequest) -> PairPlan | None:
    """The ways that there are, and the best; None where not even the target alone fits."""
    candidates = tuple(_candidates(request))
    *drafted, plain = candidates
    best = max(drafted, key=lambda each: each.tok_s)
    worth = best.tok_s
    if request.source is AcceptanceSource.ASSUMED:
        worth = max(worth, *(each.hoped_tok_s for each in drafted))
    if plain.tok_s > worth:
        best = plain
    if best.plan is None:
        return None
    ways = [plain] if best is plain else drafted
    chosen = next(each for each in ways if each.tok_s >= _AS_GOOD * best.tok_s)
    return PairPlan(request=request, candidates=candidates, best=chosen)


def _candidates(request: PairRequest) -> Iterator[PairCandidate]:
    target = request.target
    budgets = target.budgets
    if target.uses_gpu:
        vram = request.taken(on_card=True)
        left = budgets.vram - budgets.context_bytes() - vram
        for way in ("draft on card", "both on card"):
            if left < 0:
                problem = (
                    f"it needs {format_bytes(vram)} and the card has "
                    f"{format_bytes(max(0, budgets.vram - budgets.context_bytes()))}"
                )
                yield PairCandidate(way=way, problem=problem, draft_vram=vram)
                continue
            share = 0 if way == "draft on card" else budgets.vram - vram
            beside = replace(target, budgets=replace(budgets, vram=share))
            yield _best(request, way, beside, DraftCosts(request.draft, target.machine, True))
    ram = request.taken(on_card=False)
    if budgets.ram > ram:
        beside = replace(target, budgets=budgets.less(ram))
        yield _best(
            request, "draft on CPU", beside, DraftCosts(request.draft, target.machine, False)
        )
    else:
        problem = f"it needs {format_bytes(ram)} and {format_bytes(budgets.ram)} of RAM may be used"
        yield PairCandidate(way="draft on CPU", problem=problem, draft_ram=ram)
    yield _best(request, "no draft", target, None)


def _best(
    request: PairRequest, way: Way, target: PlanRequest, drafting: DraftCosts | None
) -> PairCandidate:
    """The best of the target's placements and of the trees for each."""
    empty = PairCandidate(way=way)
    if drafting is not None and drafting.on_card:
        empty = replace(empty, draft_vram=request.taken(on_card=True))
    elif drafting is not None:
        empty = replace(empty, draft_ram=request.taken(on_card=False))
    best: PairCandidate | None = None
    for rows in _PLANNED_ROWS if drafting is not None else (1,):
        plan = find_plan(replace(target, rows=rows))
        if plan is None:
            continue
        found = _best_tree(request, replace(empty, plan=plan), plan, drafting)
        hoped = max(found.hoped_tok_s, 0.0 if best is None else best.hoped_tok_s)
        if best is None or found.tok_s > best.tok_s:
            best = found
        best = replace(best, hoped_tok_s=hoped)
    if best is None:
        problem = "the target does not fit" + (" beside it" if drafting is not None else "")
        return replace(empty, problem=problem)
    return best


def _best_tree(
    request: PairRequest, placed: PairCandidate, plan: Plan, drafting: DraftCosts | None
) -> PairCandidate:
    """The tree that makes most of a placement."""

    @cache
    def verify(rows: int) -> float:
        """Seconds of a pass of so many rows under the plan's placement."""
        costs = plan.request.costs(rows=rows)
        return simulate(costs, plan.placement, passes=2, warm_up=2).seconds

    plain = replace(placed, verify_s=verify(1), plain_tok_s=1 / verify(1))
    if drafting is None:
        return plain
    held = min(plan.request.held_tokens, request.draft_ctx)

    def seconds(tree: GuessedTree) -> tuple[float, float]:
        return verify(1 + tree.guesses), drafting.tree(tree.guesses, tree.levels, held)

    hoped = max(tree.tokens / sum(seconds(tree)) for tree in _trees(_HOPED))
    best = max(_trees(request.acceptance), key=lambda tree: tree.tokens / sum(seconds(tree)))
    verify_s, draft_s = seconds(best)
    return replace(
        plain,
        guesses=best.guesses,
        levels=best.levels,
        tokens_per_pass=best.tokens,
        verify_s=verify_s,
        draft_s=draft_s,
        hoped_tok_s=hoped,
    )


def _trees(acceptance: float) -> Iterator[GuessedTree]:
    """The trees to choose from."""
    for guesses in _GUESSES:
        for depth in _DEPTHS:
            tree = guessed_tree(acceptance, guesses, depth)
            if tree.levels < depth:
                break  # no deeper than the last
            yield tree


@lru_cache(maxsize=4096)
def guessed_tree(acceptance: float, guesses: int, depth: int) -> GuessedTree:
    """The best tree of ``guesses`` nodes, at most ``depth`` deep: a forecast, the tuner measures.

    A draft's first choice is taken to come true with one probability ``p`` at every position, its
    second choice with that share of the rest, and so on. A node whose path takes ``n`` detours
    (choices after the first) on ``d`` levels comes true with probability ``p**d * (1 - p)**n``, and
    there are ``C(d - 1 + n, n)`` such nodes.
    """
    p = acceptance
    kinds = [
        (p**level * (1 - p) ** detours, level, comb(level - 1 + detours, detours))
        for level in range(1, depth + 1)
        for detours in range(_MOST_DETOURS)
    ]
    # Of equally likely nodes the higher ones: a parent comes before its children.
    kinds.sort(key=lambda kind: (-kind[0], kind[1]))
    left, levels, tokens = guesses, 0, 1.0
    for chance, level, count in kinds:
        taken = min(count, left)
        if not taken:
            break
        left -= taken
        levels = max(levels, level)
        tokens += taken * chance
    return GuessedTree(guesses, levels, tokens)


def _cells(each: PairCandidate) -> tuple[str, ...]:
    if each.plan is None:
        return ("-",) * 5
    drafted = each.guesses > 0
    return (
        format_rate(each.tok_s),
        f"{1e3 * each.verify_s:.1f} ms",
        f"{1e3 * each.draft_s:.1f} ms" if drafted else "-",
        str(each.guesses) if drafted else "-",
        f"{each.tokens_per_pass:.2f}",
    )


def _as_dict(each: PairCandidate) -> dict[str, Any]:
    return {
        "way": each.way,
        "words": each.words(),
        "fits": each.plan is not None,
        "problem": each.problem,
        "tok_s": each.tok_s,
        "plain_tok_s": each.plain_tok_s,
        "hoped_tok_s": each.hoped_tok_s,
        "guesses": each.guesses,
        "levels": each.levels,
        "tokens_per_pass": each.tokens_per_pass,
        "verify_s": each.verify_s,
        "draft_s": each.draft_s,
        "draft_vram_bytes": each.draft_vram,
        "draft_ram_bytes": each.draft_ram,
        "rows": None if each.plan is None else each.plan.request.rows,
    }
