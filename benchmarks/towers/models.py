"""Towers of real shapes with random weights, as ``mmproj`` files of F16 matrices, and text models
of one layer beside them, which libmtmd asks for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

_TEXT: Mapping[str, Any] = {
    "vocab_size": 512,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
_WIDTHS = {"qwen3.5-4b": 2560, "gemma-4-e4b": 2560, "smolvlm-500m": 960}


def _qwen() -> Any:
    from transformers import Qwen3VLConfig

    # Qwen3.5's tower is Qwen3-VL's without rows for the first layers.
    vision = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "depth": 24,
        "num_heads": 16,
        "patch_size": 16,
        "out_hidden_size": _WIDTHS["qwen3.5-4b"],
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [],
    }
    text = {**_TEXT, "hidden_size": _WIDTHS["qwen3.5-4b"]}
    return Qwen3VLConfig(text_config=text, vision_config=vision)


def _gemma() -> Any:
    from transformers import Gemma4Config

    vision = {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 16,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "head_dim": 64,
        "patch_size": 16,
        "position_embedding_size": 10240,
        "pooling_kernel_size": 3,
    }
    text = {
        **_TEXT,
        "hidden_size": _WIDTHS["gemma-4-e4b"],
        "hidden_size_per_layer_input": 0,
        "layer_types": ["full_attention"],
    }
    return Gemma4Config(text_config=text, vision_config=vision, audio_config=None)


def _smolvlm() -> Any:
    from transformers import Idefics3Config

    vision = {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 512,
        "patch_size": 16,
    }
    text = {**_TEXT, "model_type": "llama", "hidden_size": _WIDTHS["smolvlm-500m"]}
    return Idefics3Config(text_config=text, vision_config=vision, scale_factor=4)


TOWERS: Mapping[str, Callable[[], Any]] = {
    "qwen3.5-4b": _qwen,
    "gemma-4-e4b": _gemma,
    "smolvlm-500m": _smolvlm,
}
_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "qwen3.5-4b": {"size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}},
    "smolvlm-500m": {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}},
}


def write_tower(name: str, folder: Path) -> tuple[Path, Path]:
    """Write the ``mmproj`` file and the text model; return their paths."""
    import torch
    from transformers import AutoModelForImageTextToText

    from tests.models.make_mmproj import write_mmproj

    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(TOWERS[name](), dtype=torch.float16)
    model.save_pretrained(folder)
    settings = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, **_SETTINGS.get(name, {})}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    mmproj = write_mmproj(folder, folder / "mmproj-f16.gguf", kind="f16")
    return mmproj, _write_text(folder / "text.gguf", _WIDTHS[name])


def _write_text(path: Path, width: int) -> Path:
    """A Llama of one layer, whose tokens are bytes."""
    from tests.checkpoints.make_gguf import write_gguf

    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    metadata = {
        "llama.block_count": 1,
        "llama.context_length": 4096,
        "llama.embedding_length": width,
        "llama.feed_forward_length": 256,
        "llama.attention.head_count": 1,
        "llama.attention.key_length": 64,
        "llama.attention.value_length": 64,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": 64,
        "llama.vocab_size": len(tokens),
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * len(tokens),
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256],
    }
    shapes = {
        "token_embd.weight": (len(tokens), width),
        "output_norm.weight": (width,),
        **{f"blk.0.attn_{part}.weight": (64, width) for part in ("q", "k", "v")},
        "blk.0.attn_output.weight": (width, 64),
        "blk.0.attn_norm.weight": (width,),
        "blk.0.ffn_norm.weight": (width,),
        "blk.0.ffn_gate.weight": (256, width),
        "blk.0.ffn_up.weight": (256, width),
        "blk.0.ffn_down.weight": (width, 256),
    }
    rng = np.random.default_rng(0)
    tensors = {
        name: (rng.standard_normal(shape, np.float32) * np.float32(0.02), "f32")
        for name, shape in shapes.items()
    }
    return write_gguf(path, "llama", metadata, tensors)[0]
