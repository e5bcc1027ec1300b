"""Decides, before every pass, whether to guess, with what, and how much: by measurement only.

A ``Tuner`` belongs to a model and learns the seconds of a pass by its rows, a draft's seconds, and
how often each source's guesses come true. A ``Run`` is one generation: it takes the plan with the
most tokens per second, keeps of what all sources guessed the nodes that pay for their rows, lets a
draft go on while passes wait for weights, and never risks more time than ``TOLERANCE`` of plain
decoding beyond what it has gained in the same generation. It knows no model: seconds in, plans out.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import numpy as np

from localrt.speculative.costs import GapWorth, Mixture, PassCost
from localrt.speculative.mixed import MixedTree
from localrt.speculative.policy import AHEAD_S, Ahead, Gaps, Plan, Policy
from localrt.speculative.tree import TokenTree
from localrt.speculative.worth import BUDGETS, DEPTHS, FIRST_WAIT, Source, node_counts

__all__ = ["MARGIN", "REFRESH", "TOLERANCE", "Run", "Tuner"]

# The share of plain decoding's time that attempts may lose in a generation.
TOLERANCE = 0.015
# An answer is taken to be as long as this where the limit is longer: what may be lost at its start.
_ASSUMED = 96
_PLAIN_FIRST = 2  # plain steps before the first attempt
REFRESH = 128  # passes after which a plain step is measured again
_LONGEST_WAIT = 512  # steps between attempts that are not expected to pay, in the end
_LOOKUP_NODES = 64
MARGIN = 1.02  # what is expected must be better than plain by this much
_MARGIN_RESIDENT = 1.08  # where a draft takes the processor and its caches from the target
_FEW = 8  # tokens that a draft may have to catch up with at no cost worth counting


class Tuner:
    """What a model's generations have in common. Thread-safe.

    ``sources`` are names, with the share of a plain step that a level of their draft is taken to
    cost until one was made: 0 of lookups, which cost next to nothing. ``streamed``: passes wait
    for weights. ``mixture``: more tokens touch more experts.
    """

    def __init__(
        self,
        sources: Mapping[str, float],
        *,
        streamed: bool = False,
        mixture: Mixture | None = None,
    ) -> None:
        self.lock = threading.RLock()
        self.cost = PassCost(streamed=streamed, mixture=mixture)
        self.gaps = GapWorth()
        self.sources = {name: Source(level == 0, level) for name, level in sources.items()}
        self.streamed = streamed

    @property
    def plain(self) -> float | None:
        """Seconds of a plain step; None before one was measured."""
        with self.lock:
            return self.cost.plain

    def prompt(self, rows: int, seconds: float) -> None:
        """A prompt of ``rows`` was computed."""
        with self.lock:
            self.cost.add_prompt(rows, seconds)

    def passed(self, rows: int, seconds: float) -> None:
        """A target pass of ``rows`` took ``seconds``, whoever asked for it."""
        with self.lock:
            self.cost.add(rows, seconds)

    def start(self, limit: int, sources: Sequence[str], *, in_gaps: bool = True) -> Run:
        """The policy of a generation of at most ``limit`` tokens that has these sources.

        ``in_gaps`` False: nothing is drafted while passes run.
        """
        return Run(self, limit, tuple(sources), in_gaps=in_gaps)


class Run(Policy):
    """See ``Policy``."""

    def __init__(
        self, tuner: Tuner, limit: int, sources: tuple[str, ...], *, in_gaps: bool = True
    ) -> None:
        self._tuner = tuner
        self._in_gaps = in_gaps
        self._names = sources
        self._limit = limit
        self._tokens = 0  # emitted by passes
        self._passes = 0
        self._since_plain = 0
        self._lost = 0.0  # seconds beyond plain decoding of as many tokens; negative: gained
        self._draft_s = 0.0  # spent for the pass to come
        self._guessed = 0  # passes with guesses
        self._came_true = 0
        self._forced = False
        self._tried: set[str] = set()  # lookups that were asked for the pass to come
        self._mixed = MixedTree()  # what was proposed for it
        self._room = 0
        self._ready: Mapping[str, int] = {}
        self._missing: Mapping[str, int] = {}
        self._invested = 0.0  # seconds in which a draft has caught up
        self._went_ahead = ""  # the source that did so during the pass before
        self._ahead = 0  # passes during which one did
        self._failures: dict[str, str] = {}

    # -- the policy ------------------------------------------------------------------------------

    def plan(
        self, room: int, ready: Mapping[str, int] = {}, missing: Mapping[str, int] = {}
    ) -> Plan | None:
        """See ``Policy``."""
        with self._tuner.lock:
            plain = self._tuner.cost.plain
            self._forced = False
            self._room, self._ready, self._missing = room, ready, missing
            self._judge_gaps()
            if plain is None or self._tuner.cost.plain_count < _PLAIN_FIRST or room < 1:
                return None
            if self._since_plain >= REFRESH:
                return None
            for name in self._usable():
                # Drafting is free: what to verify is decided on the tree itself.
                if self._tuner.sources[name].cheap and name not in self._tried:
                    return Plan(name, min(room, _LOOKUP_NODES), DEPTHS[-1])
            return self._model_plan(room)[0]

    def caught_up(self, source: str, tokens: int, seconds: float) -> None:
        """See ``Policy``."""
        with self._tuner.lock:
            self._invested += seconds
            if tokens > _FEW:
                self._tuner.sources[source].row_s = seconds / tokens

    def drafted(self, plan: Plan, tree: TokenTree, seconds: float) -> TokenTree | None:
        """See ``Policy``."""
        tuner = self._tuner
        with tuner.lock:
            source = tuner.sources[plan.source]
            self._draft_s += seconds
            if not source.cheap:
                # Of a tree that was begun before, one level less: it knows what it begins with.
                levels = max(tree.height, 1) - plan.ready - (plan.ready > 0)
                if levels >= 0:
                    source.cost.add(plan.budget, levels, seconds)
            if len(tree):
                source.note_tree(tree, plan)
            self._mixed.add(plan.source, tree, source.calibration)
            if source.cheap:
                self._tried.add(plan.source)
                if any(n not in self._tried for n in self._usable() if self._cheap(n)):
                    return None
            worth, rate = self._worthwhile(source, self._mixed.tree(self._room))
            if source.cheap:
                other, better = self._model_plan(self._room)
                if other is not None and (better > rate or self._forced):
                    return None
            return worth

    def thought(self, seconds: float) -> None:
        """See ``Policy``."""
        with self._tuner.lock:
            self._lost += seconds

    def ahead(self, plan: Plan | None, tree: TokenTree) -> Ahead | None:
        """See ``Policy``."""
        with self._tuner.lock:
            self._went_ahead = ""
            gaps = self._tuner.gaps
            if not self._in_gaps or not gaps.pays or gaps.waited(1 + len(tree)) < AHEAD_S:
                return None
            if plan is None or self._cheap(plan.source) or not len(tree):
                # A draft that could be of use reads the prompt meanwhile.
                behind = (n for n in self._usable() if self._missing.get(n, 0) > _FEW)
                return next((Ahead(name, 0) for name in behind), None)
            self._went_ahead = plan.source
            self._ahead += 1
            return Ahead(plan.source, 2 * plan.budget + plan.depth)

    def passed(self, gaps: Gaps) -> None:
        """See ``Policy``."""
        with self._tuner.lock:
            self._tuner.gaps.passed(gaps.rows, gaps.waited_s, gaps.shared_s, gaps.ahead)

    def verified(
        self, plan: Plan | None, tree: TokenTree, path: Sequence[int], seconds: float
    ) -> None:
        """See ``Policy``."""
        tuner = self._tuner
        with tuner.lock:
            rows = 1 + len(tree)
            emitted = 1 + len(path)
            spent = seconds + self._draft_s
            self._draft_s = 0.0
            self._tried.clear()
            if rows > 1:
                self._mixed.learn(tree, tuple(path))
            self._mixed.clear()
            plain = tuner.cost.plain or seconds
            self._passes += 1
            self._tokens += emitted
            self._since_plain = 0 if rows == 1 else self._since_plain + 1
            if plan is None:
                return
            self._lost += spent - emitted * plain if rows > 1 else spent - seconds
            if rows == 1:
                return
            self._guessed += 1
            self._came_true += len(path)
            source = tuner.sources[plan.source]
            if spent < emitted * plain:
                source.next_wait = FIRST_WAIT
                source.wait = 0
            else:
                source.wait = source.next_wait
                source.next_wait = min(2 * source.next_wait, _LONGEST_WAIT)

    def failed(self, source: str, why: str) -> None:
        """See ``Policy``."""
        self._failures[source] = why
        self._draft_s = 0.0

    @property
    def reason(self) -> str:
        """See ``Policy``."""
        with self._tuner.lock:
            return f"speculation: {self._why()}"

    # -- parts -----------------------------------------------------------------------------------

    @property
    def _plain(self) -> float:
        """Seconds of a plain step."""
        plain = self._tuner.cost.plain
        assert plain is not None, "a plan needs a plain step"
        return plain

    def _affordable(self, seconds: float) -> bool:
        """Whether a pass of ``seconds`` that brings one token loses no more than is allowed."""
        tokens = max(self._tokens, min(self._limit, _ASSUMED))
        return self._lost + seconds - self._plain <= TOLERANCE * self._plain * tokens

    def _judge_gaps(self) -> None:
        """What the pass before has prepared, in the seconds that it would take now."""
        name, self._went_ahead = self._went_ahead, ""
        if not name or name in self._failures:
            return
        levels = self._ready.get(name, 0)
        spared = 0.0
        if levels:
            spared = self._tuner.sources[name].cost.seconds(1, levels - 1) or 0.0
        self._tuner.gaps.spared(spared)

    def _usable(self) -> list[str]:
        return [name for name in self._names if name not in self._failures]

    def _cheap(self, name: str) -> bool:
        return self._tuner.sources[name].cheap

    def _model_plan(self, room: int) -> tuple[Plan | None, float]:
        """The best plan that costs a draft, with its tokens per second, or an attempt at one."""
        margin = MARGIN if self._tuner.streamed else _MARGIN_RESIDENT
        best, best_rate = None, margin / self._plain
        for name in self._usable():
            source = self._tuner.sources[name]
            if source.cheap:
                continue
            plan, rate = self._best_of(name, source, room)
            if plan is not None and rate > best_rate and self._worth_reading(name, source, rate):
                best, best_rate = plan, rate
            elif best is None and source.wait <= 0:
                best = self._attempt(name, source, room)
            source.wait -= 1
        return best, best_rate

    def _reading(self, name: str, source: Source) -> float:
        """Seconds that a source needs before it can draft: a prompt that it has not seen."""
        tokens = self._missing.get(name, 0)
        if tokens <= _FEW:
            return 0.0
        cost = self._tuner.cost
        row = source.row_s
        if row is None:
            row = source.level * (cost.prompt_row or self._plain / 4)
        return tokens * row

    def _worth_reading(self, name: str, source: Source, rate: float) -> bool:
        """Whether ``rate`` tokens per second are worth it: twice, for all that is still to come."""
        seconds, plain = self._reading(name, source), self._plain
        if self._affordable(plain + seconds):
            return True
        left = min(self._limit - self._tokens, max(_ASSUMED, self._tokens))
        return bool(source.gains) and left * (plain - 1 / rate) > 2 * seconds

    def _best_of(self, name: str, source: Source, room: int) -> tuple[Plan | None, float]:
        """The plan with the most expected tokens per second, and their number."""
        cost = self._tuner.cost
        best, best_rate = None, 0.0
        for budget in BUDGETS:
            if budget > room:
                break
            most, least = cost.seconds(1 + budget), cost.seconds(1 + budget, hopeful=True)
            for depth in DEPTHS:
                if depth > budget:
                    break
                draft = self._draft_seconds(name, source, budget, depth)
                if not self._affordable(draft + most):
                    continue
                rate = (1 + source.gain(budget, depth)) / (draft + least)
                if rate > best_rate:
                    best, best_rate = Plan(name, budget, depth, self._ready.get(name, 0)), rate
        return best, best_rate

    def _attempt(self, name: str, source: Source, room: int) -> Plan | None:
        """A cheap attempt with a source that is not expected to pay, where that may be risked."""
        cost = self._tuner.cost
        for budget, depth in ((8, 4), (4, 2), (2, 1)):
            draft = self._draft_seconds(name, source, budget, depth) + self._reading(name, source)
            if budget <= room and self._affordable(draft + cost.seconds(1 + budget)):
                self._forced = True
                return Plan(name, budget, depth, self._ready.get(name, 0))
        return None

    def _draft_seconds(self, name: str, source: Source, budget: int, depth: int) -> float:
        """Of a tree of that budget and depth, some levels of which may be there already."""
        levels, ready = depth, self._ready.get(name, 0)
        if ready:
            levels = depth - ready - 1
            if levels < 0:
                return 0.0
        known = source.cost.seconds(budget, levels)
        if known is not None:
            return known
        return source.level * self._plain * (levels + 1)

    def _worthwhile(self, source: Source, tree: TokenTree) -> tuple[TokenTree, float]:
        """The best nodes of a mixed tree, as many as bring more tokens than their rows cost time.

        With the tokens per second of their pass. ``source`` proposed the last of them.
        """
        cost, plain = self._tuner.cost, self._plain
        chances = np.exp(tree.scores)
        order = np.lexsort((np.arange(len(tree)), tree.depths, -tree.scores))
        sums = np.cumsum(chances[order])
        best, best_value = 0, 0.0
        for count in node_counts(len(tree)):
            if not self._affordable(cost.seconds(1 + count) + self._draft_s):
                break
            seconds = cost.seconds(1 + count, hopeful=True)
            # Time is worth plain decoding's tokens, and a little more: guesses must pay.
            value = float(sums[count - 1]) - MARGIN * (seconds - plain) / plain
            if value > best_value:
                best, best_value = count, value
        if not best and self._may_try(source):
            best = next((n for n in node_counts(min(8, len(tree))) if sums[n - 1] > 0), 0)
            if not self._affordable(cost.seconds(1 + best) + self._draft_s):
                best = 0
        gain = float(sums[best - 1]) if best else 0.0
        return tree.trim(best), (1 + gain) / cost.seconds(1 + best)

    def _may_try(self, source: Source) -> bool:
        """Whether it is time to see if a source that did not pay has become better."""
        if self._forced:
            return True
        if not source.cheap:
            return False
        source.wait -= 1
        return source.wait < 0

    def _why(self) -> str:
        cost = self._tuner.cost
        plain = cost.plain
        if self._failures and len(self._failures) == len(self._names):
            return f"off, {next(iter(self._failures.values()))}"
        if plain is None or cost.plain_count < _PLAIN_FIRST:
            return "off, still measuring"
        names = " and ".join(self._names)
        lost = self._lost + self._invested
        if self._guessed and lost < 0:
            spent = lost + plain * self._tokens
            speed = plain * self._tokens / spent if spent > 0 else 1.0
            each = 1 + self._came_true / self._guessed
            when = ", drafted while weights load" if 2 * self._ahead > self._guessed else ""
            return (
                f"{names}, {each:.1f} tokens a pass with guesses, {speed:.2f}x plain decoding{when}"
            )
        sources = [self._tuner.sources[n] for n in self._names if n not in self._failures]
        if all(source.cheap and not source.gains for source in sources):
            return f"waiting, {names} has nothing to guess from yet"
        gain = max(source.gain(8, 4) for source in sources if source.gains or not source.cheap)
        if gain < 0.5:
            return f"off, guesses of {names} seldom come true ({gain:.1f} of 8)"
        if not self._tuner.streamed:
            return "off, the model is resident and CPU-bound"
        return f"off, guesses of {names} would cost more time than they save"
