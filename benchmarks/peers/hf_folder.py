"""A GGUF model as a Hugging Face folder in bf16, for peers that read nothing else.

Made once and kept: every weight is unpacked, rounded to bf16 and written block by block, so memory
stays small whatever the model's size. Each layer has a file of its own, as streamers of layers want
it. There is no tokenizer in it: benchmarks work on token ids. It does not know the peers.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from localrt.common.errors import StorageError, UnsupportedModelError, reason_of
from localrt.common.formatting import format_bytes
from localrt.models.checkpoints import Checkpoint, GgufCheckpoint, StoreCheckpoint, open_checkpoint
from localrt.quant.formats import PackedTensor, unpack

# GGUF's architecture to the class and model_type of Hugging Face transformers.
_CLASSES: Mapping[str, tuple[str, str]] = {
    "llama": ("LlamaForCausalLM", "llama"),
    "mistral": ("MistralForCausalLM", "mistral"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3"),
}

# Keys of a checkpoint's config that are localrt's own.
_OWN_KEYS = frozenset({"rope_dim", "norm_weights_include_one"})

_BLOCK_BYTES = 4 << 20
_SPARE_BYTES = 1 << 30


def hf_folder(
    path: Path, cache: Path, *, notify: Callable[[str], None] = lambda line: None
) -> Path:
    """The model at ``path`` as a Hugging Face folder: itself, or its copy below ``cache``.

    The copy is made at the first call and found again as long as the file is the same.

    Raises:
        UnsupportedModelError: an architecture that is not translated, or a packed store.
        StorageError: no room for it.
        LocalrtError: the model cannot be read.
    """
    with closing(open_checkpoint(path)) as checkpoint:
        if isinstance(checkpoint, StoreCheckpoint):
            raise UnsupportedModelError(
                f"{path.name} is a packed store: give the GGUF file or the folder it was made from"
            )
        if not isinstance(checkpoint, GgufCheckpoint):
            return checkpoint.path
        out = hf_folder_path(checkpoint.path, cache)
        if not out.is_dir():
            size = 2 * sum(math.prod(info.shape) for info in checkpoint.tensors.values())
            notify(f"writing {format_bytes(size)} of bf16 weights for the peers, once, to {out}")
            write_hf_folder(checkpoint, out)
        return out


def hf_folder_path(path: Path, cache: Path) -> Path:
    """Where the copy of the GGUF file at ``path`` lies, or would lie."""
    found = path.resolve().stat()
    identity = f"{path.resolve()} {found.st_size} {found.st_mtime_ns}"
    return cache / "bf16" / f"{path.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"


def write_hf_folder(checkpoint: Checkpoint, out: Path) -> None:
    """Write ``checkpoint`` to the folder ``out``, which exists whole afterwards or not at all.

    Raises:
        UnsupportedModelError: an architecture that is not translated.
        StorageError: no room for it, or the folder cannot be written.
    """
    config = _config(checkpoint)
    files = _files(checkpoint)
    names = [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)]
    sizes = {name: 2 * math.prod(info.shape) for name, info in checkpoint.tensors.items()}
    size = sum(sizes[tensor] for tensors in files for tensor in tensors)
    aside = out.with_name(f"{out.name}.{os.getpid()}.partial")
    try:
        aside.mkdir(parents=True)
        free = shutil.disk_usage(aside).free
        if free < size + _SPARE_BYTES:
            raise StorageError(
                f"bf16 weights for the peers take {format_bytes(size)} and {out.parent} has"
                f" {format_bytes(free)} free: free some, or set LOCALRT_CACHE to another disk"
            )
        weight_map: dict[str, str] = {}
        for name, tensors in zip(names, files, strict=True):
            _write_file(checkpoint, tensors, aside / name)
            weight_map |= dict.fromkeys(tensors, name)
        _write_json(
            aside / "model.safetensors.index.json",
            {"metadata": {"total_size": size}, "weight_map": weight_map},
        )
        _write_json(aside / "config.json", config)
        aside.rename(out)
    except OSError as error:
        raise StorageError(f"cannot write {aside}: {reason_of(error)}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _config(checkpoint: Checkpoint) -> dict[str, Any]:
    """``config.json``: what the file says under Hugging Face's keys, and what it implies."""
    if checkpoint.architecture not in _CLASSES:
        raise UnsupportedModelError(
            f"{checkpoint.architecture!r} models are not translated for peers that need a Hugging"
            f" Face folder (known: {', '.join(_CLASSES)})"
        )
    if "rope_freqs.weight" in checkpoint.tensors:
        raise UnsupportedModelError(
            "the file holds its rotary scaling as a tensor, which a Hugging Face config cannot"
        )
    name, kind = _CLASSES[checkpoint.architecture]
    known = {k: v for k, v in checkpoint.config.items() if k not in _OWN_KEYS and v is not None}
    biased = any(tensor.endswith("q_proj.bias") for tensor in checkpoint.tensors)
    tokens = {k: v for k, v in checkpoint.generation_config.items() if k.endswith("_token_id")}
    return {
        **known,
        **{key: value for key, value in tokens.items() if key != "pad_token_id"},
        **({"attention_bias": True} if kind == "llama" and biased else {}),
        "architectures": [name],
        "model_type": kind,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",  # what versions of transformers before 5 look for
    }


def _files(checkpoint: Checkpoint) -> list[list[str]]:
    """Tensors by file: embedding, each layer, norm and head have one of their own."""
    groups: dict[str, list[str]] = {}
    for name in checkpoint.tensors:
        if name.startswith("rope_factors_"):  # in the config
            continue
        parts = name.split(".")
        stem = 3 if name.startswith("model.layers.") else -1
        groups.setdefault(".".join(parts[:stem]), []).append(name)
    return list(groups.values())


def _write_file(checkpoint: Checkpoint, tensors: Sequence[str], path: Path) -> None:
    """One safetensors file. Synced, so that its pages can be dropped from the cache."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in tensors:
        shape = checkpoint.tensors[name].shape
        end = offset + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in tensors:
            _write_tensor(checkpoint, name, file)
        file.flush()
        os.fsync(file.fileno())


def _write_tensor(checkpoint: Checkpoint, name: str, file: BinaryIO) -> None:
    one = checkpoint.config.get("norm_weights_include_one") and name.endswith("norm.weight")
    for block in checkpoint.blocks(name, _BLOCK_BYTES):
        assert isinstance(block, PackedTensor), "only a store has tiles"
        values = unpack(block)
        file.write(_to_bf16(values - np.float32(1) if one else values).tobytes())


def _to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Rounded to the nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    return (rounded >> np.uint32(16)).astype("<u2")


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
