"""Threads that read, copy and compute: what one does while another begins anew or gives up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.common.errors import CancelledError
from localrt.offload.experts.cache import ExpertCosts
from localrt.offload.placement import LEAST_GPU_ROWS, Where
from localrt.quant.ops.protocol import Batch
from tests.models.tiny import tokens
from tests.offload.gpu.placed_on_gpu import PAGES, on_gpu, place_on_gpu, placements, some
from tests.offload.gpu.test_long_passes import LONG, passes
from tests.offload.placed import (
    Model,
    assert_same,
    cancel_after,
    conversation,
    needs_kernels,
    pack_tiny,
    passing,
)

pytestmark = needs_kernels


@pytest.fixture(scope="module", params=["qwen3-moe", "qwen2-moe", "gpt-oss", "gemma4-moe"])
def mixture(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    with closing(Model(pack_tiny(request.param, tmp_path_factory.mktemp("moe")))) as model:
        yield model


# -- dense models ----------------------------------------------------------------------------------


def test_units_arrive_between_rewinds(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the new beginnings of reading and of copying."""
    where = dict.fromkeys(passing(model.store), Where.SSD_LINK)
    with on_gpu(model, where, stall_s=5.0) as decoder:
        weights = decoder.weights
        rewind = weights.cpu.rewind

        def rewind_slowly() -> None:
            rewind()
            time.sleep(0.03)

        monkeypatch.setattr(weights.cpu, "rewind", rewind_slowly)
        for _ in range(3):
            weights.abandon()
            weights.abandon()
            assert_same(conversation(decoder), model.expected)


# -- mixtures --------------------------------------------------------------------------------------


@some
@given(data=st.data(), slack=PAGES)
def test_any_placement_of_a_mixture(
    mixture: Model, data: st.DataObject, slack: tuple[int, int]
) -> None:
    cpu, gpu, fetch = (data.draw(st.sampled_from([1e-6, 1e-4, 1e-2])) for _ in range(3))
    costs = ExpertCosts(cpu=cpu, gpu=gpu, fetch=fetch)
    names = [unit.name for unit in mixture.store.manifest.units]
    experts = [name for name in names if ".expert." in name]
    shells = [name for name in passing(mixture.store) if name not in experts]
    where = data.draw(placements(shells))
    few = len(experts) // 4  # as a plan leaves room for, of RAM
    fast = data.draw(st.integers(0, len(experts) - few))
    where |= dict.fromkeys(experts[:fast], Where.VRAM)
    where |= dict.fromkeys(experts[data.draw(st.integers(fast + few, len(experts))) :], Where.SSD)
    placement = replace(place_on_gpu(mixture.store, where, slack=slack), prefill_rows=LONG)
    if data.draw(st.booleans()):
        placement = replace(placement, gpu_rows=LEAST_GPU_ROWS)
    with on_gpu(mixture, where, placement=placement, expert_costs=costs) as decoder:
        assert_same(conversation(decoder), mixture.expected)
        sizes = data.draw(st.lists(st.sampled_from([1, 7, LONG]), min_size=2, max_size=5))
        assert_same(passes(decoder, sizes), passes(mixture.resident, sizes))
        check = cancel_after(data.draw(st.integers(1, 8)))

        def use_up_what_is_there() -> None:
            for _ in range(20):
                decoder.forward(Batch.extend([(decoder.cache(64), tokens(20))]), check=check)

        with pytest.raises(CancelledError):
            use_up_what_is_there()
        decoder.weights.memory.evict(data.draw(st.integers(1, 300_000)))
        assert_same(conversation(decoder), mixture.expected)
