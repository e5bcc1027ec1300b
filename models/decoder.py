"""The decoder that the known architectures share: config, attention, MLP, block, model.

Every part is written against ``Ops`` and never looks inside an array. An architecture's own file
(``llama.py``, ``gemma3.py``, ...) reads its config into a ``DecoderConfig`` and names its tensors.
A mixture of experts (``moe.py``) takes the place of ``GatedMlp``: a ``Block`` only calls its MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from localrt.models.latent import LatentAttention
from localrt.models.moe import MixtureNames, MixtureSpec, SparseMlp, load_expert
from localrt.models.weights import WeightLoader
from localrt.quant.ops.arrays import copy_to_host
from localrt.quant.ops.attention import LatentSpec
from localrt.quant.ops.experts import ExpertTable, Routing
from localrt.quant.ops.protocol import (
    Array,
    AttentionSpec,
    AttentionWeights,
    Batch,
    KVCache,
    MlpSpec,
    MlpWeights,
    Ops,
    Pass,
    Vector,
    Weight,
)

__all__ = [
    "Attention",
    "Block",
    "Decoder",
    "DecoderConfig",
    "GatedMlp",
    "LayerNames",
    "Mlp",
    "load_attention",
    "resident_mlp",
    "sparse_mlp",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """What a decoder is, whatever file it came from. One ``AttentionSpec`` per layer.

    ``mixtures`` has one entry per layer, None for a dense one; it is empty for a dense model.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    context_length: int
    norm_eps: float
    attention: tuple[AttentionSpec, ...]
    mlp: MlpSpec
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False  # norms on the outputs of attention and MLP
    norm_offset: float = 0.0  # added to every norm weight (Gemma publishes w - 1)
    embedding_scale: float = 1.0
    final_softcap: float | None = None
    tied_head: bool = False
    mixtures: tuple[MixtureSpec | None, ...] = ()
    residual_scale: float = 1.0  # of what attention and MLP add
    logit_scale: float = 1.0

    @property
    def layers(self) -> int:
        """Number of blocks."""
        return len(self.attention)

    @property
    def sparse(self) -> bool:
        """Whether any layer is a mixture of experts."""
        return any(self.mixtures)

    def mixture(self, layer: int) -> MixtureSpec | None:
        """A layer's mixture of experts; None where its MLP is dense."""
        return self.mixtures[layer] if self.mixtures else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNames:
    """A layer's tensors, below ``model.layers.N.``; the defaults are Llama's."""

    attention_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    attention_post_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    mlp_post_norm: str = ""
    sinks: str = "self_attn.sinks"
    mixture: MixtureNames = field(default_factory=MixtureNames)


class Attention:
    """Norm, projections, rotary, cache, attention, output projection."""

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        names: LayerNames,
        prefix: str,
        weights: WeightLoader,
    ) -> None:
        self.layer = layer
        self.spec = spec = config.attention[layer]
        hidden, size, offset = config.hidden_size, spec.head_dim, config.norm_offset
        rows = (spec.heads + 2 * spec.kv_heads) * size
        joint = spec.joint_norms

        def norm(name: str, width: int, present: bool = True) -> Vector | None:
            if not present:
                return None
            return weights.vector(width, f"{prefix}{name}.weight", offset=offset)

        self.weights = AttentionWeights(
            norm=norm(names.attention_norm, hidden),
            qkv=weights.matrix((rows, hidden), *(f"{prefix}{n}.weight" for n in names.qkv)),
            out=weights.matrix((hidden, spec.heads * size), f"{prefix}{names.out}.weight"),
            qkv_bias=weights.vector(rows, *(f"{prefix}{n}.bias" for n in names.qkv))
            if config.qkv_bias
            else None,
            out_bias=weights.vector(hidden, f"{prefix}{names.out}.bias")
            if config.out_bias
            else None,
            q_norm=norm(names.q_norm, size * (spec.heads if joint else 1), config.qk_norm),
            k_norm=norm(names.k_norm, size * (spec.kv_heads if joint else 1), config.qk_norm),
            post_norm=norm(names.attention_post_norm, hidden, config.post_norms),
            sinks=weights.vector(spec.heads, f"{prefix}{names.sinks}") if spec.sinks else None,
        )

    def __call__(self, ops: Ops, x: Array, step: Pass) -> Array:
        """(R, D) to (R, D), without the residual."""
        q = ops.norm_qkv_rope_append(x, self.weights, self.spec, step, self.layer)
        return ops.attention_output(q, self.weights, self.spec, step, self.layer)


def load_attention(
    config: DecoderConfig, layer: int, names: LayerNames, prefix: str, weights: WeightLoader
) -> Attention | LatentAttention:
    """A layer's attention, of the kind that its spec is."""
    spec = config.attention[layer]
    if isinstance(spec, LatentSpec):
        return LatentAttention(spec, config.hidden_size, layer, prefix, weights)
    return Attention(config, layer, names, prefix, weights)


class Mlp(Protocol):
    """The exchangeable part of a block."""

    def __call__(self, ops: Ops, x: Array) -> Array:
        """(R, D) to (R, D), without the residual."""


