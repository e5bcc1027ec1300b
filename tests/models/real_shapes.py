"""Random weights of real shapes as a GGUF file, for llama.cpp and localrt side by side.

    python -m tests.models.real_shapes gemma-4-12b 24 gemma.gguf tokenizer.gguf [template.jinja]

writes the first 24 layers of a shape in ``localrt/hub/known_configs.json``, packed about as Q4_K_M
is; tokens are another file's, and unused ones. The chat template is the file's at the end, if any.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from benchmarks.common.random_store import random_packed
from localrt.hub import searching
from tests.checkpoints.make_gguf import Array, write_gguf
from tests.models.gguf_keys import gguf_keys
from tests.models.make_gguf import FILES, gguf_tensors
from tests.models.tiny import keep_layers

_KNOWN = Path(searching.__file__).with_name("known_configs.json")
_SIX_BITS = ("token_embd.weight", "output.weight")
_NAMES = {"gemma4_unified_text": "gemma4-unified", "qwen3_5_text": "qwen3.5"}
_SECTIONS = {"qwen35": [11, 11, 10, 0]}  # of M-RoPE, which the shapes leave out


def write_random(
    shape: str, layers: int, path: Path, tokenizer: Path, template: Path | None = None
) -> int:
    """Write the file, and return its bytes."""
    known = json.loads(_KNOWN.read_text("utf-8"))
    config = transformers.AutoConfig.for_model(**known[shape])
    keep_layers(config, layers)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    state = {name: _placeholder(tuple(each.shape)) for name, each in model.state_dict().items()}
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    architecture = FILES[_NAMES.get(config.model_type, config.model_type)]
    plain = SimpleNamespace(**json.loads(config.to_json_string(use_diff=False)))
    keys = gguf_keys(architecture, plain, absorbed=True)
    metadata: dict[str, Any] = {f"{architecture}.{key}": value for key, value in keys.items()}
    if architecture in _SECTIONS:
        metadata[f"{architecture}.rope.dimension_sections"] = _SECTIONS[architecture]
    metadata |= _tokenizer(tokenizer, config.vocab_size)
    if template:
        metadata["tokenizer.chat_template"] = template.read_text("utf-8")
    tensors = gguf_tensors(architecture, plain, state)
    typed = {name: _packed(name, array) for name, array in tensors.items()}
    return sum(part.stat().st_size for part in write_gguf(path, architecture, metadata, typed))


def _placeholder(shape: tuple[int, ...]) -> Array:
    """Ones of a vector; of a matrix its shape, without memory."""
    return np.ones(shape, np.float32) if len(shape) < 2 else np.broadcast_to(np.int8(0), shape)


def _packed(name: str, array: Array) -> tuple[Array, str]:
    *stack, rows, columns = (1, *array.shape)[-3:]
    if array.ndim == 1 or columns % 256 or name.endswith(("_norm.weight", "gate_inp.weight")):
        plain = np.random.default_rng(0).standard_normal(array.shape).astype(np.float32)
        return (array if array.ndim == 1 else plain / columns**0.5), "f32"
    larger = "_down" in name or "attn_v" in name
    six = name in _SIX_BITS or (larger and int(name.split(".")[1]) % 2)
    kind = "q6_k" if six else "q4_k"
    parts = [np.asarray(random_packed(kind, rows, columns, seed=n).data) for n in range(stack[0])]
    return (np.stack(parts) if array.ndim == 3 else parts[0]), kind


def _tokenizer(path: Path, size: int) -> dict[str, Any]:
    fields = gguf.GGUFReader(str(path)).fields.items()
    found = {name: field.contents() for name, field in fields if name.startswith("tokenizer.ggml")}
    unused = size - len(found["tokenizer.ggml.tokens"])
    found["tokenizer.ggml.tokens"] += [f"<unused{number}>" for number in range(unused)]
    found["tokenizer.ggml.token_type"] += [5] * unused
    return found


if __name__ == "__main__":
    shape, layers, path, tokenizer, *template = sys.argv[1:]
    print(write_random(shape, int(layers), *map(Path, [path, tokenizer, *template])), "bytes")
