"""Tiny models whose matrices are quantized and published by others' schemes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints.published.schemes import (
    BF16,
    SCHEMES,
    Published,
    Table,
    Tensors,
    awq,
    compressed,
    fp8,
    gptq,
    scheme,
)
from tests.models.tiny import save_tiny

SMALL: Mapping[str, Published] = Table(
    {
        "W4A16": lambda: SCHEMES["W4A16 g32"],
        "W4A16 asymmetric": lambda: scheme(
            "int4-g32z", compressed("pack-quantized", "W4A16_ASYM", BF16, group_size=32)
        ),
        "W8A8": lambda: scheme("int8-g32b", compressed("int-quantized", "INT8_W8A8", BF16)),
        "NVFP4": lambda: SCHEMES["NVFP4A16"],
        "MXFP4": lambda: SCHEMES["MXFP4A16"],
        "GPTQ": lambda: SCHEMES["GPTQ g32"],
        "GPTQ asymmetric": lambda: scheme("int4-g32z", gptq(4, 32, symmetric=False)),
        "GPTQ ordered": lambda: scheme("f32", gptq(4, 32, symmetric=True, ordered=True)),
        "AWQ": lambda: scheme("int4-g32z", awq(32)),
        "NF4": lambda: SCHEMES["NF4 twice"],
        "FP8": lambda: scheme("e4m3-g32", fp8((32, 32))),
        "ModelOpt NVFP4": lambda: SCHEMES["ModelOpt NVFP4"],
    }
)
"""Schemes in the smallest groups they have."""


def is_quantized(name: str, shape: tuple[int, ...]) -> bool:
    """Whether these models' quantizers take a tensor; the others keep their type."""
    left_out = ("embed_tokens", "lm_head", "mlp.gate.", "router", "kv_b_proj")
    return len(shape) == 2 and not any(word in name for word in left_out)


def publish(
    folder: Path,
    name: str,
    published: Published,
    *,
    taken: Callable[[str, tuple[int, ...]], bool] = is_quantized,
    shards: int = 1,
    renamed: Callable[[Tensors], Tensors] = lambda tensors: tensors,
) -> tuple[Path, Any, dict[str, str]]:
    """A tiny model published, transformers' own of the same values, and what became of matrices."""
    plain = folder / "plain"
    plain.mkdir()
    oracle = save_tiny(name, plain).module
    kept = load_file(plain / "model.safetensors")
    tensors: Tensors = {}
    formats: dict[str, str] = {}
    for key, tensor in kept.items():
        columns = tensor.shape[-1]
        fits = columns % 32 == 0 and ("nf4" not in published.format or columns % 64 == 0)
        if not (fits and tensor.shape[0] % 32 == 0 and taken(key, tuple(tensor.shape))):
            tensors[key] = tensor
            continue
        stem = key.removesuffix(".weight")
        parts, values = published.write(tensor)
        kept[key] = torch.from_numpy(np.ascontiguousarray(values))
        formats[key] = published.format
        tensors |= {f"{stem}.{part}": content.contiguous() for part, content in parts.items()}
    save_file(kept, plain / "model.safetensors", metadata={"format": "pt"})
    oracle = type(oracle).from_pretrained(plain, dtype=torch.float32).eval()
    out = folder / "published"
    out.mkdir()
    config = json.loads((plain / "config.json").read_text("utf-8"))
    (out / "config.json").write_text(json.dumps({**config, **published.config}))
    _save(out, renamed(tensors), shards)
    return out, oracle, formats


def _save(folder: Path, tensors: Tensors, shards: int) -> None:
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    names = sorted(tensors)
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        own = {name: tensors[name] for name in names[shard::shards]}  # a weight's lie apart
        save_file(own, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(own, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
