"""Experts ahead of their need: the same logits, measured before they are used, in nobody's way."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from localrt.errors import CancelledError, CheckpointError
from localrt.models.checkpoints.store_manifest import StoredUnit
from localrt.models.decoder import Decoder
from localrt.models.timing import Mark
from localrt.offload.experts.assignment import ExpertCosts, Rate
from localrt.offload.experts.prefetch import (
    Measured,
    PredictionMeter,
    Prefetcher,
    prefetch_pays,
)
from localrt.offload.experts.reader import DemandReader, Load
from localrt.quant.ops.experts import Routing
from localrt.quant.ops.protocol import Batch
from tests.models.tiny import tokens
from tests.offload.cards.carded import assert_same, conversation, on_card
from tests.offload.cards.test_hybrid_experts import places
from tests.offload.placed import Model, extend, needs_kernels, wide_mixture
from tests.offload.test_placed_experts import Failing, experts

COSTS = ExpertCosts(cpu=Rate(0.0, 4e-4, 1e-6), gpu=Rate(1e-5, 1e-6, 1e-8), fetch=5e-5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A mixture of more experts than it uses, in a store."""
    opened = wide_mixture(tmp_path_factory.mktemp("moe"), 3)
    yield opened
    opened.close()


def decode(placed: Decoder, count: int, seed: int = 3) -> list[np.ndarray]:
    """Logits of a prompt and of tokens after it, one pass each."""
    cache = placed.cache(256)
    found = [extend(placed, cache, tokens(20))]
    return found + [extend(placed, cache, [token]) for token in tokens(count, seed)[::-1]]


# -- from the SSD ----------------------------------------------------------------------------------


@needs_kernels
def test_guesses_change_no_logit_from_the_ssd(model: Model) -> None:
    with model.placed(experts(model.store, 0.3)) as placed, model.placed([]) as whole:
        placed.residency.sparse["cpu"].prefetcher.force(True)
        for _ in range(2):
            assert_same(decode(placed, 60), decode(whole, 60))
        counts = placed.residency.counts()
        assert 0 <= counts.expert_prefetch_hits <= counts.expert_prefetches
        placed.residency.sparse["cpu"].prefetcher.force(None)
        assert_same(decode(placed, 20), decode(whole, 20))


@needs_kernels
def test_guesses_that_are_right_are_in_memory(model: Model) -> None:
    with model.placed(experts(model.store, 0.75)) as placed:
        seen: list[Routing] = []
        placed.residency.watch_routing(lambda layer, routing: seen.append(routing))
        decode(placed, 40)
        turns: list[Routing] = []
        placed.residency.watch_routing(lambda layer, routing: turns.append(routing))
        prefetcher = placed.residency.sparse["cpu"].prefetcher
        prefetcher._gate = lambda layer, x: seen[len(turns)]  # the same text has the same experts
        prefetcher.force(True)
        pool: Any = placed.residency.sparse["cpu"]._memory.pool(0)
        propose = pool.propose

        def read_at_once(layer: int, experts: list[int]) -> None:
            propose(layer, experts)
            for slot in pool._proposed.values():
                pool._reader.wait(slot.load)

        pool.propose = read_at_once
        before = placed.residency.counts()
        decode(placed, 40)
        after = placed.residency.counts()
    guesses = after.expert_prefetches - before.expert_prefetches
    right = after.expert_prefetch_hits - before.expert_prefetch_hits
    assert right == guesses >= 3


@needs_kernels
def test_buffers_for_guesses_are_the_memory_of_slots(model: Model) -> None:
    with model.placed(experts(model.store, 0.3)) as placed:
        decode(placed, 4)
        memory = placed.residency.sparse["cpu"]._memory
        (pool,) = memory.pools
        before, slots = memory.nbytes, pool.cache.capacity
        placed.residency.sparse["cpu"].prefetcher.force(True)
        decode(placed, 10)
        assert memory.nbytes == before
        assert pool.cache.capacity == slots - placed.residency.sparse["cpu"].prefetcher.most
        freed = placed.residency.memory.give_back(2 * memory.slot_nbytes)
        assert freed >= 2 * memory.slot_nbytes
        decode(placed, 10)
        placed.residency.sparse["cpu"].prefetcher.force(None)
        decode(placed, 2)
        assert pool.cache.capacity == slots


