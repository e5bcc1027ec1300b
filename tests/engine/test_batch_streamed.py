"""A batch on a model whose weights are streamed: one sweep for all, within the budget."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import pytest

from localrt.engine.batch.live import Live, LiveLimits
from localrt.engine.batch.offline import generate_batch
from localrt.engine.batch.sequence import generate
from localrt.engine.native.engine import NativeEngine
from localrt.engine.request import Request
from localrt.engine.sampling import Sampling
from tests.conftest import needs_kernels
from tests.engine.test_speculation import info_of
from tests.models.tiny import tokens
from tests.offload.placed import Model, pack_synthetic
from tests.waits import wait_for

pytestmark = needs_kernels

VOCAB, CTX = 300, 512


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
    for request in work:
        session = engine.session(CTX)
        said.append([t for c in generate(session, None, request) for t in c.token_ids])
        session.close()
    return said


def test_batch(model: Model) -> None:
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
