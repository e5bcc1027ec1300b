"""Random weights of any size in seconds: packed matrices, and stores of Qwen3's architectures.

Nothing is downloaded. Codes are random; scales keep a matrix's products near 1. No two units of a
store are equal, so that using the wrong one is noticed, but all are cut from the same 32 MB of
random tiles, so that gigabytes are created about as fast as memory is copied.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from localrt import system
from localrt.common.files import PAGE
from localrt.models.checkpoints.store.manifest import Manifest, Origin, StoredUnit, UnitTensor
from localrt.models.registry import read_config
from localrt.models.tensor_source import TensorInfo
from localrt.models.units import list_units
from localrt.models.weight_files import MANIFEST_NAME
from localrt.quant.formats import F32, FORMATS, Format, PackedTensor
from localrt.quant.formats.codebook import CODEBOOKS, join_fields, split_fields
from localrt.quant.formats.published import PUBLISHED
from localrt.quant.formats.tiled import TILE_ROWS, tile

# Mean square of each format's codes, to choose scales that keep a matrix's products near 1.
_SPREAD = {
    **dict.fromkeys(("nf4", "nf4-f32", "fp4-f32"), 0.3),
    **{"mxfp4": 2.7, "nvfp4": 2.7, "q6_k": 18.0, "q8_0": 74.0},
    **{"q2_k": 8.0, "q3_k": 45.0, "tq2_0": 1.0, "iq4_nl": 68.0, "iq4_xs": 1200.0},
}


def random_packed(name: str, rows: int, columns: int, *, seed: int = 0) -> PackedTensor:
    """A matrix (rows, columns) whose products with unit inputs are near 1, without 0 and NaN."""
    rng = np.random.default_rng([seed, rows, columns])
    format_ = FORMATS[name]
    data = rng.integers(0, 256, (rows, format_.row_bytes(columns)), dtype=np.uint8)
    blocks = data.reshape(rows, columns // format_.block, format_.block_bytes)
    spread = _SPREAD.get(name, 74.0 if name.startswith("int8") else 4.6)
    size = 1.0 / (spread * columns**0.5)
    scales = (size * rng.uniform(0.7, 1.4, blocks.shape[:2])).astype(np.float16)
    halves = scales[..., None].view(np.uint8)
    if name == "mxfp4":
        blocks[..., 0] = 127 + round(np.log2(size)) + rng.integers(-1, 2, blocks.shape[:2])
    elif name == "nvfp4":  # scales from 0.75 to 1.5, and a factor
        blocks[..., 0] = rng.integers(52, 61, blocks.shape[:2])
    elif name == "q6_k":
        blocks[..., 192:208] = rng.integers(1, 4, (*blocks.shape[:2], 16))
        blocks[..., 208:] = halves
    elif name == "q2_k":  # scales and minima of about 8 each
        blocks[..., 80:82], blocks[..., 82:] = halves, (1.5 * scales)[..., None].view(np.uint8)
    elif name in ("q3_k", "tq2_0"):
        blocks[..., -2:] = halves
    elif name in PUBLISHED:  # each group's scale, then its minimum or zero point
        codec, flat = PUBLISHED[name], scales.astype(np.float32).reshape(-1, 1)
        codes, theirs = codec.split(blocks.reshape(-1, format_.block_bytes))
        middle = 1 << (7 if name.startswith("int8") else 3)
        second = np.full_like(flat, middle) if name.endswith("z") else -middle * flat
        joined = np.concatenate([flat, second], axis=1)[:, : theirs.shape[1]]
        blocks[...] = codec.join(codes, joined).reshape(blocks.shape)
    elif name in CODEBOOKS:
        fields = split_fields(name, blocks.reshape(-1, format_.block_bytes))
        scaled = replace(fields, d=(scales / 24).astype(np.float16).view(np.uint16).reshape(-1))
        blocks[...] = join_fields(name, scaled).reshape(blocks.shape)
    else:
        blocks[..., :2] = halves
        if name in ("q4_k", "q5_k"):  # six-bit scales and minima of about 32 each
            blocks[..., :2] = (scales / 32)[..., None].view(np.uint8)
            blocks[..., 2:4] = (scales / 4)[..., None].view(np.uint8)
        elif name in ("q4_1", "q5_1") or name.endswith("m"):
            half = (1 << {"q4_1": 4, "q5_1": 5}.get(name, int(name[3:4] or 4))) / 2
            blocks[..., 2:4] = (-half * scales).astype(np.float16)[..., None].view(np.uint8)
    return PackedTensor(name, format_, (rows, columns), data, size if name == "nvfp4" else 1.0)


def decoder_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes of Qwen3, or of its mixtures."""
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    vocab = config["vocab_size"]
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocab, hidden)
    stems = ["mlp"]
    if experts := config.get("num_experts"):
        inner, stems = config["moe_intermediate_size"], [f"mlp.experts.{n}" for n in range(experts)]
    for layer in range(config["num_hidden_layers"]):
        part = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (heads * size, hidden),
            "self_attn.k_proj.weight": (groups * size, hidden),
            "self_attn.v_proj.weight": (groups * size, hidden),
            "self_attn.q_norm.weight": (size,),
            "self_attn.k_norm.weight": (size,),
            "self_attn.o_proj.weight": (hidden, heads * size),
            "post_attention_layernorm.weight": (hidden,),
        }
        if experts:
            part["mlp.gate.weight"] = (experts, hidden)
        for stem in stems:
            part[f"{stem}.gate_proj.weight"] = part[f"{stem}.up_proj.weight"] = (inner, hidden)
            part[f"{stem}.down_proj.weight"] = (hidden, inner)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in part.items()}
    return shapes


