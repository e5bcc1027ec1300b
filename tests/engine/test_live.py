"""A running batch on scripted sessions: who joins, who leaves, turns, readers, memory, faults."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.common.errors import ContextOverflowError, LocalrtError, MemoryBudgetError, OptionError
from localrt.engine.batch.chunked_prefill import PassTurns
from localrt.engine.batch.live import Live, LiveAnswer, LiveLimits
from localrt.engine.protocol import Engine
from localrt.engine.sampling import Sampling
from localrt.quant.ops.kv import grown_capacity
from tests.engine.fake_session import (
    CTX,
    KV,
    PASS_ROWS,
    VOCAB,
    ScriptedEngine,
    ScriptedSession,
    request,
)
from tests.waits import wait_for


class Stepped(ScriptedEngine):
    """Makes a pass only when it is let: ``go(n)`` allows n passes and waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self.allowed = threading.Semaphore(0)
        self.done = threading.Semaphore(0)
        self.free = False
        self.asked = 0  # passes that have been formed

    def extend_batch(self, parts: Any, *, wanted: Any, check: Any) -> Any:
        self.asked += 1
        while not self.free and not self.allowed.acquire(timeout=0.01):
            check()
        logits = super().extend_batch(parts, wanted=wanted, check=check)
        self.done.release()
        return logits

    def go(self, count: int = 1) -> None:
        for _ in range(count):
            self.allowed.release()
            assert self.done.acquire(timeout=60)


def open_live(engine: Any, **limits: Any) -> closing[Live]:
    room = limits.pop("room", 1 << 40)
    save = limits.pop("save", lambda session, *tiers: None)
    checked = LiveLimits(ctx=limits.pop("ctx", CTX), **limits)
    return closing(Live(engine, None, checked, room=lambda: room, save=save))


def said(answer: LiveAnswer) -> list[int]:
    return [token for chunk in answer for token in chunk.token_ids]


def test_join() -> None:
    engine = Stepped()
    with open_live(engine) as live:
        first = live.submit(request([10] * 4, 4))
        engine.go(2)
        second = live.submit(request([20] * 3, 2))
        wait_for(lambda: live.stats().waiting == 0 or not engine.free)
        engine.go(2)
        engine.free = True
        assert said(first) == [11, 12, 13, 14]
        assert said(second) == [21, 22]
    # The third pass was already asked for when the second request came.
    assert engine.passes[:2] == [[4], [1]]
    assert [1, 3] in engine.passes
    assert all(session.closed for session in engine.sessions)


@pytest.mark.parametrize("streamed", [False, True])
def test_turns_of_several_models(streamed: bool) -> None:
    """A model in memory waits for the others of its device; a streamed one does not."""
    engine, turns = Stepped(), PassTurns()
    engine.info = replace(engine.info, streamed=streamed)
    engine.free = True
    limits = LiveLimits(ctx=CTX)
    with closing(Live(engine, None, limits, room=lambda: 1 << 40, turns=turns)) as live:
        with turns.turn("another model"):
            answer = live.submit(request([10], 2))
            if streamed:
                assert said(answer) == [11, 12]
            else:
                wait_for(lambda: len(turns._waiting) == 1)
                assert engine.asked == 0
        assert streamed or said(answer) == [11, 12]


@pytest.mark.parametrize(
    ("asked", "turns"),
    [
        (("g1 greedy", "g2 greedy", "m1 meek", "m2 meek"), ["g1", "m1", "g2", "m2"]),
        (("b background", "i interactive"), ["i", "b"]),
    ],
)
def test_order_of_those_who_wait(asked: tuple[str, ...], turns: list[str]) -> None:
    """Clients take turns, and interactive requests go first."""
    engine = Stepped()
    order: list[str] = []
    with open_live(engine, most=1) as live:
        blocker = live.submit(request([9], 2), client="greedy")
        wait_for(lambda: live.stats().running == 1)
        answers = []
        for name, whose in map(str.split, asked):
            kind = "request_class" if whose in ("background", "interactive") else "client"
            options: dict[str, Any] = {kind: whose, "notify": partial(order.append, name)}
            answers.append(live.submit(request([1], 1), **options))
        engine.free = True
        assert said(blocker) == [10, 11]
        assert [said(answer) for answer in answers] == [[2]] * len(asked)
    assert order == turns


class Copying(ScriptedSession):
    """Can be copied from and to."""

    blocks = property(lambda self: self)  # type: ignore[assignment]

    def copy_prefix(self, other: Any, length: int) -> int:
        self.tokens = list(other.tokens[:length])
        return length


class CopyingEngine(Stepped):
    """With room for real prompts in a pass."""

    pass_rows = 200

    def session(self, capacity: int) -> Copying:
        self.sessions.append(Copying(lambda n: 0, capacity))
        return self.sessions[-1]  # type: ignore[return-value]


