"""Wrong configs and weights of models: loading one ends in a line that says what is wrong."""

from __future__ import annotations

import json
import re
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from localrt.common.errors import CheckpointError, UnsupportedModelError
from localrt.planning.models import shape_from_config
from tests.models.tiny import load_ours, save_tiny
from tests.mutations import changed, is_line, refusal


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzzed")


@cache
def tiny_config(folder: Path, name: str) -> dict[str, Any]:
    save_tiny(name, folder / name)
    config: dict[str, Any] = json.loads((folder / name / "config.json").read_text("utf-8"))
    return config


def loaded(folder: Path, name: str, config: Any) -> None:
    """Load it; raises what loading raises."""
    (folder / name / "config.json").write_text(json.dumps(config))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        load_ours(folder / name)


@pytest.mark.parametrize("value", [10**400, "x" * 10_000, [], {}, None])
def test_odd_model_type(folder: Path, value: Any) -> None:
    given = {**tiny_config(folder, "llama"), "model_type": value}
    assert is_line(refusal(lambda: loaded(folder, "llama", given)))
    assert is_line(refusal(lambda: shape_from_config(given, name="fuzzed")))


@pytest.mark.parametrize(
    ("name", "place", "value", "told"),
    [
        ("llama", "hidden_size", 32, "wrong shape"),
        ("llama", "num_hidden_layers", 4, "missing"),
        ("llama", "num_hidden_layers", 2, "not part of"),
        ("llama", "vocab_size", 10**12, "vocab_size"),
        ("llama", "num_key_value_heads", 3, "multiple"),
        ("llama", "hidden_act", "relu6", "relu6"),
        ("llama", "rms_norm_eps", "tiny", "rms_norm_eps"),
        ("afmoe", "attention_bias", True, "attention_bias"),
        ("laguna", "gating", False, "gating 'False' is not supported"),
        ("laguna", "moe_apply_router_weight_on_input", True, "weight_on_input is not supported"),
        ("laguna", "num_attention_heads_per_layer", [6, 6], "2 entries for 3 layers"),
        ("llama4", "num_experts_per_tok", 2, "must be 1 .*is 2"),
        ("gemma4", "num_kv_shared_layers", 6, "num_kv_shared_layers"),
        ("gemma4", "num_kv_shared_layers", 5, "num_kv_shared_layers 5"),
        ("gemma4", "use_bidirectional_attention", "all", "later tokens"),
        ("qwen3-moe", "num_experts_per_tok", 9, r"9 experts .*\(top-k\) cannot be chosen of 8"),
        ("qwen3-moe", "num_experts", 0, "num_experts must be an integer from 1"),
        ("qwen3-moe", "num_experts", 9, r"mlp\.gate\.weight \(8, 64\); .* asks for \(9, 64\)"),
        ("qwen3-moe", "hidden_act", "relu6", "hidden_act 'relu6' is not supported"),
        ("qwen3-moe", "scoring_func", "entmax", "scoring_func 'entmax' is not supported"),
        ("qwen3-moe", "mlp_only_layers", ["0"], "mlp_only_layers"),
        ("qwen3-moe", "mlp_only_layers", [0], "gate_proj.weight is missing"),
        ("qwen3-moe", "moe_intermediate_size", 48, "wrong shape"),
        ("olmoe", "clip_qkv", 8.0, "clip_qkv"),
        ("hunyuan-moe", "moe_topk", [3, 3, 2], "moe_topk must be the same for all layers"),
        ("gpt-oss", "swiglu_alpha", 1.5, "swiglu_alpha"),
        ("gpt-oss", "num_local_experts", 6, "holds 8 experts, the config says 6"),
        ("granite-moe", "num_local_experts", 12, "holds 8 experts, the config says 12"),
        ("deepseek-v2", "norm_topk_prob", True, "norm_topk_prob"),
        ("deepseek-v3", "kv_lora_rank", 16, "wrong shape"),
        ("deepseek-v3", "v_head_dim", 16, "wrong shape"),
        ("deepseek-v3", "qk_nope_head_dim", None, "qk_nope_head_dim must be"),
        ("deepseek-v3", "qk_rope_head_dim", 12, "wrong shape"),
        ("deepseek-v3", "qk_rope_head_dim", 15, "even"),
        ("deepseek-v3", "q_lora_rank", None, "missing"),
        ("deepseek-v3", "num_experts_per_tok", 9, "cannot be chosen"),
        ("deepseek-v3", "n_group", 3, "equal groups"),
        ("deepseek-v3", "topk_group", 5, "cannot be used"),
        ("deepseek-v3", "topk_method", "random", "topk_method 'random' is not supported"),
        ("deepseek-v3", "scoring_func", "tanh", "scoring_func 'tanh' is not supported"),
        ("deepseek-v3", "n_routed_experts", 9, "groups|missing"),
        ("deepseek-v3", "num_attention_heads", 0, "num_attention_heads must be"),
        ("deepseek-v3", "rope_parameters", {"rope_type": "yarn", "factor": -1}, "factor"),
        ("qwen4-exp", "hc_count", 1, "hc_count must be at least 2, is 1"),
        ("qwen4-exp", "ple_layer_ids", [9], "ple_layer_ids must be a layer from 1 to 3, is 9"),
        ("qwen4-exp", "ple_layer_ids", [1, 3], "n-grams of more than one layer are not supported"),
        ("qwen4-exp", "ple_embed_dim", 62, "ple_embed_dim must be a multiple of 4"),
        ("qwen4-exp", "indexer_budget", 10, "a multiple of its blocks of 4 tokens"),
        ("qwen4-exp", "indexer_kv_heads", 2, "indexer_kv_heads must be 1, is 2"),
        ("qwen4-exp", "output_gate_type", "tanh", "output_gate_type 'tanh' is not supported"),
        ("qwen4-exp", "eos_token_id", 999, "eos_token_id must be below 211, is 999"),
        ("phi3-longrope", ("rope_parameters", "long_factor"), {}, "needs 6 numbers"),
        ("phi3-longrope", ("rope_parameters", "long_factor"), ["1"] * 6, "needs 6 numbers"),
        ("phi3-longrope", ("rope_parameters", "long_factor", 0), 0.0, "too large or too small"),
        ("phi3-longrope", "original_max_position_embeddings", 1, "2 or more"),
        ("llama-yarn", ("rope_parameters", "original_max_position_embeddings"), 1, "2 or more"),
        ("llama-yarn", ("rope_parameters", "rope_theta"), 1.0, "above 1"),
        ("llama-yarn", ("rope_parameters", "beta_fast"), 5e-324, "number above 0"),
        ("llama-yarn", "head_dim", 1 << 20, "head_dim must be"),
        ("llama-yarn", "rms_norm_eps", ["x" * 1000], r"rms_norm_eps .{30,120}$"),
        ("falcon-h1", "ssm_multipliers", [1.0, 0.0], "ssm_multipliers must be 5 positive numb"),
        ("falcon-h1", "projectors_bias", True, "without the other, are not supported"),
        ("nemotron-h-groups", "layers_block_type", "ME*G", "'G' of layer 3 is not supported"),
        ("nemotron-h-groups", "layers_block_type", [], "must be an integer from 1"),
        ("nemotron-h-groups", "num_hidden_layers", 4, "has 5 entries for 4 layers"),
        ("nemotron-h-groups", "moe_latent_size", 8, "wrong shape|is missing"),
        ("nemotron-h-groups", "mamba_num_heads", 7, "heads .7. must be a multiple of key_heads"),
        ("granite-hybrid-moe", "mamba_n_groups", 3, "mamba_n_groups .3. must divide 128"),
        ("falcon-h1", "mamba_n_heads", 7, "mamba_n_heads .7. .* must divide 96"),
        ("qwen3.5-moe", "linear_num_key_heads", 7, "must be a multiple of key_heads .7"),
        ("olmo-hybrid", "linear_num_value_heads", 5, "heads .5. must be a multiple of key_he"),
    ],
)
def test_bad_configs(folder: Path, name: str, place: Any, value: Any, told: str) -> None:
    config = tiny_config(folder, name)
    known = isinstance(place, tuple)
    config = changed(config, [(place, value)]) if known else {**config, place: value}
    with pytest.raises((CheckpointError, UnsupportedModelError), match=told) as caught:
        loaded(folder, name, config)
    assert "\n" not in str(caught.value)


