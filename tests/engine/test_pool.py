"""Caches of those who wait: a conversation finds its own again, and they are held as long as it
pays and given up in the right order.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

import localrt
from localrt.engine.cache_retention import KvKeeper
from localrt.engine.pool import IdleSessions, SessionPool
from localrt.engine.saved_caches import Tier
from tests.engine.fake_session import ScriptedEngine, ScriptedSession
from tests.models.tiny import save_tiny, tokens


def use(pool: SessionPool, prompt: list[int]) -> ScriptedSession:
    with pool.lease(prompt) as session:
        session.trim(0)
        session.extend(prompt)
        assert isinstance(session, ScriptedSession)
        return session


def test_longest_prefix() -> None:
    pool = SessionPool(ScriptedEngine(), 50)
    a, b = use(pool, [1, 2, 3, 4]), use(pool, [9, 8, 7, 6])
    assert a is not b
    assert use(pool, [9, 8, 7, 6, 5]) is b
    assert use(pool, [1, 2, 3, 4, 5]) is a


@pytest.mark.parametrize("name", ["llama", "qwen3.5"])
def test_branch(name: str, tmp_path: Path) -> None:
    """It copies what it shares, and leaves the other."""
    save_tiny(name, tmp_path)
    with localrt.load(tmp_path, ctx=256, draft="off") as model:
        options = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
        prompt = tokens(200, seed=3)
        branch = prompt[:90] + tokens(30, seed=4)
        alone = model.generate(token_ids=branch, **options).token_ids
        with localrt.load(tmp_path, ctx=256, draft="off") as other:
            other.generate(token_ids=prompt[:88], **options)  # a state is kept there
            first = other.generate(token_ids=prompt, **options)
            branched = other.generate(token_ids=branch, **options)
            assert branched.token_ids == alone
            assert 88 <= branched.metrics.cached_tokens <= 90
            again = other.generate(token_ids=prompt, **options)
            assert again.token_ids == first.token_ids
            assert again.metrics.cached_tokens == len(prompt) - 1


def test_keep() -> None:
    engine = ScriptedEngine()
    pool = SessionPool(engine, 50, keep=2)
    first, second = use(pool, [1]), use(pool, [2])
    assert use(pool, [3]) is first
    assert use(pool, [2, 2]) is second
    with pool.lease([1]) as one, pool.lease([2]) as two, pool.lease([3]) as three:
        assert len({one, two, three}) == 3  # more may run at once than stay
    assert [session.closed for session in engine.sessions].count(False) == 2
    with pool.lease([4]):
        pool.close()
    assert all(session.closed for session in engine.sessions)


def session(first: int, length: int) -> ScriptedSession:
    made = ScriptedSession(lambda n: n)
    made.tokens = [first, *range(1, length)]
    return made


@pytest.mark.parametrize(
    ("sessions", "goes"),
    [
        ([(0, 100), (1, 10), (2, 50)], 1),  # the one that is read again soonest
        ([(0, 50), (1, 50), (2, 50)], 0),
        ([(0, 100), (1, 10)], 1),  # a long conversation stays, where only one can
        ([(0, 90), (1, 50), (0, 20)], 1),  # nor a short one whose beginning another holds
    ],
)
def test_evict(sessions: list[tuple[int, int]], goes: int) -> None:
    idle, kept = IdleSessions(), [session(100 + first, length) for first, length in sessions]
    for one in kept:
        idle.add(one)
    assert idle.evict() is kept[goes]
    assert list(idle) == kept[:goes] + kept[goes + 1 :]


class Waiter:
    """A conversation with a cache of so many bytes."""

    def __init__(self, nbytes: int = 100, *, parks: bool = True) -> None:
        self.kv_nbytes = nbytes
        self.parks = parks
        self.parked = threading.Event()
        self.tiers: list[Tier] = []

    def try_park(self, to: Tier) -> bool:
        if self.parks:
            self.tiers.append(to)
            self.kv_nbytes = 0
            self.parked.set()
        return self.parks


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def keeper(room: int = 10**9, price: float = 0.0, clock: Clock | None = None) -> KvKeeper:
    return KvKeeper(room=lambda: room, price=lambda _: price, clock=clock or time.monotonic)


def test_hold_s() -> None:
    """As long as it costs less than reading back, unless the tool usually takes longer."""
    clock = Clock()
    kept = keeper(price=0.5, clock=clock)
    assert kept.hold_s("search", 3 * 10**9) == 6.0
    for pause, held in ((4.0, 6.0), (60.0, 0.0)):
        waiter = Waiter()
        kept.waits(waiter, "search")
        clock.now += pause
        kept.returns(waiter)
        assert kept.hold_s("search", 3 * 10**9) == held
    assert kept.hold_s("other", 3 * 10**9) == 6.0
    assert keeper(price=0.0).hold_s("search", 1) == 600.0
    kept.close()


def test_make_room() -> None:
    clock, room = Clock(), [1000]
    kept = KvKeeper(room=lambda: room[0], price=lambda _: 0.0, clock=clock)
    first, second = Waiter(), Waiter()
    for waiter in (second, first, second):  # the second came back, and waits again
        kept.returns(waiter)
        kept.waits(waiter)
        clock.now += 1
    room[0] = 0
    assert kept.make_room() == 100
    assert first.parked.is_set()
    assert not second.parked.is_set()
    kept.close()


def test_tiers() -> None:
    clock = Clock()
    kept = KvKeeper(room=lambda: 10**9, price=lambda _: 1.0, tiers=("ram", "disk"), clock=clock)
    waiter, other = Waiter(10_000_000), Waiter()
    kept.waits(waiter, "search")
    deadline = time.monotonic() + 30
    while len(waiter.tiers) < 2 and time.monotonic() < deadline:
        clock.now += 1000.0  # in every round: a tier's time counts from when the cache is there
        kept.waits(other, "search")  # wakes the thread
        time.sleep(0.01)
    kept.close()
    assert waiter.tiers == ["ram", "disk"]
