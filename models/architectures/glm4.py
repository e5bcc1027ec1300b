"""GLM-4-0414, GLM-Z1 and the text of GLM-4.1V and GLM-OCR: norms on inputs and on results, one
matrix for gate and up, and half of each head rotated.

Rows of the rotated half have rotary pairs side by side; checkpoints reorder them
(``models/row_order.py``).
"""

from __future__ import annotations

from dataclasses import replace

from localrt.models.architectures import llama
from localrt.models.architectures.family import Family
from localrt.models.config import DecoderConfig, LayerNames
from localrt.models.raw_config import RawConfig

_NAMES = LayerNames(
    attention_post_norm="post_self_attn_layernorm",
    gate_up=("mlp.gate_up_proj",),
    mlp_post_norm="post_mlp_layernorm",
)


def read_config(raw: RawConfig) -> DecoderConfig:
    """Read Llama's keys; the tensors show whether there are biases."""
    return replace(llama.read_config(raw), names=_NAMES)


FAMILIES = (
    Family(
        name="glm4",
        read=read_config,
        folders="Glm4ForCausalLM Glm4vForConditionalGeneration Glm46VForConditionalGeneration "
        "GlmOcrForConditionalGeneration",
        gguf="glm4",
        in_pairs=True,
        gguf_in_pairs=True,
        gguf_layer={
            "post_attention_norm": "post_self_attn_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
)
