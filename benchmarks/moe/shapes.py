"""Mixtures with the layer shapes of real ones and random weights: in memory, and as GGUF files.

As many layers as are asked for, so that both engines read the same experts from RAM. The weights of
every layer are the same numbers in bytes of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.random_weights import random_packed
from benchmarks.moe.gguf_writer import Kind, Tensor, write_qwen3_moe
from localrt.quant.formats import FORMATS
from localrt.quant.formats.tiled import TiledTensor
from localrt.quant.ops.experts import (
    ExpertActivation,
    ExpertSpec,
    ExpertWeights,
    RouterSpec,
    RouterWeights,
)
from localrt.quant.ops.native.ops import NativeOps

__all__ = ["SHAPES", "VOCABULARY", "Layers", "MixtureShape", "write_mixture"]

VOCABULARY = 1024
_KINDS = {"q4_0": Kind.Q4_0, "q4_k": Kind.Q4_K, "q8_0": Kind.Q8_0, "mxfp4": Kind.MXFP4}
_MATRICES = (("gate", "inner", "hidden"), ("up", "inner", "hidden"), ("down", "hidden", "inner"))


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
    activation: ExpertActivation = "silu"
    biased: bool = False

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """An expert's, (rows, columns)."""
        return {name: (getattr(self, a), getattr(self, b)) for name, a, b in _MATRICES}

    @property
    def expert_nbytes(self) -> int:
        """Bytes of one expert."""
        row_bytes = FORMATS[self.experts].row_bytes
        return sum(rows * row_bytes(columns) for rows, columns in self.matrices.values())

    def layers_of(self, nbytes: int) -> int:
        """How many layers' experts take about so many bytes."""
        return max(1, round(nbytes / (self.count * self.expert_nbytes)))


SHAPES = {
    "qwen3-30b-a3b": MixtureShape(2048, 768, 128, 8, 32, 4, 128, "q4_k", "q4_k"),
    "gpt-oss-20b": MixtureShape(
        2880, 2880, 32, 4, 64, 8, 64, "mxfp4", "q8_0", activation="swiglu_oai", biased=True
    ),
    "mixtral-8x7b": MixtureShape(4096, 14336, 8, 2, 32, 8, 128, "q4_k", "q4_k"),
}


class Layers:
    """``count`` layers of a shape: router and experts, each expert in memory of its own."""

    def __init__(self, ops: NativeOps, shape: MixtureShape, count: int) -> None:
        self.ops, self.shape = ops, shape
        self._slots = np.empty((0, 0), np.float32)
        self._spec = ExpertSpec(activation=shape.activation)
        self.spec = RouterSpec(count=shape.count, used=shape.used, eps=1e-6)
        self._tiles = {
            name: ops.tile(replace(random_packed(shape.experts, *size, seed=1), name=name))
            for name, size in shape.matrices.items()
        }
        self.routers = [self._router(layer) for layer in range(count)]
        self.tables = [ops.expert_table(shape.count) for _ in range(count)]
        for table in self.tables:
            for expert in range(shape.count):
                table.put(expert, self._expert())

    def choose(self, rows: int, times: int) -> list[list[tuple[Any, Any]]]:
        """Inputs of ``times`` passes of ``rows``, and the choices of each layer."""
        rng = np.random.default_rng(rows)
        passes = []
        for _ in range(times):
            x = rng.standard_normal((rows, self.shape.hidden)).astype(np.float32)
            routed = [self.ops.norm_route(x, router, self.spec) for router in self.routers]
            passes.append([(x, part) for part in routed])
        return passes

    def run_experts(self, passes: list[list[tuple[Any, Any]]]) -> None:
        """The experts of every layer of every pass."""
        normed, routing = passes[0][0][1]
        shape = (routing.weights.size, normed.shape[1])
        if self._slots.shape != shape:
            self._slots = np.empty(shape, np.float32)
        for layers in passes:
            for (_, (normed, routing)), table in zip(layers, self.tables, strict=True):
                self.ops.run_experts(normed, routing, table, self._spec, self._slots)

    def run_steps(self, passes: list[list[tuple[Any, Any]]]) -> None:
        """The same from norm to sum."""
        ops = self.ops
        for layers in passes:
            for (x, _), table, router in zip(layers, self.tables, self.routers, strict=True):
                normed, routing = ops.norm_route(x, router, self.spec)
                slots = ops.expert_slots(normed, routing)
                ops.run_experts(normed, routing, table, self._spec, slots)
                ops.add(normed, ops.combine_experts(slots, routing, None))

    def _router(self, seed: int) -> RouterWeights:
        size = (self.shape.count, self.shape.hidden)
        gate = random_packed("f32", *size)
        values = np.random.default_rng(seed).standard_normal(size) / self.shape.hidden**0.5
        gate.data.view(np.float32)[:] = values
        norm = self.ops.vector(np.ones(self.shape.hidden, np.float32))
        return RouterWeights(norm=norm, gate=self.ops.weight(size, [gate]))

    def _expert(self) -> ExpertWeights:
        tiles = {name: _copied(tensor) for name, tensor in self._tiles.items()}
        hidden, inner = self.shape.hidden, self.shape.inner
        biased, vector = self.shape.biased, self.ops.vector
        return ExpertWeights(
            gate_up=self.ops.weight((2 * inner, hidden), [tiles["gate"], tiles["up"]]),
            down=self.ops.weight((hidden, inner), [tiles["down"]]),
            gate_up_bias=vector(np.zeros(2 * inner, np.float32)) if biased else None,
            down_bias=vector(np.zeros(hidden, np.float32)) if biased else None,
        )


