"""Random weights of real shapes as a GGUF file, for llama.cpp and localrt side by side.

    python -m tests.models.real_shapes gemma-4-12b 24 gemma.gguf tokenizer.gguf [template.jinja]

writes the first 24 layers of a shape in ``localrt/hub/known_configs.json``, packed about as Q4_K_M
is (0 layers: as many as 6 GB hold). Tokens are another file's, and unused ones. The chat template
is the file's at the end, if any.
"""

from __future__ import annotations

import json
import sys
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from benchmarks.common.random_store import random_packed
from localrt.hub import searching
from localrt.quant.formats import FORMATS
from tests.checkpoints.make_gguf import Array, write_gguf
from tests.models.gguf_keys import gguf_keys
from tests.models.make_gguf import FILES, gguf_tensors
from tests.models.tiny import keep_layers
from tests.models.tiny_configs import CONFIGS, MIXTURES

_KNOWN = Path(searching.__file__).with_name("known_configs.json")
_MOST_NBYTES = 6 * 10**9
_SIX_BITS = ("token_embd.weight", "output.weight")
_PLAIN = ("_norm.weight", "gate_inp.weight", "conv1d.weight", "shortconv.conv.weight")
_SECTIONS = {"qwen35": [11, 11, 10, 0]}  # of M-RoPE, which the shapes leave out
_ATTENTION = ("attention", "full_attention")  # kinds that files cannot do without


def write_random(
    shape: str, layers: int | None, path: Path, tokenizer: Path, template: Path | None = None
) -> int:
    """Write the file, and return how many layers it has: as many as 6 GB hold, if None is given."""
    known = json.loads(_KNOWN.read_text("utf-8"))[shape]
    if layers is None:
        layers = _as_many(known)
    kinds = known.get("layer_types", [])
    least = 1 + max((kinds.index(kind) for kind in _ATTENTION if kind in kinds), default=0)
    if layers < least:
        raise SystemExit(f"{shape} needs --layers {least} or more: it attends there first")
    architecture, config, tensors = _tensors(known, layers)
    keys = gguf_keys(architecture, config, absorbed=True)
    metadata: dict[str, Any] = {f"{architecture}.{key}": value for key, value in keys.items()}
    if architecture in _SECTIONS:
        metadata[f"{architecture}.rope.dimension_sections"] = _SECTIONS[architecture]
    metadata |= _tokenizer(tokenizer, config.vocab_size)
    if template:
        metadata["tokenizer.chat_template"] = template.read_text("utf-8")
    typed = {name: _packed(name, array, architecture) for name, array in tensors.items()}
    write_gguf(path, architecture, metadata, typed)
    return layers


def _tensors(known: dict[str, Any], layers: int) -> tuple[str, Any, dict[str, Array]]:
    """The file's architecture, the config, and placeholders of the file's tensors."""
    config = transformers.AutoConfig.for_model(**known)
    keep_layers(config, layers)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    state = {name: _placeholder(tuple(each.shape)) for name, each in model.state_dict().items()}
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    architecture = _architecture(config.model_type)
    plain = SimpleNamespace(**json.loads(config.to_json_string(use_diff=False)))
    return architecture, plain, gguf_tensors(architecture, plain, state)


def _as_many(known: dict[str, Any]) -> int:
    """Layers that ``_MOST_NBYTES`` hold."""
    architecture, config, tensors = _tensors(known, known["num_hidden_layers"])
    sizes = [0] * (config.num_hidden_layers + 1)  # the first is of what belongs to no layer
    for name, array in tensors.items():
        layer = int(name.split(".")[1]) + 1 if name.startswith("blk.") else 0
        columns = array.shape[-1]
        sizes[layer] += (
            array.size // columns * FORMATS[_kind(name, array, architecture)].row_bytes(columns)
        )
    return max(1, sum(total <= _MOST_NBYTES for total in accumulate(sizes)) - 1)


def _architecture(model_type: str) -> str:
    """What a file calls it: as that of the tiny model of the same type."""
    tiny = {**CONFIGS, **MIXTURES}.items()
    return next(FILES[n] for n, make in tiny if n in FILES and make().model_type == model_type)


def _placeholder(shape: tuple[int, ...]) -> Array:
    """Ones of a vector; of a matrix its shape, without memory."""
    return np.ones(shape, np.float32) if len(shape) < 2 else np.broadcast_to(np.int8(0), shape)


def _kind(name: str, array: Array, architecture: str) -> str:
    """As published: experts of gpt-oss in MXFP4 and the rest in eight bits, others as Q4_K_M."""
    columns = array.shape[-1]
    if array.ndim == 1 or columns % 32 or name.endswith(_PLAIN):
        return "f32"
    larger = "_down" in name or "attn_v" in name
    if architecture == "gpt-oss":
        return "mxfp4" if "_exps." in name else "q8_0"
    if columns % 256:
        return "q8_0" if larger else "q5_0"
    six = name in _SIX_BITS or (larger and int(name.split(".")[1]) % 2)
    return "q6_k" if six else "q4_k"


def _packed(name: str, array: Array, architecture: str) -> tuple[Array, str]:
    """Random weights of a placeholder's shape; of a vector ones."""
    kind = _kind(name, array, architecture)
    *stack, rows, columns = (1, *array.shape)[-3:]
    if array.ndim == 1:
        return np.ones(array.shape, np.float32), kind
    if kind == "f32":
        plain = np.random.default_rng(0).standard_normal(array.shape).astype(np.float32)
        return plain / columns**0.5, kind
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
    as_said = int(layers) or None
    print(write_random(shape, as_said, *map(Path, [path, tokenizer, *template])), "layers")