def _info(name: str, shape: tuple[int, ...], format: Format) -> TensorInfo:
    rows, format = (shape[0], format) if len(shape) == 2 else (1, F32)
    return TensorInfo(name, shape, format, rows * format.row_bytes(shape[-1]))


_WEIGHTS = "weights.safetensors"
_POOL_NBYTES = 32 << 20
_FEWEST_TILES = 61


def stored_units(
    architecture: str, config: Mapping[str, Any], format: str
) -> tuple[StoredUnit, ...]:
    """The units of a random store, consecutive in its file."""
    shapes = decoder_shapes(config)
    tensors = {name: _info(name, shape, FORMATS[format]) for name, shape in shapes.items()}
    described: Any = SimpleNamespace(
        architecture=architecture, config=config, tensors=tensors, kind="safetensors", metadata={}
    )
    units, end = [], 0
    for unit in list_units(tensors, read_config(described)):
        inside, at = [], 0
        for name in unit.tensors:
            info = tensors[name]
            rows = unit.rows or (0, info.shape[0])
            shape = (rows[1] - rows[0], *info.shape[1:])
            tensor = UnitTensor(name, info.format, shape, at, row=rows[0])
            inside.append(tensor)
            at += -(-tensor.nbytes // 64) * 64
        size = -(-at // PAGE) * PAGE
        units.append(StoredUnit(unit.name, _WEIGHTS, end, size, "", tuple(inside)))
        end += size
    return tuple(units)


def write_store(folder: Path, architecture: str, config: Mapping[str, Any], format: str) -> None:
    """Write a random store as a folder for ``localrt.load``; it has no tokenizer."""
    units = stored_units(architecture, config, format)
    tensors = [tensor for unit in units for tensor in unit.tensors]
    matrices = [tensor for tensor in tensors if len(tensor.shape) == 2]
    pools = {
        columns: _pool(format, columns, max(t.shape[0] for t in matrices if t.shape[1] == columns))
        for columns in {tensor.shape[1] for tensor in matrices}
    }
    # Each tensor begins with a different tile.
    numbers = {(tensor.name, tensor.row): at for at, tensor in enumerate(tensors)}

    def content(unit: StoredUnit) -> np.ndarray:
        data = np.zeros(unit.nbytes, np.uint8)
        for tensor in unit.tensors:
            part = data[tensor.offset : tensor.offset + tensor.nbytes]
            if len(tensor.shape) == 1:
                part.view(np.float32)[:] = 1.0
                continue
            pool = pools[tensor.shape[1]]
            tiles = part.reshape(-1, pool.shape[1])
            first, done = numbers[tensor.name, tensor.row] % len(pool), 0
            while done < len(tiles):
                some = pool[first : first + len(tiles) - done]
                tiles[done : done + len(some)] = some
                first, done = 0, done + len(some)
        return data

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _WEIGHTS).open("wb") as file:
        file.truncate(sum(unit.nbytes for unit in units))

        def write(unit: StoredUnit) -> StoredUnit:
            data = content(unit)
            done = 0
            while done < len(data):  # a call writes at most 2 GB
                done += system.write_at(file.fileno(), data[done:].data, unit.offset + done)
            return replace(unit, sha256=hashlib.sha256(data.data).hexdigest())

        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
            units = tuple(threads.map(write, units))
    manifest = Manifest(
        kind="safetensors",
        architecture=architecture,
        config=dict(config),
        generation_config={},
        format=format,
        exactness="approximate",
        source=Origin(folder.name, "random"),
        units=units,
    )
    (folder / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")


def _pool(format: str, columns: int, rows: int) -> np.ndarray:
    """Random tiles (tiles, bytes of a tile) for matrices of ``columns`` and at most ``rows``."""
    tile_nbytes = TILE_ROWS * FORMATS[format].row_bytes(columns)
    most = max(_FEWEST_TILES, _POOL_NBYTES // tile_nbytes)
    count = min(most, max(_FEWEST_TILES, -(-rows // TILE_ROWS) * 2))
    packed = random_packed(format, count * TILE_ROWS, columns)
    if format.startswith("int4-g") and not format.endswith("m"):
        # Codes 1 to 15, whose mean is zero: otherwise rows become more alike with each layer.
        blocks = packed.data.reshape(-1, packed.format.block_bytes)
        codes = np.arange(256, dtype=np.uint8)
        codes[codes & 15 == 0] += 8
        codes[codes < 16] += 128
        blocks[:, 2:] = codes[blocks[:, 2:]]
    return tile(packed).reshape(count, tile_nbytes)
