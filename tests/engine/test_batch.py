"""The schedule of a batch on scripted sessions: what a pass holds, who joins, memory, faults."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.common.errors import (
    LocalrtError,
)
from localrt.common.progress import Progress
from localrt.engine.batch.offline import generate_batch
from localrt.engine.batch.sequence import BatchSequence
from localrt.engine.pool import kv_room, ram_room
from localrt.engine.protocol import Engine, EngineInfo
from localrt.engine.request import Request
from localrt.engine.sampling import Sampling
from localrt.engine.types import Chunk
from localrt.models.weight_store import GpuUse
from localrt.offload.memory import current_rss
from localrt.quant.ops.kv import grown_capacity
from localrt.speculative.acceptance import TreePass
from localrt.speculative.tree import ROOT, TokenTree
from tests.engine.fake_session import VOCAB, ScriptedSession

PASS_ROWS = 12
CTX = 600
KV = 10  # bytes of a cache per token
STEP = 256 * KV + 4 * VOCAB  # bytes of a short sequence: caches grow by 256 tokens


class ScriptedEngine(Engine):
    """Counts up: after a sequence's token t comes t + 1. Remembers the rows of every pass."""

    shares_passes = True
    pass_rows = PASS_ROWS
    info = EngineInfo(
        engine="scripted",
        architecture="none",
        device="cpu",
        format="none",
        parameters=0,
        layers=0,
        vocab_size=VOCAB,
        weight_bytes=0,
        context_length=CTX,
        exactness="bit-exact",
    )

    def __init__(self) -> None:
        self.passes: list[list[int]] = []
        self.sessions: list[ScriptedSession] = []

    def kv_nbytes(self, length: int) -> int:
        return KV * grown_capacity(length)

    def session(self, capacity: int) -> ScriptedSession:
        self.sessions.append(ScriptedSession(lambda n: 0, capacity))
        return self.sessions[-1]

    def logits(self, tokens: Any, **options: Any) -> Any:
        raise AssertionError

    def close(self) -> None:
        pass

    def extend_batch(
        self, parts: Sequence[tuple[Any, Sequence[int]]], *, wanted: Sequence[int], check: Any
    ) -> Any:
        check()
        for session, tokens in parts:
            assert tokens
            session.tokens += tokens
            assert len(session.tokens) <= session.capacity
        self.passes.append([len(tokens) for _, tokens in parts])
        logits = np.zeros((len(wanted), VOCAB), np.float32)
        for row, part in enumerate(wanted):
            logits[row, (parts[part][0].tokens[-1] + 1) % VOCAB] = 10.0
        return logits


def request(prompt: Sequence[int], max_tokens: int | None = 3, **options: Any) -> Request:
    sampling = options.pop("sampling", Sampling(temperature=0))
    return Request(prompt=prompt, sampling=sampling, max_tokens=max_tokens, **options)


def run(
    engine: Any,
    requests: Sequence[Request],
    *,
    size: int | None = None,
    room: int = 1 << 40,
    cancel: threading.Event | None = None,
    on_progress: Any = None,
) -> Iterator[Any]:
    return generate_batch(
        engine,
        None,
        list(enumerate(requests)),
        ctx=CTX,
        room=room,
        size=size,
        cancel=cancel or threading.Event(),
        on_progress=on_progress,
    )


def answers(stream: Iterator[Any]) -> dict[int, list[int]]:
    said: dict[int, list[int]] = {}
    ends: list[int] = []
    for index, item in stream:
        assert isinstance(item, Chunk)
        said.setdefault(index, []).extend(item.token_ids)
        if item.finish_reason:
            ends.append(index)
    assert sorted(ends) == sorted(said)
    return said


def test_shared_passes() -> None:
    engine = ScriptedEngine()
    said = answers(run(engine, [request([10] * 4), request([20] * 5), request([30] * 7)]))
    assert said == {0: [11, 12, 13], 1: [21, 22, 23], 2: [31, 32, 33]}
    # The third prompt begins in what the first two leave of a pass and ends beside their rows.
    assert engine.passes == [[4, 5, 3], [1, 1, 4], [1, 1, 1], [1]]


def test_waiting_prompts_join() -> None:
    engine = ScriptedEngine()
    requests = [request([10], 2), request([20], 4), request([30], 2), request([40], 1)]
    assert answers(run(engine, requests, size=2)) == {
        0: [11, 12],
        1: [21, 22, 23, 24],
        2: [31, 32],
        3: [41],
    }
    assert engine.passes == [[1, 1], [1, 1], [1, 1], [1, 1], [1]]
    assert all(session.closed for session in engine.sessions)


def test_shared_prefix() -> None:
    engine = ScriptedEngine()
    requests = [request([7, 8, 9, n, n], 1) for n in (1, 2, 3)]
    cached = [
        item.metrics.cached_tokens
        for _, item in run(engine, requests, size=1)
        if item.finish_reason
    ]
    assert cached == [0, 3, 3]
    assert engine.passes == [[5], [2], [2]]
    assert len(engine.sessions) == 1


