"""A batch on a model whose weights are streamed: one sweep for all, within the budget."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from localrt.engine.batch.live import Live, LiveLimits
from localrt.engine.loop import generate, generate_batch
from localrt.engine.native.engine import NativeEngine
from localrt.engine.protocol import EngineInfo
from localrt.engine.request import Request
from localrt.engine.sampling import Sampling
from localrt.models.checkpoints import open_checkpoint
from localrt.models.registry import read_config
from localrt.offload.placement import Placement, Where
from localrt.offload.reading.files import ReadMode
from localrt.offload.store import pack_store
from tests.conftest import needs_kernels
from tests.models.tiny import tokens
from tests.offload.placed import open_decoder
from tests.store.synthetic import SyntheticCheckpoint

pytestmark = needs_kernels

VOCAB, LAYERS, CTX = 300, 4, 512


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    source = SyntheticCheckpoint(folder / "source", vocab=VOCAB, layers=LAYERS)
    pack_store(source, folder / "packed")
    return folder / "packed"


def open_engine(folder: Path, streamed: Sequence[str], budget: int) -> NativeEngine:
    from localrt.quant.cpu.ops import NativeOps

    checkpoint: Any = open_checkpoint(folder)
    config = read_config(checkpoint, context=CTX)
    units = {unit.name: unit.nbytes for unit in checkpoint.manifest.units}
    where = {name: Where.SSD if name in streamed else Where.RAM for name in units}
    decoder = open_decoder(
        checkpoint,
        NativeOps(threads=2),
        config,
        Placement(where=where, kv=("ram",) * LAYERS, ram_ring=2 * max(units.values())),
        mode=ReadMode(),
        budget=budget,
    )
    info = EngineInfo(
        engine="native",
        architecture=config.architecture,
        device="cpu",
        format="q8_0",
        parameters=0,
        layers=LAYERS,
        vocab_size=VOCAB,
        weight_bytes=sum(units.values()),
        context_length=CTX,
        exactness="approximate",
    )
    return NativeEngine(decoder, info, pass_rows=64)


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


def test_batch(store: Path) -> None:
    streamed = [f"layers.{n}.mlp" for n in range(LAYERS)]
    engine, work = open_engine(store, streamed, budget=1 << 30), requests(6)
    expected = alone(engine, work)
    before = engine.counts()
    assert before is not None
    assert together(engine, work, room=1 << 30) == expected
    after = engine.counts()
    engine.close()
    assert after is not None
    # Prompts of 165 tokens in passes of 64 rows, then 11 more tokens each; six times that alone.
    assert after.passes - before.passes <= 3 + 12
    assert after.ssd_read_bytes - before.ssd_read_bytes < before.ssd_read_bytes / 3


def test_caches_evict_weights(store: Path) -> None:
    engine = open_engine(store, [], budget=0)
    weights, cache = engine.weights.memory.reclaimable, engine.kv_nbytes(256)
    engine.close()
    work = requests(6)
    # Room for three caches beside nothing but the ring: all weights make way, and three wait.
    engine = open_engine(store, ["layers.0.mlp"], budget=max(weights, 3 * cache + 1000))
    expected = alone(engine, work)
    assert together(engine, work, room=1 << 30) == expected
    with closing(Live(engine, None, LiveLimits(ctx=CTX), room=lambda: 1 << 30)) as live:
        answers = [live.submit(request) for request in work]
        assert [[t for chunk in answer for t in chunk.token_ids] for answer in answers] == expected
    assert engine.weights.memory.reclaimable < weights
    engine.close()
