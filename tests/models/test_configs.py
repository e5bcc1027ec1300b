"""What configs and tensors of text models say: wrong ones are refused in one line that says what,

and heads that configs call tied, or not, are read as transformers reads them.
"""

from __future__ import annotations

import json
import re
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

import localrt
from localrt.common.errors import CheckpointError, OptionError, UnsupportedModelError
from localrt.models.checkpoints import open_checkpoint
from localrt.models.checkpoints.safetensors.folder import NO_HEAD, TIED_OUTSIDE
from localrt.planning.models import shape_from_config
from localrt.quant.ops.attention import LatentSpec, Rope
from localrt.quantize.quantize import Recipe, quantize_model
from tests.conftest import write_tiny_model
from tests.models.test_model import some
from tests.models.tiny import (
    CONFIGS,
    MIXTURES,
    auto_class,
    edited,
    load_ours,
    logits_of,
    oracle,
    relative_error,
    save_tiny,
    tokens,
)
from tests.mutations import changed, is_line, refusal


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
        ("deepseek-v4", "n_routed_experts", 0, "n_routed_experts"),
        ("deepseek-v4", "first_k_dense_replace", 1, None),  # all layers have experts
        ("deepseek-v4", "o_groups", 10**9, "o_groups"),
        ("deepseek-v4", "o_groups", 3, "groups"),
        ("deepseek-v4", "index_head_dim", 2, "indexer's"),
        ("deepseek-v4", "hc_sinkhorn_iters", 10**6, "hc_sinkhorn_iters"),
        (
            "glm5-next",
            ("text_config", "index_topk"),
            13,
            "must be a multiple of its blocks of 4 tokens, is 13",
        ),
        (
            "glm5-next",
            ("text_config", "index_kpool_always_select_tail"),
            False,
            "index_kpool_always_select_tail false",
        ),
        (
            "glm5-next",
            ("text_config", "indexer_types"),
            ["shared"] * 4,
            "no layer before layer 1 has an indexer",
        ),
        ("glm5-next", ("text_config", "qk_rope_head_dim"), 16, "qk_rope_head_dim must be 0"),
        (
            "glm5-next",
            ("text_config", "linear_lower_bound"),
            2.0,
            "linear_lower_bound must be a number below 0",
        ),
        ("glm5-next", ("text_config", "hidden_act"), "gelu", "hidden_act 'gelu' is not supported"),
        (
            "llama-yarn",
            "rope_parameters",
            {"rope_type": "dynamic", "factor": 2.0, "partial_rotary_factor": 0.125},
            "more than 2 rotary dimensions",
        ),
        (
            "llama",
            "architectures",
            ["T5ForConditionalGeneration"],
            r"T5ForCond.*gemma3, .*llama, .*phi3",
        ),
    ],
)
def test_bad_configs(name: str, place: Any, value: Any, told: str | None, tmp_path: Path) -> None:
    config = vars(save_tiny(name, tmp_path).config)
    config = changed(config, [(place if isinstance(place, tuple) else (place,), value)])
    if told is None:
        load_config(tmp_path, config)
        return
    with pytest.raises((CheckpointError, UnsupportedModelError), match=told) as caught:
        load_config(tmp_path, config)
    assert "\n" not in str(caught.value)


def load_config(folder: Path, config: Any) -> None:
    """Load ``folder`` with this config."""
    (folder / "config.json").write_text(json.dumps(config))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        load_ours(folder)


@pytest.mark.parametrize("value", [10**400, "x" * 10_000, [], {}, None])
def test_odd_model_type(value: Any, tmp_path: Path) -> None:
    given = {**vars(save_tiny("llama", tmp_path).config), "model_type": value}
    assert is_line(refusal(lambda: load_config(tmp_path, given)))
    assert is_line(refusal(lambda: shape_from_config(given, name="fuzzed")))


def test_llm_config(tmp_path: Path) -> None:
    config = vars(save_tiny("nemotron-h-omni", tmp_path).config)
    config |= {"llm_config": config.pop("text_config"), "architectures": ["NemotronH_Nano_VL_V2"]}
    load_config(tmp_path, config)


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
def test_layer_lists(tmp_path: Path, name: str) -> None:
    key, config = LAYER_LISTS[name], vars(save_tiny(name, tmp_path).config)
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
            load_config(tmp_path, {**config, key: values})


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 40}, "rotary and"),
        ({"rope": None}, "rotary keys"),
        ({"kv_heads": 2}, "one of them"),
        ({"window": 8}, "window"),
    ],
)
def test_a_latent_spec_checks_itself(change: dict[str, Any], message: str) -> None:
    values: dict[str, Any] = {
        "heads": 4,
        "kv_heads": 1,
        "head_dim": 48,
        "scale": 1.0,
        "eps": 1e-6,
        "rope": Rope((1.0,) * 8),
        "latent": 32,
        "nope": 16,
        "value": 16,
    }
    assert LatentSpec(**values).query_rows == 4 * 32
    with pytest.raises(ValueError, match=message):
        LatentSpec(**{**values, **change})


