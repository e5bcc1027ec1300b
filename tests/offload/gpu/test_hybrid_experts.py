"""A mixture of experts on a GPU and the CPU: who computes, and which experts are copied."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from localrt.offload.experts.cache import ExpertCosts
from tests.models.tiny import tokens
from tests.offload.gpu.placed_on_gpu import COSTS, on_gpu, places, stages
from tests.offload.placed import Model, assert_same, extend, needs_kernels, pack_tiny

pytestmark = needs_kernels


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A tiny mixture in a store."""
    with closing(Model(pack_tiny("qwen3-moe", tmp_path_factory.mktemp("moe")))) as opened:
        yield opened


def test_no_copies_for_the_layer_at_hand(model: Model) -> None:
    """Who computes depends on what was in the slots before, not on how fast a copy would be."""
    costs = ExpertCosts(cpu=1.0, gpu=1e-9, fetch=1e-9)
    with on_gpu(model, places(model, 0.5), expert_costs=costs) as placed:
        mixture, cache, twin = stages(placed), placed.cache(64), model.resident.cache(64)
        mixture.fills = False
        before = placed.weights.counts().link_bytes
        for count in (1, 20, 1):
            got, wanted = extend(placed, cache, tokens(count)), tokens(count)
            assert_same([got], [extend(model.resident, twin, wanted)])
        assert len(mixture.slots.cache) == 0
        assert placed.weights.counts().link_bytes == before


def test_no_more_fills_than_misses(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often an absent expert seems worth a slot."""
    with on_gpu(model, places(model, 0.2), expert_costs=replace(COSTS, fetch=1e-9)) as placed:
        mixture, brought = stages(placed), list[object]()
        slots = mixture.slots
        cache, bring = placed.cache(64), slots.bring
        for token in tokens(5):
            extend(placed, cache, [token])
        mixture.settle()

        def candidate(place: int, gain: float = 0.0) -> int | None:
            absent = (~slots.cache.resident(place)).nonzero()[0].tolist()
            held = mixture.memory.pool(place).holds
            return next((expert for expert in absent if held(place, expert)), None)

        monkeypatch.setattr(slots.cache, "candidate", candidate)
        monkeypatch.setattr(slots, "bring", lambda *args: (brought.append(args), bring(*args))[1])
        for number in range(500):
            mixture.fill(number % slots.cache.layers)
            mixture.settle()
        assert 0 < len(brought) <= mixture.uses - mixture.hits
