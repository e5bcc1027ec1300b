"""The speculation policy: before every pass, whether to draft, with what, and how much.

A ``Tuner`` belongs to a model and learns the seconds of a pass by its rows, a draft's seconds, and
each source's acceptance rate. A ``Run`` is one generation: it takes the source and tree size with
the most tokens per second, and never risks more time than ``TOLERANCE`` of plain decoding beyond
what it has gained. It knows no model: seconds in, plans out.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from localrt.speculative.acceptance import AcceptanceRate, expected_tokens
from localrt.speculative.cost_model import DraftCost, PassCost
from localrt.speculative.source import DEPTH, TreeSize
from localrt.speculative.tree import TokenTree, merge

# Some constants cite ``python -m tests.speculative.worlds tuner.NAME=VALUE``: the speed as a share
# of the best fixed size's, the least and the mean of eight worlds. Today's are 0.881 and 0.949. The
# other constants are chosen, not measured.
TOLERANCE = 0.015
"""The share of plain decoding's time that drafts may lose in a generation: what a user is promised
to lose at most, where nothing repeats and no draft is right.
"""
ASSUMED = 96
"""The assumed length of an answer with a higher limit; it bounds the loss at the start."""
REFRESH = 128
"""Passes after which a plain step is measured again: its time grows with the context."""
MARGIN = 1.05
"""What drafting must be expected to gain, above the noise of passes. 1.0 and 1.1: 0.881, 0.948."""
REST = 0.99
"""The share of the evidence of acceptance that remains after a pass without drafts, a third after
100 passes: so a source that has failed is tried again.
"""
FEW = 8
"""Tokens that a draft may have to catch up with as a part of its first level."""
AHEAD_S = 0.005
"""Shorter waits leave no room for drafting: about one level of a draft of 0.5 billion weights."""
# Budget and depth of trees that take time to draft: chains, and wider trees where rows are cheap
# because weights are streamed. Every second one: 0.865, 0.935. The worlds have chains alone.
_SIZES = ((1, 1), (2, 2), (4, 4), (8, 8), (16, 8), (32, 16), (64, 16), (128, 16), (256, 16))
_LOOKUP = TreeSize(64, DEPTH)
_PLAIN_FIRST = 2  # plain steps before the first draft
# Of what may be lost, one pass of several draft tokens may cost this share, so that bad luck at
# first does not end drafting. 0.15: 0.872, 0.935; 0.6: 0.904, 0.944; 1.0: 0.858, 0.936.
_STAKE = 0.3
_NEW_TEXT = 0.5  # of the evidence of acceptance counts for the next generation's text


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


@dataclass(slots=True)
class SourceRecord:
    """What is known of one draft source."""

    level: float  # assumed cost of a draft level, in plain steps, until measured
    cost: DraftCost = field(default_factory=DraftCost)
    acceptance: AcceptanceRate = field(default_factory=AcceptanceRate)
    row_s: float | None = None  # seconds per token of catching up
    drafted: bool = False  # whether it has ever drafted a token

    @property
    def cheap(self) -> bool:
        """Whether its drafts cost next to nothing, as lookups do."""
        return self.level == 0

    def note(self, tree: TokenTree) -> None:
        """Record a drafted tree."""
        self.drafted = self.drafted or len(tree) > 0
        self.acceptance.proposed(tree)

    def gain(self, budget: int, depth: int) -> float:
        """Return the expected number of accepted tokens of a tree."""
        return expected_tokens(round(self.acceptance.first_choice, 2), budget, depth)


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

    def joined(self, trees: Mapping[str, TokenTree], most: int) -> TokenTree:
        """Return the ``most`` likeliest nodes of the trees that sources drafted for one pass.

        Scores become logarithms of expected acceptance. A token that two sources propose is one
        node, with the better one.
        """
        with self.lock:
            scored = [self.sources[name].acceptance.rescored(tree) for name, tree in trees.items()]
            return merge(scored, most)

    def learn(
        self, trees: Mapping[str, TokenTree], verified: TokenTree, path: Sequence[int]
    ) -> None:
        """Learn that ``path`` was accepted of what was ``verified`` of the sources' ``trees``."""
        with self.lock:
            for name, tree in trees.items():
                self.sources[name].acceptance.verified(tree, verified, path)

    def rest(self) -> None:
        """Let the evidence of acceptance fade in a pass without drafts."""
        for source in self.sources.values():
            source.acceptance.fade(REST)


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
            waiting = self._waiting()
            if self._size is not None:
                if not waiting or room < 1:
                    return None
                name = waiting[-1]  # the last one first, since it may fail
                budget = min(self._size.budget, room)
                return Plan(name, budget, self._size.depth, ready.get(name, 0))
            room = min(room, self._tuner.most_rows - 1)
            self._room, self._ready, self._missing = room, ready, missing
            early = self._tuner.cost.plain_count < _PLAIN_FIRST
            if early or room < 1 or self._since_plain >= REFRESH:
                return None
            for name in waiting:
                # Drafting is free: the tree itself decides what to verify.
                if self._source(name).cheap:
                    return Plan(name, min(room, _LOOKUP.budget), _LOOKUP.depth)
            return self._best()[0]

    def caught_up(self, source: str, tokens: int, seconds: float) -> None:
        """Record that ``source`` took ``seconds`` to compute ``tokens`` that it had missed."""
        with self._tuner.lock:
            self._invested += seconds
            if tokens > FEW and self._size is None:
                self._source(source).row_s = seconds / tokens

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
            source = self._source(plan.source)
            if fresh:
                seconds = min(seconds, self._draft_seconds(plan.source, plan.budget, plan.depth))
            self._draft_s += seconds
            passes = source.cost.passes(plan.depth, plan.ready)
            if passes and not (source.cheap or fresh):
                source.cost.add(plan.budget, passes, seconds)
            source.note(tree)
            if source.cheap and any(self._source(name).cheap for name in waiting):
                return None
            worth, rate = self._worthwhile(self._tuner.joined(self._trees, self._room))
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
            waits, names = self._tuner.waits, self._usable()
            if not waits or median(waits) < AHEAD_S:
                return None
            source = None
            if self._size is not None:
                source = names[-1] if names else None
            elif plan is not None and len(tree) and not self._source(plan.source).cheap:
                source = plan.source
            else:  # a draft that may be useful later reads the prompt meanwhile
                behind = (name for name in names if self._missing.get(name, 0) > FEW)
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
        tuner, rows, emitted = self._tuner, 1 + len(tree), 1 + len(path)
        with tuner.lock:
            if not fresh:
                tuner.cost.add(rows, seconds)
                tuner.waits.append(waited_s - shared_s)
            elif tuner.cost.plain is not None:
                seconds = min(seconds, tuner.cost.seconds(rows))
            trees, self._trees = self._trees, {}
            spent, self._draft_s = seconds + self._draft_s, 0.0
            if self._size is not None:
                return
            self._tokens += emitted
            usual = seconds
            if rows > 1:
                tuner.learn(trees, tree, path)
                usual = emitted * (tuner.cost.plain or seconds)
                self._drafted += 1
                self._accepted += len(path)
                self._since_plain += 1
            else:
                tuner.rest()
                self._since_plain = 0
            if plan is not None:
                self._lost += spent - usual

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

    def _source(self, name: str) -> SourceRecord:
        return self._tuner.sources[name]

    def _usable(self) -> list[str]:
        return [name for name in self._names if name not in self._failures]

    def _waiting(self) -> list[str]:
        """The sources that have not drafted for the next pass."""
        return [name for name in self._usable() if name not in self._trees]

    def _best(self) -> tuple[Plan | None, float]:
        """Return the plan with the most expected tokens per second among sources whose drafts take
        time, and that number; None if plain decoding is as good.
        """
        best, best_rate = None, MARGIN / self._plain
        for name in self._usable():
            source = self._source(name)
            for budget, depth in () if source.cheap else _SIZES:
                draft_s = self._draft_seconds(name, budget, depth)
                seconds = draft_s + self._tuner.cost.seconds(1 + budget)
                rate = (1 + source.gain(budget, depth)) / seconds
                if budget > self._room or rate <= best_rate:
                    continue
                stake = _STAKE if budget > 1 else 1.0
                if self._affordable(seconds, stake) and self._worth_reading(name, rate):
                    level_s = draft_s / source.cost.passes(depth)
                    least = level_s * rate / max(source.gain(1, 1), 0.3)
                    best = Plan(name, budget, depth, self._ready.get(name, 0), least)
                    best_rate = rate
        return best, best_rate

    def _worth_reading(self, name: str, rate: float) -> bool:
        """Whether ``rate`` saves twice the time that the source needs to read the prompt."""
        tokens, source, plain = self._missing.get(name, 0), self._source(name), self._plain
        row = source.row_s
        if row is None:
            row = source.level * (self._tuner.cost.prompt_row or plain / 4)
        if tokens <= FEW or self._affordable(plain + tokens * row):
            return True
        left = min(self._limit - self._tokens, max(ASSUMED, self._tokens))
        return source.drafted and left * (plain - 1 / rate) > 2 * tokens * row

    def _draft_seconds(self, name: str, budget: int, depth: int) -> float:
        """Return the expected seconds of a draft; some of its levels may be ready already."""
        source = self._source(name)
        each = source.cost.pass_s(budget)
        each = source.level * self._plain if each is None else each
        return each * source.cost.passes(depth, self._ready.get(name, 0))

    def _worthwhile(self, tree: TokenTree) -> tuple[TokenTree, float]:
        """Return the nodes of ``tree`` that bring more tokens than their rows cost time, and the
        tokens per second of their pass.
        """
        cost, plain = self._tuner.cost, self._plain

        def affordable(count: int) -> bool:
            stake = _STAKE if count > 1 else 1.0
            return self._affordable(cost.seconds(1 + count) + self._draft_s, stake)

        (part,), gain = nodes_that_pay(
            [tree], self._room, plain, lambda n: cost.seconds(1 + n) - plain, affordable
        )
        return part, (1 + gain) / cost.seconds(1 + len(part))

    def _why(self) -> str:
        plain, names = self._tuner.cost.plain, " and ".join(self._names)
        if self._failures and len(self._failures) == len(self._names):
            return f"off, {next(iter(self._failures.values()))}"
        if self._size is not None:
            return (
                f"{'+'.join(sorted(self._names))}, {self._size.budget} draft tokens a pass as asked"
            )
        if plain is None or self._tuner.cost.plain_count < _PLAIN_FIRST:
            return "off, still measuring"
        lost, usual = self._lost + self._invested, plain * self._tokens
        if self._drafted and lost < 0:
            each, speed = 1 + self._accepted / self._drafted, usual / max(usual + lost, 1e-9)
            when = ", drafted while weights load" if 2 * self._ahead > self._drafted else ""
            gained = f"{each:.1f} tokens a pass with drafts, {speed:.2f}x plain decoding"
            return f"{names}, {gained}{when}"
        sources = [self._source(name) for name in self._usable()]
        if not any(source.drafted or not source.cheap for source in sources):
            return f"waiting, {names} has found no repeated text yet"
        chance = max(source.acceptance.first_choice for source in sources)
        accepted = f"the target would accept {chance:.0%} of first choices"
        return f"off, drafts of {names} would cost more time than they save ({accepted})"


