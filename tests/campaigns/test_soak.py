"""A few seconds of the soak: what clients and the app meet, whatever the time that it takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaigns import soak
from tests.campaigns.campaign import Run
from tests.conftest import needs_signals
from tests.models.vision.tiny import qwen_folder

FLAT = {"memory": 100 << 20, "threads": 9, "descriptors": 30, "cache": 0}


@pytest.mark.parametrize(
    ("grows", "found"),
    [
        ({}, []),
        ({"memory": 1 << 20}, ["memory"]),
        ({"memory": 1 << 17}, []),  # 13 MB in all
        ({"threads": 1, "descriptors": 1}, ["threads", "descriptors"]),
        ({"cache": 1 << 20}, ["cache"]),
    ],
)
def test_what_is_not_flat(tmp_path: Path, grows: dict[str, int], found: list[str]) -> None:
    run = Run("soak", tmp_path, seed=1, seconds=1, count=1)
    samples = [
        {name: size + number * grows.get(name, 0) for name, size in FLAT.items()}
        for number in range(100)
    ]
    soak.judge(run, "clients", [dict.fromkeys(FLAT, 0)] * 5 + samples)
    assert [what.split()[1] for what in run.failures] == found


@needs_signals
@pytest.mark.timeout(300)
def test_soak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "_CLIENTS", 12)
    run = Run("soak", tmp_path, seed=1, seconds=3, count=40)
    soak.body(run)
    assert run.done("one-shot") == 40
    assert run.done("client: polite") > 0 < run.done("app: keys")
    # Memory still grows at the beginning, and a busy machine is slow.
    timely = ("clients:", "one-shot: memory", "app", "polite")
    assert [what for what in run.failures if not what.startswith(timely)] == []


@needs_signals
@pytest.mark.timeout(300)
def test_an_app_that_ends_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "_KEYS", ["\x11"])  # Ctrl+Q, which no run types
    run = Run("soak", tmp_path, seed=1, seconds=120, count=0)
    soak.app(run, qwen_folder(tmp_path / "model"), tmp_path)
    assert "app: it ended with 0: no report" in run.failures
