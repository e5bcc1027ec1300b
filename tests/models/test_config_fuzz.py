"""Whatever a model's config says, loading it works or ends in one line, in little memory."""

from __future__ import annotations

import json
import re
import tracemalloc
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from localrt.common.errors import CheckpointError, UnsupportedModelError
from localrt.models.registry import ARCHITECTURES
from localrt.planning.models import shape_from_config
from tests.models.tiny import load_ours, save_tiny
from tests.mutations import FUZZ, changed, changes_of, is_line, paths, refusal

MOST_MEMORY = 48 << 20

# One of each architecture, with the keys that only some models of it have.
MODELS = {
    "llama-yarn": "sliding_window head_dim partial_rotary_factor rope_scaling original_max_position"
    "_embeddings",
    "qwen2-window": "max_window_layers layer_types",
    "qwen3": "use_sliding_window",
    "gemma2": "query_pre_attn_scalar attn_logit_softcapping hidden_activation",
    "gemma3": "rope_local_base_freq sliding_window_pattern final_logit_softcapping text_config",
    "gemma4-moe": "use_double_wide_mlp per_layer_config hidden_size_per_layer_input num_kv_shared"
    "_layers attention_k_eq_v",
    "qwen3.5-moe": "linear_conv_kernel_dim full_attention_interval mtp_num_hidden_layers",
    "qwen4-exp": "ple_layer_ids ple_embed_dim hc_count hc_lowrank indexer_budget indexer_head_dim"
    " ngram_vocab_size_base output_gate_type eos_token_id",
    "qwen3-next": "mlp_only_layers decoder_sparse_step linear_key_head_dim linear_value_head_dim",
    "lfm3": "use_attention_gate use_sandwich_norm sliding_window sliding_attention",
    "olmo-hybrid": "rope_theta linear_allow_neg_eigval linear_value_head_dim",
    "ling": "linear_head_dim short_conv_kernel_size layer_types kda_lower_bound num_nextn_predict"
    "_layers expert_swiglu_limit_list",
    "kimi-linear": "linear_attn_config full_attn_layers linear_head_dim moe_router_activation_func",
    "lfm2-moe": "conv_L_cache conv_bias block_auto_adjust_ff_dim full_attn_idxs num_dense_layers",
    "granite-hybrid-moe": "mamba_d_conv mamba_n_groups position_embedding_type shared_intermediate"
    "_size",
    "nemotron-h-groups": "hybrid_override_pattern layer_types num_hidden_layers moe_latent_size"
    " mlp_bias time_step_limit",
    "falcon-h1": "mamba_d_head mamba_rms_norm mamba_norm_before_gate mamba_proj_bias mlp_bias",
    "phi3-longrope": "original_max_position_embeddings",
    "smollm3-nope": "no_rope_layer_interval",
    "deepseek-v3": "moe_layer_freq scoring_func num_nextn_predict_layers",
    "deepseek-v4": "compress_ratios compress_rates layer_types mlp_layer_types num_hash_layers"
    " qk_rope_head_dim compress_rope_theta o_groups",
    "mixtral": "norm_topk_prob",
    "qwen2-moe": "mlp_only_layers decoder_sparse_step",
    "qwen3-moe": "num_local_experts",
    "olmoe": "clip_qkv",
    "granite-moe-shared": "shared_expert_intermediate_size",
    "gpt-oss": "swiglu_alpha swiglu_limit quantization_config",
    "ministral3": "sliding_window",
    "internvl-qwen3": "text_config model_type use_sliding_window",
    "llava": "text_config model_type head_dim",
    "olmo3-yarn": "rope_local_base_freq",
    "exaone4-window": "sliding_window_pattern",
    "seed-oss": "attention_out_bias",
    "ernie-moe": "moe_layer_end_index moe_layer_start_index moe_layer_interval",
    "granite": "embedding_multiplier",
    "hunyuan": "alpha",
    "granite-swa": "layer_rope_theta num_local_experts",
    "glm4": "partial_rotary_factor attention_bias",
    "muse-glimmer-bases": "post_norm_eps qk_scale_factor output_multiplier hidden_activation",
    "afmoe": "global_attn_every_n_layers mup_enabled num_dense_layers route_scale attention_bias",
    "laguna": "gating num_attention_heads_per_layer moe_router_logit_softcapping mlp_layer_types"
    " moe_apply_router_weight_on_input moe_routed_scaling_factor sliding_attention",
    "llama4": "no_rope_layers moe_layers attention_chunk_size floor_scale attn_scale layer_types"
    " num_experts_per_tok interleave_moe_layer_step intermediate_size_mlp",
    "glm4-moe": "use_qk_norm partial_rotary_factor mlp_layer_types",
    "mistral4": "llama_4_scaling_beta topk_group",
    "glm4-moe-lite": "first_k_dense_replace",
    "glm-dsa": "index_topk index_n_heads index_head_dim indexer_types index_topk_pattern"
    " index_topk_freq",
    "glm5-next": "index_topk index_kpool index_n_heads indexer_types linear_attn_config layer_types"
    " linear_lower_bound hc_mult swiglu_limit qk_rope_head_dim",
    "qwen3-vl-moe": "vision_config",
    "apertus": "xielu_alpha_p",
    "solar-open": "intermediate_size first_k_dense_replace",
    "step": "rope_theta partial_rotary_factors attention_other_setting moe_layers_enum"
    " num_nextn_predict_layers",
    "hy-v3": "route_norm norm_topk_prob",
    "exaone-moe-groups": "scoring_func first_k_dense_replace",
    "hunyuan-moe": "alpha num_experts_per_tok",
    "minimax-m2": "rotary_dim",
    "cohere2": "sliding_window_pattern layer_norm_eps logit_scale",
    "cohere2-moe-dense-first": "first_k_dense_replace prefix_dense_sliding_window_pattern"
    " sliding_window_pattern shared_expert_combination_strategy",
    "mellum-dense-first": "rope_local_base_freq mlp_layer_types num_local_experts",
}
SCALINGS = "rope_type factor rope_theta original_max_position_embeddings beta_fast beta_slow mscale"
SCALINGS += " mscale_all_dim attention_factor low_freq_factor high_freq_factor long_factor"
SCALINGS += " alpha short_factor partial_rotary_factor truncate full_attention llama_4_scaling_beta"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzzed")