def nodes_that_pay(
    trees: Sequence[TokenTree],
    room: int,
    token_s: float,
    longer_s: Callable[[int], float],
    affordable: Callable[[int], bool],
) -> tuple[list[TokenTree], float]:
    """Return the part of each tree to verify in one pass, and the tokens that they should bring.

    Of all nodes the ``room`` likeliest are considered, and as many taken as bring more tokens than
    their rows cost time: a token is worth ``token_s``, and n nodes make the pass ``longer_s(n)``
    longer. If one number is not ``affordable``, no larger one is. Scores are logarithms of
    expected acceptance.
    """
    owner = np.repeat(np.arange(len(trees)), [len(tree) for tree in trees])
    scores = np.concatenate([tree.scores for tree in trees])
    order = np.argsort(-scores, kind="stable")[: max(room, 0)]
    sums = np.cumsum(np.exp(scores[order]))
    best, best_value = 0, 0.0
    count, most = 1, len(sums)
    while count <= most and affordable(count):
        value = float(sums[count - 1]) - MARGIN * longer_s(count) / token_s
        if value > best_value:
            best, best_value = count, value
        # Try all small numbers, then growing steps, and the whole tree.
        count = count + 1 if count == most else min(max(count + 1, count * 9 // 8), most)
    counts = np.bincount(owner[order[:best]], minlength=len(trees)).tolist()
    parts = [tree.trim(count) for tree, count in zip(trees, counts, strict=True)]
    return parts, float(sums[best - 1]) if best else 0.0
