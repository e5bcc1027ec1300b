"""Tables of ``mmproj`` GGUF files: each vision family's tensor names and config keys, checked.

``vision.py`` handles differences in values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from localrt.common.errors import CheckpointError
from localrt.models.checkpoints.gguf.metadata import GgufMetadata

_COLOURS = 3
_LARGEST = 1 << 20


@dataclass(frozen=True, slots=True)
class ClipMetadata:
    """Checked metadata values under ``clip.``."""

    pairs: GgufMetadata

    def count(
        self, key: str, default: int | None = None, *, least: int = 1, most: int = _LARGEST
    ) -> int:
        """An integer."""
        value = self.pairs.integer(f"clip.{key}")
        value = default if value is None else value
        if value is None or not least <= value <= most:
            raise self.error(key, f"is {value}, not from {least} to {most}")
        return value

    def number(self, key: str, default: float) -> float:
        """A number above 0, in its shortest decimal form."""
        value = self.pairs.number(f"clip.{key}")
        value = default if value is None else value
        if not 0 < value < 1e9:
            raise self.error(key, f"is {value}, not a number above 0")
        return _decimal(value)

    def colours(self, key: str) -> list[float]:
        """One number per colour."""
        values = self.pairs.numbers(f"clip.{key}")
        numbers = [] if values is None else [_decimal(value) for value in values[: 2 * _COLOURS]]
        if len(numbers) != _COLOURS or not all(map(math.isfinite, numbers)):
            raise self.error(key, f"is {numbers}, not {_COLOURS} numbers")
        return numbers

    def flags(self, key: str) -> list[int]:
        """The indices of true values in an array of booleans."""
        values = self.pairs.numbers(f"clip.{key}")
        return [] if values is None else np.flatnonzero(values).tolist()

    def error(self, key: str, reason: str) -> CheckpointError:
        """An error about a value."""
        return CheckpointError(f"{self.pairs.path}: metadata key 'clip.{key}' {reason}")

    def activation(self) -> str:
        """transformers' name of the blocks' activation."""
        if self.pairs.flag("clip.use_silu"):
            return "silu"
        return "gelu_pytorch_tanh" if self.pairs.flag("clip.use_gelu") else "quick_gelu"


def _decimal(value: float) -> float:
    """The shortest decimal of a float32, which is the published value."""
    return float(str(np.float32(value)))


BLOCK = re.compile(r"v\.(?:blk\.(?P<block>\d{1,5})|deepstack\.(?P<deep>\d{1,5}))\.")
SECOND_KERNEL = "v.patch_embd.weight.1"
"""The kernel for the second frame of a patch."""

Vision = Mapping[str, Any]
Keys = dict[str, Any]
"""The keys of ``vision_config`` that all families have, and those of one family."""
Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of a file's tensors by name."""


