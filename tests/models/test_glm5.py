"""GLM-5 and GLM-5.3-Flash with more tokens than their indexers choose."""

from __future__ import annotations

import json
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from localrt.common.errors import LocalrtError, OptionError, UnsupportedModelError
from localrt.models.checkpoints import open_checkpoint
from localrt.models.decoder import Decoder
from localrt.models.registry import load_decoder, read_config
from localrt.offload.shapes import shape_from_checkpoint
from localrt.quant.choose import make_ops
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.ops.kv import BlockCache, held_blocks
from localrt.quant.ops.protocol import Batch
from tests.conftest import needs_kernels
from tests.models.make_gguf import write_tiny_gguf
from tests.models.test_families import llama_cpp_logits
from tests.models.tiny import (
    CONFIGS,
    check_tree,
    load_ours,
    logits_of,
    oracle,
    relative_error,
    save_tiny,
    tokens,
)
from tests.offload.placed import Model, assert_same, conversation, pack_tiny, passing

COUNT, CONTEXT = 90, 512
NAMES = ["glm5-next", "glm5-next-file", "glm5-next-tokens", "glm-dsa"]


def change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have GLM-5 choose fewer tokens, by more heads: so that no scores are equal, which is 0."""
    config = CONFIGS["glm-dsa"]()
    config.index_topk, config.index_n_heads = 13, 16
    monkeypatch.setitem(CONFIGS, "glm-dsa", lambda: config)


def save(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    change(monkeypatch)
    return save_tiny(name, folder)


def read_all(model: Decoder, ids: list[int]) -> np.ndarray:
    return model.forward(Batch.extend([(model.cache(CONTEXT), ids)]))


@pytest.fixture(scope="module", params=["glm5-next", "glm-dsa"])
def native(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    path = tmp_path_factory.mktemp("m")
    with pytest.MonkeyPatch.context() as patch:
        save(request.param, path, patch)
    return load_ours(path, NativeOps(threads=2), context=CONTEXT)


@pytest.fixture(scope="module")
def whole(native: Decoder) -> np.ndarray:
    return read_all(native, tokens(COUNT))


@pytest.mark.parametrize("name", NAMES)
def test_long(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once and in parts."""
    theirs, ids = save(name, tmp_path, monkeypatch), tokens(150)
    model, expected = load_ours(tmp_path, context=CONTEXT), oracle(theirs, ids)
    assert relative_error(read_all(model, ids), expected) < 1e-4
    cache = model.cache(150)
    parts = [
        model.forward(Batch.extend([(cache, ids[first:stop])]))
        for first, stop in pairwise((0, 5, 6, 7, 60, 61, 150))
    ]
    assert relative_error(np.concatenate(parts), expected) < 1e-4


@needs_kernels
@pytest.mark.parametrize("name", NAMES)
def test_kernels(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They round queries, keys and activations: a row may see other tokens, but few do."""
    theirs, ids = save(name, tmp_path, monkeypatch), tokens(COUNT)
    native = load_ours(tmp_path, NativeOps(threads=2), context=CONTEXT)
    errors = [
        relative_error(ours, row)
        for ours, row in zip(read_all(native, ids), oracle(theirs, ids), strict=True)
    ]
    assert np.median(errors) < 0.05


@needs_kernels
def test_bits_depend_on_no_cut(native: Decoder, whole: np.ndarray) -> None:
    """Nor on whether other rows see all of their tokens."""
    ids, other = tokens(COUNT), tokens(9, seed=5)
    cache, parts = native.cache(256), []
    for count in (1, 3, 7, 2, 30, 1, 1, 44, 1):
        part, ids = ids[:count], ids[count:]
        parts.append(native.forward(Batch.extend([(cache, part)])))
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    alone = read_all(native, other)
    both = Batch.extend([(native.cache(256), other), (native.cache(256), tokens(COUNT))])
    np.testing.assert_array_equal(native.forward(both), np.concatenate([alone, whole]))


@needs_kernels
def test_tree(native: Decoder, whole: np.ndarray) -> None:
    check_tree(native, whole)


@needs_kernels
@pytest.mark.parametrize("kept", [16, 35, 64])
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
    for each, start in ((cache, back), (other, held)):
        again = native.forward(Batch.extend([(each, ids[start:])]))
        np.testing.assert_array_equal(again, whole[start:])


@needs_kernels
def test_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit as in memory; a store has the indexers, whatever its context."""
    change(monkeypatch)
    with closing(Model(pack_tiny("glm-dsa", tmp_path))) as model:
        model.config = read_config(model.store, context=CONTEXT)
        model.resident = load_decoder(model.store, model.ops, model.config)
        names = [n for n in passing(model.store) if not n.endswith(("expert.0", "expert.1"))]
        with model.placed(names) as placed:
            assert_same(conversation(placed), model.expected)


@pytest.mark.parametrize("name", ["glm5-next-file", "glm-dsa"])
@pytest.mark.llamacpp
def test_llama_cpp(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ids = save(name, tmp_path, monkeypatch), tokens(100)
    path = write_tiny_gguf(tmp_path, tmp_path / "m.gguf", name)
    ours = logits_of(path, ids)
    assert relative_error(ours, oracle(theirs, ids)) < 1e-4
    assert relative_error(ours, llama_cpp_logits(path, ids, monkeypatch)) < 1e-3


def test_config_as_published(tmp_path: Path) -> None:
    """With an object for its delta layers."""
    theirs, path, ids = save_tiny("glm5-next", tmp_path), tmp_path / "config.json", tokens(60)
    config = json.loads(path.read_text("utf-8"))
    text = config["text_config"]
    del text["indexer_types"]
    text["index_topk_pattern"] = "FFSF"
    text["linear_attn_config"] = {
        "head_dim": text.pop("linear_head_dim"),
        "num_heads": text.pop("linear_num_heads"),
        "short_conv_kernel_size": text.pop("linear_conv_kernel_dim"),
        "gate_lower_bound": text.pop("linear_lower_bound"),
    }
    path.write_text(json.dumps(config))
    assert relative_error(logits_of(tmp_path, ids), oracle(theirs, ids)) < 1e-4


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("index_topk", 13, "must be a multiple of its blocks of 4 tokens, is 13"),
        ("index_kpool_always_select_tail", False, "index_kpool_always_select_tail false"),
        ("indexer_types", ["shared"] * 4, "no layer before layer 1 has an indexer"),
        ("qk_rope_head_dim", 16, "qk_rope_head_dim must be 0"),
        ("linear_lower_bound", 2.0, "linear_lower_bound must be a number below 0"),
        ("hidden_act", "gelu", "hidden_act 'gelu' is not supported"),
    ],
)
def test_odd_configs(key: str, value: Any, message: str, tmp_path: Path) -> None:
    save_tiny("glm5-next", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    config["text_config"][key] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(LocalrtError, match=message):
        load_ours(tmp_path)


def test_contexts_of_glm5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to as many tokens as are chosen, it has no memory of an indexer, and a GPU computes it."""
    save("glm-dsa", tmp_path, monkeypatch)
    with closing(open_checkpoint(tmp_path)) as checkpoint:
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


def test_packed_without_indexers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ids = save("glm-dsa", tmp_path, monkeypatch), tokens(13)
    path = tmp_path / "model.safetensors"
    save_file({n: t for n, t in load_file(path).items() if ".indexer." not in n}, path)
    assert relative_error(logits_of(tmp_path, ids), oracle(theirs, ids)) < 1e-4
    with pytest.raises(UnsupportedModelError, match=r"up to 13 tokens: .* or pack it again"):
        load_ours(tmp_path, context=14)
