"""Experts in RAM beside a GPU: many are pinned at once, and given back as they were pinned."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from localrt.offload.device.gpu import SLABS
from tests.offload.gpu.placed_on_gpu import COSTS, gpu_of, on_gpu, places, stages
from tests.offload.placed import PLENTY, Model, assert_same, conversation, needs_kernels, pack_tiny
from tests.waits import wait_for

pytestmark = needs_kernels


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A mixture of 160 experts or more."""
    from transformers import Qwen3MoeConfig

    from tests.models import tiny

    def many() -> Qwen3MoeConfig:
        sizes = {"num_experts": 80, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        return Qwen3MoeConfig(**tiny.SIZES, **sizes, head_dim=32, norm_topk_prob=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny.MIXTURES, "many", many)
        opened = Model(pack_tiny("many", tmp_path_factory.mktemp("moe")))
    yield opened
    opened.close()


def test_few_registrations(model: Model) -> None:
    """What is given back is no longer pinned, it returns, and closing frees each buffer once."""
    want = conversation(model.resident)
    with on_gpu(model, places(model, 0.2), expert_costs=COSTS) as placed:
        gpu, balance, memory = gpu_of(placed), placed.weights.memory, stages(placed).memory
        whole, others = memory.nbytes, sum(gpu.pinned.values()) - memory.nbytes
        assert len(memory.pools) == 1
        assert whole >= 160 * memory.slot_nbytes
        assert gpu.registered <= SLABS + 10  # and a few dense units and rings
        assert_same(conversation(placed), want)

        wait_for(lambda: memory.complete)  # what is being loaded cannot be given
        reclaimable = balance.reclaimable
        for nbytes in (memory.slot_nbytes, whole // 3):
            before = memory.nbytes
            freed = balance.evict(nbytes)
            assert nbytes <= freed < nbytes + memory.step_nbytes
            assert memory.nbytes == before - freed
            assert sum(gpu.pinned.values()) == memory.nbytes + others
        assert balance.reclaimable < reclaimable
        assert_same(conversation(placed), want)  # with room for all of them again
        assert memory.nbytes == whole
        balance.evict(PLENTY)
        assert 0 < memory.nbytes < whole // 10
        assert_same(conversation(placed), want)
    assert not gpu.pinned
