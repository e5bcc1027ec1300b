"""Decides, before every pass, whether to draft, with what, and how much: by measurement only.

A ``Tuner`` belongs to a model and learns the seconds of a pass by its rows, a draft's seconds, and
how often each source's draft tokens are accepted. A ``Run`` is one generation. It takes the plan
with the most tokens per second, joins the proposals of all sources in one tree, and keeps the nodes
that pay for their rows. It lets a draft go on while passes wait for weights, and never risks more
time than ``TOLERANCE`` of plain decoding beyond what it has gained in the same generation. An
explicit tree size overrides it. It knows no model: seconds in, plans out.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from localrt.speculative.cost_model import (
    BUDGETS,
    DEPTHS,
    MARGIN,
    Backoff,
    GapGain,
    PassCost,
    Source,
    nodes_to_verify,
)
from localrt.speculative.mixed_tree import MixedTree
from localrt.speculative.source import TreeSize
from localrt.speculative.tree import TokenTree, merge


@dataclass(frozen=True, slots=True)
class Plan:
    """Draft ``budget`` nodes with ``source``, ``depth`` deep; ``ready`` levels are prepared.

    A level behind tokens that are together less likely than ``least`` would not pay.
    """

    source: str
    budget: int
    depth: int
    ready: int = 0
    least: float = 0.0


# The share of plain decoding's time that attempts may lose in a generation.
TOLERANCE = 0.015
# The assumed length of an answer with a higher limit; it bounds the loss at the start.
_ASSUMED = 96
_BLEND = 0.2  # weight of a new measurement in a running mean
_PLAIN_FIRST = 2  # plain steps before the first attempt
REFRESH = 128  # passes after which a plain step is measured again
_LOOKUP_NODES = 64
# The share of plain decoding that drafting may take when no draft pays, and the most steps
# without drafting.
_DRAFTING, _LONGEST_BACKOFF = 0.005, 24
_MARGIN_RESIDENT = 1.08  # a draft takes the processor and its caches from the target
FEW = 8
"""Tokens that a draft may have to catch up with as a part of its first level."""
_ATTEMPTS = ((8, 4), (4, 2), (2, 1), (1, 1))  # budget and depth of uncertain attempts
_STAKE = 0.3  # the share of what may be lost that one attempt may cost
_LEAST_CHANCE = 0.3  # assumed chance of a draft token, however few were accepted


class Tuner:
    """What a model's generations have learned together. Thread-safe.

    ``sources`` maps names to the assumed cost of a draft level, as a share of a plain step, until
    one is measured: 0 for lookups, which cost next to nothing. ``streamed``: passes wait for
    weights. ``mixture``: more tokens touch more experts. Passes have at most ``most_rows`` rows,
    but for trees of an explicit size.
    """

    def __init__(
        self,
        sources: Mapping[str, float],
        *,
        streamed: bool = False,
        mixture: bool = False,
        most_rows: int = sys.maxsize,
    ) -> None:
        self.most_rows = most_rows
        self.lock = threading.RLock()
        self.cost = PassCost(streamed=streamed, mixture=mixture)
        self.gaps = GapGain()
        self.sources = {name: Source(level) for name, level in sources.items()}
        self.streamed = streamed
        self.fruitless_s = 0.0
        """Mean seconds of drafting that found nothing to verify."""

    def prompt(self, rows: int, seconds: float) -> None:
        """Record that a prompt of ``rows`` was computed."""
        with self.lock:
            self.cost.add_prompt(rows, seconds)

    def start(self, limit: int, sources: Sequence[str], *, size: TreeSize | None = None) -> Run:
        """Start the decisions of a generation of at most ``limit`` tokens with these sources.

        With ``size``, all sources draft for every pass, in one tree of that size.
        """
        with self.lock:
            for source in self.sources.values():
                source.retry.renew()
        return Run(self, limit, tuple(sources), size)


class Run:
    """The decisions of one generation, made before every pass and fed its result. In seconds."""

    def __init__(
        self, tuner: Tuner, limit: int, sources: tuple[str, ...], size: TreeSize | None
    ) -> None:
        self._tuner = tuner
        self._names = sources
        self._limit = limit
        self._size = size
        self._tokens = 0  # emitted by passes
        self._since_plain = 0
        self._lost = 0.0  # seconds more than plain decoding of as many tokens; negative: gained
        self._draft_s = 0.0  # spent on drafts for the next pass
        self._drafted = 0  # passes with draft tokens
        self._accepted = 0
        self._forced = False
        self._trees: dict[str, TokenTree] = {}  # drafted for the next pass, by source
        self._mixed = MixedTree()  # of these trees
        self._room = 0
        self._ready: Mapping[str, int] = {}
        self._missing: Mapping[str, int] = {}
        self._invested = 0.0  # seconds that drafts took to read the prompt
        self._went_ahead = ""  # the source that drafted during the last pass
        self._shared_s = 0.0  # seconds of it in which both computed
        self._ahead = 0  # passes during which a source drafted
        self._failures: dict[str, str] = {}
        self._backoff = Backoff(_DRAFTING, _LONGEST_BACKOFF)

    def backs_off(self) -> bool:
        """Whether to skip drafting before the next pass."""
        return not self._backoff.due()

    def plan(
        self, room: int, ready: Mapping[str, int] = {}, missing: Mapping[str, int] = {}
    ) -> Plan | None:
        """Return what to draft for the next pass; None for a plain step. ``room`` bounds the nodes.

        ``ready`` maps sources to the levels that they have prepared, ``missing`` to the tokens that
        they must compute before they can draft.
        """
        with self._tuner.lock:
            cost = self._tuner.cost
            self._forced = False
            if self._size is None:
                room = min(room, self._tuner.most_rows - 1)
            self._room, self._ready, self._missing = room, ready, missing
            waiting = [name for name in self._usable() if name not in self._trees]
            if self._size is not None:
                if not waiting or room < 1:
                    return None
                name = waiting[-1]  # the last one first, since it may fail
                budget = min(self._size.budget, room)
                return Plan(name, budget, self._size.depth, ready.get(name, 0))
            self._judge_gaps()
            if cost.plain_count < _PLAIN_FIRST or room < 1 or self._since_plain >= REFRESH:
                return None
            for name in waiting:
                # Drafting is free: the tree itself decides what to verify.
                if self._cheap(name):
                    return Plan(name, min(room, _LOOKUP_NODES), DEPTHS[-1])
            return self._model_plan(room)[0]

    def caught_up(self, source: str, tokens: int, seconds: float) -> None:
        """Record that ``source`` took ``seconds`` to compute ``tokens`` that it had missed."""
        with self._tuner.lock:
            self._invested += seconds
            if tokens > FEW and self._size is None:
                self._tuner.sources[source].row_s = seconds / tokens

    def drafted(
        self, plan: Plan, tree: TokenTree, seconds: float, *, fresh: bool = False
    ) -> TokenTree | None:
        """Return the part of the drafted trees to verify; an empty tree means a plain step.

        None: call ``plan`` again for another draft. ``fresh``: see ``verified``.
        """
        tuner = self._tuner
        with tuner.lock:
            self._trees[plan.source] = tree
            waiting = [name for name in self._usable() if name not in self._trees]
            if self._size is not None:
                if waiting:
                    return None
                return merge((self._trees[name] for name in self._usable()), plan.budget)
            source = tuner.sources[plan.source]
            if fresh:
                expected = self._draft_seconds(plan.source, source, plan.budget, plan.depth)
                seconds = min(seconds, expected)
            self._draft_s += seconds
            if not (source.cheap or fresh):
                # A tree with prepared levels needs one level less: its first one is ready.
                levels = max(tree.height, 1) - plan.ready - (plan.ready > 0)
                if levels >= 0:
                    source.cost.add(plan.budget, levels, seconds)
            if len(tree):
                source.note_tree(tree, plan.budget, plan.depth)
            self._mixed.add(plan.source, tree, source.calibration)
            if source.cheap and any(map(self._cheap, waiting)):
                return None
            worth, rate = self._worthwhile(source, self._mixed.tree(self._room))
            if source.cheap:
                other, better = self._model_plan(self._room)
                if other is not None and (better > rate or self._forced):
                    return None
            return worth

    def drafting_took(self, tree: TokenTree, seconds: float, charged: float) -> None:
        """Record that drafting ``tree`` took ``seconds``, ``charged`` of them counted already."""
        tuner = self._tuner
        with tuner.lock:
            self._lost += max(0.0, seconds - charged)
            if not len(tree):
                mean = tuner.fruitless_s
                tuner.fruitless_s += _BLEND * (seconds - mean) if mean else seconds
            self._backoff.drafting_took(tuner.fruitless_s, tuner.cost.plain, found=len(tree) > 0)

    def ahead(self, plan: Plan | None, tree: TokenTree) -> tuple[str, int] | None:
        """Return the source that drafts while the pass over ``tree`` runs, and its most steps; or
        None.
        """
        with self._tuner.lock:
            self._went_ahead = ""
            if not self._tuner.gaps.pays(1 + len(tree)):
                return None
            if self._size is not None:
                names = self._usable() if plan is not None else []
                source = names[-1] if names else None
            else:
                source = plan.source if plan is not None and len(tree) else None
                if source is None or self._cheap(source):
                    # A draft that may be useful later reads the prompt meanwhile.
                    behind = (n for n in self._usable() if self._missing.get(n, 0) > FEW)
                    return next(((name, 0) for name in behind), None)
            if source is None or plan is None:
                return None
            self._went_ahead = source
            self._ahead += 1
            return source, 2 * plan.budget + plan.depth

    def verified(
        self,
        plan: Plan | None,
        tree: TokenTree,
        path: Sequence[int],
        seconds: float,
        waited_s: float = 0.0,
        shared_s: float = 0.0,
        fresh: bool = False,
    ) -> None:
        """Record that a pass over ``tree`` took ``seconds``, and that ``path`` was accepted.

        It waited ``waited_s`` for weights, and computed for up to ``shared_s`` beside a draft. A
        plain step has no plan. A ``fresh`` pass counts as expected: later ones will be faster.
        """
        tuner = self._tuner
        with tuner.lock:
            rows, emitted = 1 + len(tree), 1 + len(path)
            if not fresh:
                tuner.cost.add(rows, seconds)
                tuner.gaps.passed(rows, waited_s)
            elif tuner.cost.plain is not None:
                seconds = min(seconds, tuner.cost.seconds(rows))
            self._shared_s = shared_s
            spent = seconds + self._draft_s
            self._draft_s = 0.0
            self._trees.clear()
            if self._size is not None:
                return
            if rows > 1:
                self._mixed.learn(tree, path)
            self._mixed.clear()
            plain = tuner.cost.plain or seconds
            self._tokens += emitted
            self._since_plain = 0 if rows == 1 else self._since_plain + 1
            if plan is None:
                return
            self._lost += spent - emitted * plain if rows > 1 else spent - seconds
            if rows > 1:
                self._drafted += 1
                self._accepted += len(path)
                tuner.sources[plan.source].retry.tried(paid=spent < emitted * plain)

    def failed(self, source: str, why: str) -> None:
        """Stop using a source that has failed."""
        self._failures[source] = why
        self._draft_s = 0.0

    @property
    def reason(self) -> str:
        """What was done and why, in one sentence."""
        with self._tuner.lock:
            return f"speculation: {self._why()}"

    # -- parts -----------------------------------------------------------------------------------

    @property
    def _plain(self) -> float:
        """The seconds of a plain step."""
        plain = self._tuner.cost.plain
        assert plain is not None, "a plan needs a plain step"
        return plain

    def _affordable(self, seconds: float, nodes: int = 1, *, lookup: bool = False) -> bool:
        """Whether a pass of ``seconds`` for ``nodes`` may bring one token only.

        Several nodes stake a part of what may still be lost, so that bad luck does not end it all;
        lookups, which are tried most often, leave half to drafts that cost something.
        """
        tokens = max(self._tokens, min(self._limit, _ASSUMED))
        share = 0.5 if lookup and not all(map(self._cheap, self._usable())) else 1.0
        left = share * TOLERANCE * self._plain * tokens - self._lost
        return seconds - self._plain <= (left if nodes == 1 else _STAKE * left)

    def _judge_gaps(self) -> None:
        """Credit drafting during the last pass with the seconds that it would take now."""
        name, self._went_ahead = self._went_ahead, ""
        if not name or name in self._failures:
            return
        levels = self._ready.get(name, 0)
        spared = self._tuner.sources[name].cost.seconds(1, levels - 1) if levels else None
        self._tuner.gaps.drafted(spared or 0.0, self._shared_s)

    def _usable(self) -> list[str]:
        return [name for name in self._names if name not in self._failures]

    def _cheap(self, name: str) -> bool:
        return self._tuner.sources[name].cheap

    def _model_plan(self, room: int) -> tuple[Plan | None, float]:
        """Return the best plan with a costly draft and its tokens per second, or an attempt."""
        margin = MARGIN if self._tuner.streamed else _MARGIN_RESIDENT
        best, best_rate = None, margin / self._plain
        for name in self._usable():
            source = self._tuner.sources[name]
            if source.cheap:
                continue
            plan, rate = self._best_of(name, source, room)
            if plan is not None and rate > best_rate and self._worth_reading(name, source, rate):
                best, best_rate = plan, rate
            elif best is None and source.retry.wait <= 0:
                best = self._attempt(name, source, room)
            source.retry.wait -= 1
        return best, best_rate

    def _reading(self, name: str, source: Source) -> float:
        """Return the seconds a source needs before it can draft, for a prompt it has not read."""
        tokens = self._missing.get(name, 0)
        if tokens <= FEW:
            return 0.0
        row = source.row_s
        if row is None:
            row = source.level * (self._tuner.cost.prompt_row or self._plain / 4)
        return tokens * row

    def _worth_reading(self, name: str, source: Source, rate: float) -> bool:
        """Whether ``rate`` saves twice the time of reading the prompt by the answer's end."""
        seconds, plain = self._reading(name, source), self._plain
        if self._affordable(plain + seconds):
            return True
        left = min(self._limit - self._tokens, max(_ASSUMED, self._tokens))
        return bool(source.gains) and left * (plain - 1 / rate) > 2 * seconds

    def _best_of(self, name: str, source: Source, room: int) -> tuple[Plan | None, float]:
        """Return the plan with the most expected tokens per second, and that number."""
        cost = self._tuner.cost
        size, best_rate = None, 0.0
        for budget in (budget for budget in BUDGETS if budget <= room):
            most, least = cost.seconds(1 + budget), cost.seconds(1 + budget, hopeful=True)
            for depth in (depth for depth in DEPTHS if depth <= budget):
                draft = self._draft_seconds(name, source, budget, depth)
                if not self._affordable(draft + most, budget):
                    continue
                rate = (1 + source.gain(budget, depth)) / (draft + least)
                if rate > best_rate:
                    size, best_rate = (budget, depth), rate
        return None if size is None else self._plan_for(name, *size, best_rate), best_rate

    def _plan_for(self, name: str, budget: int, depth: int, rate: float) -> Plan:
        """Return the plan of a costly source, where a second brings ``rate`` tokens."""
        source = self._tuner.sources[name]
        level = source.cost.seconds(budget, 0) or source.level * self._plain
        least = level * rate / max(source.gain(1, 1), _LEAST_CHANCE)
        return Plan(name, budget, depth, self._ready.get(name, 0), least)

    def _attempt(self, name: str, source: Source, room: int) -> Plan | None:
        """Return a cheap attempt with a source that is not expected to pay, if it is affordable."""
        cost = self._tuner.cost
        for budget, depth in _ATTEMPTS:
            draft = self._draft_seconds(name, source, budget, depth) + self._reading(name, source)
            if budget <= room and self._affordable(draft + cost.seconds(1 + budget), budget):
                self._forced = True
                return self._plan_for(name, budget, depth, 1 / self._plain)
        return None

    def _draft_seconds(self, name: str, source: Source, budget: int, depth: int) -> float:
        """Return the expected seconds of a draft; some of its levels may be ready already."""
        levels, ready = source.height(budget, depth), self._ready.get(name, 0)
        if ready:
            levels = levels - ready - 1
            if levels < 0:
                return 0.0
        known = source.cost.seconds(budget, levels)
        if known is not None:
            return known
        return source.level * self._plain * source.cost.passes(levels)

    def _worthwhile(self, source: Source, tree: TokenTree) -> tuple[TokenTree, float]:
        """Return the best nodes of a mixed tree, those that bring more tokens than their rows cost.

        Also returns the tokens per second of their pass. ``source`` proposed last.
        """
        cost, plain = self._tuner.cost, self._plain
        order = np.lexsort((np.arange(len(tree)), tree.depths, -tree.scores))
        sums = np.cumsum(np.exp(tree.scores)[order])

        def affordable(count: int) -> bool:
            seconds = cost.seconds(1 + count) + self._draft_s
            return self._affordable(seconds, count, lookup=source.cheap)

        def longer_s(count: int) -> float:
            return cost.seconds(1 + count, hopeful=True) - plain

        best = nodes_to_verify(sums, plain, longer_s, affordable)
        if not best and self._may_try(source):
            best = int(len(tree) > 0 and affordable(1))
        gain = float(sums[best - 1]) if best else 0.0
        return tree.trim(best), (1 + gain) / cost.seconds(1 + best)

    def _may_try(self, source: Source) -> bool:
        """Whether to try again a source that did not pay."""
        if self._forced or not source.cheap:
            return self._forced
        source.retry.wait -= 1
        return source.retry.wait < 0

    def _why(self) -> str:
        cost = self._tuner.cost
        plain = cost.plain
        if self._failures and len(self._failures) == len(self._names):
            return f"off, {next(iter(self._failures.values()))}"
        if self._size is not None:
            return (
                f"{'+'.join(sorted(self._names))}, {self._size.budget} draft tokens a pass as asked"
            )
        if plain is None or cost.plain_count < _PLAIN_FIRST:
            return "off, still measuring"
        names = " and ".join(self._names)
        lost = self._lost + self._invested
        if self._drafted and lost < 0:
            spent = lost + plain * self._tokens
            speed = plain * self._tokens / spent if spent > 0 else 1.0
            each = 1 + self._accepted / self._drafted
            when = ", drafted while weights load" if 2 * self._ahead > self._drafted else ""
            return (
                f"{names}, {each:.1f} tokens a pass with drafts, {speed:.2f}x plain decoding{when}"
            )
        sources = [self._tuner.sources[name] for name in self._usable()]
        if all(source.cheap and not source.gains for source in sources):
            return f"waiting, {names} has found no repeated text yet"
        gain = max(source.gain(8, 4) for source in sources if source.gains or not source.cheap)
        if gain < 0.5:
            return f"off, drafts of {names} are seldom accepted ({gain:.1f} of 8)"
        if not self._tuner.streamed:
            return "off, larger passes take too long for that"
        return f"off, drafts of {names} would cost more time than they save"
