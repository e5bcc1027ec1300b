"""A checkpoint made of random numbers in memory: real shapes without a download or a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from localrt.models.checkpoints.base import TensorInfo
from localrt.quant.formats import BF16, F32, Format, PackedTensor

Shapes = dict[str, tuple[int, ...]]


def decoder_shapes(architecture: str, config: Mapping[str, Any]) -> Shapes:
    """Tensor names and shapes of a decoder, under Hugging Face names."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim", hidden // heads)
    vocab = config["vocab_size"]
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocab, hidden)
    sandwich = architecture.startswith("Gemma")
    for layer in range(config["num_hidden_layers"]):
        part: Shapes = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.o_proj.weight": (hidden, heads * size),
            "mlp.down_proj.weight": (hidden, inner),
        }
        if architecture == "Phi3ForCausalLM":
            part["self_attn.qkv_proj.weight"] = ((heads + 2 * groups) * size, hidden)
            part["mlp.gate_up_proj.weight"] = (2 * inner, hidden)
        else:
            for name, count in (("q", heads), ("k", groups), ("v", groups)):
                part[f"self_attn.{name}_proj.weight"] = (count * size, hidden)
                if architecture == "Qwen2ForCausalLM":
                    part[f"self_attn.{name}_proj.bias"] = (count * size,)
            part["mlp.gate_proj.weight"] = part["mlp.up_proj.weight"] = (inner, hidden)
        if architecture == "Qwen3MoeForCausalLM":
            for name in ("gate", "up", "down"):
                del part[f"mlp.{name}_proj.weight"]
            part["mlp.gate.weight"] = (config["num_experts"], hidden)
            inner = config["moe_intermediate_size"]
            for number in range(config["num_experts"]):
                stem = f"mlp.experts.{number}"
                part[f"{stem}.gate_proj.weight"] = part[f"{stem}.up_proj.weight"] = (inner, hidden)
                part[f"{stem}.down_proj.weight"] = (hidden, inner)
        if architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Gemma3ForCausalLM"):
            part["self_attn.q_norm.weight"] = part["self_attn.k_norm.weight"] = (size,)
        if sandwich:
            part["pre_feedforward_layernorm.weight"] = (hidden,)
            part["post_feedforward_layernorm.weight"] = (hidden,)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in part.items()}
    return shapes


class RandomCheckpoint:
    """Follows the ``Checkpoint`` protocol. Every read of a tensor gives the same numbers."""

    kind = "safetensors"
    path = Path("random-weights")

    def __init__(
        self, architecture: str, config: Mapping[str, Any], *, format: Format = BF16, seed: int = 0
    ) -> None:
        self.architecture = architecture
        self.config = config
        self.generation_config: Mapping[str, Any] = {}
        self.metadata: Mapping[str, Any] = {}
        self._seed = seed
        self.tensors = {
            name: TensorInfo(name, shape, self._format(shape, format), self._nbytes(shape, format))
            for name, shape in decoder_shapes(architecture, config).items()
        }

    @staticmethod
    def _format(shape: tuple[int, ...], format: Format) -> Format:
        return F32 if len(shape) == 1 else format

    def _nbytes(self, shape: tuple[int, ...], format: Format) -> int:
        rows = shape[0] if len(shape) == 2 else 1
        return rows * self._format(shape, format).row_bytes(shape[-1])

    def read(self, name: str, start: int = 0, stop: int | None = None) -> PackedTensor:
        """Rows of a tensor."""
        info = self.tensors[name]
        rng = np.random.default_rng([self._seed, *name.encode()])
        values = rng.standard_normal(info.shape, np.float32)
        # Unit variance through a matrix; norms and biases near one half, so that none is neutral.
        values = values * 0.1 + 0.5 if len(info.shape) == 1 else values / info.shape[1] ** 0.5
        if len(info.shape) == 1:
            return PackedTensor(name, info.format, info.shape, values[None].view(np.uint8))
        rows = values[start:stop]
        bits = rows.view(np.uint32) >> 16 if info.format is BF16 else rows
        packed = bits.astype(np.uint16) if info.format is BF16 else bits
        return PackedTensor(name, info.format, rows.shape, packed.view(np.uint8))

    def blocks(self, name: str, max_bytes: int = 2 << 20) -> Iterator[PackedTensor]:
        """The whole tensor at once: it was made whole."""
        yield self.read(name)

    def close(self) -> None:
        """Nothing to close."""
