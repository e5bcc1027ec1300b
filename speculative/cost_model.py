"""Measured costs of target passes and drafts, and the acceptance rate of each draft source.

Costs are medians of the latest few measurements, so that one disturbed pass changes nothing. A
source's acceptance is one number: how many of its draft tokens are accepted for each that its
stated probabilities promise. ``expected_tokens`` says what a tree brings. Nothing is decided here:
``tuner.py`` does.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from heapq import heappop, heappush
from statistics import median

import numpy as np
import numpy.typing as npt

from localrt.speculative.tree import ROOT, TokenTree

FIRST_CHOICE = 0.7
"""The assumed chance that a draft's first choice is accepted, until it is measured: it is higher
for code, lower for prose.
"""
MARGIN = 1.05
"""What drafting is expected to gain must be above the noise of measured passes, 2 to 5 %."""
_KEPT = 7  # measurements of a size
# Without a measured prompt, another row is assumed to cost this share of a plain step's: more than
# on CPUs and GPUs, where it is 0.05 to 0.15. In mixtures each row reads other experts.
_ROW, _ROW_MIXTURE = 0.25, 0.5
_PRIOR = 4.0  # accepted tokens that the assumed acceptance counts for, against measured ones
_FADE = 0.98  # of the weight of earlier tests at each new one: the last 50 count
_BLEND = 0.2  # weight of a new number in a running mean
_LEAST = 1e-9  # the least probability, so that its logarithm is a valid score


class PassCost:
    """The seconds of a target pass by its rows. In a ``mixture``, more rows touch more experts."""

    def __init__(self, *, mixture: bool = False) -> None:
        self._mixture = mixture
        self._seen: dict[int, deque[tuple[int, float]]] = {}
        self._curve: tuple[list[float], list[float]] = ([], [])  # rows and seconds, both rising
        self.plain: float | None = None  # seconds of a pass of one row, once one was measured
        self.prompt_row: float | None = None  # seconds of a prompt's row, once one was computed
        self._prompt = 0  # the rows of that prompt: short prompts cost more per row

    def add(self, rows: int, seconds: float) -> None:
        """Record that a pass of ``rows`` took ``seconds``."""
        self._seen.setdefault(_bucket(rows), deque(maxlen=_KEPT)).append((rows, seconds))
        self._curve = ([], [])  # computed when needed
        if rows == 1:
            times = sorted(s for _, s in self._seen[1])
            # A disturbed plain step would make drafts look better than they are.
            self.plain = times[len(times) // 4]

    def add_prompt(self, rows: int, seconds: float) -> None:
        """Record a long pass without logits, which bounds the cost of a row."""
        if rows >= 8 and 2 * rows >= self._prompt:
            self.prompt_row, self._prompt = seconds / rows, rows

    @property
    def plain_count(self) -> int:
        """How many plain steps are measured and kept."""
        return len(self._seen.get(1, ()))

    def covers(self, rows: int) -> bool:
        """Whether a pass of at least this many rows was measured."""
        return max(self._points()[0], default=0) >= rows

    def seconds(self, rows: int) -> float:
        """Return the seconds of a pass of ``rows``, never less than of a smaller one.

        Between measured sizes the curve is a straight line. Beyond them a row costs what it does in
        a prompt.

        Raises:
            ValueError: nothing was measured yet.
        """
        sizes, times = self._points()
        if not sizes:
            raise ValueError("a pass must be measured first")
        if rows <= sizes[-1]:
            return _between(rows, sizes, times)
        row = (_ROW_MIXTURE if self._mixture else _ROW) * times[0] / sizes[0]
        if self.prompt_row is not None and not self._mixture:
            row = min(times[0], self.prompt_row)
        return times[-1] + (rows - sizes[-1]) * row

    def _points(self) -> tuple[list[float], list[float]]:
        """Return rows and seconds, both rising."""
        sizes, times = self._curve
        for key in sorted(self._seen) if not sizes else ():
            usual = median(s for _, s in self._seen[key])
            low = self.plain if key == 1 and self.plain is not None else usual
            sizes.append(median(r for r, _ in self._seen[key]))
            times.append(max(low, times[-1] if times else 0.0))
        return sizes, times


def _bucket(rows: int) -> int:
    """Return the bucket of a size: one each up to 8, then one per step of about a fifth."""
    return rows if rows <= 8 else 8 + round(math.log(rows / 8) / math.log(1.2))


def _between(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Interpolate one number, for which ``numpy.interp`` has too much overhead."""
    at = bisect_right(xs, x) - 1
    if at < 0:
        return ys[0]
    if xs[at] == x or at == len(xs) - 1:
        return ys[at]
    return (ys[at + 1] - ys[at]) / (xs[at + 1] - xs[at]) * (x - xs[at]) + ys[at]


