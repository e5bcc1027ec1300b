"""What passes cost, learnt while they run: seconds of a target pass by its rows, and of a draft.

Medians of the latest few measurements, so that one disturbed pass changes nothing. Between measured
sizes the curve is a straight line; beyond them it goes on at the prompt's seconds per row, or at a
pessimistic guess.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localrt.models.config import DecoderConfig

__all__ = ["DraftCost", "GapWorth", "Mixture", "PassCost"]

_KEPT = 7
# Before anything is known of larger passes, a row is taken to cost at most this share of a plain
# step (less where reading weights takes the time), or what a prompt's row did and half as much
# again, for the logits; in hope, the other shares of it.
_MOST, _MOST_STREAMED, _LOGITS = 0.5, 0.25, 1.5
_HOPED, _HOPED_UNKNOWN = 0.2, 0.04
_HOPED_EXPERTS = 0.5  # of the experts that tokens without any in common would touch
_BLEND = 0.2  # of a new measurement in a running mean
_TRIES, _REST = 8, 64  # passes before drafting ahead is judged, and after it has not paid


def _bucket(rows: int) -> int:
    """Sizes that count as the same: each on its own up to 8, then in steps of about a fifth."""
    return rows if rows <= 8 else 8 + round(math.log(rows / 8) / math.log(1.2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """A target of which ``used`` of ``count`` experts see a token, ``share`` of its work for it.

    Passes of several tokens touch more experts, and so read more weights.
    """

    count: int
    used: int
    share: float

    @classmethod
    def of(cls, config: DecoderConfig) -> Mixture | None:
        """That of a model, by the weights that a token meets; None of a dense one."""
        sparse = [mixture for mixture in config.mixtures if mixture is not None]
        if not sparse:
            return None
        hidden = config.hidden_size
        experts = sum(3 * m.inner * hidden * m.router.used for m in sparse)
        dense = config.layers - len(sparse)
        rest = 3 * dense * config.intermediate_size * hidden + config.vocab_size * hidden
        rest += sum(3 * m.shared * hidden for m in sparse)
        rest += sum((2 * a.heads + 2 * a.kv_heads) * a.head_dim * hidden for a in config.attention)
        first = sparse[0].router
        return cls(count=first.count, used=first.used, share=experts / (experts + rest))

    def growth(self, rows: float) -> float:
        """What the experts of a pass of ``rows`` cost of a plain pass, were they all different.

        That is the most: neighbouring tokens have experts in common.
        """
        missed: float = (1 - self.used / self.count) ** rows
        return self.share * self.count * (1 - missed) / self.used


class PassCost:
    """Seconds of a target pass by its rows. ``streamed``: the pass waits for weights.

    ``mixture`` where the target has experts.
    """

    def __init__(self, *, streamed: bool = False, mixture: Mixture | None = None) -> None:
        self._most = _MOST_STREAMED if streamed else _MOST
        self._mixture = mixture
        self._seen: dict[int, deque[tuple[int, float]]] = {}
        self._curve: list[tuple[float, float]] = []  # rows and seconds, both rising
        self._plain: float | None = None
        self._row: float | None = None  # seconds per row of a prompt
        self._prompt = 0  # and that prompt's rows: of short ones, a row costs more than it must

    def add(self, rows: int, seconds: float) -> None:
        """A pass of ``rows`` took ``seconds``."""
        self._seen.setdefault(_bucket(rows), deque(maxlen=_KEPT)).append((rows, seconds))
        self._curve = []  # made when it is asked for
        if rows == 1:
            times = sorted(s for _, s in self._seen[1])
            # A plain step that was disturbed would make guessing look better than it is.
            self._plain = times[len(times) // 4]

    def _points(self) -> list[tuple[float, float]]:
        """Rows and seconds, both rising."""
        if self._curve:
            return self._curve
        low = 0.0
        for key in sorted(self._seen):
            usual = median(s for _, s in self._seen[key])
            low = max(low, self._plain if key == 1 and self._plain is not None else usual)
            self._curve.append((median(r for r, _ in self._seen[key]), low))
        return self._curve

    def add_prompt(self, rows: int, seconds: float) -> None:
        """A long pass without logits: says what a row costs at most."""
        if rows >= 8 and 2 * rows >= self._prompt:
            self._row, self._prompt = seconds / rows, rows

    @property
    def prompt_row(self) -> float | None:
        """Seconds of a row of a prompt; None before one was computed."""
        return self._row

    @property
    def plain(self) -> float | None:
        """Seconds of a pass of one row; None before one was measured."""
        return self._plain

    @property
    def plain_count(self) -> int:
        """How many such passes were measured, up to those kept."""
        return len(self._seen.get(1, ()))

    def covers(self, rows: int) -> bool:
        """Whether a pass of so many rows, or of more, was measured."""
        return any(at >= rows for at, _ in self._points())

    def seconds(self, rows: int, *, hopeful: bool = False) -> float:
        """Of a pass of ``rows``, never less than of a smaller one.

        Beyond what was measured a pass is taken to cost what it does at most; ``hopeful``, what it
        may: else larger ones would never be tried.

        Raises:
            ValueError: nothing was measured yet.
        """
        points = self._points()
        if not points:
            raise ValueError("a pass must be measured first")
        below, low = points[0]
        plain = low  # of the fewest rows where a single one was never measured
        for at, value in points:
            if at >= rows:
                return value if at <= below else low + (value - low) * (rows - below) / (at - below)
            below, low = at, value
        first = points[0][0]
        row = self._most * plain
        if self._row is not None:
            row = min(plain, _LOGITS * self._row)
        if hopeful and below > first:
            row = min(row, (low - plain) / (below - first))
        elif hopeful:
            row *= _HOPED_UNKNOWN if self._row is None else _HOPED
        more = (rows - below) * row
        if self._mixture is not None:
            experts = plain * (self._mixture.growth(rows) - self._mixture.growth(below))
            more = max(more, _HOPED_EXPERTS * experts if hopeful else experts)
        return low + more


class DraftCost:
    """Seconds of a draft by its budget and depth: a draft takes about as many passes as levels."""

    def __init__(self) -> None:
        self._median: dict[int, float] = {}
        self._levels: dict[int, deque[float]] = {}  # by budget: seconds per level

    def add(self, budget: int, levels: int, seconds: float) -> None:
        """A tree of ``levels`` took ``seconds``; of levels that were there, none."""
        kept = self._levels.setdefault(budget, deque(maxlen=_KEPT))
        kept.append(seconds / (levels + 1))
        self._median[budget] = median(kept)

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return bool(self._levels)

    def seconds(self, budget: int, depth: int) -> float | None:
        """Of a tree of that budget and depth; None before anything was measured."""
        if not self._levels:
            return None
        nearest = min(self._levels, key=lambda b: abs(math.log(b / budget)))
        # More nodes in a level cost more, but less than as many passes.
        wider = math.sqrt(max(1.0, budget / nearest))
        return self._median[nearest] * wider * (depth + 1)


class GapWorth:
    """Whether drafting while passes wait is worth it: what the gaps are, and what came of them."""

    def __init__(self) -> None:
        self._waited: dict[int, deque[float]] = {}  # seconds, by rows
        self._saved = 0.0  # seconds of drafting that a pass's gaps have spared, in the mean
        self._lost = 0.0  # and that it has shared its processor for
        self._tries = 0
        self._rest = 0  # passes without, before it is tried again

    def passed(self, rows: int, waited: float, shared: float, ahead: bool) -> None:
        """A pass of ``rows`` waited, and shared the processor, for so many seconds."""
        self._waited.setdefault(_bucket(rows), deque(maxlen=_KEPT)).append(waited)
        self._rest -= 1
        if ahead:
            self._lost += _BLEND * (shared - self._lost)

    def spared(self, seconds: float) -> None:
        """The gaps of the pass before have made this much of the next draft unnecessary."""
        self._saved += _BLEND * (seconds - self._saved)
        self._tries += 1
        if self._tries >= _TRIES and self._saved < self._lost:
            self._tries, self._rest = 0, _REST

    def waited(self, rows: int) -> float:
        """Seconds that a pass of about ``rows`` is expected to wait; 0 before any was seen."""
        if not self._waited:
            return 0.0
        key = _bucket(rows)
        return median(self._waited[min(self._waited, key=lambda k: abs(k - key))])

    @property
    def pays(self) -> bool:
        """Whether it has not turned out to cost more than it saves, of late."""
        return self._rest <= 0
