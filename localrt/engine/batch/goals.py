"""When the readers of answers want their tokens, and which rows the next pass takes for that.

A chat is read as it is written, a completion is of use at once or never, background work is read by
programs. Rows of prompts and of background work fill a pass as long as nobody's next token comes
later than its goal, by what passes of so many rows have taken lately. Nothing here knows sequences.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias

from localrt.common.errors import OptionError
from localrt.common.option_names import option

RequestClass: TypeAlias = Literal["interactive", "completion", "background"]


@dataclass(frozen=True, slots=True)
class Goal:
    """The first token comes within ``first_s`` seconds, each further one within ``next_s``."""

    first_s: float = math.inf
    next_s: float = math.inf

    @property
    def background(self) -> bool:
        """Whether nobody waits for the next token."""
        return self.next_s == math.inf


GOALS: Mapping[RequestClass, Goal] = {
    "interactive": Goal(1.0, 0.2),
    "completion": Goal(0.5, 0.1),
    "background": Goal(),
}


def goal_of(name: str) -> Goal:
    """Return the goal of a class of requests.

    Raises:
        OptionError: there is no such class.
    """
    found = next((goal for known, goal in GOALS.items() if known == name), None)
    if found is None:
        known = ", ".join(GOALS)
        raise OptionError(f"{option('request_class')} must be one of {known}, is {name!r}")
    return found


_BLEND = 0.25  # weight of a new measurement in a running mean


class PassTimes:
    """The seconds of passes by their rows, as measured lately."""

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, float]] = {}  # rows and seconds, by a power of two

    def add(self, rows: int, seconds: float) -> None:
        """Record that a pass of ``rows`` took ``seconds``."""
        key = rows.bit_length()
        old_rows, old_seconds = self._means.get(key, (rows, seconds))
        self._means[key] = (
            old_rows + _BLEND * (rows - old_rows),
            old_seconds + _BLEND * (seconds - old_seconds),
        )

    def seconds(self, rows: int) -> float | None:
        """Return the seconds of a pass of ``rows``; None if none was measured.

        Outside the measured sizes it is taken to grow like the rows, which is more than it will be
        for more rows, and less for fewer: these are then measured.
        """
        points = self._points()
        for (fewer, short), (more, long) in pairwise(points):
            if fewer <= rows <= more:
                return short + (rows - fewer) / (more - fewer) * (long - short)
        if not points:
            return None
        fewer, short = points[0] if rows < points[0][0] else points[-1]
        return short * rows / fewer

    def rows_within(self, seconds: float) -> int:
        """Return the most rows of a pass that takes at most ``seconds``; 0 if none does."""
        points = self._points()
        if not points:
            return 0
        if seconds < points[0][1]:
            return int(points[0][0] * seconds / points[0][1])
        for (fewer, short), (more, long) in pairwise(points):
            if short <= seconds < long:
                return int(fewer + (seconds - short) / (long - short) * (more - fewer))
        return int(min(points[-1][0] * seconds / points[-1][1], 1 << 30))

    def _points(self) -> list[tuple[float, float]]:
        """Return rows and seconds, both rising."""
        points: list[tuple[float, float]] = []
        for rows, seconds in sorted(self._means.values()):
            points.append((rows, max(seconds, points[-1][1] if points else 1e-9)))
        return points


class Reading(NamedTuple):
    """A prompt of ``client`` that is being read: ``length`` tokens are left, the answer has a
    ``goal`` and its first token is wanted at ``deadline``.
    """

    client: Hashable
    length: int
    goal: Goal
    deadline: float


# Passes are planned for this share of the shortest goal: their times vary.
_MARGIN = 0.8
# While only background work runs, a pass takes about this long: others may come meanwhile.
_BACKGROUND_S = 0.1
# However tight the goals, a pass may take this many times as long as without prompts, and has room
# for so many rows of them: otherwise they would never be read where passes are long. Less where
# other models wait for the same cores.
_LONGER, _LEAST_ROWS = 2.0, 16
# Background prompts may make a pass that reads others' prompts this much longer, or take one row
# for so many of theirs.
_BESIDE, _SHARE = 1.1, 8


def rows_of_pass(
    answers: Sequence[Goal],
    prompts: Sequence[Reading],
    times: PassTimes,
    *,
    most: int,
    guess: int,
    turn: int,
    others: int = 0,
) -> tuple[list[int], list[int]]:
    """Return which ``answers`` get a row in the next pass, and how many rows each prompt gets.

    A pass has at most ``most`` rows. Before one was measured, ``guess`` rows of prompts are taken
    beside answers. ``turn`` counts passes: background answers that do not all fit take turns.
    The goals' time is shared with ``others``, models that compute on the same cores by turns.
    """
    limit = _MARGIN / (1 + others) * min((goal.next_s for goal in answers), default=math.inf)
    if limit == math.inf and all(prompt.goal.background for prompt in prompts):
        limit = _BACKGROUND_S

    def allowed(least: int) -> int:
        """The rows of a pass that has ``least`` in any case."""
        alone = times.seconds(max(least, 1))
        if alone is None:
            return least + guess
        longest = max(limit, (1 + (_LONGER - 1) / (1 + 3 * others)) * alone)
        return max(least, times.rows_within(longest))

    waiting = [number for number, goal in enumerate(answers) if goal.background]
    chosen = [number for number, goal in enumerate(answers) if not goal.background]
    room = max(allowed(len(chosen)) - len(chosen), -(-len(waiting) // 4))
    first = turn * room % len(waiting) if waiting else 0
    chosen = sorted([*chosen, *[*waiting[first:], *waiting[:first]][:room]])
    room = allowed(len(chosen)) - len(chosen) if limit < math.inf else most
    room = min(most - len(chosen), max(room, _LEAST_ROWS // (1 + others), len(prompts)))
    return chosen, _shares(prompts, room, len(chosen), times)


def _shares(prompts: Sequence[Reading], room: int, beside: int, times: PassTimes) -> list[int]:
    """Share ``room`` rows among prompts, the earliest deadlines of a class first, background last.

    ``beside`` rows of the pass are answers'.
    """
    shares = [0] * len(prompts)
    groups: dict[Goal, list[int]] = {}
    for number, prompt in enumerate(prompts):
        groups.setdefault(prompt.goal, []).append(number)
    kept = room // _SHARE if len(groups) > 1 and any(goal.background for goal in groups) else 0

    def order(goal: Goal) -> tuple[bool, float]:
        return goal.background, min(prompts[number].deadline for number in groups[goal])

    for goal in sorted(groups, key=order):
        taken = sum(shares)
        left = room - taken - (0 if goal.background else kept)
        if goal.background and taken:
            longer = _BESIDE * (times.seconds(beside + taken) or 0.0)
            left = min(left, max(taken // _SHARE, times.rows_within(longer) - beside - taken))
        asked = [(prompts[number].client, prompts[number].length) for number in groups[goal]]
        for number, rows in zip(groups[goal], even_shares(asked, left), strict=True):
            shares[number] = rows
    return shares


def even_shares(prompts: Sequence[tuple[Hashable, int]], room: int) -> list[int]:
    """Share ``room`` rows equally among clients, then among the prompts (client, tokens to read) of
    each; unused rows go to others.
    """
    totals: Counter[Hashable] = Counter()
    for client, length in prompts:
        totals[client] += length
    shares = [0] * len(prompts)
    for place, client in enumerate(sorted(totals, key=totals.__getitem__)):
        own = [number for number, prompt in enumerate(prompts) if prompt[0] == client]
        left = room // (len(totals) - place)
        for after, number in enumerate(sorted(own, key=lambda number: prompts[number][1])):
            shares[number] = min(prompts[number][1], left // (len(own) - after))
            left -= shares[number]
        room -= sum(shares[number] for number in own)
    return shares
