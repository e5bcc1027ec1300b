"""Which models of a server give memory to another, by what they are used for and how often.

First give the models that nobody is expected to wait for soon, of these the one expected back last.
Nothing here measures or moves memory.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from localrt.engine.saved_caches import SAMPLES, expected_s

K = TypeVar("K", bound=Hashable)
_SOON_S = 600.0  # a model that somebody is expected to wait for by then is used often
_APART_S = 10.0  # uses that follow sooner are one: nothing could be gained in between


@dataclass(slots=True, eq=False)
class Uses:
    """The uses of a model for one purpose: ``count`` now, and how long it was ``away`` before each
    of the last, in seconds. ``last`` is when one ended.
    """

    count: int = 0
    last: float = -math.inf
    away: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))

    def begin(self, now: float) -> None:
        """Count a use that begins ``now``."""
        if not self.count and _APART_S <= now - self.last < math.inf:
            self.away.append(now - self.last)
        self.count += 1

    def back_s(self, now: float) -> float:
        """Return the seconds until the next use is expected; infinity before the first."""
        return 0.0 if self.count else expected_s(tuple(self.away), now - self.last)


def stay_s(away: Collection[float], least: float) -> float:
    """Return how long an unused model stays: ``least`` seconds, and longer as long as it is
    expected back within so many more.
    """
    stay = least
    for longer in sorted(away):
        if longer > stay and expected_s(away, stay) < least:
            stay = longer
    return stay


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """The bytes that a model can give: ``caches``, ``weights`` that it streams without, and the
    ``rest``, for which it is unloaded.

    ``wanted_s`` is the time until somebody is expected to wait for it, ``used_s`` until any use.
    ``kept``: whether the time that a user has set for it still runs; None: there is none.
    """

    caches: int = 0
    weights: int = 0
    rest: int = 0
    wanted_s: float = math.inf
    used_s: float = math.inf
    kept: bool | None = None

    @property
    def rank(self) -> int:
        """0 for the models that give first, 1 for those used often, 2 for those a user keeps."""
        return int(self.wanted_s <= _SOON_S) if self.kept is None else 2 * self.kept

    @property
    def most(self) -> int:
        """The bytes that it can give while it stays loaded."""
        return self.caches + self.weights


def giving_order(models: Mapping[K, Holding]) -> list[K]:
    """Return the models in the order in which they give."""
    return sorted(models, key=lambda name: (models[name].rank, -models[name].used_s))


def plan_room(models: Mapping[K, Holding], nbytes: int) -> dict[K, int]:
    """Return the bytes that each gives, together ``nbytes`` or as many as possible; a model that
    gives more than its ``most`` is unloaded.

    Of each rank, all shrink before one is unloaded. A higher rank gives what is still missing.
    """
    gifts: dict[K, int] = {}
    order = giving_order(models)
    for rank in range(3):
        group = [name for name in order if models[name].rank == rank]
        most = sum(models[name].most + models[name].rest for name in group)
        for name in reversed(group):  # those expected back soon are spared first
            if most - models[name].rest >= nbytes:
                most -= models[name].rest
            elif models[name].rest:
                gifts[name] = models[name].most + models[name].rest
        nbytes -= sum(gifts.get(name, 0) for name in group)
        for name in group:
            if name not in gifts and (gift := min(models[name].most, nbytes)) > 0:
                gifts[name] = gift
                nbytes -= gift
    return gifts
