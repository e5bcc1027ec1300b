"""The speculation policy: before every pass, whether to draft, with what, and how much.

A ``Tuner`` belongs to a model and learns the seconds of a pass by its rows, a draft's seconds, and
each source's acceptance rate. A ``Run`` is one generation. It takes the source and tree size with
the most tokens per second, joins the proposals of all sources in one tree, and keeps the nodes
that pay for their rows. It never risks more time than ``TOLERANCE`` of plain decoding beyond what
it has gained in the same generation. An explicit tree size overrides it. It knows no model:
seconds in, plans out.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from localrt.speculative.cost_model import MARGIN, PassCost, SourceRecord, nodes_to_verify
from localrt.speculative.proposals import Proposals
from localrt.speculative.source import DEPTH, TreeSize
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


TOLERANCE = 0.015
"""The share of plain decoding's time that drafts may lose in a generation: what a user is promised
to lose at most, where nothing repeats and no draft is right.
"""
ASSUMED = 96
"""The assumed length of an answer with a higher limit; it bounds the loss at the start."""
REFRESH = 128
"""Passes after which a plain step is measured again: its time grows with the context."""
SIZES = ((1, 1), (2, 2), (4, 4), (8, 8), (16, 8), (32, 16), (64, 16), (128, 16), (256, 16))
"""Budget and depth of trees that take time to draft: chains, and wider trees where rows are cheap
because weights are streamed.
"""
REST = 0.99
"""The share of the evidence of acceptance that remains after a pass without drafts, a third after
100 passes: so a source that has failed is tried again.
"""
FEW = 8
"""Tokens that a draft may have to catch up with as a part of its first level."""
AHEAD_S = 0.005
"""Shorter waits leave no room for drafting: about one level of a draft of 0.5 billion weights."""
_PLAIN_FIRST = 2  # plain steps before the first draft
_LOOKUP = TreeSize(64, DEPTH)
# The share of what may be lost that one pass may cost, so that bad luck at first does not end it:
# in simulations of MTP, 0.91 and 0.98 of the best fixed size; with one half, 0.84 and 0.89.
_STAKE = 0.3
_NEW_TEXT = 0.5  # of the evidence of acceptance counts for the next generation's text


_SELDOM = 0.4  # chance of a first choice below which the reason names it


class Tuner:
    """What a model's generations have learned together. Thread-safe.

    ``sources`` maps names to the assumed cost of a draft level, as a share of a plain step, until
    one is measured: 0 for lookups, which cost next to nothing. ``mixture``: more tokens touch more
    experts. Passes have at most ``most_rows`` rows, but for trees of an explicit size.
    """

    def __init__(
        self, sources: Mapping[str, float], *, mixture: bool = False, most_rows: int = sys.maxsize
    ) -> None:
        self.most_rows = most_rows
        self.lock = threading.RLock()
        self.cost = PassCost(mixture=mixture)
        self.sources = {name: SourceRecord(level) for name, level in sources.items()}
        self.waits: deque[float] = deque(maxlen=7)
        """Seconds that the latest passes waited for weights and did not share with a draft."""

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
                source.acceptance.fade(_NEW_TEXT)
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
        self._trees: dict[str, TokenTree] = {}  # drafted for the next pass, by source
        self._proposals = Proposals()  # of these trees
        self._room = 0
        self._ready: Mapping[str, int] = {}
        self._missing: Mapping[str, int] = {}
        self._invested = 0.0  # seconds that drafts took to read the prompt
        self._ahead = 0  # passes during which a source drafted
        self._failures: dict[str, str] = {}

    def may_draft(self) -> bool:
        """Whether what was lost allows for drafting before the next pass."""
        with self._tuner.lock:
            plain = self._tuner.cost.plain
            return self._size is not None or plain is None or self._affordable(plain)

    def plan(
        self, room: int, ready: Mapping[str, int] = {}, missing: Mapping[str, int] = {}
    ) -> Plan | None:
        """Return what to draft for the next pass; None for a plain step. ``room`` bounds the nodes.

        ``ready`` maps sources to the levels that they have prepared, ``missing`` to the tokens that
        they must compute before they can draft.
        """
        with self._tuner.lock:
            cost = self._tuner.cost
            if self._size is None:
                room = min(room, self._tuner.most_rows - 1)
            self._room, self._ready, self._missing = room, ready, missing
            waiting = self._waiting()
            if self._size is not None:
                if not waiting or room < 1:
                    return None
                name = waiting[-1]  # the last one first, since it may fail
                budget = min(self._size.budget, room)
                return Plan(name, budget, self._size.depth, ready.get(name, 0))
            if cost.plain_count < _PLAIN_FIRST or room < 1 or self._since_plain >= REFRESH:
                return None
            for name in waiting:
                # Drafting is free: the tree itself decides what to verify.
                if self._cheap(name):
                    return Plan(name, min(room, _LOOKUP.budget), _LOOKUP.depth)
            return self._best()[0]

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
        with self._tuner.lock:
            self._trees[plan.source] = tree
            waiting = self._waiting()
            if self._size is not None:
                if waiting:
                    return None
                return merge((self._trees[name] for name in self._usable()), plan.budget)
            source = self._tuner.sources[plan.source]
            if fresh:
                seconds = min(seconds, self._draft_seconds(plan.source, plan.budget, plan.depth))
            self._draft_s += seconds
            passes = source.cost.passes(plan.depth, plan.ready)
            if passes and not (source.cheap or fresh):
                source.cost.add(plan.budget, passes, seconds)
            source.note(tree)
            self._proposals.add(plan.source, tree, source.acceptance)
            if source.cheap and any(map(self._cheap, waiting)):
                return None
            worth, rate = self._worthwhile(self._proposals.tree(self._room))
            if source.cheap and self._best()[1] > rate:
                return None
            return worth

    def overhead(self, seconds: float) -> None:
        """Record ``seconds`` spent on drafting that are in no call of ``drafted``."""
        with self._tuner.lock:
            self._lost += seconds

    def ahead(self, plan: Plan | None, tree: TokenTree) -> tuple[str, int] | None:
        """Return the source that drafts while the pass over ``tree`` runs, and its most steps; or
        None.
        """
        with self._tuner.lock:
            waits = self._tuner.waits
            if not waits or median(waits) < AHEAD_S:
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
                tuner.waits.append(waited_s - shared_s)
            elif tuner.cost.plain is not None:
                seconds = min(seconds, tuner.cost.seconds(rows))
            spent = seconds + self._draft_s
            self._draft_s = 0.0
            self._trees.clear()
            if self._size is not None:
                return
            if rows > 1:
                self._proposals.learn(tree, path)
                self._drafted += 1
                self._accepted += len(path)
            else:
                for name in self._names:
                    tuner.sources[name].acceptance.fade(REST)
            self._proposals.clear()
            plain = tuner.cost.plain or seconds
            self._tokens += emitted
            self._since_plain = 0 if rows == 1 else self._since_plain + 1
            if plan is not None:
                self._lost += spent - (emitted * plain if rows > 1 else seconds)

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

    def _affordable(self, seconds: float, stake: float = 1.0) -> bool:
        """Whether a pass of ``seconds`` may bring one token only, for a ``stake`` of what may still
        be lost.
        """
        tokens = max(self._tokens, min(self._limit, ASSUMED))
        left = TOLERANCE * tokens * self._plain - self._lost
        return seconds - self._plain <= stake * left

    def _usable(self) -> list[str]:
        return [name for name in self._names if name not in self._failures]

    def _waiting(self) -> list[str]:
        """The sources that have not drafted for the next pass."""
        return [name for name in self._usable() if name not in self._trees]

    def _cheap(self, name: str) -> bool:
        return self._tuner.sources[name].cheap

    def _best(self) -> tuple[Plan | None, float]:
        """Return the plan with the most expected tokens per second among sources whose drafts take
        time, and that number; None if plain decoding is as good.
        """
        cost, best, best_rate = self._tuner.cost, None, MARGIN / self._plain
        for name in self._usable():
            source = self._tuner.sources[name]
            if source.cheap:
                continue
            for budget, depth in SIZES:
                seconds = self._draft_seconds(name, budget, depth) + cost.seconds(1 + budget)
                rate = (1 + source.gain(budget, depth)) / seconds
                if budget > self._room or rate <= best_rate:
                    continue
                stake = _STAKE if budget > 1 else 1.0
                if self._affordable(seconds, stake) and self._worth_reading(name, rate):
                    best_rate = rate
                    pass_s = seconds - cost.seconds(1 + budget)
                    least = pass_s / source.cost.passes(depth) * rate / max(source.gain(1, 1), 0.3)
                    best = Plan(name, budget, depth, self._ready.get(name, 0), least)
        return best, best_rate

    def _worth_reading(self, name: str, rate: float) -> bool:
        """Whether ``rate`` saves twice the time that the source needs to read the prompt."""
        tokens, source, plain = self._missing.get(name, 0), self._tuner.sources[name], self._plain
        row = source.row_s
        if row is None:
            row = source.level * (self._tuner.cost.prompt_row or plain / 4)
        if tokens <= FEW or self._affordable(plain + tokens * row):
            return True
        left = min(self._limit - self._tokens, max(ASSUMED, self._tokens))
        return source.drafted and left * (plain - 1 / rate) > 2 * tokens * row

    def _draft_seconds(self, name: str, budget: int, depth: int) -> float:
        """Return the expected seconds of a draft; some of its levels may be ready already."""
        source = self._tuner.sources[name]
        each = source.cost.pass_s(budget)
        each = source.level * self._plain if each is None else each
        return each * source.cost.passes(depth, self._ready.get(name, 0))

    def _worthwhile(self, tree: TokenTree) -> tuple[TokenTree, float]:
        """Return the nodes of ``tree`` that bring more tokens than their rows cost time, and the
        tokens per second of their pass.
        """
        cost, plain = self._tuner.cost, self._plain
        order = np.lexsort((np.arange(len(tree)), tree.depths, -tree.scores))
        sums = np.cumsum(np.exp(tree.scores)[order])

        def affordable(count: int) -> bool:
            stake = _STAKE if count > 1 else 1.0
            return self._affordable(cost.seconds(1 + count) + self._draft_s, stake)

        best = nodes_to_verify(sums, plain, lambda n: cost.seconds(1 + n) - plain, affordable)
        gain = float(sums[best - 1]) if best else 0.0
        return tree.trim(best), (1 + gain) / cost.seconds(1 + best)

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
        if not any(source.drafted or not source.cheap for source in sources):
            return f"waiting, {names} has found no repeated text yet"
        chance = max(source.acceptance.first_choice for source in sources)
        if chance < _SELDOM:
            return f"off, drafts of {names} are seldom accepted ({chance:.0%} of first choices)"
        return f"off, drafts of {names} would cost more time than they save"
