"""Attention to chosen tokens in a block: ``Attention``, and the indexer that chooses.

What they compute is ``quant/ops/index.py``'s.
"""

from __future__ import annotations

from localrt.models.config import DecoderConfig
from localrt.models.parts import Attention, PassState
from localrt.models.weights import WeightLoader
from localrt.quant.ops.index import IndexSpec, IndexWeights
from localrt.quant.ops.protocol import Array, Weight

__all__ = ["IndexedAttention"]

_PREFIX = "self_attn.indexer."
_JOINT = ("index_qk_proj",)
_APART = ("q_proj", "k_proj")  # as GGUF files have it


class IndexedAttention:
    """An indexer, then attention. ``index_at`` is what the indexer remembers in the cache."""

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        weights: WeightLoader,
        spec: IndexSpec,
        index_at: int,
        at: int,
    ) -> None:
        self.attention = Attention(config, layer, weights, at)
        self.spec, self.layer = spec, index_at
        prefix, size, offset = f"model.layers.{layer}.{_PREFIX}", spec.head_dim, config.norm_offset
        names = _APART if config.index_apart else _JOINT
        self.weights = IndexWeights(
            qk=weights.matrix(
                (spec.projected_rows, config.hidden_size), *(f"{prefix}{n}.weight" for n in names)
            ),
            q_norm=weights.vector(size, f"{prefix}q_layernorm.weight", offset=offset),
            k_norm=weights.vector(size, f"{prefix}k_layernorm.weight", offset=offset),
        )

    def __call__(self, state: PassState) -> Array:
        """See ``Layer``."""
        ops, step, own = state.ops, state.step, self.attention
        chosen = ops.choose_tokens(state.x, self.weights, self.spec, step, self.layer)
        q = ops.norm_qkv_rope_append(state.x, own.weights, own.spec, step, own.layer)
        return ops.attention_output(q, own.weights, own.spec, step, own.layer, chosen)

    def matrices(self) -> dict[str, Weight]:
        """See ``Layer``."""
        return self.attention.matrices()
