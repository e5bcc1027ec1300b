"""Vision encoders as ``mmproj`` GGUF files, as llama.cpp's converter writes them, from folders of
Hugging Face's.

Tensors' names are the gguf package's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from tests.checkpoints.make_gguf import Array, in_pairs, write_gguf

_MEAN = [0.48145466, 0.4578275, 0.40821073]
_PROJECTORS = {
    "gemma3": "gemma3",
    "gemma4": "gemma4v",
    "gemma4_unified": "gemma4uv",
    "glm4v": "glm4v",
    "glm4v_moe": "glm4v",
    "glm_ocr": "glm4v",
    "idefics3": "idefics3",
    "smolvlm": "idefics3",
    "lfm2_vl": "lfm2",
    "internvl": "internvl",
    "minicpmv4_6": "minicpmv4_6",
    "llava": "pixtral",
    "mistral3": "pixtral",
    "paddleocr_vl": "paddleocr",
    "qwen2_vl": "qwen2vl_merger",
    "qwen2_5_vl": "qwen2.5vl_merger",
    "qwen3_vl": "qwen3vl_merger",
    "qwen3_vl_moe": "qwen3vl_merger",
    "qwen3_5": "qwen3vl_merger",
}
_QWEN3_MERGER = {"linear_fc1": "mm.0", "linear_fc2": "mm.2", "norm": "v.post_ln"}
_DEEP = {"linear_fc1": "fc1", "linear_fc2": "fc2", "norm": "norm"}
_UNIFIED = {
    "patch_dense": "v.patch_embd",
    "patch_ln1": "v.patch_norm.1",
    "patch_ln2": "v.patch_norm.2",
    "pos_norm": "v.patch_norm.3",
    "pos_embedding": "v.position_embd.weight",
}
"""What gguf does not know of Gemma 4 12B's."""
_MERGER = {f"self_attn.{part}_proj": f"attn_{part}" for part in ("q", "k", "v", "out")}
_MERGER |= {"layer_norm1": "ln1", "pre_norm": "ds_ln"}
_MERGER |= {"linear_1": "ds_ffn_up", "linear_2": "ds_ffn_down"}
"""What MiniCPM-V's merger within the encoder has; gguf does not know it."""
_SUFFIXES = (".weight", ".bias")
_OWN = ("vision_", "visual.", "multi_modal_projector.", "connector.", "embed_vision.", "mlp_AR.")
_OWN += ("merger.",)
_NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 64)
_CLIPPED = re.compile(r"(.+)\.((?:in|out)put_(?:min|max))")


def write_mmproj(
    folder: Path,
    path: Path,
    *,
    changes: Mapping[str, Any] = MappingProxyType({}),
    named: Callable[[str], str | None] = str,
) -> Path:
    """The encoder of the model in ``folder`` as the file ``path``.

    ``changes`` are other metadata (None: without it), ``named`` gives a tensor another name, or
    leaves it out.
    """
    config = json.loads((folder / "config.json").read_text("utf-8"))
    state = {
        key.removeprefix("model."): value
        for file in folder.glob("*.safetensors")
        for key, value in load_file(file).items()
    }
    state = {k: v for k, v in state.items() if k.startswith(_OWN) and ".head." not in k}
    model = config["model_type"]
    tensors = {
        name: array
        for key, value in state.items()
        for name, array in _made(model, key, value, config)
    }
    if _PROJECTORS[model] == "pixtral":  # a row of the decoder's embeddings
        columns = config["text_config"]["hidden_size"]
        tensors["v.token_embd.img_break"] = np.ones(columns, np.float32)
    metadata = {**_metadata(folder, config), **changes}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    typed = {
        new: (array, "f32") for name, array in tensors.items() if (new := named(name)) is not None
    }
    return write_gguf(path, "clip", metadata, typed)[0]


