"""Latent attention (DeepSeek-V2), and attention to the tokens that an indexer chooses.

Knows names, shapes and order of the tensors; ``quant/ops/attention.py`` computes. Checkpoints
present the matrices from latents to keys and values separately, whatever their published form
(``models/checkpoints/family_tensors.py``).

An indexer scores blocks of a few tokens, and attention sees the tokens of the best blocks. The
indexer's memory is one more layer of the KV cache: a token's key there is its index key, its value
the finished key of the block that it ends. Both depend only on earlier tokens, like any key and
value, so trimming, trees, saved caches, formats and restarts work unchanged. A row's tokens are
gathered in order, as for a tree, so its bits depend only on the rows before it. The index stays in
RAM; the keys and values that are read do not grow with the context.
"""

from __future__ import annotations

from typing import cast

from localrt.models.config import DecoderConfig
from localrt.models.layers.compressed import TokenIndex
from localrt.models.layers.parts import Attention, PassState
from localrt.models.weights import UnreadTensors, WeightLoader
from localrt.quant.ops.arrays import Array, Weight
from localrt.quant.ops.attention import IndexSpec, IndexWeights, LatentSpec, LatentWeights
from localrt.quant.ops.protocol import IndexOps

_NORM = "input_layernorm"
_QUERY = "self_attn.q_proj"
_QUERY_DOWN = "self_attn.q_a_proj"
_QUERY_NORM = "self_attn.q_a_layernorm"
_QUERY_UP = "self_attn.q_b_proj"
_GATE = "self_attn.g_proj"
_DOWN = "self_attn.kv_a_proj_with_mqa"
_LATENT_NORM = "self_attn.kv_a_layernorm"
_KEY_UP = "self_attn.k_b_proj"
_VALUE_UP = "self_attn.v_b_proj"
_OUT = "self_attn.o_proj"


def latent_groups(spec: LatentSpec) -> tuple[tuple[str, ...], ...]:
    """The matrices that are multiplied whole, grouped by shared input.

    Per-head matrices to keys and values are not included: each has its own inputs.
    """
    gates = (_GATE,) if spec.head_gates else ()
    first = (_QUERY_DOWN if spec.query_rank else _QUERY, *gates, _DOWN)
    return (first, *(((_QUERY_UP,),) if spec.query_rank else ()), (_OUT,))


class LatentAttention:
    """Norm, projections down, rotary, cache, attention over latents, projections up.

    ``at`` is the layer's number in the cache; its indexer's, if there is one, is that before.
    """

    def __init__(self, config: DecoderConfig, layer: int, weights: WeightLoader, at: int) -> None:
        spec, hidden = config.attention[layer], config.hidden_size
        assert isinstance(spec, LatentSpec), "the layer's attention is of another kind"
        self.layer = at
        self.spec = spec

        def name(stem: str) -> str:
            return f"model.layers.{layer}.{stem}.weight"

        rank = spec.query_rank
        first = (name(stem) for stem in latent_groups(spec)[0])
        self.weights = LatentWeights(
            norm=weights.vector(hidden, name(_NORM)),
            down=weights.matrix((spec.down_rows, hidden), *first),
            latent_norm=weights.vector(spec.latent, name(_LATENT_NORM)),
            key_up=weights.matrix((spec.heads * spec.latent, spec.nope), name(_KEY_UP)),
            value_up=weights.matrix((spec.heads * spec.value, spec.latent), name(_VALUE_UP)),
            out=weights.matrix((hidden, spec.heads * spec.value), name(_OUT)),
            query_norm=weights.vector(rank, name(_QUERY_NORM)) if rank else None,
            query_up=weights.matrix((spec.query_rows, rank), name(_QUERY_UP)) if rank else None,
        )
        self._index = None
        if spec.index is not None:
            loader = weights if spec.sparse else UnreadTensors(weights)
            self._index = TokenIndex(config, layer, loader, self.weights.down, at - 1)

    def __call__(self, state: PassState) -> Array:
        ops, step = state.ops, state.step
        if self.spec.sparse:
            if self._index is not None:
                state.chosen = self._index(state)
            step = step if state.chosen is None else state.chosen
        q = ops.norm_latent_append(state.x, self.weights, self.spec, step, self.layer)
        return ops.latent_output(q, self.weights, self.spec, step, self.layer)

    def matrices(self) -> dict[str, Weight]:
        own = self.weights
        whole = [weight for weight in (own.down, own.query_up, own.out) if weight is not None]
        groups = latent_groups(self.spec)
        return {group[0]: weight for group, weight in zip(groups, whole, strict=True)}


_PREFIX = "self_attn.indexer."
_JOINT = ("index_qk_proj",)
_APART = ("q_proj", "k_proj")  # GGUF's name


class IndexedAttention:
    """An indexer, then ``attention``. ``index_at`` is the place of the indexer's memory in the
    cache; ``apart``: separate matrices project its queries and key.
    """

    def __init__(
        self,
        attention: Attention,
        config: DecoderConfig,
        layer: int,
        weights: WeightLoader,
        spec: IndexSpec,
        index_at: int,
        *,
        apart: bool,
    ) -> None:
        self.attention = attention
        self.spec, self.layer = spec, index_at
        prefix, size, offset = f"model.layers.{layer}.{_PREFIX}", spec.head_dim, config.norm_offset
        names = _APART if apart else _JOINT
        self.weights = IndexWeights(
            qk=weights.matrix(
                (spec.projected_rows, config.hidden_size), *(f"{prefix}{n}.weight" for n in names)
            ),
            q_norm=weights.vector(size, f"{prefix}q_layernorm.weight", offset=offset),
            k_norm=weights.vector(size, f"{prefix}k_layernorm.weight", offset=offset),
        )

    def __call__(self, state: PassState) -> Array:
        ops, step, own = state.ops, state.step, self.attention
        index = cast(IndexOps, ops)
        chosen = index.choose_tokens(state.x, self.weights, self.spec, step, self.layer)
        q = ops.norm_qkv_rope_append(state.x, own.weights, own.spec, step, own.layer)
        return index.chosen_output(q, own.weights, own.spec, step, own.layer, chosen)

    def matrices(self) -> dict[str, Weight]:
        return self.attention.matrices()