@needs_kernels
def test_guesses_are_never_made_with_hardly_any_slots(model: Model) -> None:
    with model.placed(experts(model.store), slack=0) as placed:
        placed.residency.sparse["cpu"].prefetcher.force(True)
        decode(placed, 10)
        assert placed.residency.counts().expert_prefetches == 0


@needs_kernels
def test_a_disk_that_fails_meanwhile_ends_the_pass_and_no_more(model: Model) -> None:
    files = Failing(model.store.path, {unit.file for unit in model.store.manifest.units})
    with model.placed(experts(model.store, 0.7), files=files) as placed, model.placed([]) as whole:
        placed.residency.sparse["cpu"].prefetcher.force(True)
        want = decode(whole, 30)
        assert_same(decode(placed, 30), want)
        files.broken = lambda: True
        with pytest.raises(CheckpointError, match="the disk is gone"):
            decode(placed, 200, seed=7)
        files.broken = lambda: False
        assert_same(decode(placed, 30), want)


@needs_kernels
def test_a_pass_that_is_cancelled_leaves_no_guess_behind(model: Model) -> None:
    with model.placed(experts(model.store, 0.7)) as placed, model.placed([]) as whole:
        placed.residency.sparse["cpu"].prefetcher.force(True)
        want = decode(whole, 30)
        for stages in range(1, 8):
            left = stages

            def check() -> None:
                nonlocal left
                left -= 1
                if left < 0:
                    raise CancelledError("stopped")

            cache = placed.cache(64)
            extend(placed, cache, tokens(5))
            with pytest.raises(CancelledError):
                placed.forward(Batch.extend([(cache, [9])]), check=check)
            assert_same(decode(placed, 30), want)


# -- on a card -------------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize("ssd", [0.0, 0.4])
def test_guesses_change_no_logit_on_a_card(model: Model, ssd: float) -> None:
    want = conversation(model.resident)
    with on_card(model, places(model, 0.5, ssd=ssd), expert_costs=COSTS) as placed:
        placed.residency.sparse["gpu"].prefetcher.force(True)
        assert_same(conversation(placed), want)
        cache = placed.cache(128)
        for token in tokens(60):
            extend(placed, cache, [token])
        assert_same(conversation(placed), want)
        counts = placed.residency.counts()
        assert 0 <= counts.expert_prefetch_hits <= counts.expert_prefetches


@needs_kernels
def test_guesses_fill_the_links_idle_time(model: Model) -> None:
    def hits(on: bool | None) -> tuple[int, int]:
        with on_card(model, places(model, 0.6), expert_costs=COSTS) as placed:
            stage: Any = placed.residency.sparse["gpu"]
            stage.fills = False
            placed.residency.sparse["gpu"].prefetcher.force(on)
            cache = placed.cache(128)
            for token in tokens(80):
                extend(placed, cache, [token])
            counts = placed.residency.counts()
            return counts.expert_prefetches, counts.expert_prefetch_hits

    assert hits(None) == (0, 0)
    copied, right = hits(True)
    assert copied >= right > 0


# -- the reader ------------------------------------------------------------------------------------


class Slow:
    """A source that gives a piece when it is told to."""

    def __init__(self) -> None:
        self.fetched: list[str] = []
        self.gate = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)

    def fetch(self, unit: StoredUnit, start: int, out: Any, after: Mark) -> Mark:
        """Note what is fetched, wait, and fill it."""
        self.fetched.append(unit.name)
        self.entered.release()
        assert self.gate.acquire(timeout=60)
        out[:] = 7
        return None

    def skip(self, unit: StoredUnit) -> None:
        """Nothing."""


