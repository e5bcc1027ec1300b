"""ERNIE 4.5: Llama, and a mixture of experts in most layers of the larger ones; the text model of
PaddleOCR-VL.

A bias only affects the choice of experts. ERNIE's published rows of queries and keys have rotary
pairs side by side; checkpoints reorder them (``models/row_order.py``).
"""

from __future__ import annotations

from dataclasses import replace

from localrt.models.architectures import llama
from localrt.models.architectures.family import Family
from localrt.models.config import CHOICE_BIAS, DecoderConfig
from localrt.models.raw_config import RawConfig, expert_count_key, read_mixture, with_mixture


def read_config(raw: RawConfig) -> DecoderConfig:
    """Read Llama's keys and the mixture's; GGUF names some differently."""
    config = llama.read_config(raw)
    if not raw.has(expert_count_key(raw)):
        return config
    gguf, layers = raw.is_gguf, range(config.layers)
    inner = raw.integer("moe_intermediate_size")
    shared = raw.optional_integer("n_shared_experts" if gguf else "moe_num_shared_experts") or 0
    spec = replace(
        read_mixture(raw, config, inner=inner),
        shared=inner * shared,
        choice_bias=any(raw.has_tensor(f"model.layers.{n}.{CHOICE_BIAS}") for n in layers),
    )
    first = raw.optional_integer("first_k_dense_replace" if gguf else "moe_layer_start_index") or 0
    last = raw.last_layer("moe_layer_end_index", config.layers)
    step = raw.integer("moe_layer_interval", 1)
    sparse = [first <= layer <= last and (layer + 1) % step == 0 for layer in layers]
    return with_mixture(config, spec, sparse)


FAMILIES = (
    Family(
        name="ernie",
        read=read_config,
        folders="Ernie4_5ForCausalLM Ernie4_5_MoeForCausalLM",
        gguf="ernie4_5 ernie4_5-moe",
        in_pairs=True,
        gguf_in_pairs=True,
    ),
    Family(
        name="ernie",
        read=read_config,
        folders="PaddleOCRVLForConditionalGeneration",
        gguf="paddleocr",
    ),
)
