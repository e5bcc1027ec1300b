"""Which of the sessions that nobody uses stays, and which goes."""

from __future__ import annotations

import pytest

from localrt.engine.pool import IdleSessions
from tests.engine.fake_session import ScriptedSession


def session(first: int, length: int) -> ScriptedSession:
    made = ScriptedSession(lambda n: n)
    made.tokens = [first, *range(1, length)]
    return made


@pytest.mark.parametrize(
    ("lengths", "goes"),
    [
        ([100, 10, 50], 1),  # the one that is read again soonest
        ([100, 50, 10], 1),  # not the latest, though it is the shortest
        ([50, 50, 50], 0),
        ([100, 10], 1),  # a long conversation stays, where only one can
        ([10, 100], 0),
        ([10], 0),
    ],
)
def test_the_one_that_goes(lengths: list[int], goes: int) -> None:
    idle = IdleSessions()
    kept = [session(100 + number, length) for number, length in enumerate(lengths)]
    for one in kept:
        idle.add(one)
    assert idle.evict() is kept[goes]
    assert list(idle) == kept[:goes] + kept[goes + 1 :]


def test_the_latest_stays_though_another_holds_its_tokens() -> None:
    """A short prompt whose beginning a longer text holds, which is not trimmed for it."""
    idle = IdleSessions()
    kept = [session(100, 90), session(101, 50), session(100, 20)]
    for one in kept:
        idle.add(one)
    assert idle.evict() is kept[1]
