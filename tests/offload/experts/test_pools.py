"""Pools of slots for layers whose experts differ in size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from localrt.models.checkpoints.store.manifest import StoredUnit
from localrt.offload.experts import memory as expert_memory
from localrt.offload.experts.memory import size_classes
from tests.offload.placed import Model, assert_same, needs_kernels, wide_mixture
from tests.offload.test_placed_experts import answers, experts


def units(*sizes: int, experts: int = 4) -> dict[tuple[int, int], StoredUnit]:
    return {
        (layer, expert): StoredUnit(f"{layer}.{expert}", "f", 0, nbytes, "", ())
        for layer, nbytes in enumerate(sizes)
        for expert in range(experts)
    }


@pytest.mark.parametrize(
    ("sizes", "classes"),
    [
        ([9, 9, 9], [[0, 1, 2]]),
        ([1000, 1010, 1005], [[0, 1, 2]]),  # not worth it
        ([1153, 1000, 1153, 1000], [[1, 3], [0, 2]]),  # Q4_K_M
        ([1200, 1120, 1000, 1000, 1120, 1000], [[2, 3, 5], [1, 4], [0]]),  # Q3_K_M
        ([1000, 1000, 1000, 1064], [[0, 1, 2], [3]]),  # Q4_K_S: few are larger
    ],
)
def test_size_classes(sizes: list[int], classes: list[list[int]]) -> None:
    assert size_classes(units(*sizes)) == classes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A mixture of many experts in a store, whose layers are taken to differ."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_memory, "size_classes", lambda units: [[0, 2], [1]])
        with closing(wide_mixture(tmp_path_factory.mktemp("moe"), 2)) as opened:
            yield opened


@needs_kernels
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6])
def test_several_pools(model: Model, share: float) -> None:
    with model.placed(experts(model.store, share)) as placed, model.placed([]) as whole:
        memory = placed.weights.sparse["cpu"].memory
        assert len(memory.pools) > 1
        assert memory.nbytes <= len(experts(model.store)) * memory.slot_nbytes
        want = answers(whole)
        assert_same(answers(placed), want)
        before = placed.weights.memory.reclaimable
        assert placed.weights.memory.evict(6 * memory.slot_nbytes) >= 6 * memory.slot_nbytes
        assert_same(answers(placed), want)
        assert placed.weights.memory.reclaimable == before  # there was room for it again


@needs_kernels
def test_one_pool(model: Model) -> None:
    with model.placed(experts(model.store)) as placed:
        assert len(placed.weights.sparse["cpu"].memory.pools) == 1