def test_end_of_context() -> None:
    said = answers(run(ScriptedEngine(), [request([1] * 590, None), request([1] * 599, 50)]))
    assert [len(said[0]), len(said[1])] == [10, 1]


def test_cancel() -> None:
    cancel = threading.Event()
    engine = ScriptedEngine()
    stream = run(engine, [request([n], 50) for n in range(4)], size=2, cancel=cancel)
    begun = [next(stream)[0] for _ in range(4)]
    cancel.set()
    rest = list(stream)
    assert sorted(begun) == [0, 0, 1, 1]
    assert [(index, item.finish_reason) for index, item in rest] == [
        (n, "cancelled") for n in range(4)
    ]
    assert all(session.closed for session in engine.sessions)


def test_close() -> None:
    engine = ScriptedEngine()
    stream = run(engine, [request([1], 50), request([2], 50)])
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert len(engine.sessions) == 2
    assert all(session.closed for session in engine.sessions)


def test_error_within_tree() -> None:
    """The tokens before it are given."""
    logits = np.zeros((2, VOCAB), np.float32)
    logits[0, 3], logits[1] = 10.0, np.nan
    sequence: BatchSequence[None] = BatchSequence(None, request([1]), CTX)
    sequence.start(ScriptedSession(lambda n: 0), None)
    first, last = sequence.take(TreePass(TokenTree.of([3], [ROOT], [-1.0], "x"), logits))
    assert first.token_ids == (3,)
    assert isinstance(last.error, LocalrtError)
    assert sequence.done


def test_failed_pass() -> None:
    class Failing(ScriptedEngine):
        def extend_batch(self, parts: Any, **options: Any) -> Any:
            if len(self.passes) == 2:
                raise LocalrtError("the disk is gone")
            return super().extend_batch(parts, **options)

    engine = Failing()
    with pytest.raises(LocalrtError, match="disk"):
        list(run(engine, [request([1], 9), request([2], 9)]))
    assert all(session.closed for session in engine.sessions)


def test_progress() -> None:
    steps: list[Progress] = []
    answers(run(ScriptedEngine(), [request([1], 1), request([2], 2)], on_progress=steps.append))
    assert [(s.stage, s.done, s.total, s.unit, s.detail) for s in steps] == [
        ("batch", 1, 2, "prompts", "2 tokens"),
        ("batch", 2, 2, "prompts", "3 tokens"),
    ]


def test_kv_room() -> None:
    engine: Any = ScriptedEngine()
    assert kv_room(engine) > 0
    engine.ram = 1 << 20
    assert kv_room(engine) == 0  # this process has more already
    engine.weights = SimpleNamespace(memory=SimpleNamespace(reclaimable=1 << 40))
    assert kv_room(engine) > 1 << 39
    engine.free_memory = lambda: 1000
    for use, room in ((GpuUse(100, 600), 400), (GpuUse(100, 600, leavable=300), 640)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ScriptedEngine, "gpu_use", use)
            assert kv_room(engine) == room
            placed: Any = ScriptedEngine()
            assert kv_room(placed) > 1000  # its caches are in RAM
            placed.plan = SimpleNamespace(placement=SimpleNamespace(kv=("ram", "vram")))
            assert kv_room(placed) == room


def test_ram_room() -> None:
    """What caches of a GPU leave to weights, of which none go for them."""
    engine: Any = ScriptedEngine()
    engine.ram = current_rss() + (1 << 30)
    assert ram_room(engine) == 0  # caches are in RAM
    engine.free_memory = lambda: 1000
    assert 1 << 28 < ram_room(engine) < 1 << 30
    engine.weights = SimpleNamespace(memory=SimpleNamespace(streams=True, spare=1000))
    assert ram_room(engine) == 800
    engine.ram = 1 << 20
    assert ram_room(engine) < 0


@given(
    sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=12),
    size=st.none() | st.integers(1, PASS_ROWS),
    steps=st.integers(0, 6),
)
def test_any_mix(sizes: list[tuple[int, int]], size: int | None, steps: int) -> None:
    engine = ScriptedEngine()
    requests = [request([20 * n % 200] * p, m) for n, (p, m) in enumerate(sizes)]
    room = steps * STEP if size is None else 1 << 30
    said = answers(run(engine, requests, size=size, room=room))
    for n, (_, m) in enumerate(sizes):
        assert said[n] == [20 * n % 200 + 1 + i for i in range(m)]
    assert max(map(sum, engine.passes)) <= PASS_ROWS
    assert max(map(len, engine.passes)) <= (size or min(PASS_ROWS, max(1, steps)))
    assert all(session.closed for session in engine.sessions)
    assert sum(map(sum, engine.passes)) <= sum(p + m - 1 for p, m in sizes)
