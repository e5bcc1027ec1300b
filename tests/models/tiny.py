"""Tiny random models of every architecture, written by Hugging Face transformers, our oracle."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import (
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    GraniteMoeConfig,
    GraniteMoeSharedConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from localrt.models.checkpoints import open_checkpoint
from localrt.models.decoder import Decoder
from localrt.models.registry import load_decoder, read_config
from localrt.quant.ops.protocol import Batch
from localrt.quant.reference.ops import TorchOps
from tests.models.tiny_deepseek import DEEPSEEK_CONFIGS
from tests.models.tiny_families import FAMILIES, FAMILY_MIXTURES
from tests.models.tiny_hybrid import hybrid_configs, hybrid_mixtures

SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = 16

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [1.5 + 0.3 * i for i in range(6)],
    "partial_rotary_factor": 0.75,
}

_SLIDING, _FULL = "sliding_attention", "full_attention"
_GEMMA4: dict[str, Any] = {
    **SIZES,
    "num_hidden_layers": 6,
    "head_dim": 16,
    "global_head_dim": 48,
    "sliding_window": WINDOW,
    "final_logit_softcapping": 30.0,  # what llama.cpp takes a file to have that says none
    # Layers that share come behind a sliding and a full one, as in llama.cpp's code
    "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING, _FULL, _FULL],
}
_INPUTS: dict[str, Any] = {"hidden_size_per_layer_input": 24, "vocab_size_per_layer_input": 211}

_GEMMA3N: dict[str, Any] = {
    **SIZES,
    "num_hidden_layers": 5,
    "intermediate_size": [96, 128, 96, 96, 160],
    "head_dim": 16,
    "sliding_window": WINDOW,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 24,
    "vocab_size_per_layer_input": 200,
    "laurel_rank": 12,
    "activation_sparsity_pattern": [0.9, 0.0, 0.5, 0.0, 0.0],
    "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL, _SLIDING],
}

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama-tied-bias": lambda: LlamaConfig(
        **SIZES, tie_word_embeddings=True, attention_bias=True, head_dim=32
    ),
    "llama-3.1": lambda: LlamaConfig(**SIZES, rope_parameters=_LLAMA3),
    "llama-linear": lambda: LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    ),
    "llama-yarn": lambda: LlamaConfig(**SIZES, rope_parameters=_YARN),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=None),
    "mistral-window": lambda: MistralConfig(**SIZES, sliding_window=WINDOW),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen2-window": lambda: Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=32),
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES, head_dim=32, sliding_window=WINDOW, query_pre_attn_scalar=24
    ),
    "gemma3-softcap": lambda: Gemma3TextConfig(
        **SIZES,
        head_dim=32,
        sliding_window=WINDOW,
        final_logit_softcapping=3.0,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "gemma2": lambda: Gemma2Config(
        **SIZES,
        head_dim=32,
        sliding_window=WINDOW,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3n": lambda: Gemma3nTextConfig(**_GEMMA3N),
    # As llama.cpp knows it: sizes of its code, gates of the first ten layers cut alike
    "gemma3n-gguf": lambda: Gemma3nTextConfig(
        **{
            **_GEMMA3N,
            "intermediate_size": 1536,
            "activation_sparsity_pattern": [0.95] * 5,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 211,
            "laurel_rank": 64,
        }
    ),
    "gemma3n-other-stream": lambda: Gemma3nTextConfig(
        **{**_GEMMA3N, "num_kv_shared_layers": 0, "hidden_size": 96},
        altup_num_inputs=3,
        altup_active_idx=2,
        altup_correct_scale=False,
    ),
    "gemma4": lambda: Gemma4TextConfig(**_GEMMA4, **_INPUTS, num_kv_shared_layers=3),
    "gemma4-double-wide": lambda: Gemma4TextConfig(
        **{**_GEMMA4, "final_logit_softcapping": 3.0},
        **_INPUTS,
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
    ),
    "gemma4-keys-as-values": lambda: Gemma4TextConfig(
        **_GEMMA4,
        hidden_size_per_layer_input=0,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
    ),
    "phi3": lambda: Phi3Config(**SIZES, sliding_window=None),
    "phi3-window": lambda: Phi3Config(**SIZES, sliding_window=WINDOW),
    "phi3-longrope": lambda: Phi3Config(
        **SIZES, rope_parameters=dict(_LONGROPE), original_max_position_embeddings=48
    ),
    "smollm3": lambda: SmolLM3Config(**SIZES, tie_word_embeddings=True),
    "smollm3-nope": lambda: SmolLM3Config(**SIZES, no_rope_layers=[1, 0, 1]),
    **DEEPSEEK_CONFIGS,
    **FAMILIES,
    **hybrid_configs(SIZES),
}


_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_GRANITE: dict[str, Any] = {
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "embedding_multiplier": 1.7,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.6,
    "logits_scaling": 2.5,
}
_GPT_OSS: dict[str, Any] = {
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "head_dim": 32,
    "sliding_window": WINDOW,
}

# Mixtures of experts, which not every implementation of ``Ops`` computes.
MIXTURES: dict[str, Callable[[], Any]] = {
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=5, num_experts_per_tok=2),
    "mixtral-window": lambda: MixtralConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW
    ),
    "qwen2-moe": lambda: Qwen2MoeConfig(**SIZES, **_EXPERTS, shared_expert_intermediate_size=64),
    "qwen2-moe-window": lambda: Qwen2MoeConfig(
        **SIZES,
        **_EXPERTS,
        shared_expert_intermediate_size=32,
        mlp_only_layers=[1],
        norm_topk_prob=True,
        use_sliding_window=True,
        sliding_window=WINDOW,
    ),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **SIZES, **_EXPERTS, head_dim=32, norm_topk_prob=True, mlp_only_layers=[]
    ),
    "qwen3-moe-steps": lambda: Qwen3MoeConfig(
        **SIZES,
        **_EXPERTS,
        head_dim=32,
        decoder_sparse_step=2,
        use_sliding_window=True,
        sliding_window=WINDOW,
        tie_word_embeddings=True,
    ),
    "olmoe": lambda: OlmoeConfig(
        **{**SIZES, "num_key_value_heads": 4}, num_experts=8, num_experts_per_tok=3
    ),
    "olmoe-groups": lambda: OlmoeConfig(**SIZES, num_experts=8, num_experts_per_tok=3),
    "granite-moe": lambda: GraniteMoeConfig(**SIZES, **_GRANITE, tie_word_embeddings=True),
    "granite-moe-shared": lambda: GraniteMoeSharedConfig(
        **SIZES, **_GRANITE, shared_intermediate_size=32
    ),
    "gemma4-moe": lambda: Gemma4TextConfig(
        **_GEMMA4,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=8,
        top_k_experts=3,
        moe_intermediate_size=32,
    ),
    "gpt-oss": lambda: GptOssConfig(**SIZES, **_GPT_OSS),
    "gpt-oss-full-first": lambda: GptOssConfig(
        **SIZES,
        **_GPT_OSS,
        swiglu_limit=0.7,  # so that it is met
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    **FAMILY_MIXTURES,
    **hybrid_mixtures(SIZES),
}


def save_tiny(name: str, folder: Path, seed: int = 0, *, layers: int | None = None) -> Any:
    """Write a random model as a Hugging Face folder; returns transformers' own, in float32.

    ``layers`` are the first that it keeps.
    """
    torch.manual_seed(seed)
    config = (CONFIGS | MIXTURES)[name]()
    text = config.get_text_config()
    if layers is not None:
        text.num_hidden_layers = layers
        for kinds in ("layer_types", "mlp_layer_types"):
            if getattr(text, kinds, None) is not None:
                setattr(text, kinds, getattr(text, kinds)[:layers])
    config._attn_implementation = "eager"
    auto = transformers.AutoModelForCausalLM
    if text is not config:
        auto = transformers.AutoModelForImageTextToText
    model = auto.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # Random norms and biases too, so that none can be forgotten unseen.
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.15))
            if parameter.ndim == 1:
                parameter.add_(0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(torch.rand_like(buffer) + 0.5)
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(torch.randn_like(buffer) * 0.2)
    model = model.float().eval()
    model.save_pretrained(folder)
    return model


def load_ours(folder: Path, *, context: int | None = None, device: str = "cpu") -> Decoder:
    """The same folder through localrt, computing in float32."""
    checkpoint = open_checkpoint(folder)
    with closing(checkpoint):
        config = read_config(checkpoint, context=context)
        ops = TorchOps(compute_format="f32", device=device)
        return load_decoder(checkpoint, ops, config)


def oracle(model: Any, ids: list[int]) -> np.ndarray:
    """The logits of transformers' model."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    return np.asarray(logits.float().numpy())


def logits_of(path: Path, ids: list[int]) -> np.ndarray:
    """The logits of the model at ``path`` in one pass, computed in float32."""
    ours = load_ours(path, context=len(ids))
    return ours.forward(Batch.extend([(ours.cache(len(ids)), ids)]))


def edited(folder: Path, **changes: Any) -> Path:
    """``folder`` with changes to its config."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def tokens(count: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    return [int(t) for t in np.random.default_rng(seed).integers(3, SIZES["vocab_size"], count)]


def relative_error(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Largest difference over the largest magnitude."""
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())
