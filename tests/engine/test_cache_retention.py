"""Caches of those who wait: held as long as it pays, and given up in the right order."""

from __future__ import annotations

import threading
import time

from localrt.engine.cache_retention import KvKeeper
from localrt.engine.saved_caches import Tier


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


def test_long_wait() -> None:
    kept = keeper(price=1.0)  # at 1 GB/s, 10 MB are 10 ms
    waiter = Waiter(10_000_000)
    kept.waits(waiter, "search")
    assert waiter.parked.wait(60)
    kept.returns(waiter)


def test_returns_in_time() -> None:
    clock = Clock()
    kept = keeper(price=1.0, clock=clock)
    waiter = Waiter(200_000_000)
    kept.waits(waiter, "search")
    kept.returns(waiter)
    clock.now += 1000.0
    other = Waiter()
    kept.waits(other, "search")  # wakes the thread
    assert not waiter.parked.wait(0.4)
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


def test_not_parkable() -> None:
    kept = keeper(room=0)
    waiter = Waiter(parks=False)
    kept.waits(waiter)
    assert kept.make_room() == 0
    kept.returns(waiter)


def test_dropped_chats() -> None:
    kept = keeper(price=1.0)
    for _ in range(50):
        dropped = [Waiter(10**12) for _ in range(20)]
        for waiter in dropped:
            kept.waits(waiter, "search")
        del dropped, waiter
    waiter = Waiter(10_000_000)
    kept.waits(waiter, "search")
    assert waiter.parked.wait(60)
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
