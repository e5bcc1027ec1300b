"""A pass that waits says so: others may use the processor meanwhile.

Whoever runs a pass gives it a check; one that is also a ``Waiter`` is told when the pass waits for
weights and when it goes on. It knows neither passes nor weights.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, runtime_checkable

__all__ = ["Waiter", "waiting"]


@runtime_checkable
class Waiter(Protocol):
    """A check that wants to know."""

    def __call__(self) -> None:
        """Raises to abandon the pass."""

    def waiting(self) -> AbstractContextManager[None]:
        """Held while the pass waits and computes nothing."""


def waiting(check: Callable[[], None] | None) -> AbstractContextManager[None]:
    """What to hold while waiting, for a check of either kind."""
    return check.waiting() if isinstance(check, Waiter) else nullcontext()
