"""How many answers should share a pass: timing, advice, and what the server takes from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from localrt.bench.batches import (
    SIZES,
    Advice,
    PassTime,
    advise,
    save_advice,
    saved_batch,
    time_passes,
    to_table,
)
from localrt.common.errors import MemoryBudgetError
from tests.engine.fake_session import ScriptedSession
from tests.engine.test_batch import PASS_ROWS, ScriptedEngine


def test_time_passes() -> None:
    engine = ScriptedEngine()
    engine.pass_rows = 64
    times = time_passes(engine, runs=2)
    assert [each.rows for each in times] == [*SIZES]
    assert [len(rows) for rows in engine.passes] == [rows for rows in SIZES for _ in range(3)]
    assert all(session.closed for session in engine.sessions)
    small = ScriptedEngine()
    assert max(each.rows for each in time_passes(small, runs=1)) <= PASS_ROWS


def test_short_of_memory() -> None:
    class Full(ScriptedEngine):
        def session(self, capacity: int) -> ScriptedSession:
            if len(self.sessions) == 5:
                raise MemoryBudgetError("full")
            return super().session(capacity)

    engine, notes = Full(), list[str]()
    assert [each.rows for each in time_passes(engine, runs=1, notify=notes.append)] == [1, 2, 4]
    assert "8 answers do not fit" in notes[-1]
    assert all(session.closed for session in engine.sessions)


@pytest.mark.parametrize(
    ("seconds", "batch", "limit"),
    [
        ([1, 1, 1, 1], 8, "nothing measured"),  # weights are read, whoever asks
        ([1, 2, 4, 8], 1, "computing"),
        ([1, 1.1, 1.4, 2.7], 4, "computing"),
        ([1, 1.2, 1.8, 3.0], 4, "computing"),
        ([1], 1, "nothing measured"),
    ],
)
def test_advice(seconds: list[float], batch: int, limit: str) -> None:
    times = [PassTime(1 << i, each) for i, each in enumerate(seconds)]
    found = advise(times)
    assert (found.batch, found.limit) == (batch, limit)
    assert f"{batch} answers at a time" in to_table(times, found)


def test_saved(tmp_path: Path) -> None:
    model, cache = tmp_path / "model.gguf", tmp_path / "cache"
    model.write_bytes(b"model")
    assert saved_batch(cache, model) is None
    times = [PassTime(1, 0.1)]
    save_advice(cache, model, times, Advice(8, 1.0, "computing"))
    assert saved_batch(cache, model) == 8
    save_advice(cache, model, times, Advice(4, 1.0, "computing"))
    assert saved_batch(cache, model) == 4
    model.write_bytes(b"another")  # measured anew
    assert saved_batch(cache, model) is None
    (cache / "batches.json").write_text(json.dumps({"a": {"batch": "many"}}))
    assert saved_batch(cache, model) is None
