"""GGUF files of mixtures with the layer shapes of real ones, random weights and a small vocabulary.

As many layers as are asked for, so that both engines read the same experts from RAM. The weights of
every layer are the same numbers in bytes of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Kind
from random_packed import random_packed

from localrt.quant.formats import FORMATS
from localrt.quant.ops.experts import ExpertActivation

__all__ = ["SHAPES", "MixtureShape", "write_mixture"]

VOCABULARY = 1024
_KINDS = {"q4_0": Kind.Q4_0, "q4_k": Kind.Q4_K, "q8_0": Kind.Q8_0, "mxfp4": Kind.MXFP4}


@dataclass(frozen=True, slots=True, kw_only=True)
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
    activation: ExpertActivation = "silu"
    biased: bool = False

    @property
    def expert_nbytes(self) -> int:
        """Bytes of one expert."""
        rows = FORMATS[self.experts].row_bytes
        return 2 * self.inner * rows(self.hidden) + self.hidden * rows(self.inner)

    def layers_of(self, nbytes: int) -> int:
        """How many layers' experts take about so many bytes."""
        return max(1, round(nbytes / (self.count * self.expert_nbytes)))


SHAPES = {
    "qwen3-30b-a3b": MixtureShape(
        hidden=2048,
        inner=768,
        count=128,
        used=8,
        heads=32,
        kv_heads=4,
        head_dim=128,
        experts="q4_k",
        dense="q4_k",
    ),
    "gpt-oss-20b": MixtureShape(
        hidden=2880,
        inner=2880,
        count=32,
        used=4,
        heads=64,
        kv_heads=8,
        head_dim=64,
        experts="mxfp4",
        dense="q8_0",
        activation="swiglu_oai",
        biased=True,
    ),
    "mixtral-8x7b": MixtureShape(
        hidden=4096,
        inner=14336,
        count=8,
        used=2,
        heads=32,
        kv_heads=8,
        head_dim=128,
        experts="q4_k",
        dense="q4_k",
    ),
}


def write_mixture(shape: MixtureShape, layers: int, out: Path) -> Path:
    """Write the model as ``qwen3moe``, whose experts are gated by SiLU, without biases."""
    writer = gguf.GGUFWriter(out, "qwen3moe", use_temp_file=False)
    _write_config(writer, shape, layers)
    _write_tokenizer(writer)
    width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    rng = np.random.default_rng(0)

    def matrix(name: str, format_name: str, *dimensions: int) -> None:
        *count, rows, columns = dimensions
        data = random_packed(format_name, rows, columns).data
        if count:
            # Experts differ by where their rows begin.
            data = np.stack([np.roll(data, 7 * expert, axis=0) for expert in range(count[0])])
        writer.add_tensor(name, data, raw_dtype=_KINDS[format_name])

    def vector(name: str, values: npt.NDArray[Any]) -> None:
        writer.add_tensor(name, values.astype(np.float32))

    matrix("token_embd.weight", shape.dense, VOCABULARY, shape.hidden)
    matrix("output.weight", shape.dense, VOCABULARY, shape.hidden)
    vector("output_norm.weight", np.ones(shape.hidden))
    for layer in range(layers):
        prefix = f"blk.{layer}."
        vector(f"{prefix}attn_norm.weight", np.ones(shape.hidden))
        vector(f"{prefix}ffn_norm.weight", np.ones(shape.hidden))
        vector(f"{prefix}attn_q_norm.weight", np.ones(shape.head_dim))
        vector(f"{prefix}attn_k_norm.weight", np.ones(shape.head_dim))
        matrix(f"{prefix}attn_q.weight", shape.dense, width, shape.hidden)
        matrix(f"{prefix}attn_k.weight", shape.dense, kv_width, shape.hidden)
        matrix(f"{prefix}attn_v.weight", shape.dense, kv_width, shape.hidden)
        matrix(f"{prefix}attn_output.weight", shape.dense, shape.hidden, width)
        gate = rng.standard_normal((shape.count, shape.hidden)) / shape.hidden**0.5
        vector(f"{prefix}ffn_gate_inp.weight", gate)
        stacks = (("gate", shape.inner, shape.hidden), ("up", shape.inner, shape.hidden))
        for name, rows, columns in (*stacks, ("down", shape.hidden, shape.inner)):
            matrix(f"{prefix}ffn_{name}_exps.weight", shape.experts, shape.count, rows, columns)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def _write_config(writer: Any, shape: MixtureShape, layers: int) -> None:
    writer.add_name("random mixture")
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


def _write_tokenizer(writer: Any) -> None:
    """Bytes as GPT-2 writes them, and numbered words to fill the vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable}
    characters.update({byte: chr(256 + index) for index, byte in enumerate(others)})
    tokens = [characters[byte] for byte in range(256)]
    tokens += ["th", *(f"<{number}>" for number in range(257, VOCABULARY))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    types = [gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.CONTROL] * (VOCABULARY - 257)
    writer.add_token_types(types)
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(VOCABULARY - 1)
    writer.add_add_bos_token(False)