def _made(model: str, key: str, value: Array, config: Any) -> Iterator[tuple[str, Array]]:
    """The file's tensors made of one of the folder's."""
    vision = config["vision_config"]
    patch = vision.get("patch_size", 16)
    if model == "paddleocr_vl":
        key = key.replace("visual.", "model.")
    if model == "internvl":
        parts = {"layer_norm": "0", "linear_1": "1", "linear_2": "3"}
        _, stem, *_ = key.split(".")
        key = key.replace(f"multi_modal_projector.{stem}", f"mlp1.{parts.get(stem)}")
        key += ".weight" if "lambda_" in key or "position" in key else ""
        value = value.reshape(value.shape[-2:] if value.ndim == 3 else value.shape).squeeze()
    if key == "visual.patch_embed.proj.weight":
        yield "v.patch_embd.weight", value[:, :, 0]
        yield "v.patch_embd.weight.1", value[:, :, 1]
        return
    if ".qkv." in key and model.startswith("qwen2"):
        for part, rows in zip("qkv", np.split(value, 3), strict=True):
            yield _named(key.replace("qkv", part), vision), rows
        return
    if key.endswith(("_embedder.input_proj.weight", "patch_embedding.weight")) and value.ndim == 2:
        value = value.reshape(len(value), patch, patch, 3).transpose(0, 3, 1, 2)
    if ".patch_ln1." in key or key.endswith(".patch_dense.weight"):  # colour by colour
        pixels = value.reshape(*value.shape[:-1], -1, 3)
        value = np.ascontiguousarray(pixels.swapaxes(-1, -2)).reshape(value.shape)
    if key.endswith(".pos_embedding"):
        value = np.ascontiguousarray(value.swapaxes(0, 1))
    if key.endswith("soft_emb_norm.weight"):
        value = value + 1
    if re.search(r"(attention|\.attn)\.[qk]_proj", key) and model != "internvl":
        value = in_pairs(value, vision["num_attention_heads"])
    yield _named(key, vision), value.reshape(1) if value.ndim == 0 else value


def _named(key: str, vision: Any) -> str:
    """The file's name of a tensor of the folder."""
    stem, _, suffix = key.rpartition(".")
    if (merger := re.fullmatch(r"vision_tower\.vit_merger\.(.+)\.(\w+)", key)) is not None:
        return f"v.vit_merger.{_MERGER[merger[1]]}.{merger[2]}"
    if key.startswith("merger.mlp.0."):
        _, _, _, stem, suffix = key.split(".")
        parts = {"pre_norm": "input_norm", "linear_1": "up", "linear_2": "down"}
        return f"mm.{parts[stem]}.{suffix}"
    if key.startswith("vision_embedder."):
        _, stem, *suffixes = key.split(".")
        return ".".join([_UNIFIED[stem], *suffixes])
    if "deepstack_merger_list." in key:
        _, _, number, stem, suffix = key.split(".")
        block = vision["deepstack_visual_indexes"][int(number)]
        return f"v.deepstack.{block}.{_DEEP[stem]}.{suffix}"
    if key.startswith("visual.merger.") and (stem := key.split(".")[2]) in _QWEN3_MERGER:
        return f"{_QWEN3_MERGER[stem]}.{key.split('.')[3]}"
    key, suffix = match.groups() if (match := _CLIPPED.fullmatch(key)) else (key, "")
    key = key.replace("_projection_weight", "_projection.weight")
    key = key.replace(".linear.weight", ".weight")
    siglip = key.replace("vision_tower.", "vision_tower.vision_model.")
    gemma4 = key.replace("vision_tower.encoder.", "vision_model.model.")
    table = key.replace("embedding_table", "embedding_table.weight")
    for known in (f"model.{table}", key, f"model.{key}", siglip, gemma4):
        found = _NAMES.get_name(known, _SUFFIXES)
        if found is not None:
            return f"{found}.{suffix}" if suffix else found
    raise KeyError(key)