HEAD = "lm_head.weight"
EMBEDDING = re.compile(r"(^|\.)(embed_tokens|embeddings?|word_embeddings)\.weight$")
TOLERANCE = 1e-4


def change_head(folder: Path, kind: str) -> None:
    """Have the files hold a head that is "other" than the embedding, "equal" to it, or "none"."""
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    (embedding,) = (tensors[name] for name in tensors if EMBEDDING.search(name))
    at = next((name for name in tensors if name.endswith(HEAD) or name == "head.weight"), HEAD)
    tensors.pop(at, None)
    if kind != "none":
        tensors[at] = embedding.copy()
        if kind == "other":  # in the last row: a token that was added
            tensors[at][-1] = np.random.default_rng(0).standard_normal(embedding.shape[1])
    save_file(tensors, path, metadata={"format": "pt"})


def theirs(folder: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    return auto_class(config).from_pretrained(folder, dtype=torch.float32).eval()


# One of each way to name a head's tensors.
@some(
    CONFIGS | MIXTURES,
    ("deepseek-v2", "gemma4", "llama", "llava", "nemotron-h", "qwen3-moe", "qwen3-vl"),
)
def test_another_head_and_none(name: str, tmp_path: Path) -> None:
    """A head that differs counts, whatever the config says. One that is neither in the files nor
    tied: opened for embeddings, with a line for those who want text.
    """
    config, ids = save_tiny(name, tmp_path).config, tokens(6)
    change_head(tmp_path, "other")
    edited(tmp_path, tie_word_embeddings=True)
    assert relative_error(logits_of(tmp_path, ids), oracle(theirs(tmp_path), ids)) < TOLERANCE
    change_head(tmp_path, "none")
    edited(tmp_path, tie_word_embeddings=False)
    if text := getattr(config, "text_config", None):
        edited(tmp_path, text_config={**text, "tie_word_embeddings": False})
    with closing(open_checkpoint(tmp_path)) as checkpoint:
        assert checkpoint.config["headless"]
        assert NO_HEAD in checkpoint.notes
    load_ours(tmp_path)


FLAGS = (True, False, None)


@pytest.mark.parametrize("head", ["other", "equal", "none"])
@pytest.mark.parametrize("inner", FLAGS)
@pytest.mark.parametrize("outer", FLAGS)
@pytest.mark.parametrize("name", ["qwen3-vl", "mistral3"])
def test_flags_of_models_that_see(
    name: str, outer: bool | None, inner: bool | None, head: str, tmp_path: Path
) -> None:
    """The outer config's flag and the text model's, each given or left out."""
    save_tiny(name, tmp_path)
    change_head(tmp_path, head)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text("utf-8"))
    for part, flag in ((config, outer), (config["text_config"], inner)):
        part.pop("tie_word_embeddings", None)
        if flag is not None:
            part["tie_word_embeddings"] = flag
    path.write_text(json.dumps(config))
    model, ids = theirs(tmp_path), tokens(6)
    if head == "none" and model.lm_head.weight is not model.get_input_embeddings().weight:
        # Its head is a random one: ours is the embedding where that is not denied.
        with closing(open_checkpoint(tmp_path)) as checkpoint:
            asked = outer if inner is None else inner
            assert checkpoint.config.get("headless", False) is (asked is False)
        return
    assert relative_error(logits_of(tmp_path, ids), oracle(model, ids)) < TOLERANCE


def test_outer_defaults() -> None:
    """Those that tie the head where their outer config does not say."""
    kinds = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    seen = (
        "gemma3",
        "gemma4",
        "idefics3",
        "internvl",
        "lfm2_vl",
        "llava",
        "mistral3",
        "qwen2_5_vl",
        "qwen2_vl",
    )
    more = (
        "minicpmv4_6",
        "paddleocr_vl",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_vl",
        "qwen3_vl_moe",
        "smolvlm",
    )
    tied = {kind for kind in (*seen, *more) if kinds[kind]().tie_word_embeddings}
    assert tied == TIED_OUTSIDE


def test_text_without_a_head(tmp_path: Path) -> None:
    """Vectors need none; text gets the line that says what to change."""
    change_head(write_tiny_model(tmp_path), "none")
    with closing(open_checkpoint(tmp_path)) as source:
        recipe = Recipe("int4-g32", method="rtn")
        store = quantize_model(source, tmp_path / "store", recipe, threads=1).path
    for path in (tmp_path, store):
        with localrt.load(path) as model:
            assert len(model.embed(["a b"])[0]) == 64
            with pytest.raises(OptionError, match="tie_word_embeddings"):
                model.generate("a")
    edited(tmp_path, tie_word_embeddings=True)
    with localrt.load(str(tmp_path)) as model:
        assert model.generate("a", max_tokens=2).token_ids
