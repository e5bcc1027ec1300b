"""Experts that pass through slots, recurrent layers and pictures: bit for bit as in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from localrt.common.errors import CancelledError
from localrt.models.checkpoints.store.checkpoint import StoreCheckpoint
from localrt.models.checkpoints.store.manifest import StoredUnit
from localrt.models.decoder import Decoder
from localrt.offload.experts import memory as expert_memory
from localrt.offload.experts.memory import size_classes
from localrt.offload.kv.cache import KvTier
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.ops.hybrid_cache import split_layers
from localrt.quant.ops.protocol import Batch, PictureRows, Span
from tests.offload.placed import (
    Model,
    assert_same,
    cancel_after,
    extend,
    needs_kernels,
    pack_tiny,
    passing,
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


# -- recurrent layers and pictures -----------------------------------------------------------------


OTHERS = (pytest.param(n, marks=pytest.mark.slow) for n in ("kimi-linear", "lfm3", "qwen4-exp"))


@pytest.fixture(scope="module", params=["qwen3.5-moe", "falcon-h1", *OTHERS])
def hybrid(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    folder = pack_tiny(request.param, tmp_path_factory.mktemp("recurrent"))
    with closing(Model(folder)) as opened:
        yield opened


def test_kv_on_ssd(hybrid: Model, tmp_path: Path) -> None:
    ops = NativeOps(threads=1)
    specs, _ = split_layers(hybrid.config.memory)
    tier = KvTier(specs, ["ssd"] * len(specs), tmp_path, capacity=600, kv_format="bf16")
    ops.kv_maker = tier
    here = hybrid.ops.kv_cache(hybrid.config.memory, 600)
    there = ops.kv_cache(hybrid.config.memory, 600)
    assert there.kv_layout == "", "what is on the SSD is not taken out"
    for part in (tokens(400), tokens(120, seed=2), [7]):
        want = extend(hybrid.resident, here, part)
        np.testing.assert_array_equal(extend(hybrid.resident, there, part), want)
    tier.close()


BEGIN, END, LENGTH = 5, 14, 24


def seen(decoder: Decoder, *, both_ways: bool) -> list[np.ndarray]:
    """Logits of a text with a picture, whose rows are given anew behind the first layer."""
    config, rows = decoder.config, END - BEGIN
    given = np.random.default_rng(1).standard_normal((rows, config.hidden_size), np.float32)
    axes = np.repeat(np.arange(LENGTH)[None], 3, 0)
    axes[1, BEGIN:END], axes[2, BEGIN:END] = BEGIN + 1, BEGIN + np.arange(rows)
    ahead = np.zeros(LENGTH, np.int32)
    ahead[BEGIN:END] = END - 1 - np.arange(BEGIN, END)
    cache = decoder.cache(LENGTH + 1)
    batch = Batch(
        np.asarray(tokens(LENGTH), np.int64),
        np.arange(LENGTH),
        (Span(cache, LENGTH, None, ahead if both_ways else None),),
        PictureRows(np.arange(BEGIN, END), given, (given[::-1].copy(),)),
        axes,
    )
    return [decoder.forward(batch), decoder.forward(Batch.extend([(cache, [7])]))]


@pytest.mark.parametrize("name", ["qwen3-vl", "gemma3", "glm-ocr"])
def test_streamed(name: str, tmp_path: Path) -> None:
    both_ways = name == "gemma3"
    with closing(Model(pack_tiny(name, tmp_path))) as model:
        expected = seen(model.resident, both_ways=both_ways)
        streamed = passing(model.store)
        for names in (streamed, streamed[1::2]):
            with model.placed(names) as placed:
                assert_same(seen(placed, both_ways=both_ways), expected)