def _metadata(folder: Path, config: Any) -> dict[str, Any]:
    vision, text = config["vision_config"], config.get("text_config", {})
    model = config["model_type"]
    keys, attention = gguf.Keys.ClipVision, gguf.Keys.ClipVision.Attention
    processor: dict[str, Any] = {}
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (folder / name).exists():
            read = json.loads((folder / name).read_text("utf-8"))
            processor |= {**read, **read.get("image_processor", {})}
    hidden = vision.get("embed_dim") if model == "qwen2_vl" else vision.get("hidden_size")
    size = vision.get("image_size", 560)
    if unified := model == "gemma4_unified":  # which has no blocks
        hidden = vision["mm_embed_dim"]
        vision |= dict.fromkeys(("depth", "num_heads", "mlp_ratio"), 0)
    inner = vision.get("intermediate_size") or int(hidden * vision.get("mlp_ratio", 4))
    found = {
        "clip.has_vision_encoder": True,
        "clip.projector_type": _PROJECTORS[model],
        keys.PROJECTION_DIM: text.get("hidden_size") or config["hidden_size"],
        keys.IMAGE_SIZE: size,
        keys.PATCH_SIZE: vision["patch_size"],
        keys.EMBEDDING_LENGTH: hidden,
        keys.FEED_FORWARD_LENGTH: inner,
        keys.BLOCK_COUNT: vision.get("num_hidden_layers") or vision["depth"],
        attention.HEAD_COUNT: vision.get("num_attention_heads") or vision["num_heads"],
        attention.LAYERNORM_EPS: vision.get("layer_norm_eps", vision.get("rms_norm_eps", 1e-6)),
        keys.IMAGE_MEAN: processor.get("image_mean", _MEAN),
        keys.IMAGE_STD: processor.get("image_std", [0.5] * 3),
    }
    if model.startswith(("qwen", "paddle")):  # newer converters say this
        found[keys.IMAGE_MIN_PIXELS] = processor["size"]["shortest_edge"]
        found[keys.IMAGE_MAX_PIXELS] = processor["size"]["longest_edge"]
    if model.startswith("glm"):
        found[attention.LAYERNORM_EPS] = vision["rms_norm_eps"]
    if model == "paddleocr_vl":  # the converter has no other for the largest picture
        found[keys.IMAGE_SIZE] = int(processor["size"]["longest_edge"] ** 0.5)
        return {**found, keys.USE_GELU: True}
    merge = vision.get("spatial_merge_size", config.get("spatial_merge_size"))
    merge = vision.get("merge_size", merge)
    if merge:
        found[keys.SPATIAL_MERGE_SIZE] = merge
    if model in ("llava", "mistral3"):
        found[attention.LAYERNORM_EPS] = 1e-5
    if model == "gemma3":
        side = round(config["mm_tokens_per_image"] ** 0.5)
        found[keys.Projector.SCALE_FACTOR] = size // vision["patch_size"] // side
    if model.startswith("gemma4"):
        found["clip.has_audio_encoder"] = unified
        found["clip.vision.projector_type"] = found.pop("clip.projector_type")
        found[keys.Projector.SCALE_FACTOR] = vision["pooling_kernel_size"]
    if model in ("idefics3", "smolvlm"):
        found[keys.Projector.SCALE_FACTOR] = config["scale_factor"]
        if "size" in processor:
            found[keys.PREPROC_IMAGE_SIZE] = processor["size"]["longest_edge"]
    if model == "internvl":
        sides = {keys.IMAGE_SIZE: "image_size", keys.PATCH_SIZE: "patch_size"}
        found |= {key: vision[name][0] for key, name in sides.items()}
        found[keys.Projector.SCALE_FACTOR] = round(1 / config["downsample_ratio"])
    if model == "minicpmv4_6":
        found[keys.IMAGE_SIZE] = processor["scale_resolution"]
        found[keys.Projector.SCALE_FACTOR] = 4
        found["clip.vision.wa_layer_indexes"] = [config["insert_layer_id"]]
    if model == "lfm2_vl":
        found[keys.Projector.SCALE_FACTOR] = config["downsample_factor"]
    if model == "qwen2_5_vl":
        found[keys.N_WA_PATTERN] = vision["fullatt_block_indexes"][0] + 1
        found[keys.WINDOW_SIZE] = vision["window_size"]
    if "deepstack_visual_indexes" in vision:
        deep = vision["deepstack_visual_indexes"]
        found[keys.IS_DEEPSTACK_LAYERS] = [n in deep for n in range(vision["depth"])]
    act = vision.get("hidden_act", vision.get("hidden_activation", "quick_gelu"))
    if act == "silu" or act.startswith("gelu"):
        found[keys.USE_SILU if act == "silu" else keys.USE_GELU] = True
    return found
