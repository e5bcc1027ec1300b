"""Tiny random models of Qwen's that see, written by transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers as hf
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
    PaddleOCRVLImageProcessorPil,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.models.tiny import random_model

TEXT = {
    "vocab_size": 120,
    "hidden_size": 64,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CHUNKED = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 2, 3]}
MIXED = {**CHUNKED, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
HALF = {**CHUNKED, "mrope_section": [1, 2, 1], "partial_rotary_factor": 0.5}
IDS = {"image_token_id": 110, "video_token_id": 111, "vision_start_token_id": 112}
VISION = {"depth": 3, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64}
LEARNED = {**VISION, "intermediate_size": 56, "num_position_embeddings": 49, "patch_size": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
TINY: dict[str, Callable[[], Any]] = {
    "qwen2_vl": lambda: hf.Qwen2VLConfig(
        text_config={**TEXT, "rope_parameters": CHUNKED},
        vision_config={
            "depth": 3,
            "embed_dim": 32,
            "hidden_size": 64,
            "mlp_ratio": 2,
            "num_heads": 2,
            "patch_size": 4,
        },
        **IDS,
    ),
    "qwen2_5_vl": lambda: hf.Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": CHUNKED},
        vision_config={
            **VISION,
            "intermediate_size": 56,
            "patch_size": 4,
            "window_size": 24,
            "fullatt_block_indexes": [1],
        },
        **IDS,
    ),
    "qwen3_vl": lambda: hf.Qwen3VLConfig(
        text_config={**TEXT, "head_dim": 16, "rope_parameters": MIXED},
        vision_config={**LEARNED, "deepstack_visual_indexes": [0, 2]},
        **IDS,
    ),
    "qwen3_vl_moe": lambda: hf.Qwen3VLMoeConfig(
        text_config={
            **TEXT,
            **EXPERTS,
            "head_dim": 16,
            "rope_parameters": MIXED,
            "tie_word_embeddings": False,
        },
        vision_config={**LEARNED, "deepstack_visual_indexes": [1]},
        **IDS,
    ),
    "qwen3_5": lambda: hf.Qwen3_5Config(
        text_config={
            **TEXT,
            **DELTA,
            "head_dim": 32,
            "rope_parameters": {**MIXED, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25},
        },
        vision_config=LEARNED,
        **IDS,
    ),
    "glm4v": lambda: hf.Glm4vConfig(
        text_config={**TEXT, "rope_parameters": HALF},
        vision_config={**VISION, "intermediate_size": 56, "image_size": 28, "patch_size": 4},
        **IDS,
    ),
    "glm4v_moe": lambda: hf.Glm4vMoeConfig(
        text_config={
            **TEXT,
            "rope_parameters": HALF,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
        vision_config={**VISION, "intermediate_size": 56, "image_size": 28, "patch_size": 4},
        **IDS,
    ),
    "glm_ocr": lambda: hf.GlmOcrConfig(
        text_config={**TEXT, "rope_parameters": HALF},
        vision_config={**VISION, "intermediate_size": 56, "patch_size": 4},
        **IDS,
    ),
    "paddleocr_vl": lambda: hf.PaddleOCRVLConfig(
        text_config={**TEXT, "head_dim": 16, "rope_parameters": CHUNKED},
        vision_config={
            "num_hidden_layers": 3,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "intermediate_size": 56,
            "image_size": 28,
            "patch_size": 4,
        },
        **IDS,
    ),
}
PIXELS = {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}


def save_tiny_vl(kind: str, folder: Path, seed: int = 0) -> Any:
    """Write a random model as a folder; returns transformers' own."""
    model = random_model(TINY[kind](), seed)
    model.save_pretrained(folder)
    settings = {"patch_size": 4, "size": PIXELS, "image_mean": [0.4, 0.5, 0.6]}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return model


def processor_of(folder: Path) -> Any:
    """Transformers' image processor of a folder of ``save_tiny_vl``."""
    settings = json.loads((folder / "preprocessor_config.json").read_text("utf-8"))
    kind = json.loads((folder / "config.json").read_text("utf-8"))["model_type"]
    if "qwen3" in kind:
        settings.setdefault("image_std", [0.5, 0.5, 0.5])
    processors = dict.fromkeys(("glm4v", "glm4v_moe", "glm_ocr"), Glm46VImageProcessorPil)
    processors["paddleocr_vl"] = PaddleOCRVLImageProcessorPil
    return processors.get(kind, Qwen2VLImageProcessorPil)(**settings)
