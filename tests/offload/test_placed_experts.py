"""A mixture of experts whose experts pass through slots: the same logits, whatever is in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from localrt.common.errors import CancelledError
from localrt.models.checkpoints.store.checkpoint import StoreCheckpoint
from localrt.models.checkpoints.store.manifest import StoredUnit
from localrt.models.decoder import Decoder
from localrt.offload.experts import memory as expert_memory
from localrt.offload.experts.memory import size_classes
from localrt.quant.ops.protocol import Batch
from tests.offload.placed import (
    Model,
    assert_same,
    cancel_after,
    extend,
    needs_kernels,
    pack_tiny,
    tokens,
    wide_mixture,
)

pytestmark = needs_kernels


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A tiny mixture, in a store."""
    with closing(Model(pack_tiny("qwen3-moe", tmp_path_factory.mktemp("moe")))) as opened:
        yield opened


@pytest.fixture(scope="module")
def want(model: Model) -> list[np.ndarray]:
    """What it answers with all in memory, which is read once."""
    with model.placed([]) as whole:
        found = answers(whole)
        read = whole.weights.counts().ssd_read_bytes
        assert_same(answers(whole), found)
        assert whole.weights.counts().ssd_read_bytes == read
    return found


def experts(store: StoreCheckpoint, share: float = 1.0) -> list[str]:
    """The names of the last ``share`` of the experts."""
    names = [unit.name for unit in store.manifest.units if ".expert." in unit.name]
    return names[len(names) - round(share * len(names)) :]


def answers(decoder: Decoder, count: int = 12) -> list[np.ndarray]:
    """Logits of a prompt and of tokens after it, one pass each."""
    cache = decoder.cache(256)
    found = [extend(decoder, cache, tokens(20))]
    found += [extend(decoder, cache, [token]) for token in tokens(count, seed=3)]
    return found


def test_only_absent_experts_are_read(model: Model) -> None:
    with model.placed(experts(model.store, 0.5)) as placed:
        cache = placed.cache(64)
        extend(placed, cache, tokens(20))
        before = placed.weights.counts()
        for token in tokens(12, seed=3):
            extend(placed, cache, [token])
        after = placed.weights.counts()
    uses = after.expert_uses - before.expert_uses
    hits = after.expert_hits - before.expert_hits
    spec = model.config.mixture(0)
    assert spec is not None
    assert uses == 12 * model.config.layers * spec.router.used
    assert 0 < hits < uses
    size = max(u.nbytes for u in model.store.manifest.units if ".expert." in u.name)
    assert after.ssd_read_bytes - before.ssd_read_bytes == (uses - hits) * size


@pytest.mark.parametrize("share", [0.7, 1.0])
def test_cancel_in_any_layer(model: Model, want: list[np.ndarray], share: float) -> None:
    streamed = ["layers.0.attention", "layers.1.mlp", "head.0"] if share < 1 else []
    with model.placed([*experts(model.store, share), *streamed]) as placed:
        for layer in range(3):
            cache = placed.cache(64)
            batch = Batch.extend([(cache, tokens(20))])
            with pytest.raises(CancelledError):
                placed.forward(batch, check=cancel_after(layer + 1))
            assert cache.length == 0
        assert_same(answers(placed), want)


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
        ([1153, 1000, 1153, 1000], [[1, 3], [0, 2]]),  # Q4_K_M
        ([1000, 1000, 1000, 1064], [[0, 1, 2], [3]]),  # Q4_K_S: few are larger
    ],
)
def test_size_classes(sizes: list[int], classes: list[list[int]]) -> None:
    assert size_classes(units(*sizes)) == classes


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A mixture of many experts in a store, whose layers are taken to differ."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_memory, "size_classes", lambda units: [[0, 2], [1]])
        with closing(wide_mixture(tmp_path_factory.mktemp("moe"), 2)) as opened:
            yield opened


@pytest.mark.parametrize("share", [0.0, 0.6])
def test_several_pools(apart: Model, share: float) -> None:
    with apart.placed(experts(apart.store, share)) as placed, apart.placed([]) as whole:
        memory = placed.weights.sparse["cpu"].memory
        assert len(memory.pools) > 1
        assert memory.nbytes <= len(experts(apart.store)) * memory.slot_nbytes
        want = answers(whole)
        assert_same(answers(placed), want)
        before = placed.weights.memory.reclaimable
        assert placed.weights.memory.evict(6 * memory.slot_nbytes) >= 6 * memory.slot_nbytes
        assert_same(answers(placed), want)
        assert placed.weights.memory.reclaimable == before  # there was room for it again
    with apart.placed(experts(apart.store)) as placed:
        assert len(placed.weights.sparse["cpu"].memory.pools) == 1
