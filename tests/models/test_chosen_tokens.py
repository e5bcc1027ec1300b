"""Models whose layers choose or compress the tokens that they attend to, beyond what they choose.

DeepSeek-V4 behind its window, GLM-5 and GLM-5.3-Flash, Qwen3.8-Flash-Next with its hashed n-grams.
"""

from __future__ import annotations

from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localrt.common.errors import OptionError
from localrt.models.checkpoints import open_checkpoint
from localrt.models.decoder import Decoder
from localrt.models.layers.ngrams import NgramHash, NgramSpec
from localrt.models.registry import load_decoder, read_config
from localrt.offload.shapes import shape_from_checkpoint
from localrt.quant.choose import make_ops
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.ops.hybrid_cache import HybridCache
from localrt.quant.ops.kv import BlockCache, held_blocks
from localrt.quant.ops.protocol import Batch
from tests.conftest import needs_kernels
from tests.models.test_model import some
from tests.models.tiny import CONFIGS, check_tree, load_ours, relative_error, tiny_model, tokens
from tests.offload.placed import Model, assert_same, conversation, pack_tiny, passing

COUNT, CONTEXT = 90, 512
LONG = ("deepseek-v4", "glm5-next", "glm5-next-file")
KERNELS = {
    **dict.fromkeys(("deepseek-v4", "glm-dsa", "glm5-next", "qwen4-exp"), "bf16"),
    **{f"qwen4-exp, {kv}": kv for kv in ("int8", "int4")},
}
QUICK = ("deepseek-v4", "glm-dsa", "qwen4-exp, int8")


@pytest.fixture(autouse=True, scope="module")
def glm_dsa() -> Any:
    """Have GLM-5 choose fewer tokens, by more heads: so that no scores are equal, which is 0."""
    config = CONFIGS["glm-dsa"]()
    config.index_topk, config.index_n_heads = 13, 16
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONFIGS, "glm-dsa", lambda: config)
        yield


def read_all(model: Decoder, ids: list[int]) -> np.ndarray:
    return model.forward(Batch.extend([(model.cache(CONTEXT), ids)]))


def in_parts(model: Decoder, ids: list[int], cuts: tuple[int, ...]) -> np.ndarray:
    cache = model.cache(CONTEXT)
    parts = [ids[start:stop] for start, stop in pairwise((0, *cuts, len(ids)))]
    return np.concatenate([model.forward(Batch.extend([(cache, part)])) for part in parts])


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in KERNELS],
)
def native(request: pytest.FixtureRequest) -> Decoder:
    ops = NativeOps(threads=2, kv_format=KERNELS[request.param])
    return load_ours(tiny_model(request.param.partition(",")[0]).folder, ops, context=CONTEXT)


@pytest.fixture(scope="module")
def whole(native: Decoder) -> np.ndarray:
    return read_all(native, tokens(COUNT))


@some([*LONG, "glm-dsa"], ("deepseek-v4", "glm5-next"))
def test_long(name: str) -> None:
    """At once and in parts."""
    tiny, ids = tiny_model(name), tokens(150)
    model, expected = load_ours(tiny.folder, context=CONTEXT), tiny.logits(ids)
    assert relative_error(read_all(model, ids), expected) < 1e-4
    assert relative_error(in_parts(model, ids, (5, 6, 7, 60, 61)), expected) < 1e-4


@needs_kernels
@some(("glm5-next", "glm-dsa", "qwen4-exp"), ("glm5-next",))
def test_kernels(name: str) -> None:
    """They round queries, keys and activations: a row may see other tokens, but few do."""
    tiny, ids = tiny_model(name), tokens(COUNT)
    native = load_ours(tiny.folder, NativeOps(threads=2), context=CONTEXT)
    pairs = zip(read_all(native, ids), tiny.logits(ids), strict=True)
    assert np.median([relative_error(ours, row) for ours, row in pairs]) < 0.05


@needs_kernels
def test_bits_depend_on_no_cut(native: Decoder, whole: np.ndarray) -> None:
    """Nor on other rows, whether these see all of their tokens or not."""
    ids = tokens(COUNT)
    cuts = (1, 4, 11, 13, 43, 44, 45, 89)
    np.testing.assert_array_equal(in_parts(native, ids, cuts), whole)
    for other in (tokens(9, seed=5), tokens(33, seed=5)):
        alone = read_all(native, other)
        both = Batch.extend([(native.cache(256), other), (native.cache(256), ids)])
        np.testing.assert_array_equal(native.forward(both), np.concatenate([alone, whole]))


@needs_kernels
def test_tree(native: Decoder, whole: np.ndarray) -> None:
    """Blocks end within its branches."""
    check_tree(native, whole)


@needs_kernels
@pytest.mark.parametrize("kept", [16, 35])
def test_caches_go_back_and_are_saved(native: Decoder, whole: np.ndarray, kept: int) -> None:
    ids, cache, other = tokens(COUNT), native.cache(256), native.cache(256)
    native.forward(Batch.extend([(cache, ids[:kept])]))
    assert isinstance(cache, BlockCache)
    assert isinstance(other, BlockCache)
    other.reserve(kept)
    other.fill_blocks(0, 1, held_blocks(np.array(cache.take_blocks(0, 1))))
    assert other.restore(kept, cache.saved_states()) in (kept, 0)
    held = other.length
    native.forward(Batch.extend([(cache, ids[kept:])]))
    back = cache.trim(kept)
    if not isinstance(cache, HybridCache):  # recurrent layers go back further
        assert back == held == kept
    for each, start in ((cache, back), (other, held)):
        again = native.forward(Batch.extend([(each, ids[start:])]))
        np.testing.assert_array_equal(again, whole[start:])


@needs_kernels
def test_streamed(tmp_path: Path) -> None:
    """Bit for bit as in memory; a store has the indexers, whatever its context."""
    with closing(Model(pack_tiny("glm-dsa", tmp_path))) as model:
        model.config = read_config(model.store, context=CONTEXT)
        model.resident = load_decoder(model.store, model.ops, model.config)
        names = [n for n in passing(model.store) if not n.endswith(("expert.0", "expert.1"))]
        with model.placed(names) as placed:
            assert_same(conversation(placed), model.expected)


def test_contexts_of_glm5() -> None:
    """Up to as many tokens as are chosen, it has no memory of an indexer, and a GPU computes it."""
    with closing(open_checkpoint(tiny_model("glm-dsa").folder)) as checkpoint:
        for context in (None, 13):
            config = read_config(checkpoint, context=context)
            assert (config.context_length, len(config.memory)) == (13, config.layers)
        config = read_config(checkpoint, context=14)
        shapes = [shape_from_checkpoint(checkpoint, context=ctx) for ctx in (None, 14)]
    assert (config.context_length, len(config.memory)) == (256, 5)
    assert [shape.off_gpu for shape in shapes] == [
        "",
        "they do not choose the tokens that attention sees",
    ]
    assert shapes[0].units == shapes[1].units
    ops = NativeOps(threads=1)
    assert sum(shapes[1].kv_nbytes("bf16", 300)) == ops.kv_nbytes(config.memory, 300)
    with pytest.raises(OptionError, match="in this context, runs on the CPU alone"):
        make_ops(config.memory, device="cuda", compute_format="bf16")
    with pytest.raises(OptionError, match="int8 is not for chosen"):
        make_ops(config.memory, device="cpu", kv_format="int8")


def test_the_published_table_of_ngrams() -> None:
    hashed = NgramHash(NgramSpec(vocab=248_320, separator=248_046))
    assert (hashed.rows, hashed.spec.rows_per_token) == (320_001_536, 16)