@cache
def tiny_config(folder: Path, name: str) -> dict[str, Any]:
    save_tiny(name, folder / name)
    config: dict[str, Any] = json.loads((folder / name / "config.json").read_text("utf-8"))
    return config


def loaded(folder: Path, name: str, config: Any, context: int | None) -> None:
    """Load it; raises what loading raises."""
    (folder / name / "config.json").write_text(json.dumps(config))
    tracemalloc.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            load_ours(folder / name, context=context)
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < MOST_MEMORY


@FUZZ
@given(data=st.data(), name=st.sampled_from(sorted(MODELS)), context=st.sampled_from([None, 999]))
def test_any_config(folder: Path, data: Any, name: str, context: int | None) -> None:
    config = tiny_config(folder, name)
    more = [(key,) for key in MODELS[name].split()]
    more += [
        (part, key) for part in ("rope_parameters", "rope_scaling") for key in SCALINGS.split()
    ]
    given = changed(config, data.draw(changes_of([*paths(config), *more])))
    assert is_line(refusal(lambda: loaded(folder, name, given, context)))
    assert is_line(refusal(lambda: shape_from_config(given, name="fuzzed")))


@pytest.mark.parametrize("value", [10**400, "x" * 10_000, [], {}, None])
def test_odd_model_type(folder: Path, value: Any) -> None:
    given = {**tiny_config(folder, "llama"), "model_type": value}
    assert is_line(refusal(lambda: loaded(folder, "llama", given, None)))
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
        loaded(folder, name, config, None)
    assert "\n" not in str(caught.value)


def test_llm_config(folder: Path) -> None:
    config = dict(tiny_config(folder, "nemotron-h-omni"))
    config |= {"llm_config": config.pop("text_config"), "architectures": ["NemotronH_Nano_VL_V2"]}
    loaded(folder, "nemotron-h-omni", config, None)


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
            loaded(folder, name, {**config, key: values}, None)


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


def test_every_architecture(folder: Path) -> None:
    tried = {ARCHITECTURES[tiny_config(folder, name)["architectures"][0]] for name in MODELS}
    assert tried == set(ARCHITECTURES.values())


def test_dynamic_scaling(folder: Path) -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0, "partial_rotary_factor": 0.125}
    config = changed(tiny_config(folder, "llama-yarn"), [(("rope_parameters",), scaling)])
    with pytest.raises(CheckpointError, match="more than 2 rotary dimensions"):
        loaded(folder, "llama-yarn", config, None)