def write_mixture(shape: MixtureShape, layers: int, out: Path) -> Path:
    """Write the model as ``qwen3moe``, whose experts are gated by SiLU, without biases."""
    config = {
        "num_hidden_layers": layers,
        "max_position_embeddings": 4096,
        "hidden_size": shape.hidden,
        "moe_intermediate_size": shape.inner,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "num_experts": shape.count,
        "num_experts_per_tok": shape.used,
    }
    # Bytes as GPT-2 writes them, and numbered words to fill the vocabulary.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    tokens = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    tokens += ["th", *(f"<{number}>" for number in range(257, VOCABULARY))]
    return write_qwen3_moe(
        out,
        config,
        _tensors(shape, layers),
        tokens=tokens,
        controls=range(257, VOCABULARY),
        merges=["t h"],
    )


def _tensors(shape: MixtureShape, layers: int) -> Iterator[Tensor]:
    width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    rng = np.random.default_rng(0)

    def dense(name: str, rows: int, columns: int) -> Tensor:
        return name, random_packed(shape.dense, rows, columns).data, _KINDS[shape.dense]

    yield dense("token_embd.weight", VOCABULARY, shape.hidden)
    yield dense("output.weight", VOCABULARY, shape.hidden)
    yield "output_norm.weight", np.ones(shape.hidden), Kind.F32
    for layer in range(layers):
        prefix = f"blk.{layer}."
        for name in ("attn", "ffn"):
            yield f"{prefix}{name}_norm.weight", np.ones(shape.hidden), Kind.F32
        for name in ("attn_q", "attn_k"):
            yield f"{prefix}{name}_norm.weight", np.ones(shape.head_dim), Kind.F32
        yield dense(f"{prefix}attn_q.weight", width, shape.hidden)
        yield dense(f"{prefix}attn_k.weight", kv_width, shape.hidden)
        yield dense(f"{prefix}attn_v.weight", kv_width, shape.hidden)
        yield dense(f"{prefix}attn_output.weight", shape.hidden, width)
        gate = rng.standard_normal((shape.count, shape.hidden)) / shape.hidden**0.5
        yield f"{prefix}ffn_gate_inp.weight", gate, Kind.F32
        for name, size in shape.matrices.items():
            data = random_packed(shape.experts, *size).data
            # Experts differ by where their rows begin.
            stack = np.stack([np.roll(data, 7 * expert, axis=0) for expert in range(shape.count)])
            yield f"{prefix}ffn_{name}_exps.weight", stack, _KINDS[shape.experts]


def _copied(tensor: TiledTensor) -> TiledTensor:
    return replace(tensor, data=tensor.data.copy())
