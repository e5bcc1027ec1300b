"""The measured cost of target passes and drafts, and the acceptance of each source's tokens.

``PassCost`` and ``DraftCost`` keep medians of the latest few measurements, so that one disturbed
pass changes nothing. Between measured sizes a pass's curve is a straight line; beyond them it
continues at the prompt's seconds per row, or at a pessimistic estimate. ``Calibration`` learns how
reliable a source's probabilities are. The gain of an untried tree is estimated from smaller ones,
as if a tree were a chain. It decides nothing: ``tuner.py`` does.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import median

import numpy as np
import numpy.typing as npt

from localrt.speculative.tree import ROOT, TokenTree

_BINS = 12
_PRIOR = 4.0  # the number of tests that the stated probability counts for
_FADE = 0.98  # factor for a bin's counts at each new test


def _bin(conditional: float) -> int:
    """Return a probability's bin. Equal widths in log-odds separate 0.9 from 0.99."""
    p = min(max(conditional, 1e-4), 1 - 1e-4)
    odds = math.log(p / (1 - p))
    return min(max(int((odds + 6) * _BINS / 12), 0), _BINS - 1)


class Calibration:
    """How reliable one source's probabilities are.

    A draft token is tested when the target has accepted its parent. For tokens of about the same
    stated probability, tests and acceptances are counted together. Old counts fade, so that a
    source's improvement or decline shows.
    """

    def __init__(self) -> None:
        self._tests = [0.0] * _BINS
        self._hits = [0.0] * _BINS

    def believed(self, conditional: float) -> float:
        """Return the calibrated probability that a token is accepted if its parent is."""
        key = _bin(conditional)
        return (self._hits[key] + _PRIOR * conditional) / (self._tests[key] + _PRIOR)

    def probabilities(self, tree: TokenTree) -> npt.NDArray[np.float64]:
        """Return (n,) chances of acceptance. Children's sum to at most their parent's."""
        parents = tree.parents.tolist()
        own = [self.believed(c) for c in _conditionals(tree)]
        total: dict[int, float] = {}
        for parent, chance in zip(parents, own, strict=True):
            total[parent] = total.get(parent, 0.0) + chance
        result: list[float] = []
        for parent, chance in zip(parents, own, strict=True):
            above = 1.0 if parent == ROOT else result[parent]
            result.append(above * chance / max(1.0, total[parent]))
        return np.array(result, np.float64)

    def learn(self, tree: TokenTree, path: Sequence[int]) -> None:
        """Learn that ``path`` was accepted of ``tree`` (whose nodes were all verified)."""
        accepted = set(path)
        tested_under = {ROOT, *path}
        stated = _conditionals(tree)
        for node, parent in enumerate(tree.parents.tolist()):
            if parent in tested_under:
                key = _bin(stated[node])
                self._tests[key] = self._tests[key] * _FADE + 1
                self._hits[key] = self._hits[key] * _FADE + (node in accepted)


def _conditionals(tree: TokenTree) -> list[float]:
    """Return the stated probability of each node given its parent."""
    above = np.where(tree.parents == ROOT, 0.0, tree.scores[tree.parents])
    stated: list[float] = np.exp(np.minimum(tree.scores - above, 0.0)).tolist()
    return stated


# Shorter waits leave no room for drafting: about one level of a small draft.
AHEAD_S = 0.005
_KEPT = 7
# Until larger passes are measured, a row is assumed to cost at most this share of a plain step
# (less if weights are streamed), or 1.5 times a prompt's row, for the logits. The hopeful estimate
# uses the other shares.
_MOST, _MOST_STREAMED, _LOGITS = 0.5, 0.25, 1.5
_HOPED, _HOPED_UNKNOWN = 0.2, 0.04
# The pessimistic and the hopeful share for a mixture, whose larger passes touch more experts.
_MOST_MIXTURE, _HOPED_MIXTURE = 0.75, 0.35
_BLEND = 0.2  # weight of a new measurement in a running mean
_FIRST_WAIT, _LONGEST_WAIT = 4, 512


def _bucket(rows: int) -> int:
    """Return the bucket of a size: one each up to 8, then one per step of about a fifth."""
    return rows if rows <= 8 else 8 + round(math.log(rows / 8) / math.log(1.2))


class Retry:
    """When to retry what did not pay: after 4, 8, 16, ... 512 passes, counted down in ``wait``."""

    def __init__(self) -> None:
        self.wait = 0
        self._next = _FIRST_WAIT

    def tried(self, *, paid: bool) -> None:
        """Record the end of an attempt."""
        self.wait = 0 if paid else self._next
        self._next = _FIRST_WAIT if paid else min(2 * self._next, _LONGEST_WAIT)

    def renew(self) -> None:
        """Retry soon: what did not pay for the last text may pay for the next one."""
        self.wait = min(self.wait, _FIRST_WAIT)


