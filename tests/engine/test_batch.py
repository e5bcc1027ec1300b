"""The schedule of a batch on scripted sessions: what a pass holds, who joins, memory; one sweep for
all where weights are streamed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.engine.batch.live import Live, LiveLimits
from localrt.engine.batch.offline import generate_batch
from localrt.engine.batch.sequence import generate
from localrt.engine.native.engine import NativeEngine
from localrt.engine.pool import kv_room
from localrt.engine.request import Request
from localrt.engine.sampling import Sampling
from localrt.engine.types import Chunk
from localrt.models.weight_store import GpuUse
from tests.conftest import needs_kernels
from tests.engine.fake_session import CTX, KV, PASS_ROWS, VOCAB, ScriptedEngine, request
from tests.engine.test_speculation import info_of
from tests.models.tiny import tokens
from tests.offload.placed import Model, pack_synthetic
from tests.waits import wait_for


def run(
    engine: Any, requests: Sequence[Request], *, size: int | None = None, room: int = 1 << 40
) -> Iterator[Any]:
    return generate_batch(
        engine,
        None,
        list(enumerate(requests)),
        ctx=CTX,
        room=room,
        size=size,
        cancel=threading.Event(),
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


@given(
    sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=12),
    size=st.none() | st.integers(1, PASS_ROWS),
    steps=st.integers(0, 6),
)
def test_any_mix(sizes: list[tuple[int, int]], size: int | None, steps: int) -> None:
    engine = ScriptedEngine()
    requests = [request([20 * n % 200] * p, m) for n, (p, m) in enumerate(sizes)]
    step = 256 * KV + 4 * VOCAB  # bytes of a short sequence: caches grow by 256 tokens
    room = steps * step if size is None else 1 << 30
    said = answers(run(engine, requests, size=size, room=room))
    for n, (_, m) in enumerate(sizes):
        assert said[n] == [20 * n % 200 + 1 + i for i in range(m)]
    assert max(map(sum, engine.passes)) <= PASS_ROWS
    assert max(map(len, engine.passes)) <= (size or min(PASS_ROWS, max(1, steps)))
    assert all(session.closed for session in engine.sessions)
    assert sum(map(sum, engine.passes)) <= sum(p + m - 1 for p, m in sizes)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with closing(Model(pack_synthetic(tmp_path_factory.mktemp("s"), vocab=VOCAB, layers=4))) as it:
        yield it


@contextmanager
def streaming(
    model: Model, streamed: Sequence[str], budget: int, **options: Any
) -> Iterator[NativeEngine]:
    largest = 2 * max(unit.nbytes for unit in model.store.manifest.units)
    with model.placed(streamed, budget=budget, largest=largest, **options) as decoder:
        info = replace(info_of("llama"), vocab_size=VOCAB, streamed=True)
        yield NativeEngine(decoder, info, pass_rows=64)


def requests(count: int) -> list[Request]:
    sampling = Sampling(temperature=1.5, seed=5)
    return [
        Request(prompt=tokens(5 + 9 * i, seed=i), sampling=sampling, max_tokens=12)
        for i in range(count)
    ]


def together(engine: NativeEngine, work: list[Request], room: int) -> list[list[int]]:
    said: list[list[int]] = [[] for _ in work]
    stream = generate_batch(
        engine, None, list(enumerate(work)), ctx=CTX, room=room, cancel=threading.Event()
    )
    for index, item in stream:
        assert not isinstance(item, Exception)
        said[index] += item.token_ids
    return said


def alone(engine: NativeEngine, work: list[Request]) -> list[list[int]]:
    said = []
    for one in work:
        session = engine.session(CTX)
        said.append([t for c in generate(session, None, one) for t in c.token_ids])
        session.close()
    return said


@needs_kernels
def test_streamed_batch(model: Model) -> None:
    work = requests(6)
    with streaming(model, [f"layers.{n}.mlp" for n in range(4)], budget=1 << 30) as engine:
        expected = alone(engine, work)
        before = engine.counts()
        assert before is not None
        assert together(engine, work, room=1 << 30) == expected
        after = engine.counts()
    assert after is not None
    # Prompts of 165 tokens in passes of 64 rows, then 11 more tokens each; six times that alone.
    assert after.passes - before.passes <= 3 + 12
    assert after.ssd_read_bytes - before.ssd_read_bytes < before.ssd_read_bytes / 3


@needs_kernels
def test_caches_evict_weights(model: Model) -> None:
    with streaming(model, [], budget=0) as engine:
        weights, cache = engine.weights.memory.reclaimable, engine.kv_nbytes(256)
    work, budget = requests(6), max(weights, 3 * cache + 1000)
    # Room for three caches beside nothing but the ring: all weights make way, and three wait.
    with streaming(model, ["layers.0.mlp"], budget=budget) as engine:
        expected = alone(engine, work)
        assert together(engine, work, room=1 << 30) == expected
        with closing(Live(engine, None, LiveLimits(ctx=CTX), room=lambda: 1 << 30)) as live:
            answers = [live.submit(request) for request in work]
            said = [[t for chunk in answer for t in chunk.token_ids] for answer in answers]
        assert said == expected
        assert engine.weights.memory.reclaimable < weights


@needs_kernels
def test_an_idle_model_gives_way(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs get the memory of its weights without waiting for its next pass."""
    monkeypatch.setattr("localrt.engine.native.engine._LOOK_S", 0.02)
    needed, work = [0], requests(1)

    def shortage() -> tuple[int, int]:
        ram, needed[0] = needed[0], 0
        return ram, 0

    with streaming(model, ["layers.0.mlp"], 1 << 30, shortage=shortage) as engine:
        expected = alone(engine, work)
        with closing(engine.session(CTX)) as session:
            assert session.tree_rows is None
        held = engine.weights.memory.ram_nbytes
        needed[0] = held // 2
        wait_for(lambda: engine.weights.memory.ram_nbytes <= held - held // 2)
        assert alone(engine, work) == expected
        with closing(engine.session(CTX)) as session:
            assert session.tree_rows is not None, "logits take memory that others need"
