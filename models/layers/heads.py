"""The blocks of draft heads: small decoders that read features of the model they draft for.

The row of a token takes in the token's embedding and the target's features of the token before it;
of draft tokens, the head's own output. ``models/heads.py`` opens heads and reads their configs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.models.config import DecoderConfig, Part, Places
from localrt.models.layers.block import ResidualBlock
from localrt.models.layers.inputs import GatedInputs
from localrt.models.layers.parts import Attention, Head, PassState
from localrt.models.weights import WeightLoader
from localrt.quant.ops.arrays import Vector, Weight
from localrt.quant.ops.features import CARRIED

_FUSION = "model.fc.weight"


@dataclass(frozen=True, slots=True, eq=False)
class Fusion:
    """Embeddings and features side by side, normed if there are norms, and projected: a layer's
    input.
    """

    projection: Weight  # (D, 2 F)
    norms: tuple[Vector | None, Vector | None]  # of embeddings, of features
    eps: float

    def __call__(self, state: PassState) -> None:
        """Set ``state.x``, which was the embeddings."""
        ops, given = state.ops, state.given
        assert given is not None, "a head's pass is given its target's features"
        both = ops.joined_norms(state.x, ops.given_rows(given), self.norms, self.eps)
        state.x = ops.projected(both, self.projection)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionBlock(ResidualBlock):
    """A block of multi-token prediction (DeepSeek-V3, section 2.2): ``Fusion``, then a layer of the
    model's own kind.
    """

    def before(self, config: DecoderConfig, weights: WeightLoader) -> Sequence[Part]:
        hidden, offset = config.hidden_size, config.norm_offset

        def norm(name: str) -> Vector:
            return weights.vector(hidden, f"model.pre_fc_norm_{name}.weight", offset=offset)

        projection = weights.matrix((hidden, 2 * hidden), _FUSION)
        return (Fusion(projection, (norm("embedding"), norm("hidden")), config.norm_eps),)


class FusedAttention:
    """EAGLE-3's attention: it reads normed embeddings and normed features side by side, and the
    features are the residual stream.
    """

    def __init__(
        self, block: FeatureBlock, config: DecoderConfig, weights: WeightLoader, at: Places
    ) -> None:
        ((_, place),) = at
        hidden, self._features = config.hidden_size, block.features
        self._eps, self._residual_normed = config.norm_eps, block.residual_normed
        self._attention = Attention(config, 0, weights, place)
        self._projection = weights.matrix((hidden, block.features), _FUSION)
        self._feature_norm = weights.optional_vector(
            block.features_normed, block.features, "model.fc_norm.weight"
        )
        self._norms = (
            weights.vector(hidden, "model.layers.0.input_layernorm.weight"),
            weights.vector(hidden, "model.layers.0.hidden_norm.weight"),
        )

    def __call__(self, state: PassState) -> None:
        """Set ``state.x``, which was the embeddings."""
        ops, given = state.ops, state.given
        assert given is not None, "a head's pass is given its target's features"
        x = ops.given_rows(given)
        if given.shape[1] == self._features:  # the target's; its own output is narrower
            if self._feature_norm is not None:
                x = ops.norm(x, self._feature_norm, self._eps)
            x = ops.projected(x, self._projection)
        if self._residual_normed:
            x = ops.norm(x, self._norms[1], self._eps)
            norms = (self._norms[0], None)
        else:
            norms = self._norms
        state.x = ops.joined_norms(state.x, x, norms, self._eps)
        state.x = ops.add(x, self._attention(state))


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureBlock(ResidualBlock):
    """EAGLE-3's only layer (Li et al. 2025). ``features`` is the width of what it is given of the
    target, several layers side by side.
    """

    features: int
    features_normed: bool = False
    residual_normed: bool = False

    def attention_width(self, config: DecoderConfig) -> int:
        return 2 * config.hidden_size

    def attention(
        self, config: DecoderConfig, layer: int, weights: WeightLoader, at: Places
    ) -> Part:
        return FusedAttention(self, config, weights, at)


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantBlock(GatedInputs):
    """Gemma 4's assistants: layers of the target's kind, which have no keys and values but read
    the target's. Embeddings and features have the target's ``width``. Of ``clusters`` (C, n) of
    tokens, those of the best ``used`` get their logits.
    """

    width: int
    clusters: npt.NDArray[np.int64] | None = field(compare=False)
    used: int

    def before(self, config: DecoderConfig, weights: WeightLoader) -> Sequence[Part]:
        shape = (config.hidden_size, 2 * self.width)
        projection = weights.matrix(shape, "model.pre_projection.weight")
        return (Fusion(projection, (None, None), config.norm_eps),)


class ContextKeys:
    """DFlash's reading of its target: each layer has a key and a value of a token's features.

    These are projected, and take the place of what the ``layers`` of the draft read, behind a norm
    of their own.
    """

    def __init__(
        self, config: DecoderConfig, features: int, weights: WeightLoader, layers: Sequence[Any]
    ) -> None:
        self._projection = weights.matrix((config.hidden_size, features), _FUSION)
        norm = weights.vector(config.hidden_size, "model.hidden_norm.weight")
        parts = [layer.parts[-1].layer for layer in layers]
        self._layers = [(each, replace(each.weights, norm=norm)) for each in parts]

    def __call__(self, state: PassState) -> None:
        """Append keys and values to the caches."""
        assert state.given is not None, "a pass over the context is given its features"
        x = state.ops.projected(state.ops.given_rows(state.given), self._projection)
        for layer, weights in self._layers:
            state.ops.norm_qkv_rope_append(x, weights, layer.spec, state.step, layer.layer)


class AssistantHead(Head):
    """An assistant's logits, and its output ``CARRIED`` back to the target's width."""

    def __init__(
        self, head: Head, block: AssistantBlock, config: DecoderConfig, weights: WeightLoader
    ) -> None:
        super().__init__(config, head.norm, head.weight)
        hidden, self._clusters, self._used = config.hidden_size, block.clusters, block.used
        self._carried = weights.matrix((block.width, hidden), "model.post_projection.weight")
        if block.clusters is not None:
            shape = (len(block.clusters), hidden)
            self._centroids = weights.matrix(shape, "model.masked_embedding.centroids.weight")

    def __call__(self, state: PassState) -> None:
        """Fill ``state.logits`` and the features ``CARRIED``, of the rows wanted."""

        def product(weight: Weight) -> npt.NDArray[np.float32]:
            return state.ops.head(state.x, state.wanted, self.norm, self._eps, weight)

        state.logits = logits = product(self.weight)
        if self._clusters is not None:
            best = np.argpartition(product(self._centroids), -self._used)[:, -self._used :]
            seen = self._clusters[best].reshape(len(best), -1)
            kept = np.take_along_axis(logits, seen, 1)
            logits[:] = kept.min(1, keepdims=True) - 1
            np.put_along_axis(logits, seen, kept, 1)
        out = None if state.features is None else state.features.of(CARRIED)
        if out is not None:
            out[:] = product(self._carried)