class Backoff:
    """How many passes to skip before drafting again, after a draft that did not pay.

    Drafting takes at most ``share`` of the time of the passes between, and is skipped for at most
    ``longest`` passes: first for one, then for twice as many each time.
    """

    def __init__(self, share: float, longest: int) -> None:
        self._share, self._longest = share, longest
        self._left, self._most = 0, 1

    def due(self) -> bool:
        """Whether to draft before the next pass; counts that pass."""
        self._left -= 1
        return self._left < 0

    def drafting_took(self, seconds: float, plain: float | None, *, found: bool) -> None:
        """Record that drafting took ``seconds``; a pass without a draft takes ``plain``."""
        if found:
            self._most = 1
        elif plain:
            self._left = min(int(seconds / (self._share * plain)), self._most)
            self._most = min(2 * self._most, self._longest)


class PassCost:
    """The seconds of a target pass by its rows. ``streamed``: the pass waits for weights.

    ``mixture``: more tokens touch more experts.
    """

    def __init__(self, *, streamed: bool = False, mixture: bool = False) -> None:
        self._most = _MOST_STREAMED if streamed else _MOST
        self._mixture = mixture
        self._seen: dict[int, deque[tuple[int, float]]] = {}
        self._curve: tuple[list[float], list[float]] = ([], [])  # rows and seconds, both rising
        self.plain: float | None = None  # seconds of a pass of one row, once one was measured
        self._row: float | None = None  # seconds per row of a prompt
        self._prompt = 0  # the rows of that prompt: short prompts cost more per row

    def add(self, rows: int, seconds: float) -> None:
        """Record that a pass of ``rows`` took ``seconds``."""
        self._seen.setdefault(_bucket(rows), deque(maxlen=_KEPT)).append((rows, seconds))
        self._curve = ([], [])  # computed when needed
        if rows == 1:
            times = sorted(s for _, s in self._seen[1])
            # A disturbed plain step would make drafts look better than they are.
            self.plain = times[len(times) // 4]

    def _points(self) -> tuple[list[float], list[float]]:
        """Return rows and seconds, both rising."""
        sizes, times = self._curve
        for key in sorted(self._seen) if not sizes else ():
            usual = median(s for _, s in self._seen[key])
            low = self.plain if key == 1 and self.plain is not None else usual
            sizes.append(median(r for r, _ in self._seen[key]))
            times.append(max(low, times[-1] if times else 0.0))
        return sizes, times

    def add_prompt(self, rows: int, seconds: float) -> None:
        """Record a long pass without logits, which bounds the cost of a row."""
        if rows >= 8 and 2 * rows >= self._prompt:
            self._row, self._prompt = seconds / rows, rows

    @property
    def prompt_row(self) -> float | None:
        """The seconds of a prompt's row; None before one was computed."""
        return self._row

    @property
    def plain_count(self) -> int:
        """How many plain steps are measured and kept."""
        return len(self._seen.get(1, ()))

    def covers(self, rows: int) -> bool:
        """Whether a pass of at least this many rows was measured."""
        return max(self._points()[0], default=0) >= rows

    def seconds(self, rows: int, *, hopeful: bool = False) -> float:
        """Return the seconds of a pass of ``rows``, never less than of a smaller one.

        Beyond the measured sizes it assumes the highest cost or, if ``hopeful``, a lower one:
        otherwise larger passes would never be tried.

        Raises:
            ValueError: nothing was measured yet.
        """
        sizes, times = self._points()
        if not sizes:
            raise ValueError("a pass must be measured first")
        if rows <= sizes[-1]:
            return _between(rows, sizes, times)
        plain = times[0]  # of the fewest rows, if no single row was measured
        if self._mixture:
            row = (_HOPED_MIXTURE if hopeful else _MOST_MIXTURE) * plain
        else:
            row = self._most * plain if self._row is None else min(plain, _LOGITS * self._row)
            if hopeful and len(sizes) == 1:
                row *= _HOPED_UNKNOWN if self._row is None else _HOPED
        if hopeful and len(sizes) > 1:
            row = min(row, (times[-1] - plain) / (sizes[-1] - sizes[0]))
        return times[-1] + (rows - sizes[-1]) * row


def _between(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Interpolate one number, for which ``numpy.interp`` has too much overhead."""
    at = bisect_right(xs, x) - 1
    if at < 0:
        return ys[0]
    if xs[at] == x or at == len(xs) - 1:
        return ys[at]
    return (ys[at + 1] - ys[at]) / (xs[at + 1] - xs[at]) * (x - xs[at]) + ys[at]


class DraftCost:
    """Seconds of a draft by budget and depth: about a pass per level, or for all ``at_once``."""

    at_once = False

    def __init__(self) -> None:
        self._levels: dict[int, deque[float]] = {}  # by budget: seconds per level
        self._median: dict[int, float] = {}

    def add(self, budget: int, levels: int, seconds: float) -> None:
        """Record that a tree of ``levels`` took ``seconds``; levels made before do not count."""
        kept = self._levels.setdefault(budget, deque(maxlen=_KEPT))
        kept.append(seconds / self.passes(levels))
        self._median[budget] = median(kept)

    def seconds(self, budget: int, levels: float) -> float | None:
        """Return the seconds of a draft of that budget and height; None before any measurement."""
        if not self._median:
            return None
        nearest = min(self._median, key=lambda b: abs(math.log(b / budget)))
        # More nodes in a level cost more, but less than as many passes would.
        wider = math.sqrt(max(1.0, budget / nearest))
        return self._median[nearest] * wider * self.passes(levels)

    def passes(self, levels: float) -> float:
        """Return about how many passes a tree of ``levels`` takes."""
        return 1 if self.at_once else levels + 1


class GapGain:
    """Whether drafting while passes wait pays, by the length of waits and what it saved."""

    def __init__(self) -> None:
        self._waited: dict[int, deque[float]] = {}  # seconds, by rows
        self._retry = Retry()
        self._gain = AHEAD_S  # mean seconds of drafting saved, less the seconds shared

    def passed(self, rows: int, waited: float) -> None:
        """Record that a pass of ``rows`` ``waited`` for this many seconds."""
        self._waited.setdefault(_bucket(rows), deque(maxlen=_KEPT)).append(waited)
        self._retry.wait -= 1

    def drafted(self, spared: float, shared: float) -> None:
        """Record drafting during a pass: seconds it ``spared``, seconds of CPU it ``shared``."""
        self._gain += _BLEND * (spared - shared - self._gain)
        self._retry.tried(paid=self._gain >= 0)

    def pays(self, rows: int) -> bool:
        """Whether passes of about ``rows`` have waited long enough to draft in."""
        if not self._waited or self._retry.wait > 0:
            return False
        key = _bucket(rows)
        return median(self._waited[min(self._waited, key=lambda k: abs(k - key))]) >= AHEAD_S


BUDGETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
DEPTHS = (1, 2, 4, 8, 16)
MARGIN = 1.02
"""What is expected must be better than plain decoding by this much."""
_PRIOR_CHANCE = 0.7  # initial chance that a source's token is accepted


@dataclass(slots=True)
class Source:
    """What is known of one draft source."""

    level: float  # assumed cost of a draft level, in plain steps, until measured
    cost: DraftCost = field(default_factory=DraftCost)
    calibration: Calibration = field(default_factory=Calibration)
    gains: dict[tuple[int, int], float] = field(default_factory=dict)
    heights: dict[tuple[int, int], float] = field(default_factory=dict)
    row_s: float | None = None  # seconds per token of catching up
    retry: Retry = field(default_factory=Retry)  # for attempts that are not expected to pay

    @property
    def cheap(self) -> bool:
        """Whether its drafts cost next to nothing, as lookups do."""
        return self.level == 0

    def gain(self, budget: int, depth: int) -> float:
        """Return the expected number of accepted tokens of a tree."""
        known = self.gains.get((budget, depth))
        if known is not None:
            return known
        # From the largest smaller tree, as if it were a chain; if none is known, from the prior.
        smaller = [(b, d) for b, d in self.gains if b <= budget and d <= depth]
        chance = _PRIOR_CHANCE
        if smaller:
            b, d = max(smaller)
            chance = _chance(self.gains[b, d], d)
        return _chain(chance, min(depth, budget))

    def note_tree(self, tree: TokenTree, budget: int, depth: int) -> None:
        """Record what trees of this and smaller budgets and depths would have brought."""
        chances = self.calibration.probabilities(tree)
        order = np.lexsort((np.arange(len(tree)), -tree.scores))
        for d in (d for d in DEPTHS if d <= depth):
            deep = order[tree.depths[order] <= d]
            sums = np.concatenate([[0.0], np.cumsum(chances[deep])])
            highest = np.concatenate([[0], np.maximum.accumulate(tree.depths[deep])])
            for b in (b for b in BUDGETS if b <= budget):
                for known, new in ((self.gains, sums), (self.heights, highest)):
                    now = float(new[min(b, len(deep))])
                    old = known.get((b, d), now)
                    known[b, d] = old + _BLEND * (now - old)

    def height(self, budget: int, depth: int) -> float:
        """Return the expected levels of a tree, which may end before ``depth``."""
        return self.heights.get((budget, depth), depth)


def _chain(chance: float, levels: int) -> float:
    """Return the accepted tokens of a chain, if each has the same chance."""
    return sum(chance**level for level in range(1, levels + 1))


@lru_cache(maxsize=64)  # many sizes need the same few
def _chance(gain: float, levels: int) -> float:
    """Return the chance that makes a chain of ``levels`` bring ``gain``."""
    low, high = 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if _chain(middle, levels) < gain else (low, middle)
    return (low + high) / 2


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
