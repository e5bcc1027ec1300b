"""Placements on a card that does everything as late as it may: nothing is read before it has come,
nothing is overwritten before it has been read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from localrt.errors import CancelledError
from localrt.offload.cards.clock import WallClock
from localrt.offload.experts.scheduler import ExpertCosts
from localrt.offload.placement import LEAST_CARD_ROWS, Where
from localrt.quant.ops.native.ops import NativeOps
from localrt.quant.ops.protocol import Batch
from tests.models.tiny import tokens
from tests.offload.cards.carded import (
    assert_same,
    conversation,
    on_card,
    place_on_card,
    placements,
)
from tests.offload.cards.late import POISON, LateAccelerator
from tests.offload.cards.test_long_passes import LONG, crossing, passes
from tests.offload.experts.rates import Rate
from tests.offload.placed import (
    PLENTY,
    Model,
    extend,
    needs_kernels,
    pack_synthetic,
    pack_tiny,
    passing,
)

pytestmark = needs_kernels

# A race shows in some runs only: there is nothing to be shrunk.
some = settings(phases=(Phase.explicit, Phase.generate))
PAGES = st.tuples(st.integers(0, 90), st.integers(0, 90))


class Expected(Model):
    """With what the resident decoder gives."""

    @property
    def expected(self) -> list[np.ndarray]:
        if not hasattr(self, "_expected"):
            self._expected = conversation(self.resident)
        return self._expected


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Expected]:
    """Three layers and a head of slices."""
    folder = pack_synthetic(tmp_path_factory.mktemp("llama"), vocab=1500, layers=3, hidden=128)
    with closing(Expected(folder)) as model:
        yield model


@pytest.fixture(scope="module", params=["qwen3-moe", "gpt-oss"])
def mixture(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Expected]:
    with closing(Expected(pack_tiny(request.param, tmp_path_factory.mktemp("moe")))) as model:
        yield model


# -- the card itself -------------------------------------------------------------------------------


def late_card() -> LateAccelerator:
    return LateAccelerator(WallClock(), NativeOps(threads=1), capacity=PLENTY)


def test_bytes_arrive_when_they_are_waited_for_and_not_before() -> None:
    card = late_card()
    out, source = card.alloc(8), np.arange(8, dtype=np.uint8)
    mark = card.copy_in("a", source, out, None, None)
    source[:] = 9  # the copy was waited for: its source may change
    assert set(out) == {POISON}
    card.wait(mark)
    assert list(out) == list(range(8))
    mark = card.copy_in("b", source, out, None, None, wait=False)
    source[:] = 3  # too early
    card.settled(mark)
    assert set(out) == {3}
    card.free(out)
    assert set(out) == {POISON}
    assert not card.faults


def test_a_copy_that_waits_for_too_little_is_found() -> None:
    card = late_card()
    memory, source = card.alloc(8), np.zeros(8, np.uint8)
    early = card.mark(None, memory[:4])
    used = card.mark(None, memory[4:], last=True)
    assert list(memory[4:]) == [POISON] * 4
    card.copy_in("fine", source[:4], memory[:4], early, None)
    assert not card.faults
    card.copy_in("race", source[:4], memory[4:], early, None, wait=False)
    assert len(card.faults) == 1
    card.copy_in("fine", source[:4], memory[4:], used, None, wait=False)
    assert len(card.faults) == 1
    card.free_host(source)
    card.free(memory)
    assert len(card.faults) == 3


# -- dense models ----------------------------------------------------------------------------------


@settings(some, max_examples=25)
@given(data=st.data(), slack=PAGES)
def test_any_placement_computes_the_same(
    model: Expected, data: st.DataObject, slack: tuple[int, int]
) -> None:
    where = data.draw(placements([*passing(model.store), "embedding"]))
    where["embedding"] = Where.SSD if where["embedding"].read else Where.RAM
    with on_card(model, where, slack=slack, late=True) as decoder:
        assert_same(conversation(decoder), model.expected)


@settings(some, max_examples=15)
@given(data=st.data(), slack=PAGES)
def test_cancelled_passes_and_memory_given_back(
    model: Expected, data: st.DataObject, slack: tuple[int, int]
) -> None:
    where = data.draw(placements(passing(model.store)))
    stops = data.draw(st.lists(st.integers(0, 12), min_size=2, max_size=6))
    taken = st.tuples(st.integers(0, 300_000), st.integers(0, 300_000))
    shortages = data.draw(st.lists(taken, max_size=4))
    pending = iter([(0, 0), *shortages, *[(0, 0)] * 100])
    with on_card(model, where, slack=slack, late=True, shortage=lambda: next(pending)) as decoder:
        cache, twin = decoder.cache(100), model.resident.cache(100)
        for seed, stop in enumerate(stops):
            left = stop

            def check() -> None:
                nonlocal left
                left -= 1
                if not left:
                    raise CancelledError("stop")

            if 0 < stop <= len(passing(model.store)):
                with pytest.raises(CancelledError):
                    decoder.forward(Batch.extend([(cache, [5, 6])]), check=check)
            assert_same(
                [extend(decoder, cache, tokens(2, seed=seed))],
                [extend(model.resident, twin, tokens(2, seed=seed))],
            )


@settings(some, max_examples=15)
@given(data=st.data(), slack=PAGES)
def test_long_passes_for_which_weights_cross(
    model: Expected, data: st.DataObject, slack: tuple[int, int]
) -> None:
    where = data.draw(placements(passing(model.store)))
    sizes = data.draw(st.lists(st.sampled_from([1, 7, LONG]), min_size=2, max_size=6))
    taken = st.tuples(st.integers(0, 300_000), st.integers(0, 300_000))
    shortages = data.draw(st.lists(taken, max_size=4))
    pending = iter([(0, 0), *shortages, *[(0, 0)] * 100])
    with crossing(model, where, slack=slack, late=True, shortage=lambda: next(pending)) as decoder:
        assert_same(passes(decoder, sizes), passes(model.resident, sizes))


# -- mixtures --------------------------------------------------------------------------------------


@settings(some, max_examples=8)
@given(data=st.data(), slack=PAGES)
def test_any_placement_of_a_mixture_computes_the_same(
    mixture: Expected, data: st.DataObject, slack: tuple[int, int]
) -> None:
    cpu, gpu, fetch = (data.draw(st.sampled_from([1e-6, 1e-4, 1e-2])) for _ in range(3))
    costs = ExpertCosts(cpu=Rate(0.0, cpu, cpu / 9), gpu=Rate(gpu, 0.0, 0.0), fetch=fetch)
    names = [unit.name for unit in mixture.store.manifest.units]
    experts = [name for name in names if ".expert." in name]
    shells = [name for name in passing(mixture.store) if name not in experts]
    where = data.draw(placements(shells))
    few = len(experts) // 4  # as a plan leaves room for, of RAM
    fast = data.draw(st.integers(0, len(experts) - few))
    where |= dict.fromkeys(experts[:fast], Where.VRAM)
    where |= dict.fromkeys(experts[data.draw(st.integers(fast + few, len(experts))) :], Where.SSD)
    placement = replace(place_on_card(mixture.store, where, slack=slack), prefill_rows=LONG)
    if data.draw(st.booleans()):
        placement = replace(placement, card_rows=LEAST_CARD_ROWS)
    with on_card(mixture, where, placement=placement, late=True, expert_costs=costs) as decoder:
        assert_same(conversation(decoder), mixture.expected)
        sizes = data.draw(st.lists(st.sampled_from([1, 7, LONG]), min_size=2, max_size=5))
        assert_same(passes(decoder, sizes), passes(mixture.resident, sizes))
        left = data.draw(st.integers(1, 8))

        def check() -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise CancelledError("stop")

        def use_up_what_is_there() -> None:
            for _ in range(20):
                decoder.forward(Batch.extend([(decoder.cache(64), tokens(20))]), check=check)

        with pytest.raises(CancelledError):
            use_up_what_is_there()
        decoder.residency.memory.give_back(data.draw(st.integers(1, 300_000)))
        assert_same(conversation(decoder), mixture.expected)
