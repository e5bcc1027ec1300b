"""Writes a GGUF file of a Qwen3 mixture from a config with Hugging Face's keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Kind

__all__ = ["Kind", "Tensor", "write_qwen3_moe"]

Tensor = tuple[str, npt.NDArray[Any], Kind]
"""Name, values or packed bytes, type."""


def write_qwen3_moe(
    out: Path,
    config: Mapping[str, Any],
    tensors: Iterable[Tensor],
    *,
    tokens: Sequence[str],
    controls: range,
    merges: Sequence[str],
) -> Path:
    """Write ``out``. ``tokens`` are byte-level, as GPT-2's; ``controls`` are no text."""
    writer = gguf.GGUFWriter(out, "qwen3moe", use_temp_file=True)
    writer.add_name(out.stem)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    types = gguf.TokenType
    writer.add_token_types(
        [types.CONTROL if n in controls else types.NORMAL for n in range(len(tokens))]
    )
    writer.add_token_merges(merges)
    writer.add_eos_token_id(controls[0])
    writer.add_add_bos_token(False)
    for name, data, kind in tensors:
        if kind == Kind.F32:
            writer.add_tensor(name, data.astype(np.float32))
        else:
            writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out