def unit(name: str, nbytes: int = 400) -> StoredUnit:
    return StoredUnit(name=name, file="f", offset=0, nbytes=nbytes, sha256="", tensors=())


def test_a_demand_waits_for_the_piece_that_is_being_read_and_for_no_more() -> None:
    source = Slow()
    reader = DemandReader(source, threads=1, block=100, stall_s=30.0)
    try:
        memory = {name: np.zeros(400, np.uint8) for name in "abc"}
        guess = reader.ask(unit("a"), memory["a"], urgent=False)
        reader.ask(unit("b"), memory["b"], urgent=False)
        source.entered.acquire()
        wanted = reader.ask(unit("c"), memory["c"])
        source.gate.release(20)
        reader.wait(wanted)
        assert source.fetched[:5] == ["a ahead", "c", "c", "c", "c"]
        reader.hurry(guess)
        reader.wait(guess)
        assert (memory["a"] == 7).all()
    finally:
        reader.close()


def test_what_is_called_off_is_not_read_on() -> None:
    source = Slow()
    reader = DemandReader(source, threads=1, block=100, stall_s=30.0)
    try:
        ended: deque[Load] = deque()
        first = reader.ask(unit("a"), np.zeros(400, np.uint8), urgent=False, ends=ended)
        second = reader.ask(unit("b"), np.zeros(400, np.uint8), urgent=False)
        source.entered.acquire()
        assert not reader.cancel(first)  # a piece of it is on its way
        assert reader.cancel(second)
        assert not first.done
        source.gate.release(20)
        wanted = reader.ask(unit("c", 100), np.zeros(100, np.uint8))
        reader.wait(wanted)
        assert source.fetched == ["a ahead", "c"]
        assert first.done
        assert list(ended) == [first]
    finally:
        reader.close()


def test_only_what_was_demanded_counts_as_busy() -> None:
    source = Slow()
    source.gate.release(20)
    reader = DemandReader(source, threads=2, block=100, stall_s=30.0)
    try:
        guess = reader.ask(unit("a"), np.zeros(400, np.uint8), urgent=False)
        reader.wait(guess)
        assert reader.time().busy_s == 0.0
        assert reader.time().loads == 0
        reader.wait(reader.ask(unit("b"), np.zeros(400, np.uint8)))
        assert reader.time().busy_s > 0.0
        assert reader.time().loads == 1
    finally:
        reader.close()


# -- whether it pays -------------------------------------------------------------------------------


class Machine:
    """Passes of three layers whose next experts are known, or not; a clock of its own."""

    def __init__(self, *, right: float, busy: float, saved: float, seed: int = 0) -> None:
        self.now = 0.0
        self.totals = Measured()
        self.random = np.random.default_rng(seed)
        self.right, self.busy, self.saved = right, busy, saved
        self.coming: dict[int, int] = {}
        self.prefetcher = Prefetcher(
            3, gate=self.gate, now=lambda: self.now, measured=lambda: self.totals
        )

    def gate(self, layer: int, x: Any) -> Routing:
        told = self.coming[layer]
        if self.random.random() >= self.right:
            told = (told + 1) % 16
        return routing(told)

    def one_pass(self) -> list[int]:
        chosen = self.random.integers(0, 16, 3)
        proposed = []
        for layer, expert in enumerate(chosen):
            self.coming = {layer + 1: int(chosen[layer + 1])} if layer < 2 else {}
            _, found = self.prefetcher.turn(
                layer, routing(int(expert)), None, lambda layer: np.zeros(16, bool)
            )
            proposed += found
            self.now += 1e-3
            done = self.totals
            self.totals = Measured(
                done.busy_s + self.busy,
                done.loads + 1,
                done.saved_s + self.saved,
                done.misses + 1,
                done.cpu_s + 3e-5,
            )
        return proposed


