"""Layers whose experts a GPU computes too: the CPU's part, with a thread in the GPU's place."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np
import pytest

from localrt.quant.cpu import replay
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.cpu.replay import NativeSharedLayers
from localrt.quant.ops.experts import ExpertTable, Routing, SharedWords
from tests.conftest import needs_kernels
from tests.ops.test_native_experts import COUNT, HIDDEN, SPEC, Expert, fill, inputs, routing, run

pytestmark = needs_kernels


@dataclass
class Layer:
    """A ``Share`` in plain RAM, for ``rows`` rows; the GPU has the ``present`` experts."""

    rows: np.ndarray
    routing: Routing
    present: np.ndarray
    words: SharedWords = field(
        default_factory=lambda: SharedWords(*(np.zeros(1, np.int32) for _ in range(4)))
    )

    def __post_init__(self) -> None:
        slots = len(self.rows) * self.routing.used
        self.host_slots = np.full((slots, HIDDEN), np.nan, np.float32)


def layers(rows: int) -> list[Layer]:
    halves = np.arange(COUNT) % 2 == 0, np.ones(COUNT, bool), np.zeros(COUNT, bool)
    return [
        Layer(inputs(rows, seed=seed), routing(rows, seed=seed), present)
        for seed, present in enumerate(halves)
    ]


@pytest.fixture(scope="module")
def ops() -> NativeOps:
    return NativeOps(threads=2)


@pytest.fixture(scope="module")
def expert() -> Expert:
    return Expert(("q4_0", "q4_0", "q4_0"), 0)


@pytest.fixture
def table(ops: NativeOps, expert: Expert) -> ExpertTable:
    return fill(ops, [expert] * COUNT)


def begun(ops: NativeOps, table: ExpertTable, shared: list[Layer]) -> NativeSharedLayers:
    work = ops.shared_layers([(layer, table, SPEC) for layer in shared])
    for number, layer in enumerate(shared):
        work.present(number, layer.present)
        layer.words.turn[0] += 1
    return work


@pytest.mark.parametrize("rows", [1, 5])
def test_absent_experts(ops: NativeOps, table: ExpertTable, rows: int) -> None:
    shared = layers(rows)
    work = begun(ops, table, shared)

    def gpu() -> None:
        """Each layer's ticket once the one before is done, or needs nobody."""
        for before, layer in zip([None, *shared], shared, strict=False):
            while before is not None and before.words.done[0] != before.words.turn[0]:
                pass
            layer.words.ticket[0] = layer.words.turn[0]

    thread = threading.Thread(target=gpu)
    thread.start()
    at = 0
    while at < len(shared):  # a slow machine may try its patience
        at = work.run(at)
    thread.join()
    for layer in shared:
        computed = ~layer.present[layer.routing.chosen.reshape(-1)]
        whole = run(ops, table, layer.rows, layer.routing)
        assert np.array_equal(layer.host_slots[computed], whole[computed])
        assert np.isnan(layer.host_slots[~computed]).all()
    assert work.busy_s > 0


def test_what_is_left(
    ops: NativeOps, expert: Expert, table: ExpertTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer without a ticket, with an expert that is not in RAM, or of a pass given up."""
    monkeypatch.setattr(replay, "_PATIENCE_US", 1000)
    shared = layers(3)
    work = begun(ops, table, shared)
    assert work.run(0) == 0
    for layer in shared:
        layer.words.ticket[0] = 1
    missing = int(shared[2].routing.chosen[0, 0])
    table.drop(missing)
    assert work.run(1) == 2
    assert np.isnan(shared[2].host_slots).all()
    assert [layer.words.done[0] for layer in shared] == [0, 1, 0]
    table.put(missing, expert.load(ops))
    assert work.run(2) == 3
    shared[0].words.turn[0], shared[0].words.stop[0] = 2, 1
    assert work.run(0) == 0