class GatedMlp:
    """``down(activation(gate(norm(x))) * up(norm(x)))``."""

    def __init__(
        self, config: DecoderConfig, names: LayerNames, prefix: str, weights: WeightLoader
    ) -> None:
        hidden, inner, offset = config.hidden_size, config.intermediate_size, config.norm_offset
        self.spec = config.mlp
        self.weights = MlpWeights(
            norm=weights.vector(hidden, f"{prefix}{names.mlp_norm}.weight", offset=offset),
            gate_up=weights.matrix(
                (2 * inner, hidden), *(f"{prefix}{n}.weight" for n in names.gate_up)
            ),
            down=weights.matrix((hidden, inner), f"{prefix}{names.down}.weight"),
            post_norm=weights.vector(hidden, f"{prefix}{names.mlp_post_norm}.weight", offset=offset)
            if config.post_norms
            else None,
        )

    def __call__(self, ops: Ops, x: Array) -> Array:
        """(R, D) to (R, D)."""
        return ops.norm_gated_mlp(x, self.weights, self.spec)


def sparse_mlp(
    config: DecoderConfig,
    spec: MixtureSpec,
    names: LayerNames,
    prefix: str,
    weights: WeightLoader,
    table: ExpertTable,
) -> SparseMlp:
    """A sparse layer's MLP with the experts that ``table`` holds."""
    return SparseMlp(
        spec, config.mlp, config.hidden_size, names.mlp_norm, names.mixture, prefix, weights, table
    )


def resident_mlp(
    config: DecoderConfig,
    layer: int,
    names: LayerNames,
    prefix: str,
    weights: WeightLoader,
    ops: Ops,
) -> GatedMlp | SparseMlp:
    """A layer's MLP with all that it computes with."""
    spec = config.mixture(layer)
    if spec is None:
        return GatedMlp(config, names, prefix, weights)
    table = ops.expert_table(spec.router.count)
    part = sparse_mlp(config, spec, names, prefix, weights, table)
    for number in range(spec.router.count):
        expert = load_expert(spec, config.hidden_size, number, names.mixture, prefix, weights)
        table.put(number, expert)
    return part


class Block:
    """One layer: attention and MLP, each added to the residual stream."""

    def __init__(
        self, attention: Attention | LatentAttention, mlp: Mlp, scale: float = 1.0
    ) -> None:
        self.attention = attention
        self.mlp = mlp
        self.scale = scale

    def __call__(self, ops: Ops, x: Array, step: Pass) -> Array:
        """(R, D) to (R, D)."""
        x = ops.add(x, self.attention(ops, x, step), self.scale)
        return ops.add(x, self.mlp(ops, x), self.scale)


class Decoder:
    """Embedding, blocks, head. ``forward`` is one pass over the rows of a batch."""

    def __init__(
        self, config: DecoderConfig, ops: Ops, weights: WeightLoader, names: LayerNames
    ) -> None:
        self.config = config
        self.ops = ops
        table = (config.vocab_size, config.hidden_size)
        with ops.scope():
            self.embedding: Weight = weights.matrix(table, "model.embed_tokens.weight")
            self.blocks = [self._block(layer, names, weights) for layer in range(config.layers)]
            self.norm: Vector = weights.vector(
                config.hidden_size,
                "model.norm.weight",
                offset=config.norm_offset,
                scale=config.logit_scale,
            )
            if config.tied_head:
                weights.skip("lm_head.weight")
                self.head: Weight = self.embedding
            else:
                self.head = weights.matrix(table, "lm_head.weight")
        weights.finish()

    def _block(self, layer: int, names: LayerNames, weights: WeightLoader) -> Block:
        prefix = f"model.layers.{layer}."
        attention = load_attention(self.config, layer, names, prefix, weights)
        mlp = resident_mlp(self.config, layer, names, prefix, weights, self.ops)
        return Block(attention, mlp, self.config.residual_scale)

    def watch_routing(self, watch: Callable[[int, Routing], None]) -> None:
        """Tell ``watch`` of every choice of experts, with the layer's number among the sparse."""
        sparse = [block.mlp for block in self.blocks if isinstance(block.mlp, SparseMlp)]
        for place, mlp in enumerate(sparse):
            mlp.watch = partial(watch, place)

    def cache(self, capacity: int) -> KVCache:
        """An empty KV cache for one sequence."""
        return self.ops.kv_cache(self.config.attention, capacity)

    def reserve(self, cache: KVCache, length: int) -> None:
        """Make room in ``cache`` for ``length`` tokens that do not come from a pass."""
        cache.reserve(length)

    def forward(
        self,
        batch: Batch,
        *,
        rows: Sequence[int] | None = None,
        check: Callable[[], None] | None = None,
        features: npt.NDArray[np.float32] | None = None,
    ) -> npt.NDArray[np.float32]:
        """Logits of the chosen ``rows`` (default: all), shape (rows, vocab), float32.

        Keys and values of the batch are in the caches afterwards and count as held. ``check`` runs
        before every layer; when it raises, the caches are as they were. ``features`` (R, D) is
        filled with the residual stream of all rows after the last block, before the final norm.
        """
        ops = self.ops
        wanted = np.arange(len(batch.tokens)) if rows is None else np.asarray(rows, np.intp)
        with ops.scope():
            step = ops.begin(batch)
            x = ops.embed(self.embedding, step, self.config.embedding_scale)
            for block in self.blocks:
                if check is not None:
                    check()
                x = block(ops, x, step)
            if features is not None:
                copy_to_host(x, features)
            logits = ops.head(
                x, wanted, self.norm, self.config.norm_eps, self.head, self.config.final_softcap
            )
        for span in batch.spans:
            span.cache.advance(span.rows)
        return logits
