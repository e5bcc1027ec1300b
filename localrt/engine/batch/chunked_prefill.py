"""Chunked prefill scheduler: which rows the next pass computes, and whose pass it is on a device.

Rows of prompts and of background work are added to a pass as long as its expected time, based on
recent passes, keeps the next tokens of interactive answers in time. Models that share a device
compute one pass at a time, each for the same share of the time. This module does not know
sequences.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias, get_args

from localrt.common.errors import OptionError
from localrt.common.option_names import option

RequestClass: TypeAlias = Literal["interactive", "background"]
CLASSES: tuple[RequestClass, ...] = get_args(RequestClass)


def is_background(name: str) -> bool:
    """Whether nobody waits for the tokens of requests of a class.

    Raises:
        OptionError: there is no such class.
    """
    if name not in CLASSES:
        names = ", ".join(CLASSES)
        raise OptionError(f"{option('request_class')} must be one of {names}, is {name!r}")
    return name == "background"


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
    """The unread part of a prompt, ``length`` tokens."""

    client: Hashable
    length: int
    background: bool = False


# The seconds that a pass should take at most while interactive answers wait for their next tokens,
# and while there is background work only, which a new request may have to wait for.
_INTERACTIVE_S, _BACKGROUND_S = 0.16, 0.1
# But a pass may take this many times as long as without prompts, and has room for this many prompt
# rows: otherwise prompts would never be processed if passes are long.
_PROMPT_SLOWDOWN, _MIN_PROMPT_ROWS = 2.0, 16
_ROWS_PER_BACKGROUND_ROW = 8  # of other prompts


def rows_of_pass(
    answers: Sequence[bool],
    prompts: Sequence[UnreadPrompt],
    times: PassTimes,
    *,
    most: int,
    guess: int,
    pass_number: int,
    others: int = 0,
) -> tuple[list[int], list[int]]:
    """Return which ``answers`` get a row in the next pass, and how many rows each prompt gets.

    ``answers`` says which are background work; if not all of these fit, they rotate with
    ``pass_number``. A pass has at most ``most`` rows. While no pass has been measured, ``guess``
    prompt rows are added to those of answers. The time is divided among this model and ``others``
    that compute on the same device.
    """
    interactive = [number for number, background in enumerate(answers) if not background]
    work = [number for number, background in enumerate(answers) if background]
    limit = None  # nobody waits for a next token
    if interactive:
        limit = _INTERACTIVE_S / (1 + others)
    elif all(prompt.background for prompt in prompts):
        limit = _BACKGROUND_S

    def spare(rows: int) -> int:
        """The most rows that a pass of ``rows`` has room for."""
        seconds = times.seconds(max(rows, 1))
        if seconds is None:
            return guess
        longest = max(limit or 0.0, (1 + (_PROMPT_SLOWDOWN - 1) / (1 + others)) * seconds)
        return max(0, times.rows_within(longest) - rows)

    room = len(work) if limit is None else max(spare(len(interactive)), -(-len(work) // 4))
    first = pass_number * room % len(work) if work else 0
    chosen = sorted([*interactive, *[*work[first:], *work[:first]][:room]])
    room = most if limit is None else max(spare(len(chosen)), _MIN_PROMPT_ROWS // (1 + others))
    room = min(most - len(chosen), max(room, len(prompts)))
    return chosen, _shares(prompts, room)


def _shares(prompts: Sequence[UnreadPrompt], room: int) -> list[int]:
    """Divide ``room`` rows among prompts: those of background work get what the others leave, and
    one row in eight at least.
    """
    shares = [0] * len(prompts)
    both = len({prompt.background for prompt in prompts}) == 2
    reserved = room // _ROWS_PER_BACKGROUND_ROW if both else 0
    for background in (False, True):
        left = room - sum(shares) - (0 if background else reserved)
        group = [number for number, each in enumerate(prompts) if each.background == background]
        if background and both:
            left = min(left, max(reserved, sum(shares) // _ROWS_PER_BACKGROUND_ROW))
        own = [(prompts[number].client, prompts[number].length) for number in group]
        for number, rows in zip(group, even_shares(own, left), strict=True):
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


_BETWEEN_S = 0.02  # a batch that is at work comes back for its next pass within this time


class PassTurns:
    """A fair lock for one device: one pass at a time, of the batch at work that has used the least
    time (start-time fair queueing, Goyal et al. 1996). Thread-safe.

    Two simultaneous passes on the same cores take longer than two consecutive ones, since each
    waits for threads that the other has displaced. The short passes of a small model get as much
    time as the long ones of a large one: by turns, each of its tokens would wait for one of those.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._changed = threading.Condition()
        self._now, self._busy = now, False
        self._waiting: list[Hashable] = []  # in order of arrival
        self._used: dict[Hashable, float] = {}  # seconds of each batch at work
        self._ended: dict[Hashable, float] = {}  # when its last pass did

    @contextmanager
    def turn(self, batch: Hashable = None) -> Iterator[int]:
        """Lock the device for a pass; yields how many other batches are at work.

        A ``batch`` is at work from its first pass until it ``leave``s. It begins with as much used
        time as the one with the least.
        """
        who = object() if batch is None else batch
        with self._changed:
            self._used.setdefault(who, min(self._used.values(), default=0.0))
            self._waiting.append(who)
            while self._busy or (wait_s := self._wait_s(who)) != 0:
                self._changed.wait(None if self._busy else wait_s)
            self._waiting.remove(who)
            self._busy, began = True, self._now()
            others = len(self._used.keys() - {who})
        try:
            yield others
        finally:
            with self._changed:
                self._busy, ended = False, self._now()
                if batch is None:
                    del self._used[who]
                elif who in self._used:
                    self._used[who] += ended - began
                    self._ended[who] = ended
                self._changed.notify_all()

    def leave(self, batch: Hashable) -> None:
        """Report that ``batch`` has nothing to compute."""
        with self._changed:
            self._used.pop(batch, None)
            self._ended.pop(batch, None)
            self._changed.notify_all()

    def _wait_s(self, who: Hashable) -> float | None:
        """Return how long ``who`` waits for one that has used less; None: until another's pass."""
        used = self._used[who]
        if min(self._waiting, key=self._used.__getitem__) is not who:
            return None
        between = [end for one, end in self._ended.items() if self._used[one] < used]
        return max(0.0, max(between) + _BETWEEN_S - self._now()) if between else 0.0