def passes_to_first(engine: Stepped, answer: LiveAnswer) -> int:
    """Passes from now until ``answer`` has its first token, with the one that is on its way."""
    for count in range(1, 100):
        engine.go()
        wait_for(lambda: engine.asked > len(engine.passes) or bool(answer._unread))
        if any(chunk.token_ids for chunk in answer.take()):
            return count
    raise AssertionError("it never came")


LONG = [5] * 150
OWN = [[100 + n] * 150 for n in range(8)]  # prompts that share nothing


@pytest.mark.parametrize(
    ("make", "prompts", "limits"),
    [
        (Stepped, [[1] * 40] * 16, {"most": 16}),  # n: 16, nothing can be copied
        (CopyingEngine, [LONG] * 16, {"most": 2}),
        (CopyingEngine, OWN, {"most": 8, "room": 3 * (512 * KV + 4 * VOCAB)}),  # of memory
    ],
)
def test_first_token_of_another_client(
    make: type[Stepped], prompts: list[list[int]], limits: dict[str, int]
) -> None:
    engine, under_way = make(), 12
    with open_live(engine, **limits) as live:
        answers = [live.submit(request(prompt, 100), client="greedy") for prompt in prompts]
        engine.go(under_way)
        wait_for(lambda: engine.asked > under_way)
        short = live.submit(request([200], 1), client="meek")
        assert passes_to_first(engine, short) <= 2
        engine.free = True
        expected = [[prompt[0] + 1 + i for i in range(100)] for prompt in prompts]
        assert [said(answer) for answer in answers] == expected


def test_shared_prompt() -> None:
    engine = CopyingEngine()
    with open_live(engine, most=16) as live:
        answers = [live.submit(request(LONG, 3), client="one") for _ in range(16)]
        engine.free = True
        assert [said(answer) for answer in answers] == [[6, 7, 8]] * 16
    assert sum(map(sum, engine.passes)) <= len(LONG) + 3 * 16 + 1


class Sized(ScriptedEngine):
    """Whose caches take memory."""

    def session(self, capacity: int) -> ScriptedSession:
        class SizedSession(ScriptedSession):
            @property
            def nbytes(self) -> int:  # type: ignore[override]
                return KV * grown_capacity(len(self.tokens))

        self.sessions.append(SizedSession(lambda n: 0, capacity))
        return self.sessions[-1]


@pytest.mark.parametrize(
    ("titles", "most", "caches", "kept"),
    [
        (1, 2, 3, True),  # the conversation's cache has room
        (20, 1, 100, True),
        (1, 2, 1, False),  # it is read again
    ],
)
def test_long_requests_between_turns(titles: int, most: int, caches: int, kept: bool) -> None:
    """Titles as long as the conversation, as Open WebUI asks for."""
    room = caches * KV * 256 + 4 * VOCAB
    with open_live(Sized(), ctx=768, most=most, room=room) as live:
        talk = [n % 90 for n in range(240)]
        said(live.submit(request(talk, 1)))
        for title in range(titles):
            said(live.submit(request([100 + title] * 250, 1)))
        *_, last = live.submit(request([*talk, 91, 91], 1))
    assert (last.metrics.cached_tokens == len(talk)) is kept