def routing(expert: int) -> Routing:
    return Routing(
        np.array([[expert]], np.int32), np.ones((1, 1), np.float32), np.ones((1, 1), np.float32)
    )


@pytest.mark.parametrize(
    ("right", "busy", "saved", "pays"),
    [
        (0.9, 2e-4, 2e-4, True),  # the disk rests most of the time
        (0.9, 1e-3, 2e-4, False),  # it has no time to spare
        (0.0, 2e-4, 2e-4, False),  # wrong
        (0.9, 2e-4, 0.0, False),  # a hit saves nothing
    ],
)
def test_prefetching_is_on_where_it_pays_and_only_there(
    right: float, busy: float, saved: float, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localrt.offload.experts.prefetch._SHARE", float("inf"))
    machine = Machine(right=right, busy=busy, saved=saved)
    assert not machine.prefetcher.on
    proposed = [machine.one_pass() for _ in range(400)]
    assert not any(proposed[:20]), "nothing is loaded before it is measured"
    assert machine.prefetcher.on is pays
    assert any(proposed) is pays
    judged = machine.prefetcher.judgement
    assert judged is not None
    assert judged.precision == pytest.approx(right, abs=0.1)
    assert judged.fetch_s == pytest.approx(busy)


def test_predictions_that_stop_being_right_turn_it_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("localrt.offload.experts.prefetch._SHARE", float("inf"))
    machine = Machine(right=0.9, busy=2e-4, saved=2e-4)
    for _ in range(300):
        machine.one_pass()
    assert machine.prefetcher.on
    machine.right = 0.0
    for _ in range(4000):
        machine.one_pass()
    assert not machine.prefetcher.on


def test_a_prompt_is_no_evidence_and_gets_no_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localrt.offload.experts.prefetch._SHARE", float("inf"))
    machine = Machine(right=1.0, busy=2e-4, saved=2e-4)
    many = Routing(
        np.zeros((2, 1), np.int32), np.ones((2, 1), np.float32), np.ones((2, 1), np.float32)
    )
    for _ in range(300):
        machine.one_pass()
    for layer in range(3):
        found = machine.prefetcher.turn(layer, many, None, lambda layer: np.zeros(16, bool))
        assert found[1] == []
    meter = machine.prefetcher._meter
    seen = meter.predicted
    for layer in range(3):
        meter.observe(layer, np.array([0]))
    assert meter.predicted == seen  # what was foretold of the text before is not compared


def measured(right: int, of: int) -> PredictionMeter:
    meter = PredictionMeter()
    for number in range(of):
        meter.predict(0, [1])
        meter.observe(0, np.array([1 if number < right else 2]))
    return meter


def test_prefetch_pays_only_where_it_was_measured_to() -> None:
    good, bad = measured(700, 1000), measured(100, 1000)
    assert good.precision == 0.7
    link = {"fetch_s": 200e-6, "saved_s": 75e-6}
    assert prefetch_pays(good, idle_s=300e-6, **link)  # the link would rest
    assert not prefetch_pays(good, idle_s=0.0, **link)  # the link is the bottleneck
    assert not prefetch_pays(good, idle_s=300e-6, cost_s=60e-6, **link)  # reading takes cores
    assert not prefetch_pays(bad, idle_s=300e-6, cost_s=10e-6, **link)
    assert prefetch_pays(bad, idle_s=300e-6, cost_s=5e-6, **link)
    assert not prefetch_pays(measured(10, 10), idle_s=1.0, **link)  # too little was seen
    assert not prefetch_pays(PredictionMeter(), idle_s=1.0, **link)


def test_the_meter_forgets() -> None:
    meter = measured(4000, 4000)
    for _ in range(12000):
        meter.predict(0, [1])
        meter.observe(0, np.array([0]))
    assert meter.precision is not None
    assert meter.precision < 0.2
