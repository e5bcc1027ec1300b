"""Tiny mixtures as GGUF files, as llama.cpp's converter would write them, from folders."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from localrt.models.checkpoints import open_checkpoint
from localrt.quant.formats import unpack
from tests.checkpoints.make_gguf import Array, in_pairs, write_gguf

ARCHITECTURES = {
    "mixtral": "llama",
    "qwen2-moe": "qwen2moe",
    "qwen3-moe": "qwen3moe",
    "olmoe": "olmoe",
    "granite-moe": "granitemoe",
    "granite-moe-shared": "granitemoe",
    "gpt-oss": "gpt-oss",
}
_PAIRED = ("llama", "granitemoe")

_KEYS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "sliding_window": "attention.sliding_window",
    "embedding_multiplier": "embedding_scale",
    "attention_multiplier": "attention.scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "vocab_size": "vocab_size",
}
_FLOATS = ("scale", "epsilon", "freq_base")

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")


def write_mixture(folder: Path, path: Path, name: str, *, stacked: bool = True) -> Path:
    """The Hugging Face model in ``folder``, the tiny mixture ``name``, as the GGUF file ``path``.

    Without ``stacked`` every expert is a tensor, as in Mixtral's first files.
    """
    architecture = ARCHITECTURES[name]
    config = json.loads((folder / "config.json").read_text())
    if architecture in ("granitemoe", "gpt-oss"):
        config["moe_intermediate_size"] = config["intermediate_size"]
    (file,) = write_gguf(
        path,
        architecture,
        _metadata(architecture, config),
        _tensors(folder, architecture, config, stacked=stacked),
    )
    return file


def _metadata(architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"tokenizer.ggml.model": "no_vocab"}
    for key, ours in _KEYS.items():
        value = config.get(key)
        if value is not None:
            found[f"{architecture}.{ours}"] = float(value) if ours.endswith(_FLOATS) else value
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config["rope_parameters"]
    found[f"{architecture}.attention.key_length"] = head
    found[f"{architecture}.attention.value_length"] = head
    found[f"{architecture}.rope.dimension_count"] = head
    found[f"{architecture}.rope.freq_base"] = float(rope.get("rope_theta", 10_000.0))
    if rope["rope_type"] == "yarn":
        scaling = f"{architecture}.rope.scaling."
        found[f"{scaling}type"] = "yarn"
        found[f"{scaling}factor"] = float(rope["factor"])
        found[f"{scaling}original_context_length"] = rope["original_max_position_embeddings"]
    return found


def _tensors(
    folder: Path, architecture: str, config: Mapping[str, Any], *, stacked: bool
) -> dict[str, tuple[Array, str]]:
    tensors: dict[str, tuple[Array, str]] = {}
    stacks: dict[str, dict[int, Array]] = {}
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    with closing(open_checkpoint(folder)) as checkpoint:
        for name in checkpoint.tensors:
            values = unpack(checkpoint.read(name))
            if name in _TOP:
                tensors[_TOP[name]] = values, "f32"
                continue
            _, _, layer, stem = name.split(".", 3)
            if (expert := _EXPERT.fullmatch(stem)) is not None:
                number, kind, suffix = int(expert[1]), expert[2], expert[3]
                if stacked:
                    stack = stacks.setdefault(f"blk.{layer}.ffn_{kind}_exps.{suffix}", {})
                    stack[number] = values
                else:
                    tensors[f"blk.{layer}.ffn_{kind}.{number}.{suffix}"] = values, "f32"
                continue
            if architecture in _PAIRED and (paired := stem.split(".")[1][0]) in heads:
                values = in_pairs(values, heads[paired])
            if stem == "mlp.shared_expert_gate.weight":
                values = values.reshape(-1)
            tensors[f"blk.{layer}.{_name(architecture, stem)}"] = values, "f32"
    for name, experts in stacks.items():
        tensors[name] = np.stack([experts[number] for number in sorted(experts)]), "f32"
    return tensors


def _name(architecture: str, stem: str) -> str:
    if stem == "self_attn.sinks":
        return "attn_sinks.weight"
    module, _, suffix = stem.rpartition(".")
    if architecture == "gpt-oss" and module == "post_attention_layernorm":
        return f"post_attention_norm.{suffix}"
    return f"{_NAMES[module]}.{suffix}"
