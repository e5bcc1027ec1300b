"""Latency goals of requests, and which rows the next pass computes to meet them.

A chat is read while it is generated, a late completion is useless, and nobody waits for background
work. Rows of prompts and of background work are added to a pass as long as its expected time, based
on recent passes, meets the goals of the answers in it. This module does not know sequences.
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
    """The first token within ``first_s`` seconds, each further token within ``next_s``."""

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
    for request_class, goal in GOALS.items():
        if request_class == name:
            return goal
    names = ", ".join(GOALS)
    raise OptionError(f"{option('request_class')} must be one of {names}, is {name!r}")


_BLEND = 0.25  # weight of a new measurement in a running mean


class PassTimes:
    """The duration of recent passes, by number of rows."""

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, float]] = {}  # by bit length: mean rows, seconds

    def add(self, rows: int, seconds: float) -> None:
        """Record that a pass of ``rows`` took ``seconds``."""
        key = rows.bit_length()
        old_rows, old_seconds = self._means.get(key, (rows, seconds))
        self._means[key] = (
            old_rows + _BLEND * (rows - old_rows),
            old_seconds + _BLEND * (seconds - old_seconds),
        )

    def seconds(self, rows: int) -> float | None:
        """Return the expected seconds of a pass of ``rows``; None if no pass was measured.

        Outside the measured sizes, time is assumed proportional to rows: too long for larger
        passes, too short for smaller ones, which are therefore tried and measured.
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
        """Return (rows, seconds), both increasing."""
        points: list[tuple[float, float]] = []
        for rows, seconds in sorted(self._means.values()):
            points.append((rows, max(seconds, points[-1][1] if points else 1e-9)))
        return points


class UnreadPrompt(NamedTuple):
    """The unread part of a prompt, ``length`` tokens; its answer's first token is due at
    ``deadline``.
    """

    client: Hashable
    length: int
    goal: Goal
    deadline: float


# Passes are planned for this share of the shortest goal, since their times vary.
_MARGIN = 0.8
# The duration of a pass with background work only, which a new request may have to wait.
_BACKGROUND_S = 0.1
# However tight the goals, a pass may take this many times as long as without prompts, and has room
# for this many prompt rows: otherwise prompts would never be processed if passes are long. Both are
# lower if other models wait for the same cores.
_PROMPT_SLOWDOWN, _MIN_PROMPT_ROWS = 2.0, 16
# Background prompts may lengthen a pass by 10 %, or add one row per eight rows of other prompts.
_BACKGROUND_SLOWDOWN, _ROWS_PER_BACKGROUND_ROW = 1.1, 8


def rows_of_pass(
    answers: Sequence[Goal],
    prompts: Sequence[UnreadPrompt],
    times: PassTimes,
    *,
    most: int,
    guess: int,
    pass_number: int,
    others: int = 0,
) -> tuple[list[int], list[int]]:
    """Return which ``answers`` get a row in the next pass, and how many rows each prompt gets.

    A pass has at most ``most`` rows. While no pass has been measured, ``guess`` prompt rows are
    added to those of answers. Background answers that do not all fit rotate with ``pass_number``.
    The time is divided among this model and ``others`` that wait for the same cores.
    """
    limit = _MARGIN / (1 + others) * min((goal.next_s for goal in answers), default=math.inf)
    if limit == math.inf and all(prompt.goal.background for prompt in prompts):
        limit = _BACKGROUND_S

    def max_rows(rows: int) -> int:
        """The most rows of a pass that needs at least ``rows``."""
        seconds = times.seconds(max(rows, 1))
        if seconds is None:
            return rows + guess
        longest = max(limit, (1 + (_PROMPT_SLOWDOWN - 1) / (1 + 3 * others)) * seconds)
        return max(rows, times.rows_within(longest))

    background = [number for number, goal in enumerate(answers) if goal.background]
    chosen = [number for number, goal in enumerate(answers) if not goal.background]
    room = max(max_rows(len(chosen)) - len(chosen), -(-len(background) // 4))
    first = pass_number * room % len(background) if background else 0
    chosen = sorted([*chosen, *[*background[first:], *background[:first]][:room]])
    room = max_rows(len(chosen)) - len(chosen) if limit < math.inf else most
    room = min(most - len(chosen), max(room, _MIN_PROMPT_ROWS // (1 + others), len(prompts)))
    return chosen, _shares(prompts, room, len(chosen), times)


def _shares(
    prompts: Sequence[UnreadPrompt], room: int, answer_rows: int, times: PassTimes
) -> list[int]:
    """Divide ``room`` rows among prompts: the class with the earliest deadline first, background
    last. The pass also has ``answer_rows``.
    """
    shares = [0] * len(prompts)
    groups: dict[Goal, list[int]] = {}
    for number, prompt in enumerate(prompts):
        groups.setdefault(prompt.goal, []).append(number)
    mixed = len(groups) > 1 and any(goal.background for goal in groups)
    reserved = room // _ROWS_PER_BACKGROUND_ROW if mixed else 0  # for background prompts

    def order(goal: Goal) -> tuple[bool, float]:
        return goal.background, min(prompts[number].deadline for number in groups[goal])

    for goal in sorted(groups, key=order):
        taken = sum(shares)
        left = room - taken - (0 if goal.background else reserved)
        if goal.background and taken:
            longest = _BACKGROUND_SLOWDOWN * (times.seconds(answer_rows + taken) or 0.0)
            extra = times.rows_within(longest) - answer_rows - taken
            left = min(left, max(taken // _ROWS_PER_BACKGROUND_ROW, extra))
        group = [(prompts[number].client, prompts[number].length) for number in groups[goal]]
        for number, rows in zip(groups[goal], even_shares(group, left), strict=True):
            shares[number] = rows
    return shares


def even_shares(prompts: Sequence[tuple[Hashable, int]], room: int) -> list[int]:
    """Divide ``room`` rows equally among clients, then among each client's ``prompts`` (client,
    unread tokens). Rows that a prompt cannot use go to others.
    """
    totals: Counter[Hashable] = Counter()
    for client, length in prompts:
        totals[client] += length
    shares = [0] * len(prompts)
    for place, client in enumerate(sorted(totals, key=totals.__getitem__)):
        numbers = [number for number, prompt in enumerate(prompts) if prompt[0] == client]
        left = room // (len(totals) - place)
        for index, number in enumerate(sorted(numbers, key=lambda number: prompts[number][1])):
            shares[number] = min(prompts[number][1], left // (len(numbers) - index))
            left -= shares[number]
        room -= sum(shares[number] for number in numbers)
    return shares
