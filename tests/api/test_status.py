"""Snapshots of a running model: what counts, what rates follow, and that nobody waits for them."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

import localrt
from localrt.common.settings import Settings
from localrt.common.speeds import known_speed
from localrt.service.status import MemoryUse, Status


def status(**changes: object) -> Status:
    values: dict[str, object] = {
        "clock_s": 0.0,
        "streamed": False,
        "generating": True,
        "ram": MemoryUse(1, 2),
        "vram": None,
        "kv": None,
        "weight_bytes": 100,
    }
    return Status(**{**values, **changes})  # type: ignore[arg-type]


def test_status(tiny: localrt.Model) -> None:
    before = tiny.status()
    chat = tiny.chat()
    for _ in chat.stream("Hi", max_tokens=5, ignore_eos=True):
        now = tiny.status(lanes=True)
        assert now.generating
    after = tiny.status()
    assert not after.streamed
    assert not after.generating
    assert after.tokens - before.tokens == 5
    assert after.metrics is not None
    assert after.metrics.completion_tokens == 5
    assert after.ram.budget is not None
    assert after.ram.used > 0
    assert after.kv is not None
    assert after.kv.budget is not None
    assert 0 < after.kv.used <= after.kv.budget
    flow = after.since(before)
    assert flow.tok_s is not None
    assert flow.tok_s > 0
    assert flow.ssd_bytes_s is None
    assert flow.busy == {}
    assert "memory" in flow.why
    chat.close()
    stream = tiny.stream("Hi", max_tokens=5, ignore_eos=True)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not tiny.status().generating
    assert tiny.status().kv.used <= after.kv.used  # type: ignore[union-attr]


def test_speed_is_kept(
    tiny: localrt.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the last answer which had enough tokens and the model for itself."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    folder, options = Settings.from_environment().data_dir, {"ignore_eos": True, "seed": 1}
    name = tiny.info.path.name

    def answer(tokens: int) -> float | None:
        return tiny.generate("Hi", max_tokens=tokens, **options).metrics.decode_tok_s

    answer(31)
    assert known_speed(folder, name) is None
    first = answer(32)
    assert known_speed(folder, name) == first
    with closing(tiny.stream("Ho", max_tokens=50, **options)) as other:
        next(other)
        answer(40)
        assert known_speed(folder, name) == first
    assert known_speed(folder, name) == first  # it was closed before its end
    for damaged in ("[]", json.dumps({name: "fast"})):
        (folder / "speeds.json").write_text(damaged, encoding="utf-8")
        assert known_speed(folder, name) is None
        assert answer(32) == known_speed(folder, name)


def test_flow() -> None:
    then = status(
        streamed=True,
        passes=0,
        ssd_read_bytes=0,
        link_bytes=0,
        busy_s={"ssd": 0.0, "cpu": 0.0},
        ceiling_tok_s=20.0,
    )
    now = status(
        clock_s=2.0,
        streamed=True,
        passes=20,
        tokens=20,
        ssd_read_bytes=1_000_000_000,
        link_bytes=0,
        busy_s={"ssd": 1.9, "cpu": 0.5},
        expert_uses=10,
        expert_hits=9,
        ceiling_tok_s=20.0,
    )
    flow = now.since(then)
    assert flow.tok_s == 10
    assert flow.ssd_bytes_s == 5e8
    assert flow.pass_bytes == 5e7
    assert flow.busy == {"ssd": 0.95, "cpu": 0.25}
    assert flow.expert_hit_rate == 0.9
    assert flow.why == (
        "The disk sets the pace, busy 95 % of the time: every pass reads 50 MB that do not fit in "
        "memory."
    )
    assert now.share_of_ceiling(flow.tok_s) == 0.5