@pytest.mark.parametrize("slow", [False, True])
def test_what_is_saved_to_the_disk(slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has no room, if reading it again takes long."""
    limit = 0.0 if slow else float("inf")
    monkeypatch.setattr("localrt.engine.batch.schedule._WORTH_SAVING_S", limit)
    saved = list[tuple[str, ...]]()
    room, save = KV * 256 + 4 * VOCAB, lambda _, *tiers: saved.append(tiers)
    with open_live(Sized(), ctx=768, most=2, room=room, save=save) as live:
        for token in (7, 100):
            said(live.submit(request([token] * 250, 1)))
    assert set(saved) == {("ram", "disk") if slow else ("ram",)}


def test_patience() -> None:
    with open_live(ScriptedEngine(), buffer=4, patience_s=0.05) as live:
        left = live.submit(request([7], 500))
        wait_for(lambda: live.stats().passes > 3)
        wait_for(lambda: live.stats().running + live.stats().paused == 0)
        chunks = list(left)
        assert chunks[-1].finish_reason == "cancelled"
        assert sum(len(chunk.token_ids) for chunk in chunks) == 4


def test_pause() -> None:
    engine = ScriptedEngine()
    with open_live(engine, buffer=8) as live:
        slow = live.submit(request([7] * 3, 200))
        wait_for(lambda: live.stats().paused == 1)
        passes = len(engine.passes)
        assert said(live.submit(request([100], 50))) == list(range(101, 151))  # not held up
        assert live.stats().paused == 1
        assert len(engine.passes) <= passes + 60
        assert said(slow) == [(8 + i) % VOCAB for i in range(200)]
    # Its cache stayed: nothing was computed twice but the last token, once for each pause.
    assert max(map(sum, engine.passes)) <= PASS_ROWS
    assert len(engine.sessions) == 2


def test_cache_of_a_conversation() -> None:
    engine = ScriptedEngine()
    with open_live(engine) as live:
        prompt = list(range(50, 80))
        answer = said(live.submit(request(prompt, 5)))
        again = [*prompt, *answer, 1, 2, 3]
        chunks = list(live.submit(request(again, 2)))
        assert chunks[-1].metrics.cached_tokens == len(prompt) + len(answer) - 1
        other = list(live.submit(request([99, *again], 2)))
        assert other[-1].metrics.cached_tokens == 0
        # A few common words are no reason to overwrite a long conversation.
        short = list(live.submit(request([*prompt[:4], 200], 1)))
        assert short[-1].metrics.cached_tokens == 0
        last = list(live.submit(request([*again, 7], 1)))
        assert last[-1].metrics.cached_tokens == len(again)


def test_submit_while_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localrt.engine.batch.live._IDLE_TIMEOUT_S", 0.05)
    saving, saved, moved = (threading.Event() for _ in range(3))

    def save(session: Any, *tiers: str) -> None:
        if session is None and tiers == ("disk",):  # those in RAM
            moved.set()
        saving.set()
        saved.wait(60)

    engine = ScriptedEngine()
    with open_live(engine, save=save) as live:
        assert said(live.submit(request([1, 2, 3], 2))) == [4, 5]
        assert saving.wait(60)
        with ThreadPoolExecutor() as pool:
            try:
                answer = pool.submit(live.submit, request([1, 2, 3], 2)).result(30)
            finally:
                saved.set()
        assert said(answer) == [4, 5]
        assert moved.wait(60)
        wait_for(lambda: engine.sessions[0].closed)


class Short(ScriptedEngine):
    """Holds ``fits`` tokens in all, whatever was planned."""

    fits = 40

    def extend_batch(self, parts: Any, **options: Any) -> Any:
        held = sum(len(session.tokens) for session in self.sessions if not session.closed)
        if held + sum(len(tokens) for _, tokens in parts) > self.fits:
            raise MemoryBudgetError("no room")
        return super().extend_batch(parts, **options)


def test_short_of_memory() -> None:
    engine = Short()
    with open_live(engine) as live:
        answers = [live.submit(request([20 * n] * (n + 1), 12)) for n in range(6)]
        never = live.submit(request([1] * 50, 3))
        for n, answer in enumerate(answers):
            assert said(answer) == [20 * n + 1 + i for i in range(12)]
        with pytest.raises(MemoryBudgetError, match="no room"):
            list(never)
        assert said(live.submit(request([5], 3))) == [6, 7, 8]


def test_failed_pass() -> None:
    class Failing(Stepped):
        error: Exception | None = None

        def extend_batch(self, parts: Any, *, wanted: Any, check: Any) -> Any:
            logits = super().extend_batch(parts, wanted=wanted, check=check)
            if self.error is not None:
                error, self.error = self.error, None
                raise error
            return logits

    for error in (LocalrtError("the disk is gone"), ZeroDivisionError("the disk is gone")):
        engine = Failing()
        with open_live(engine) as live:
            answers = [live.submit(request([1], 9))]
            wait_for(lambda engine=engine: engine.asked == 1)  # type: ignore[misc]
            answers.append(live.submit(request([2], 9)))
            engine.go(1)
            wait_for(lambda engine=engine: engine.asked == 2)  # type: ignore[misc]
            assert live.stats().running == 2
            engine.error = error
            engine.free = True
            for answer in answers:
                with pytest.raises(LocalrtError, match="disk is gone"):
                    list(answer)
            assert said(live.submit(request([3], 2))) == [4, 5]


def test_bad_requests() -> None:
    with open_live(ScriptedEngine()) as live:
        for prompt in ([], [VOCAB], [-1]):
            with pytest.raises(OptionError):
                live.submit(request(prompt))
        with pytest.raises(ContextOverflowError):
            live.submit(request([1] * CTX))
        with pytest.raises(OptionError, match="request_class"):
            live.submit(request([1], 1), request_class="urgent")
        bad = Sampling(temperature=0, logit_bias={VOCAB + 5: 1.0})
        wrong, right = live.submit(request([2], sampling=bad)), live.submit(request([3]))
        with pytest.raises(OptionError, match="logit_bias"):
            list(wrong)
        assert wrong.over
        assert said(right) == [4, 5, 6]

        def gone() -> None:
            raise RuntimeError("Event loop is closed")

        assert list(live.submit(request([1], 400), notify=gone))[-1].finish_reason == "cancelled"
    with pytest.raises(LocalrtError, match="closed"):
        live.submit(request([3]))
    for wrong_limit in ({"most": 0}, {"buffer": True}, {"patience_s": 0}):
        with pytest.raises(OptionError):
            LiveLimits(ctx=8, **wrong_limit)  # type: ignore[arg-type]


def test_close() -> None:
    engine = Stepped()
    live = Live(engine, None, LiveLimits(ctx=CTX, most=1, buffer=3), room=lambda: 1 << 40)
    engine.free = True
    paused = live.submit(request([5], 100))
    wait_for(lambda: live.stats().paused == 1)
    engine.free = False
    answers = [live.submit(request([1], 50)), live.submit(request([2], 50))]
    wait_for(lambda: live.stats().running == 1)
    live.close()
    for answer in [*answers, paused]:
        assert list(answer)[-1].finish_reason == "cancelled"
    assert all(session.closed for session in engine.sessions)
    live.close()


def test_cancel_all() -> None:
    engine = Stepped()
    with open_live(engine) as live:
        answer = live.submit(request([1] * 50, 3))
        wait_for(lambda: live.stats().running == 1)
        answer.cancel()  # the pass is never let through
        assert [chunk.finish_reason for chunk in answer] == ["cancelled"]
        assert engine.passes == []
    with open_live(ScriptedEngine(), buffer=4) as live:
        answers = [live.submit(request([n], 400)) for n in range(5)]
        wait_for(lambda: live.stats().paused == 5)
        live.cancel_all()
        assert {list(answer)[-1].finish_reason for answer in answers} == {"cancelled"}
        assert said(live.submit(request([3], 2))) == [4, 5]


class Single(ScriptedEngine):
    """An engine that cannot join sequences."""

    shares_passes = False
    extend_batch = Engine.extend_batch

    def session(self, capacity: int) -> ScriptedSession:
        self.sessions.append(ScriptedSession(lambda n: n % VOCAB, capacity))
        return self.sessions[-1]


def test_single_sequence_engine() -> None:
    engine = Single()
    bad = Sampling(temperature=0, logit_bias={VOCAB + 5: 1.0})
    with open_live(engine, buffer=8) as live:
        unread = live.submit(request([1, 2], 100))
        wait_for(lambda: live.stats().paused == 1)
        assert said(live.submit(request([1, 2, 3], 2))) == [3, 4]
        with pytest.raises(OptionError):
            list(live.submit(request([1], sampling=bad)))
        assert said(unread) == [2 + i for i in range(100)]
        lost = live.submit(request([9], 400))
        wait_for(lambda: live.stats().paused == 1)
        lost.cancel()
        last = list(lost)[-1]
        assert last.finish_reason == "cancelled"
        assert last.metrics.completion_tokens > 0
    assert all(session.closed for session in engine.sessions)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30)), min_size=1, max_size=10),
    buffer=st.integers(1, 20),
    most=st.integers(1, 12),
    dropped=st.sets(st.integers(0, 9)),
)
def test_any_mix(sizes: list[tuple[int, int]], buffer: int, most: int, dropped: set[int]) -> None:
    engine = ScriptedEngine()
    with open_live(engine, buffer=buffer, most=most) as live:
        answers = [
            live.submit(request([20 * n % 200] * p, m), client=n % 2)
            for n, (p, m) in enumerate(sizes)
        ]
        for n in dropped & set(range(len(sizes))):
            answers[n].cancel()
        for n, (_, m) in enumerate(sizes):
            expected = [20 * n % 200 + 1 + i for i in range(m)]
            tokens = said(answers[n])
            assert tokens == (expected[: len(tokens)] if n in dropped else expected)
    assert max(map(sum, engine.passes), default=0) <= PASS_ROWS
    assert max(map(len, engine.passes), default=0) <= most
    assert all(session.closed for session in engine.sessions)


def test_background_gives_way() -> None:
    """A chat takes the place of background work, which goes on behind it where it was."""
    engine = Stepped()
    with open_live(engine, most=2) as live:
        work = [live.submit(request([n] * 4, 30), request_class="background") for n in (10, 50, 90)]
        engine.go(3)
        wait_for(lambda: engine.asked > 3)
        chat = live.submit(request([200] * 3, 2))
        assert passes_to_first(engine, chat) <= 2
        engine.free = True
        assert [said(answer) for answer in work] == [
            [n + 1 + i for i in range(30)] for n in (10, 50, 90)
        ]
    assert max(map(len, engine.passes)) <= 2
    read = sum(max(rows) for rows in engine.passes if max(rows) > 2)
    assert read <= 4 * 3 + 3 + 2  # nothing that was displaced was read again
