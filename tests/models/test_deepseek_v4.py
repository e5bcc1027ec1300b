"""DeepSeek-V4 behind its window, several blocks and more entries than are chosen: on the kernels,
and as it is published.
"""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from localrt.common.errors import LocalrtError, OptionError
from localrt.drafts.heads.files import prediction_notes
from localrt.models.checkpoints import open_checkpoint
from localrt.models.decoder import Decoder
from localrt.models.registry import read_config
from localrt.offload.kv.cache import KvTier
from localrt.offload.placement import KvPlace
from localrt.quant.choose import make_ops
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.formats.fp4 import E2M1
from localrt.quant.ops.kv import BlockCache, held_blocks
from localrt.quant.ops.protocol import Batch
from tests.conftest import needs_kernels
from tests.models.make_gguf import write_tiny_gguf
from tests.models.test_families import llama_cpp_logits
from tests.models.tiny import (
    check_tree,
    load_ours,
    logits_of,
    oracle,
    relative_error,
    save_tiny,
    tokens,
)

COUNT = 90


def read_all(model: Decoder, ids: list[int]) -> np.ndarray:
    return model.forward(Batch.extend([(model.cache(512), ids)]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("v4")
    save_tiny("deepseek-v4", path)
    return path


@pytest.fixture(scope="module")
def native(folder: Path) -> Decoder:
    return load_ours(folder, NativeOps(threads=2))


@pytest.fixture(scope="module")
def whole(native: Decoder) -> np.ndarray:
    return read_all(native, tokens(COUNT))


@pytest.mark.parametrize("name", ["deepseek-v4", "deepseek-v4-plain"])
def test_long(name: str, tmp_path: Path) -> None:
    """At once and in parts."""
    theirs, ids = save_tiny(name, tmp_path), tokens(150)
    model, expected = load_ours(tmp_path), oracle(theirs, ids)
    assert relative_error(read_all(model, ids), expected) < 1e-4
    cache = model.cache(150)
    cuts = (0, 5, 6, 7, 60, 61, 150)
    parts = [
        model.forward(Batch.extend([(cache, ids[first:stop])])) for first, stop in pairwise(cuts)
    ]
    assert relative_error(np.concatenate(parts), expected) < 1e-4


@needs_kernels
def test_bits_depend_on_no_cut(native: Decoder, whole: np.ndarray) -> None:
    ids, other = tokens(COUNT), tokens(33, seed=5)
    cache, parts = native.cache(256), []
    for count in (1, 3, 7, 2, 30, 1, 1, 44, 1):
        part, ids = ids[:count], ids[count:]
        parts.append(native.forward(Batch.extend([(cache, part)])))
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    both = Batch.extend([(native.cache(256), other), (native.cache(256), tokens(COUNT))])
    np.testing.assert_array_equal(native.forward(both)[len(other) :], whole)


@needs_kernels
def test_tree(native: Decoder, whole: np.ndarray) -> None:
    """Blocks end within its branches."""
    check_tree(native, whole)


@needs_kernels
@pytest.mark.parametrize("kept", [16, 35, 64])
def test_caches_go_back_and_are_saved(native: Decoder, whole: np.ndarray, kept: int) -> None:
    ids, cache, other = tokens(COUNT), native.cache(256), native.cache(256)
    native.forward(Batch.extend([(cache, ids)]))
    assert cache.trim(kept) == kept
    assert isinstance(cache, BlockCache)
    assert isinstance(other, BlockCache)
    other.reserve(kept)
    other.fill_blocks(0, 1, held_blocks(np.array(cache.take_blocks(0, 1))))
    assert other.restore(kept, ()) == kept
    for each in (cache, other):
        again = native.forward(Batch.extend([(each, ids[kept:])]))
        np.testing.assert_array_equal(again, whole[kept:])


def fp4(weight: torch.Tensor, seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A random matrix of a shape as two tensors, and its values."""
    rng, (rows, columns) = np.random.default_rng(seed), weight.shape
    codes = rng.integers(0, 16, (rows, columns), np.uint8)
    exponents = rng.integers(122, 126, (rows, columns // 32), np.uint8)
    values = E2M1[codes] * np.repeat(np.ldexp(1.0, exponents.astype(int) - 127), 32, axis=1)
    packed = torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int8)
    scales = torch.from_numpy(exponents).view(torch.float8_e8m0fnu)
    return {"weight": packed, "scale": scales}, torch.from_numpy(values.astype(np.float32))


def fp8(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A matrix in blocks of 16 x 32, and its values."""
    codes, (rows, columns) = (weight * 8).to(torch.float8_e4m3fn), weight.shape
    scales = torch.full((-(-rows // 16), -(-columns // 32)), 124, dtype=torch.uint8)
    both = {"weight": codes, "scale": scales.view(torch.float8_e8m0fnu)}
    return both, codes.float() / 8


def test_as_published(tmp_path: Path) -> None:
    """Names without a prefix, keys of the first configs, a block that predicts; FP4 and FP8."""
    theirs = save_tiny("deepseek-v4-file", tmp_path)
    path, found, changed = tmp_path / "model.safetensors", {}, {}
    for name, tensor in load_file(path).items():
        own = name.removeprefix("model.").replace("hc_head.hc_", "hc_head_")
        own = own.replace("embed_tokens.", "embed.").replace(".attn.norm.", ".attn.kv_norm.")
        stem = own.removesuffix(".weight")
        if ".experts." in own:
            tensors, changed[name] = fp4(tensor, len(changed))
        elif stem.endswith(("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1")) and "comp" not in stem:
            tensors, changed[name] = fp8(tensor)
        else:
            found[own] = tensor
            continue
        found |= {f"{stem}.{kind}": each.contiguous() for kind, each in tensors.items()}
    found["mtp.0.norm.weight"] = torch.ones(64)
    save_file(load_file(path) | changed, path, metadata={"format": "pt"})
    ids = tokens(150)
    expected = oracle(type(theirs).from_pretrained(tmp_path, attn_implementation="eager"), ids)
    save_file(found, path)
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    rope = config.pop("rope_parameters")["compress"]
    for key in ("layer_types", "mlp_layer_types", "compress_rates", "partial_rotary_factor"):
        del config[key]
    config |= {
        "compress_ratios": [0, 4, 128, 4, 0],
        "num_hash_layers": 2,
        "num_nextn_predict_layers": 1,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 32]},
        "rope_scaling": {"type": rope.pop("rope_type")}
        | {key: rope[key] for key in ("factor", "original_max_position_embeddings")},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with closing(open_checkpoint(tmp_path)) as checkpoint:
        formats = {info.format.name for info in checkpoint.tensors.values()}
    assert {"mxfp4", "e4m3-g32", "f32"} <= formats
    assert relative_error(logits_of(tmp_path, ids), expected) < 1e-4
    assert prediction_notes(tmp_path) == ()


@pytest.mark.llamacpp
def test_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind an entry of 128 tokens."""
    theirs, ids = save_tiny("deepseek-v4-file", tmp_path), tokens(150)
    path = write_tiny_gguf(tmp_path, tmp_path / "m.gguf", "deepseek-v4-file")
    ours = logits_of(path, ids)
    assert relative_error(ours, oracle(theirs, ids)) < 1e-4
    assert relative_error(ours, llama_cpp_logits(path, ids, monkeypatch)) < 1e-3


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("n_routed_experts", 0, "n_routed_experts"),
        ("first_k_dense_replace", 1, None),  # all layers have experts
        ("o_groups", 10**9, "o_groups"),
        ("o_groups", 3, "groups"),
        ("index_head_dim", 2, "indexer's"),
        ("hc_sinkhorn_iters", 10**6, "hc_sinkhorn_iters"),
    ],
)
def test_odd_configs(
    key: str, value: int, message: str | None, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
    if message is None:
        load_ours(tmp_path)
        return
    with pytest.raises(LocalrtError, match=message) as raised:
        load_ours(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("expert", [-1, 99])
def test_experts_that_are_not_there(expert: int, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    name = next(each for each in tensors if each.endswith("tid2eid"))
    tensors[name][7, 0] = expert
    save_file(tensors, file)
    with pytest.raises(LocalrtError, match="tid2eid has experts that are not there"):
        load_ours(tmp_path)


def test_on_a_gpu(folder: Path) -> None:
    with closing(open_checkpoint(folder)) as checkpoint:
        memory = read_config(checkpoint).memory
    with pytest.raises(OptionError, match="runs on the CPU alone: use"):
        make_ops(memory, device="cuda", compute_format="bf16")
    assert make_ops(memory).device == "cpu"


@needs_kernels
def test_caches_on_the_ssd(folder: Path, native: Decoder, tmp_path: Path) -> None:
    """Of every other layer, with blocks that are written and come back."""
    ids, layers = tokens(600), list(native.config.attending)
    places: list[KvPlace] = ["ram", "ssd", "ram", "ssd"]
    tier = KvTier(layers, places, tmp_path, capacity=700, kv_format="bf16", slots=1)
    ops = NativeOps(threads=2)
    ops.kv_maker = tier
    model, results = load_ours(folder, ops), []
    for decoder in (native, model):
        cache = decoder.cache(700)
        decoder.forward(Batch.extend([(cache, ids[:300])]), rows=[])
        decoder.forward(Batch.extend([(cache, ids[300:])]), rows=[])
        cache.trim(520)
        results.append(decoder.forward(Batch.extend([(cache, ids[520:])])))
        del cache
    np.testing.assert_array_equal(results[1], results[0])
    tier.close()
