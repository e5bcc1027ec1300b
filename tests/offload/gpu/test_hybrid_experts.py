"""A mixture of experts on a GPU and the CPU: the same logits, whoever computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from localrt.offload.experts.scheduler import ExpertCosts, schedule
from tests.models.tiny import tokens
from tests.offload.experts.rates import Rate
from tests.offload.gpu.placed_on_gpu import COSTS, on_gpu, places, stages
from tests.offload.placed import (
    Model,
    assert_same,
    conversation,
    extend,
    needs_kernels,
    pack_tiny,
)

pytestmark = needs_kernels


@pytest.fixture(scope="module", params=["qwen3-moe", "qwen2-moe", "gpt-oss", "gemma4-moe"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    """A tiny mixture in a store."""
    opened = Model(pack_tiny(request.param, tmp_path_factory.mktemp("moe")))
    yield opened
    opened.close()


# What is counted is the scheduler's and the slots': the same for all mixtures.
one_mixture = pytest.mark.parametrize("model", ["qwen3-moe"], indirect=True)


@pytest.mark.parametrize(("share", "ssd"), [(0.2, 0.0), (0.5, 0.0), (1.0, 0.0), (0.3, 0.6)])
def test_same_logits(model: Model, share: float, ssd: float) -> None:
    want = conversation(model.resident)
    with on_gpu(model, places(model, share, ssd=ssd), expert_costs=COSTS) as placed:
        assert_same(conversation(placed), want)
        assert_same(conversation(placed), want)


@one_mixture
def test_slots_and_cpu_share_the_work(model: Model) -> None:
    with on_gpu(model, places(model, 0.5), expert_costs=COSTS) as placed:
        cache = placed.cache(64)
        for token in tokens(30):
            extend(placed, cache, [token])
        counts = placed.weights.counts()
        busy = placed.weights.counts().busy_s
    assert 0 < counts.expert_hits < counts.expert_uses
    assert busy["cpu"] > 0
    assert busy["gpu"] > 0
    assert counts.link_bytes > 0


@one_mixture
def test_costs_choose_who_computes(model: Model) -> None:
    def fetched(costs: ExpertCosts) -> int:
        with on_gpu(model, places(model, 0.5), expert_costs=costs) as placed:
            stages(placed).fills = False
            cache = placed.cache(64)
            before = placed.weights.counts().link_bytes
            for token in tokens(20):
                extend(placed, cache, [token])
            return placed.weights.counts().link_bytes - before

    quick = Rate(0.0, 1e-6, 1e-8)
    slow_cpu = fetched(ExpertCosts(cpu=Rate(1.0, 0.0, 0.0), gpu=quick, fetch=1e-6))
    slow_link = fetched(ExpertCosts(cpu=quick, gpu=quick, fetch=1.0))
    assert slow_link < slow_cpu


@one_mixture
def test_idle_links_fill_slots(model: Model) -> None:
    def never(rows: Any, resident: Any, costs: Any, ready: Any) -> Any:
        return schedule(rows, resident, costs, ready, fetched=0)

    def hits(fills: bool) -> int:
        with on_gpu(model, places(model, 0.5), expert_costs=COSTS) as placed:
            stages(placed).scheduler, stages(placed).fills = never, fills
            cache = placed.cache(64)
            for token in tokens(20):
                extend(placed, cache, [token])
            return placed.weights.counts().expert_hits

    assert hits(False) == 0  # a static placement whose slots nobody has filled
    assert hits(True) > 0


@one_mixture
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
