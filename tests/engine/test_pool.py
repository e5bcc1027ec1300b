"""The session pool: a conversation finds its cache again, and old caches go first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import localrt
from localrt.engine.pool import SessionPool
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
        held = list(session.tokens)
        session.trim(0)
        session.extend(prompt)
        assert isinstance(session, ScriptedSession)
        session.held_before = held  # type: ignore[attr-defined]
        return session


def test_the_session_with_the_longest_prefix_is_taken() -> None:
    engine = FakeEngine()
    pool = SessionPool(engine, 50)
    a, b = use(pool, [1, 2, 3, 4]), use(pool, [9, 8, 7, 6])
    assert a is not b
    assert use(pool, [9, 8, 7, 6, 5]) is b
    assert use(pool, [1, 2, 3, 4, 5]) is a


def test_a_short_shared_start_does_not_destroy_a_long_cache() -> None:
    engine = FakeEngine()
    pool = SessionPool(engine, 50)
    long = use(pool, list(range(20)))
    assert use(pool, [0, 1, 99]) is not long
    assert long.tokens == list(range(20))


@pytest.mark.parametrize("name", ["llama", "deepseek-v3", "qwen3.5"])
def test_a_branch_copies_what_it_shares_and_leaves_the_other(name: str, tmp_path: Path) -> None:
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


def test_the_one_unused_longest_is_recycled() -> None:
    engine = FakeEngine()
    pool = SessionPool(engine, 50, keep=2)
    first, second = use(pool, [1]), use(pool, [2])
    assert use(pool, [3]) is first
    assert use(pool, [2, 2]) is second
    assert len(engine.made) == 2


def test_more_may_run_at_once_than_stay() -> None:
    engine = FakeEngine()
    pool = SessionPool(engine, 50, keep=1)
    with pool.lease([1]) as one, pool.lease([2]) as two:
        assert one is not two
    assert [session.closed for session in engine.made].count(True) == 1


def test_closing_frees_idle_and_returning_sessions() -> None:
    engine = FakeEngine()
    pool = SessionPool(engine, 50)
    use(pool, [1])
    with pool.lease([2]):
        pool.close()
    assert all(session.closed for session in engine.made)
