"""The cost model of speculation: the seconds of a target's pass by its rows, and of a draft's.

Both are medians of the latest few measurements, so that one disturbed pass changes nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from statistics import median

# Chosen, not measured: the measurements of a size that count, and, without a measured prompt, what
# another row costs, as a share of a plain step. In mixtures each row reads other experts.
_KEPT = 7
_ROW, _ROW_MIXTURE = 0.25, 0.5


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


def _between(x: float, xs: list[float], ys: list[float]) -> float:
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
