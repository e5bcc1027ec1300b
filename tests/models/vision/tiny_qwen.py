"""Tiny random models of Qwen's that see, written by transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.models.tiny import random_model
from tests.models.tiny_configs import hf

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
VISION |= {"intermediate_size": 56, "patch_size": 4}
LEARNED = {**VISION, "num_position_embeddings": 49}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}


def _made(name: str, vision: dict[str, Any], **text: Any) -> Callable[[], Any]:
    """What makes a config, of transformers' class ``name``."""
    kind = f"{name}Config"
    return lambda: getattr(hf, kind)(text_config={**TEXT, **text}, vision_config=vision, **IDS)


TINY: dict[str, Callable[[], Any]] = {
    "qwen2_vl": _made(
        "Qwen2VL",
        {
            **{"depth": 3, "embed_dim": 32, "hidden_size": 64},
            **{"mlp_ratio": 2, "num_heads": 2, "patch_size": 4},
        },
        rope_parameters=CHUNKED,
    ),
    "qwen2_5_vl": _made(
        "Qwen2_5_VL",
        {**VISION, "window_size": 24, "fullatt_block_indexes": [1]},
        rope_parameters=CHUNKED,
    ),
    "qwen3_vl": _made(
        "Qwen3VL",
        {**LEARNED, "deepstack_visual_indexes": [0, 2]},
        head_dim=16,
        rope_parameters=MIXED,
    ),
    "qwen3_vl_moe": _made(
        "Qwen3VLMoe",
        {**LEARNED, "deepstack_visual_indexes": [1]},
        **EXPERTS,
        head_dim=16,
        rope_parameters=MIXED,
        tie_word_embeddings=False,
    ),
    "qwen3_5": _made(
        "Qwen3_5",
        LEARNED,
        **DELTA,
        head_dim=32,
        rope_parameters={**MIXED, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25},
    ),
    "glm4v": _made("Glm4v", {**VISION, "image_size": 28}, rope_parameters=HALF),
    "glm4v_moe": _made(
        "Glm4vMoe",
        {**VISION, "image_size": 28},
        rope_parameters=HALF,
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "glm_ocr": _made("GlmOcr", VISION, rope_parameters=HALF),
    "paddleocr_vl": _made(
        "PaddleOCRVL",
        {
            **{"hidden_size": 32, "intermediate_size": 56, "image_size": 28, "patch_size": 4},
            **{"num_hidden_layers": 3, "num_attention_heads": 2},
        },
        head_dim=16,
        rope_parameters=CHUNKED,
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
    processors = dict.fromkeys(("glm4v", "glm4v_moe", "glm_ocr"), hf.Glm46VImageProcessorPil)
    processors["paddleocr_vl"] = hf.PaddleOCRVLImageProcessorPil
    return processors.get(kind, hf.Qwen2VLImageProcessorPil)(**settings)