def deep_blocks(names: Iterable[str]) -> list[int]:
    """The blocks that are followed by a merger of their own."""
    return sorted(
        {int(match["deep"]) for match in map(BLOCK.match, names) if match and match["deep"]}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFamily:
    """The family of a projector type: ``kind`` is the ``model_type`` of the published config, and
    ``decoders`` are the GGUF architectures that it belongs to.

    ``names`` are the encoder's tensors, ``block`` those of a block under ``prefix``, all without
    suffixes. ``out`` is the last matrix, whose rows are the decoder's hidden size. ``keys`` returns
    further keys of the config and its image processor.
    """

    kind: str
    decoders: tuple[str, ...]
    prefix: str
    block: Mapping[str, str]
    names: Mapping[str, str]
    out: str
    keys: Callable[[ClipMetadata, Mapping[str, Any], Shapes], dict[str, Any]]
    deep: str = ""  # prefix of mergers after inner blocks
    joined: bool = False  # queries, keys and values are one matrix
    paired: bool = False  # rotary rows are in pairs
    colours_last: bool = False  # order of patches' columns
    whole: Mapping[str, str] = field(default_factory=dict)  # names with their endings


def _rows(shapes: Shapes, name: str) -> int:
    """The length of a tensor's last axis but one; 0 if there is none."""
    shape = shapes.get(name, ())
    return shape[-2] if len(shape) > 1 else 0


def _gemma3(metadata: ClipMetadata, vision: Mapping[str, Any], shapes: Shapes) -> dict[str, object]:
    del shapes
    side = vision["image_size"] // vision["patch_size"]
    merge = metadata.count("vision.projector.scale_factor", 4)
    return {"mm_tokens_per_image": (side // merge) ** 2}


def _gemma4(metadata: ClipMetadata, vision: Mapping[str, Any], shapes: Shapes) -> dict[str, object]:
    merge = metadata.count("vision.projector.scale_factor", 3)
    size = _rows(shapes, "v.blk.0.attn_q.weight") // vision["num_attention_heads"]
    own = {
        "model_type": "gemma4_vision",
        "num_key_value_heads": _rows(shapes, "v.blk.0.attn_k.weight") // max(size, 1),
        "head_dim": size,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": vision["layer_norm_eps"],
        "pooling_kernel_size": merge,
        "position_embedding_size": _rows(shapes, "v.position_embd.weight"),
        "standardize": "v.std_bias" in shapes,
        "use_clipped_linears": any(name.endswith(".input_max") for name in shapes),
    }
    found: dict[str, object] = {"vision_config": own}
    if not metadata.pairs.flag("clip.has_audio_encoder"):
        # In Gemma 4's models without audio, a picture's rows attend to one another.
        found["text_config"] = {"use_bidirectional_attention": "vision"}
    return found


def _gemma4_unified(metadata: ClipMetadata, vision: Vision, shapes: Shapes) -> Keys:
    own = {
        "mm_embed_dim": vision["hidden_size"],
        "mm_posemb_size": _rows(shapes, "v.position_embd.weight"),
        "pooling_kernel_size": metadata.count("vision.projector.scale_factor", 3),
        "rms_norm_eps": vision["layer_norm_eps"],
    }
    return {"vision_config": own}


def _qwen(metadata: ClipMetadata, vision: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
    """The keys of all generations; each reads its own."""
    merge, layers = metadata.count("vision.spatial_merge_size", 2), vision["num_hidden_layers"]
    own = {
        "depth": layers,
        "num_heads": vision["num_attention_heads"],
        "spatial_merge_size": merge,
        "temporal_patch_size": 2 if SECOND_KERNEL in shapes else 1,
    }
    if positions := _rows(shapes, "v.position_embd.weight"):
        deep = deep_blocks(shapes)
        own |= {"num_position_embeddings": positions, "deepstack_visual_indexes": deep}
    else:
        each = metadata.count("vision.n_wa_pattern", layers)
        own["fullatt_block_indexes"] = list(range(each - 1, layers, each))
        own["window_size"] = metadata.count("vision.window_size", 112)
    return {"vision_config": own}


def _qwen2(metadata: ClipMetadata, vision: Mapping[str, Any], shapes: Shapes) -> dict[str, object]:
    found = _qwen(metadata, vision, shapes)
    found["vision_config"] |= {
        "embed_dim": vision["hidden_size"],
        "hidden_size": vision["out_hidden_size"],
        "mlp_ratio": vision["intermediate_size"] / vision["hidden_size"],
    }
    return found


def _any_shape(metadata: ClipMetadata, vision: Vision, shapes: Shapes) -> Keys:
    """The keys of PaddleOCR-VL and GLM-4V; ``image_size`` is that of the table of positions."""
    side = math.isqrt(_rows(shapes, "v.position_embd.weight"))
    own = {
        "depth": vision["num_hidden_layers"],
        "num_heads": vision["num_attention_heads"],
        "rms_norm_eps": vision["layer_norm_eps"],
        "image_size": max(side, 1) * vision["patch_size"],
        "spatial_merge_size": metadata.count("vision.spatial_merge_size", 2),
    }
    return {"vision_config": own}


def _pixtral(metadata: ClipMetadata, vision: Vision, shapes: Shapes) -> Keys:
    return {
        "spatial_merge_size": metadata.count("vision.spatial_merge_size", 1),
        "multimodal_projector_bias": "mm.1.bias" in shapes,
        "processor": {"size": {"longest_edge": vision["image_size"]}},
        "vision_config": {"model_type": "pixtral"},
    }


def _idefics3(metadata: ClipMetadata, vision: Vision, shapes: Shapes) -> Keys:
    del shapes
    edge = vision["image_size"]
    longest = metadata.count("vision.preproc_image_size", 4 * edge)
    sizes = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": edge}}
    factor = metadata.count("vision.projector.scale_factor", 2)
    return {"scale_factor": factor, "processor": sizes}


def _lfm2(metadata: ClipMetadata, vision: Vision, shapes: Shapes) -> Keys:
    return {
        "downsample_factor": metadata.count("vision.projector.scale_factor", 2),
        "projector_hidden_size": max(shapes.get("mm.1.bias", (1,))),
        "projector_bias": "mm.1.bias" in shapes,
        "projector_use_layernorm": "mm.input_norm.weight" in shapes,
        "vision_config": {
            "model_type": "siglip2_vision_model",
            "num_patches": _rows(shapes, "v.position_embd.weight"),
        },
    }


def _internvl(metadata: ClipMetadata, vision: Vision, shapes: Shapes) -> Keys:
    tiles = {"min_patches": metadata.count("vision.preproc_min_tiles", 1)}
    tiles["max_patches"] = metadata.count("vision.preproc_max_tiles", 12)
    act = vision["hidden_act"].removesuffix("_pytorch_tanh")  # the exact one, as published
    own = {"hidden_act": act, "use_qk_norm": "v.blk.0.attn_q_norm.weight" in shapes}
    ratio = 1 / metadata.count("vision.projector.scale_factor", 2)
    return {"downsample_ratio": ratio, "vision_config": own, "processor": tiles}


def _minicpm(metadata: ClipMetadata, vision: Vision, shapes: Shapes) -> Keys:
    """``image_size`` is a slice's there."""
    side = math.isqrt(_rows(shapes, "v.position_embd.weight"))
    layers = metadata.pairs.numbers("clip.vision.wa_layer_indexes")
    return {
        "insert_layer_id": 6 if layers is None or not len(layers) else int(layers[0]),
        "downsample_mode": f"{metadata.count('vision.projector.scale_factor', 4) ** 2}x",
        "vision_config": {"image_size": side * vision["patch_size"]},
        "processor": {"scale_resolution": vision["image_size"]},
    }


_ATTENTION = {f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"}
_SIGLIP = {
    **_ATTENTION,
    "attn_out": "self_attn.out_proj",
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_SIGLIP_NAMES = {
    "v.patch_embd": "embeddings.patch_embedding",
    "v.position_embd": "embeddings.position_embedding",
    "v.post_ln": "post_layernorm",
}
_PROJECTOR = {f"mm.{n}": f"multi_modal_projector.linear_{n}" for n in (1, 2)}
_GATED = {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
_MERGER = {**_ATTENTION, "attn_out": "self_attn.out_proj", "ln1": "layer_norm1"}
_MERGER |= {"ds_ln": "pre_norm", "ds_ffn_up": "linear_1", "ds_ffn_down": "linear_2"}
_QWEN = {
    "attn_qkv": "attn.qkv",
    "attn_out": "attn.proj",
    "ln1": "norm1",
    "ln2": "norm2",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_QWEN2_NAMES = {
    "v.patch_embd": "visual.patch_embed.proj",
    "v.post_ln": "visual.merger.ln_q",
    "mm.0": "visual.merger.mlp.0",
    "mm.2": "visual.merger.mlp.2",
}
_QWEN2 = VisionFamily(
    kind="qwen2_vl",
    out="mm.2.weight",
    decoders=("qwen2vl",),
    prefix="visual.blocks.",
    block=_QWEN,
    names=_QWEN2_NAMES,
    keys=_qwen2,
    joined=True,
)

FAMILIES: Mapping[str, VisionFamily] = {
    # by the name of clip.projector_type
    "gemma3": VisionFamily(
        kind="gemma3",
        out="mm.input_projection.weight",
        decoders=("gemma3",),
        prefix="vision_tower.vision_model.encoder.layers.",
        block=_SIGLIP,
        names={
            **{ours: f"vision_tower.vision_model.{name}" for ours, name in _SIGLIP_NAMES.items()},
            "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
        },
        whole={"mm.input_projection.weight": "multi_modal_projector.mm_input_projection_weight"},
        keys=_gemma3,
    ),
    "gemma4v": VisionFamily(
        kind="gemma4",
        out="mm.input_projection.weight",
        decoders=("gemma4",),
        prefix="vision_tower.encoder.layers.",
        block={
            **{name: f"{matrix}.linear" for name, matrix in {**_ATTENTION, **_GATED}.items()},
            "attn_out": "self_attn.o_proj.linear",
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
            "ln1": "input_layernorm",
            "ln2": "pre_feedforward_layernorm",
            "attn_post_norm": "post_attention_layernorm",
            "ffn_post_norm": "post_feedforward_layernorm",
        },
        names={
            "v.patch_embd": "vision_tower.patch_embedder.input_proj",
            "v.std_bias": "vision_tower.std_bias",
            "v.std_scale": "vision_tower.std_scale",
            "mm.input_projection": "embed_vision.embedding_projection",
        },
        whole={"v.position_embd.weight": "vision_tower.patch_embedder.position_embedding_table"},
        keys=_gemma4,
        colours_last=True,
    ),
    "gemma4uv": VisionFamily(
        kind="gemma4_unified",
        out="mm.input_projection.weight",
        decoders=("gemma4",),
        prefix="",
        block={},
        names={
            "v.patch_norm.1": "vision_embedder.patch_ln1",
            "v.patch_embd": "vision_embedder.patch_dense",
            "v.patch_norm.2": "vision_embedder.patch_ln2",
            "v.patch_norm.3": "vision_embedder.pos_norm",
            "mm.input_projection": "embed_vision.embedding_projection",
        },
        whole={"v.position_embd.weight": "vision_embedder.pos_embedding"},
        keys=_gemma4_unified,
        colours_last=True,
    ),
    "qwen2vl_merger": _QWEN2,
    "qwen2.5vl_merger": replace(_QWEN2, kind="qwen2_5_vl", block={**_QWEN, **_GATED}, keys=_qwen),
    "qwen3vl_merger": replace(
        _QWEN2,
        kind="qwen3_vl",
        decoders=("qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe"),
        block={
            **_QWEN,
            "ffn_up": "mlp.linear_fc1",
            "ffn_down": "mlp.linear_fc2",
            "norm": "norm",
            "fc1": "linear_fc1",
            "fc2": "linear_fc2",
        },
        names={
            "v.patch_embd": "visual.patch_embed.proj",
            "v.position_embd": "visual.pos_embed",
            "v.post_ln": "visual.merger.norm",
            "mm.0": "visual.merger.linear_fc1",
            "mm.2": "visual.merger.linear_fc2",
        },
        keys=_qwen,
        deep="visual.deepstack_merger_list.",
        joined=False,
    ),
    "paddleocr": VisionFamily(
        kind="paddleocr_vl",
        out="mm.2.weight",
        decoders=("paddleocr",),
        prefix="visual.vision_model.encoder.layers.",
        block=_SIGLIP,
        names={
            **{ours: f"visual.vision_model.{name}" for ours, name in _SIGLIP_NAMES.items()},
            "mm.input_norm": "mlp_AR.pre_norm",
            **{f"mm.{n}": f"mlp_AR.linear_{n}" for n in (1, 2)},
        },
        keys=_any_shape,
    ),
    "glm4v": replace(
        _QWEN2,
        kind="glm4v",
        out="mm.down.weight",
        decoders=("glm4", "glm4moe"),
        block={**_QWEN, **_GATED, **{f"attn_{n}_norm": f"attn.{n}_norm" for n in "qk"}},
        names={
            "v.patch_embd": "visual.patch_embed.proj",
            "v.norm_embd": "visual.post_conv_layernorm",
            "v.position_embd": "visual.embeddings.position_embedding",
            "v.post_ln": "visual.post_layernorm",
            "mm.patch_merger": "visual.downsample",
            "mm.model.fc": "visual.merger.proj",
            "mm.post_norm": "visual.merger.post_projection_norm",
            **{f"mm.{part}": f"visual.merger.{part}_proj" for part in ("gate", "up", "down")},
        },
        keys=_any_shape,
        joined=False,
    ),
    "pixtral": VisionFamily(
        kind="llava",
        out="mm.2.weight",
        decoders=("llama", "mistral3"),
        prefix="vision_tower.transformer.layers.",
        block={
            **{f"attn_{part}": f"attention.{part}_proj" for part in "qkv"},
            "attn_out": "attention.o_proj",
            "ln1": "attention_norm",
            "ln2": "ffn_norm",
            **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
        },
        names={
            **_PROJECTOR,
            "v.patch_embd": "vision_tower.patch_conv",
            "v.pre_ln": "vision_tower.ln_pre",
            "mm.input_norm": "multi_modal_projector.norm",
            "mm.patch_merger": "multi_modal_projector.patch_merger.merging_layer",
        },
        keys=_pixtral,
        paired=True,
    ),
    "idefics3": VisionFamily(
        kind="idefics3",
        out="mm.model.fc.weight",
        decoders=("llama",),
        prefix="vision_model.encoder.layers.",
        block=_SIGLIP,
        names={
            **{ours: f"vision_model.{name}" for ours, name in _SIGLIP_NAMES.items()},
            "mm.model.fc": "connector.modality_projection.proj",
        },
        keys=_idefics3,
    ),
    "lfm2": VisionFamily(
        kind="lfm2_vl",
        out="mm.2.weight",
        decoders=("lfm2", "lfm2moe"),
        prefix="vision_tower.vision_model.encoder.layers.",
        block=_SIGLIP,
        names={
            **_PROJECTOR,
            **{ours: f"vision_tower.vision_model.{name}" for ours, name in _SIGLIP_NAMES.items()},
            "mm.input_norm": "multi_modal_projector.layer_norm",
        },
        keys=_lfm2,
        colours_last=True,
    ),
    "minicpmv4_6": VisionFamily(
        kind="minicpmv4_6",
        out="mm.down.weight",
        decoders=("qwen35", "qwen35moe"),
        prefix="vision_tower.encoder.layers.",
        block=_SIGLIP,
        names={
            **{ours: f"vision_tower.{name}" for ours, name in _SIGLIP_NAMES.items()},
            **{
                f"v.vit_merger.{ours}": f"vision_tower.vit_merger.{n}"
                for ours, n in _MERGER.items()
            },
            "mm.input_norm": "merger.mlp.0.pre_norm",
            "mm.up": "merger.mlp.0.linear_1",
            "mm.down": "merger.mlp.0.linear_2",
        },
        keys=_minicpm,
    ),
    "internvl": VisionFamily(
        kind="internvl",
        out="mm.model.mlp.3.weight",
        decoders=("qwen2", "qwen3", "qwen3moe", "llama"),
        prefix="vision_tower.encoder.layers.",
        block={**_SIGLIP, "ls1": "scale1", "ls2": "scale2"},
        names={
            **{ours: f"vision_tower.{name}" for ours, name in _SIGLIP_NAMES.items()},
            "v.class_embd": "vision_tower.embeddings.cls_token",
            "mm.model.mlp.0": "multi_modal_projector.layer_norm",
            "mm.model.mlp.1": "multi_modal_projector.linear_1",
            "mm.model.mlp.3": "multi_modal_projector.linear_2",
        },
        keys=_internvl,
    ),
}
