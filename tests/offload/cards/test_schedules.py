"""The benchmark of schedules: its loop takes what its bound says, and the pipeline reaches it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from localrt.models.checkpoints import StoreCheckpoint, open_checkpoint
from localrt.offload.planner.cards import parse_card
from tests.offload.placed import MODE, needs_kernels, pack_synthetic

pytestmark = needs_kernels


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreCheckpoint]:
    # Layers whose two units are about of one size, so that a ring of six units holds three layers.
    folder = pack_synthetic(
        tmp_path_factory.mktemp("llama"), vocab=64, layers=12, hidden=128, inner=128
    )
    with closing(open_checkpoint(folder)) as found:
        assert isinstance(found, StoreCheckpoint)
        yield found


@pytest.mark.parametrize("placement", ["alternating layers", "every third", "clusters of four"])
def test_in_simulated_time_the_pipeline_reaches_the_bound(
    store: StoreCheckpoint, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(__file__).parents[3] / "benchmarks"
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    import schedules

    monkeypatch.setattr(schedules, "ROWS", (24, 32, 48, 64))
    case = schedules.Case(store, placement, virtual=True, threads=1)
    case.card = parse_card("virtual:8GB@100MB/s,1GB/s,20GFLOPS")
    found = schedules.measure(case, MODE, 4)
    assert found["simulated"]
    # The loop's time is its steps', and the pipeline's the busier resource's.
    assert found["bound"] > 1.15
    assert found["loop_s"] == pytest.approx(
        found["bound"] * max(found["loads_s"], found["computes_s"]), rel=0.05
    )
    assert 0.9 < found["share_of_bound"] < 1.02
    assert found["pipeline_efficiency"] <= 1.02


def test_on_a_disk_both_compute_the_same(
    store: StoreCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(__file__).parents[3] / "benchmarks"
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    import schedules

    monkeypatch.setattr(schedules, "ROWS", (4, 8))
    case = schedules.Case(store, "alternating layers", virtual=False, threads=1)
    found = schedules.measure(case, MODE, 2)
    assert not found["simulated"]
    assert found["loop_s"] > 0
    assert found["loads_s"] > 0
    assert "alternating layers" in schedules.describe([found])
