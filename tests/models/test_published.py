"""Models as their publishers write them: the keys, names and forms that transformers does not save.

And what is said of files that lack something, or have it twice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from localrt.common.errors import LocalrtError
from localrt.drafts.heads.files import prediction_notes
from localrt.models.checkpoints import open_checkpoint
from localrt.models.registry import read_config
from localrt.offload.store import pack_store
from localrt.quant.formats import F16, unpack
from localrt.quant.formats.fp4 import E2M1
from localrt.quant.formats.tiled import tile_tensor
from tests.models.test_model import LENGTH
from tests.models.tiny import (
    edited,
    load_ours,
    logits_of,
    oracle,
    relative_error,
    save_tiny,
    tiny_model,
    tokens,
)

IDS = tokens(LENGTH)
Tensors = dict[str, torch.Tensor]


def rewrite(folder: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """Change the tensors of a folder."""
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})
    return folder


def step(config: dict[str, Any]) -> None:
    """Lists also have an entry for a prediction block."""
    text = config["text_config"]
    for key, name in (
        ("num_key_value_heads", "num_attention_groups"),
        ("n_routed_experts", "moe_num_experts"),
        ("num_experts_per_tok", "moe_top_k"),
    ):
        text[name] = text.pop(key)
    ropes = text.pop("rope_parameters")
    own = [ropes[kind] for kind in text["layer_types"]]
    text["rope_theta"] = [rope["rope_theta"] for rope in own] + [1e4]
    text["partial_rotary_factors"] = [rope.get("partial_rotary_factor", 1.0) for rope in own] + [1]
    shared = ("rope_theta", "partial_rotary_factor")
    scaling = {key: value for key, value in ropes["full_attention"].items() if key not in shared}
    sparse = [n for n, kind in enumerate(text.pop("mlp_layer_types")) if kind == "sparse"]
    text["attention_other_setting"] = {
        "num_attention_heads": text.pop("num_sliding_attention_heads")
    }
    text |= {
        "rope_scaling": scaling,
        "moe_layers_enum": ",".join(map(str, sparse)),
        "num_nextn_predict_layers": 1,
        "layer_types": [*text["layer_types"], "sliding_attention"],
        "swiglu_limits": [*text["swiglu_limits"], 0.0],
        "swiglu_limits_shared": [*text["swiglu_limits_shared"], 0.0],
    }


def kimi_linear(config: dict[str, Any]) -> None:
    """An object for delta layers, and layers that are counted from 1."""
    for key in ("layer_types", "mlp_layer_types"):
        del config[key]
    config["first_k_dense_replace"] = 1
    config["moe_router_activation_func"] = "sigmoid"
    config["linear_attn_config"] = {
        "full_attn_layers": [2],
        "kda_layers": [1, 3],
        "head_dim": config.pop("linear_head_dim"),
        "num_heads": config.pop("linear_num_heads"),
        "short_conv_kernel_size": config.pop("linear_conv_kernel_dim"),
    }


def minimax_m2(config: dict[str, Any]) -> None:
    """The number of rotated dimensions instead of their share."""
    config |= {"rope_parameters": None, "rope_theta": 5e4, "rotary_dim": 16}


@pytest.mark.parametrize("publish", [step, kimi_linear, minimax_m2])
def test_configs(publish: Callable[[dict[str, Any]], None], tmp_path: Path) -> None:
    save_tiny(publish.__name__.replace("_", "-"), tmp_path)
    with closing(open_checkpoint(tmp_path)) as checkpoint:
        saved = read_config(checkpoint)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text("utf-8"))
    publish(config)
    path.write_text(json.dumps(config))
    with closing(open_checkpoint(tmp_path)) as checkpoint:
        assert read_config(checkpoint) == saved


def kimi_names(tensors: Tensors) -> Tensors:
    return {name.replace("model.blocks.", "model.layers."): t for name, t in tensors.items()}


def turned_experts(tensors: Tensors) -> Tensors:
    """Qwen3-VL's are stacked the other way round than transformers writes them."""
    return {
        name: tensor.swapaxes(1, 2).contiguous() if ".experts." in name else tensor
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize(
    ("name", "publish", "part"),
    [("kimi-k2.5", kimi_names, ".blocks."), ("qwen3-vl-moe", turned_experts, ".experts.")],
)
def test_tensors(
    name: str, publish: Callable[[Tensors], Tensors], part: str, tmp_path: Path
) -> None:
    tiny = save_tiny(name, tmp_path)
    assert any(part in each for each in load_file(tmp_path / "model.safetensors"))
    logits = logits_of(rewrite(tmp_path, publish), IDS)
    assert relative_error(logits, tiny.logits(IDS)) < 1e-4


def test_gpt_oss(tmp_path: Path) -> None:
    """Experts in MXFP4, in a folder and in a store of it, against transformers' dequantization."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    theirs, rng = save_tiny("gpt-oss", tmp_path).module, np.random.default_rng(3)

    def publish(tensors: Tensors) -> Tensors:
        for layer, block in enumerate(theirs.model.layers):
            for name in ("gate_up_proj", "down_proj"):
                stem = f"model.layers.{layer}.mlp.experts.{name}"
                experts, columns, rows = tensors.pop(stem).shape
                shape = (experts, rows, columns // 32, 16)
                packed = torch.from_numpy(rng.integers(0, 256, shape, np.uint8))
                scales = torch.from_numpy(rng.integers(122, 126, shape[:3], np.uint8))
                tensors[f"{stem}_blocks"], tensors[f"{stem}_scales"] = packed, scales
                values = convert_moe_packed_tensors(packed, scales, dtype=torch.float32)
                getattr(block.mlp.experts, name).data = values
        return tensors

    rewrite(tmp_path, publish)
    edited(tmp_path, quantization_config={"quant_method": "mxfp4"})
    assert relative_error(logits_of(tmp_path, IDS), oracle(theirs, IDS)) < 1e-4
    with closing(open_checkpoint(tmp_path)) as source:
        store = pack_store(source, tmp_path / "store", tiler=tile_tensor)
    with closing(open_checkpoint(store)) as opened:
        formats = {i.format.name for n, i in opened.tensors.items() if ".experts." in n}
    assert formats == {"mxfp4", "f32"}  # matrices and biases
    np.testing.assert_array_equal(logits_of(store, IDS), logits_of(tmp_path, IDS))


def fp4(weight: torch.Tensor, seed: int) -> tuple[Tensors, torch.Tensor]:
    """A random matrix of a shape as two tensors, and its values."""
    rng, (rows, columns) = np.random.default_rng(seed), weight.shape
    codes = rng.integers(0, 16, (rows, columns), np.uint8)
    exponents = rng.integers(122, 126, (rows, columns // 32), np.uint8)
    values = E2M1[codes] * np.repeat(np.ldexp(1.0, exponents.astype(int) - 127), 32, axis=1)
    packed = torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int8)
    scales = torch.from_numpy(exponents).view(torch.float8_e8m0fnu)
    return {"weight": packed, "scale": scales}, torch.from_numpy(values.astype(np.float32))


def fp8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """A matrix in blocks of 16 x 32, and its values."""
    codes, (rows, columns) = (weight * 8).to(torch.float8_e4m3fn), weight.shape
    scales = torch.full((-(-rows // 16), -(-columns // 32)), 124, dtype=torch.uint8)
    both = {"weight": codes, "scale": scales.view(torch.float8_e8m0fnu)}
    return both, codes.float() / 8


def test_deepseek_v4(tmp_path: Path) -> None:
    """Names without a prefix, keys of the first configs, a block that predicts; FP4 and FP8."""
    tiny = save_tiny("deepseek-v4-file", tmp_path)
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
    rewrite(tmp_path, lambda tensors: tensors | changed)
    kind, ids = type(tiny.module), tokens(150)
    expected = oracle(kind.from_pretrained(tmp_path, attn_implementation="eager"), ids)
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


TABLE = "model.layers.2.ple.ple_embedding.ngram_embedding."


def test_quantized_kv_b(tmp_path: Path) -> None:
    """Values in their own bytes; keys, which have to be transposed, in f16."""
    tiny = tiny_model("deepseek-v2-dense")
    path = tiny.gguf(absorbed=False, kind="q8_0")
    heads, nope, value = 4, tiny.config.qk_nope_head_dim, tiny.config.v_head_dim
    with closing(open_checkpoint(path)) as checkpoint:
        stem = "model.layers.0.self_attn."
        assert f"{stem}kv_b_proj.weight" not in checkpoint.tensors
        keys, values = (checkpoint.tensors[f"{stem}{n}_b_proj.weight"] for n in "kv")
        assert (keys.format, values.format.name) == (F16, "q8_0")
        assert (keys.shape, values.shape) == ((heads * 32, nope), (heads * value, 32))
        for info in (keys, values):
            once = checkpoint.read(info.name)
            pieces = [block.data for block in checkpoint.blocks(info.name, 1)]
            assert np.array_equal(np.concatenate(pieces), once.data)
            assert np.array_equal(checkpoint.read(info.name, 3, 70).data, once.data[3:70])
        both = load_file(tiny.folder / "model.safetensors")[f"{stem}kv_b_proj.weight"].numpy()
        both = both.reshape(heads, nope + value, 32)
        got = unpack(checkpoint.read(keys.name)).reshape(heads, 32, nope)
        np.testing.assert_allclose(got, both[:, :nope].swapaxes(1, 2), atol=0.01)
        got = unpack(checkpoint.read(values.name)).reshape(heads, value, 32)
        np.testing.assert_allclose(got, both[:, nope:], atol=0.01)
    assert relative_error(logits_of(path, IDS), tiny.logits(IDS)) < 0.05


def drop(part: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: t for name, t in tensors.items() if part not in name}


EXPERT = "model.layers.1.mlp.experts.5.up_proj.weight"


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("deepseek-v3", drop("correction"), r"e_score_correction_bias.*missing"),
        ("qwen4-exp", drop(f"{TABLE}shard_0"), "3 of 4 parts are there"),
        ("qwen3-moe", drop(EXPERT), rf"layer 1 lacks expert 5: tensor {re.escape(EXPERT)} is miss"),
    ],
)
def test_tensors_that_lack(
    name: str, change: Callable[[Tensors], Tensors], told: str, tmp_path: Path
) -> None:
    save_tiny(name, tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(LocalrtError, match=told) as refused:
        load_ours(tmp_path)
    assert "\n" not in str(refused.value)
