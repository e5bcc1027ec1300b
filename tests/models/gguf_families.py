"""Tiny models of many families as GGUF files: gguf's own names, its converters' keys."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from localrt.models.checkpoints import open_checkpoint
from localrt.quant.formats import unpack
from tests.checkpoints.make_gguf import Array, in_pairs, write_gguf

__all__ = ["FAMILY_FILES", "write_family"]

FAMILY_FILES = {
    "llama-tied-bias": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "phi3": "phi3",
    "smollm3": "smollm3",
    "ministral3": "mistral3",
    "mistral3": "mistral3",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "olmo3-yarn": "olmo2",
    "exaone4": "exaone4",
    "seed-oss": "seed_oss",
    "granite": "granite",
    "granite-swa": "granite_swa",
    "granite-moe-swa": "granite_swa",
    "hunyuan": "hunyuan-dense",
    "ernie": "ernie4_5",
    "ernie-moe": "ernie4_5-moe",
    "qwen2.5-vl": "qwen2vl",
    "qwen3-vl": "qwen3vl",
    "qwen3-vl-moe": "qwen3vlmoe",
    "glm4-moe": "glm4moe",
    "glm4-moe-norms": "glm4moe",
}
"""What each tiny config's file calls its architecture."""

_PAIRED = ("ernie4_5", "ernie4_5-moe", "granite", "granite_swa", "llama", "mistral3", "smollm3")

_NEWER = {"granite_swa": ("granite", "granitemoe", "gpt-oss")}
"""What gguf does not know, and where its tensors have the same names."""

_KEYS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "vocab_size": "vocab_size",
    "sliding_window": "attention.sliding_window",
    "embedding_multiplier": "embedding_scale",
    "attention_multiplier": "attention.scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "moe_num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_k": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "moe_num_shared_experts": "expert_shared_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "first_k_dense_replace": "leading_dense_block_count",
    "moe_layer_start_index": "leading_dense_block_count",
    "moe_layer_interval": "interleave_moe_layer_step",
}
_FLOATS = ("scale", "epsilon")
_SCALING = {
    "factor": "factor",
    "original_max_position_embeddings": "original_context_length",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "mscale_all_dim": "yarn_log_multiplier",
}
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(\w+)\.weight")


def write_family(folder: Path, path: Path, name: str, *, predicting: int = 0) -> Path:
    """The Hugging Face model in ``folder``, the tiny config ``name``, as the file ``path``.

    ``predicting`` blocks of multi-token prediction follow the layers.
    """
    architecture = FAMILY_FILES[name]
    config = json.loads((folder / "config.json").read_text())
    config = {**config, **config.get("text_config", {})}
    tensors = _tensors(folder, architecture, config)
    metadata = {f"{architecture}.{key}": value for key, value in _metadata(config).items()}
    if architecture == "granite_swa":
        metadata |= _granite_swa(config)
        _fuse_shared(tensors)
    if predicting:
        _add_prediction(tensors, metadata, architecture, config, predicting)
    if config.get("tie_word_embeddings"):
        tensors.pop("output.weight", None)
    metadata["tokenizer.ggml.model"] = "no_vocab"
    return write_gguf(path, architecture, metadata, {n: (t, "f32") for n, t in tensors.items()})[0]


def _add_prediction(
    tensors: dict[str, Array],
    metadata: dict[str, Any],
    architecture: str,
    config: Mapping[str, Any],
    count: int,
) -> None:
    """Blocks like the last layer, each with what joins a token and a hidden state."""
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    metadata[f"{architecture}.block_count"] = layers + count
    metadata[f"{architecture}.nextn_predict_layers"] = count
    for block in range(layers, layers + count):
        last = f"blk.{layers - 1}."
        own = {name: values for name, values in tensors.items() if name.startswith(last)}
        for name, values in own.items():
            tensors[f"blk.{block}.{name.removeprefix(last)}"] = values
        tensors[f"blk.{block}.nextn.eh_proj.weight"] = np.ones((hidden, 2 * hidden), np.float32)
        for norm in ("enorm", "hnorm", "shared_head_norm"):
            tensors[f"blk.{block}.nextn.{norm}.weight"] = np.ones(hidden, np.float32)


def _metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, ours in _KEYS.items():
        if (value := config.get(key)) is not None:
            found[ours] = float(value) if ours.endswith(_FLOATS) else value
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    found["attention.key_length"] = found["attention.value_length"] = head
    found["rope.dimension_count"] = int(head * rope.get("partial_rotary_factor", 1.0))
    found["rope.freq_base"] = rope["rope_theta"] * rope.get("alpha", 1.0) ** (head / (head - 2))
    if rope["rope_type"] == "yarn":
        found["rope.scaling.type"] = "yarn"
        for key, ours in _SCALING.items():
            if key in rope:
                value = rope[key]
                found[f"rope.scaling.{ours}"] = value if ours.endswith("length") else float(value)
    if "llama_4_scaling_beta" in rope:
        found["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
    if "mrope_section" in rope:
        found["rope.dimension_sections"] = [*rope["mrope_section"], 0]
        if config["model_type"].startswith("qwen3"):
            found["n_deepstack_layers"] = 1
    if config.get("sliding_window") and "layer_types" in config:
        kinds = [kind == "sliding_attention" for kind in config["layer_types"]]
        found["attention.sliding_window_pattern"] = kinds
    if config["model_type"] == "glm4_moe":
        found["expert_gating_func"] = 2
    if shared := config.get("moe_num_shared_experts"):
        found["expert_shared_feed_forward_length"] = shared * config["moe_intermediate_size"]
    return found


def _granite_swa(config: Mapping[str, Any]) -> dict[str, Any]:
    bases = config["layer_rope_theta"]
    return {"granite_swa.attention.rope_pattern": [base != 0 for base in bases]}


def _fuse_shared(tensors: dict[str, Array]) -> None:
    """Gates and ups of shared experts, if there are any, as one matrix under the ups' name."""
    for name in [name for name in tensors if "ffn_gate_shexp" in name]:
        up = name.replace("gate", "up")
        tensors[up] = np.concatenate([tensors.pop(name), tensors[up]])


def _tensors(folder: Path, architecture: str, config: Mapping[str, Any]) -> dict[str, Array]:
    maps = [
        gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
        for arch, name in gguf.MODEL_ARCH_NAMES.items()
        if name in _NEWER.get(architecture, (architecture,))
    ]
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    stacks: dict[str, list[Array]] = {}
    tensors: dict[str, Array] = {}
    with closing(open_checkpoint(folder)) as checkpoint:
        for name in checkpoint.tensors:
            values = unpack(checkpoint.read(name))
            if (expert := _EXPERT.fullmatch(name)) is not None:
                stacks.setdefault(f"{expert[1]}.{expert[3]}.weight", []).append(values)
                continue
            part = name.split(".")[-2]
            if architecture in _PAIRED and part in heads:
                values = in_pairs(values, heads[part])
            tensors[name.replace("_correction_bias", "_correction.bias")] = values
    tensors |= {name: np.stack(parts) for name, parts in stacks.items()}
    found: dict[str, Array] = {}
    for name, values in tensors.items():
        known = [names.get_name(name, try_suffixes=(".weight", ".bias")) for names in maps]
        gguf_name = next(filter(None, known), None)
        assert gguf_name is not None, f"gguf has no name for {name}"
        found[gguf_name if "." in gguf_name[6:] else f"{gguf_name}.weight"] = values
    return found