def test_llm_config(folder: Path) -> None:
    config = dict(tiny_config(folder, "nemotron-h-omni"))
    config |= {"llm_config": config.pop("text_config"), "architectures": ["NemotronH_Nano_VL_V2"]}
    loaded(folder, "nemotron-h-omni", config)


LAYER_LISTS = {
    "olmo3": "layer_types",
    "gemma2": "layer_types",
    "gpt-oss": "layer_types",
    "granite-swa": "layer_rope_theta",
    "glm4-moe-lite": "mlp_layer_types",
    "qwen3.5-moe": "layer_types",
    "kimi-linear": "layer_types",
    "lfm2-moe": "layer_types",
    "granite-hybrid-moe": "layer_types",
    "olmo-hybrid": "layer_types",
}


@pytest.mark.parametrize("name", LAYER_LISTS)
def test_layer_lists(folder: Path, name: str) -> None:
    key, config = LAYER_LISTS[name], tiny_config(folder, name)
    layers = len(config[key])
    wrong: list[tuple[list[Any], str]] = [
        ([*config[key], config[key][0]], f"{key} has {layers + 1} entries for {layers} layers"),
        (config[key][1:], f"{key} has {layers - 1} entries for {layers} layers"),
    ]
    if key != "layer_rope_theta":
        told = f"{key} 'chunked_attention' of layer 1 is not supported .known: "
        wrong.append(([config[key][0], "chunked_attention", config[key][2]], told))
    for values, told in wrong:
        with pytest.raises((CheckpointError, UnsupportedModelError), match=told):
            loaded(folder, name, {**config, key: values})


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("qwen3.5-moe", "model.layers.0.linear_attn.A_log"),
        ("qwen3.5-moe", "model.layers.0.linear_attn.conv1d.weight"),
        ("kimi-linear", "model.layers.0.self_attn.k_conv1d.weight"),
        ("lfm2-moe", "model.layers.0.conv.conv.weight"),
        ("granite-hybrid-moe", "model.layers.0.mamba.dt_bias"),
        ("falcon-h1", "model.layers.0.mamba.D"),
        ("olmo-hybrid", "model.layers.0.linear_attn.v_conv1d.weight"),
    ],
)
@pytest.mark.parametrize("change", [-1, 1])
def test_recurrent_shape(tmp_path: Path, name: str, tensor: str, change: int) -> None:
    save_tiny(name, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    rows = tensors[tensor]
    wrong = rows[:-1] if change < 0 else np.concatenate([rows, rows[:1]])
    save_file({**tensors, tensor: wrong}, file)
    told = rf"wrong shape: .*{re.escape(tensor)} \({wrong.size},\).*; the config asks for "
    with pytest.raises(CheckpointError, match=told):
        load_ours(tmp_path)


@pytest.mark.parametrize("value", [np.inf, np.nan, 3e38, -3e38])
@pytest.mark.parametrize("name", ["llama-yarn", "qwen3.5-moe", "granite-hybrid-moe", "falcon-h1"])
def test_damaged_numbers(tmp_path: Path, name: str, value: float) -> None:
    save_tiny(name, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    wrong = {key: np.full_like(own, value) for key, own in tensors.items() if own.ndim == 1}
    save_file({**tensors, **wrong}, file)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_ours(tmp_path)


def test_dynamic_scaling(folder: Path) -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0, "partial_rotary_factor": 0.125}
    config = changed(tiny_config(folder, "llama-yarn"), [(("rope_parameters",), scaling)])
    with pytest.raises(CheckpointError, match="more than 2 rotary dimensions"):
        loaded(folder, "llama-yarn", config)
