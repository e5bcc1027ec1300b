"""The session pool: a conversation finds its cache again, and old caches go first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import localrt
from localrt.engine.pool import IdleSessions, SessionPool
from localrt.engine.protocol import Engine
from tests.engine.fake_session import ScriptedSession
from tests.models.tiny import save_tiny, tokens


class FakeEngine(Engine):
    def __init__(self) -> None:
        self.made: list[ScriptedSession] = []

    def session(self, capacity: int) -> ScriptedSession:
        self.made.append(ScriptedSession(lambda n: 0, capacity))
        return self.made[-1]

    def logits(self, tokens: Any, **options: Any) -> Any:
        raise AssertionError

    def kv_nbytes(self, length: int) -> int:
        return 0

    def close(self) -> None:
        pass


def use(pool: SessionPool, prompt: list[int]) -> ScriptedSession:
    with pool.lease(prompt) as session:
        session.trim(0)
        session.extend(prompt)
        assert isinstance(session, ScriptedSession)
        return session


def test_longest_prefix() -> None:
    pool = SessionPool(FakeEngine(), 50)
    a, b = use(pool, [1, 2, 3, 4]), use(pool, [9, 8, 7, 6])
    assert a is not b
    assert use(pool, [9, 8, 7, 6, 5]) is b
    assert use(pool, [1, 2, 3, 4, 5]) is a


def test_short_prefix() -> None:
    pool = SessionPool(FakeEngine(), 50)
    long = use(pool, list(range(20)))
    assert use(pool, [0, 1, 99]) is not long
    assert long.tokens == list(range(20))


@pytest.mark.parametrize("name", ["llama", "deepseek-v3", "qwen3.5"])
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
    engine = FakeEngine()
    pool = SessionPool(engine, 50, keep=2)
    first, second = use(pool, [1]), use(pool, [2])
    assert use(pool, [3]) is first
    assert use(pool, [2, 2]) is second
    with pool.lease([1]) as one, pool.lease([2]) as two, pool.lease([3]) as three:
        assert len({one, two, three}) == 3  # more may run at once than stay
    assert [session.closed for session in engine.made].count(False) == 2


def test_close() -> None:
    engine = FakeEngine()
    pool = SessionPool(engine, 50)
    use(pool, [1])
    with pool.lease([2]):
        pool.close()
    assert all(session.closed for session in engine.made)


def session(first: int, length: int) -> ScriptedSession:
    made = ScriptedSession(lambda n: n)
    made.tokens = [first, *range(1, length)]
    return made


@pytest.mark.parametrize(
    ("sessions", "goes"),
    [
        ([(0, 100), (1, 10), (2, 50)], 1),  # the one that is read again soonest
        ([(0, 100), (1, 50), (2, 10)], 1),  # not the latest, though it is the shortest
        ([(0, 50), (1, 50), (2, 50)], 0),
        ([(0, 100), (1, 10)], 1),  # a long conversation stays, where only one can
        ([(0, 10), (1, 100)], 0),
        ([(0, 10)], 0),
        ([(0, 90), (1, 50), (0, 20)], 1),  # nor a short one whose beginning another holds
    ],
)
def test_evict(sessions: list[tuple[int, int]], goes: int) -> None:
    idle, kept = IdleSessions(), [session(100 + first, length) for first, length in sessions]
    for one in kept:
        idle.add(one)
    assert idle.evict() is kept[goes]
    assert list(idle) == kept[:goes] + kept[goes + 1 :]
