"""Mixtures with the layer shapes of real ones and random weights, as GGUF files.

They are written as ``qwen3moe``, whose experts are gated by SiLU and have no biases. The weights of
every layer are the same numbers in bytes of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from benchmarks.common.random_store import random_packed
from localrt.quant.formats import FORMATS

VOCABULARY = 1024
_KINDS = {"q4_k": Kind.Q4_K, "q8_0": Kind.Q8_0, "mxfp4": Kind.MXFP4}


@dataclass(frozen=True, slots=True)
class MixtureShape:
    """The layers of a mixture. ``hidden`` x ``inner`` experts, ``used`` of ``count`` for a row."""

    hidden: int
    inner: int
    count: int
    used: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: str  # format of the experts
    dense: str  # of attention and head

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """An expert's, (rows, columns)."""
        wide = (self.inner, self.hidden)
        return {"gate": wide, "up": wide, "down": (self.hidden, self.inner)}

    def layers_of(self, nbytes: int) -> int:
        """How many layers' experts take about so many bytes."""
        row_bytes = FORMATS[self.experts].row_bytes
        expert = sum(rows * row_bytes(columns) for rows, columns in self.matrices.values())
        return max(1, round(nbytes / (self.count * expert)))


SHAPES = {
    "qwen3-30b-a3b": MixtureShape(2048, 768, 128, 8, 32, 4, 128, "q4_k", "q4_k"),
    "gpt-oss-20b": MixtureShape(2880, 2880, 32, 4, 64, 8, 64, "mxfp4", "q8_0"),
    "mixtral-8x7b": MixtureShape(4096, 14336, 8, 2, 32, 8, 128, "q4_k", "q4_k"),
}


def write_mixture(shape: MixtureShape, layers: int, out: Path) -> Path:
    """Write a model of so many layers; its tokens are GPT-2's bytes and numbered words."""
    writer = gguf.GGUFWriter(out, "qwen3moe", use_temp_file=True)
    writer.add_name(out.stem)
    writer.add_block_count(layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_expert_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_expert_count(shape.count)
    writer.add_expert_used_count(shape.used)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    tokens = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    words = [f"<{number}>" for number in range(257, VOCABULARY)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*tokens, "th", *words])
    types = gguf.TokenType
    writer.add_token_types([types.NORMAL] * 257 + [types.CONTROL] * len(words))
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(257)
    writer.add_add_bos_token(False)
    for name, data, kind in _tensors(shape, layers):
        if kind == Kind.F32:
            writer.add_tensor(f"{name}.weight", data.astype(np.float32))
        else:
            writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def _tensors(shape: MixtureShape, layers: int) -> Iterator[tuple[str, NDArray[Any], Kind]]:
    """Name, values or packed bytes, type."""
    width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    rng = np.random.default_rng(0)

    def dense(name: str, rows: int, columns: int) -> tuple[str, NDArray[Any], Kind]:
        return name, random_packed(shape.dense, rows, columns).data, _KINDS[shape.dense]

    yield dense("token_embd", VOCABULARY, shape.hidden)
    yield dense("output", VOCABULARY, shape.hidden)
    yield "output_norm", np.ones(shape.hidden), Kind.F32
    for layer in range(layers):
        prefix = f"blk.{layer}."
        for name in ("attn", "ffn"):
            yield f"{prefix}{name}_norm", np.ones(shape.hidden), Kind.F32
        for name in ("attn_q", "attn_k"):
            yield f"{prefix}{name}_norm", np.ones(shape.head_dim), Kind.F32
        yield dense(f"{prefix}attn_q", width, shape.hidden)
        yield dense(f"{prefix}attn_k", kv_width, shape.hidden)
        yield dense(f"{prefix}attn_v", kv_width, shape.hidden)
        yield dense(f"{prefix}attn_output", shape.hidden, width)
        gate = rng.standard_normal((shape.count, shape.hidden)) / shape.hidden**0.5
        yield f"{prefix}ffn_gate_inp", gate, Kind.F32
        for name, size in shape.matrices.items():
            data = random_packed(shape.experts, *size).data
            # Experts differ by where their rows begin.
            stack = np.stack([np.roll(data, 7 * expert, axis=0) for expert in range(shape.count)])
            yield f"{prefix}ffn_{name}_exps", stack, _KINDS[shape.experts]
