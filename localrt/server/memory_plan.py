"""Decides which models of a server free memory for another, by their use.

No card has run this yet.

Models that nobody is expected to wait for soon come first, and of these the one whose next use is
expected last. Nothing here measures or moves memory.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from localrt.engine.saved_caches import SAMPLES, expected_s

K = TypeVar("K", bound=Hashable)
_SOON_S = 600.0  # if someone is expected to wait for a model by then, it is used often
_APART_S = 10.0  # uses that are closer count as one: freeing memory in between gains nothing


@dataclass(slots=True, eq=False)
class Uses:
    """The uses of a model for one purpose: ``count`` is the current number, ``away`` the seconds of
    disuse before each of the last uses, ``last`` the end of the latest.
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
    """Return how long an unused model stays loaded: ``least`` seconds, or longer if its next use is
    expected within that much more time.
    """
    stay = least
    for longer in sorted(away):
        if longer > stay and expected_s(away, stay) < least:
            stay = longer
    return stay


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """The bytes that a model can free: ``caches``, ``weights`` that it can stream instead, and the
    ``rest``, for which it must be unloaded.

    ``wanted_s`` is the expected time until someone waits for it, ``used_s`` until any use.
    ``kept``: whether the keep-alive time set by a user has not expired; None: none is set.
    """

    caches: int = 0
    weights: int = 0
    rest: int = 0
    wanted_s: float = math.inf
    used_s: float = math.inf
    kept: bool | None = None

    @property
    def rank(self) -> int:
        """0 for models that free memory first, 1 for often used ones, 2 for a user's choice."""
        return int(self.wanted_s <= _SOON_S) if self.kept is None else 2 * self.kept

    @property
    def most(self) -> int:
        """The bytes that it can free while it stays loaded."""
        return self.caches + self.weights


def giving_order(models: Mapping[K, Holding]) -> list[K]:
    """Return the models in the order in which they free memory."""
    return sorted(models, key=lambda name: (models[name].rank, -models[name].used_s))


def plan_room(models: Mapping[K, Holding], nbytes: int) -> dict[K, int]:
    """Return the bytes that each model frees, ``nbytes`` in all or as many as possible; a model
    that frees more than its ``most`` is unloaded.

    Within a rank, all models shrink before one is unloaded. Higher ranks free what is still
    missing.
    """
    gifts: dict[K, int] = {}
    order = giving_order(models)
    for rank in range(3):
        group = [name for name in order if models[name].rank == rank]
        most = sum(models[name].most + models[name].rest for name in group)
        for name in reversed(group):  # spare those whose next use is soonest
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