class DraftCost:
    """Seconds of a draft's pass by the tree's budget: one for each level, or one ``at_once``."""

    at_once = False

    def __init__(self) -> None:
        self._seen: dict[int, deque[float]] = {}

    def add(self, budget: int, passes: float, seconds: float) -> None:
        """Record that the ``passes`` of a tree took ``seconds``."""
        self._seen.setdefault(budget, deque(maxlen=_KEPT)).append(seconds / passes)

    def pass_s(self, budget: int) -> float | None:
        """Return the seconds of a pass, from the nearest budget; None before any measurement."""
        if not self._seen:
            return None
        return median(self._seen[min(self._seen, key=lambda b: abs(math.log(b / budget)))])

    def passes(self, depth: int, ready: int = 0) -> int:
        """Return how many passes a tree takes of which ``ready`` levels are prepared."""
        if ready:
            return max(0, depth - ready)
        return 1 if self.at_once else depth + 1


class AcceptanceRate:
    """How many of one source's draft tokens are accepted, against what their scores promise.

    A draft token is tested when the target has accepted its parent and the token was verified. The
    evidence fades, so that a source that has failed is tried again.
    """

    def __init__(self) -> None:
        self._promised = self._accepted = 0.0
        self._stated = FIRST_CHOICE  # mean probability of first choices

    @property
    def ratio(self) -> float:
        """Accepted tokens for each that was promised."""
        return (self._accepted + _PRIOR) / (self._promised + _PRIOR)

    @property
    def first_choice(self) -> float:
        """The chance that a first choice is accepted if its parent is."""
        return min(1.0, self.ratio * self._stated)

    def proposed(self, tree: TokenTree) -> None:
        """Learn how sure the source is of the first choices of ``tree``."""
        node = first_choice(tree, ROOT)
        while node is not None:
            self._stated += _BLEND * (stated(tree, node) - self._stated)
            node = first_choice(tree, node)

    def tested(self, promised: float, *, accepted: bool) -> None:
        """Learn whether a token of that stated probability was accepted."""
        self.fade(_FADE)
        self._promised += promised
        self._accepted += accepted

    def fade(self, factor: float) -> None:
        """Let the evidence count for less."""
        self._promised *= factor
        self._accepted *= factor

    def rescored(self, tree: TokenTree) -> TokenTree:
        """Return the same nodes with the logarithms of expected acceptance as scores."""
        own = np.where(tree.parents == ROOT, 0.0, tree.scores[tree.parents])
        own = np.minimum(tree.scores - own + math.log(max(self.ratio, _LEAST)), 0.0)
        scores = np.maximum(own, math.log(_LEAST))
        for node, parent in enumerate(tree.parents.tolist()):
            if parent != ROOT:
                scores[node] += scores[parent]
        return replace(tree, scores=scores)


def first_choice(tree: TokenTree, node: int) -> int | None:
    """Return the likeliest child of ``node``; None for a leaf."""
    children = tree.children(node)
    return int(children[tree.scores[children].argmax()]) if len(children) else None


def stated(tree: TokenTree, node: int) -> float:
    """Return the stated probability of ``node`` given its parent."""
    parent = int(tree.parents[node])
    above = 0.0 if parent == ROOT else float(tree.scores[parent])
    return math.exp(min(float(tree.scores[node]) - above, 0.0))


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


@lru_cache(maxsize=2048)
def expected_tokens(acceptance: float, budget: int, depth: int) -> float:
    """Return the accepted tokens of the likeliest tree of ``budget`` nodes and ``depth`` levels.

    A first choice is accepted with probability ``acceptance`` at every level, a second one with the
    same share of the rest, and so on.
    """
    waiting, total = [(-acceptance, 1)], 0.0
    for _ in range(budget):
        if not waiting:
            break
        chance, level = heappop(waiting)
        total -= chance
        if 0.0 < acceptance < 1.0:
            heappush(waiting, (chance * (1 - acceptance), level))
        if level < depth:
            heappush(waiting, (chance * acceptance, level + 1))
    return total


def nodes_to_verify(
    sums: npt.NDArray[np.float64],
    token_s: float,
    longer_s: Callable[[int], float],
    affordable: Callable[[int], bool],
) -> int:
    """Return how many of the likeliest nodes to verify, which together bring ``sums`` tokens.

    It takes as many as bring more tokens than their rows cost time: a token is worth ``token_s``,
    and n nodes make the pass ``longer_s(n)`` longer. If one number is not ``affordable``, no larger
    one is.
    """
    best, best_value = 0, 0.0
    count, most = 1, len(sums)
    while count <= most and affordable(count):
        value = float(sums[count - 1]) - MARGIN * longer_s(count) / token_s
        if value > best_value:
            best, best_value = count, value
        # Try all small numbers, then growing steps, and the whole tree.
        count = count + 1 if count == most else min(max(count + 1, count * 9 // 8), most)
    return best
