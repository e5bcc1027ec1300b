"""EAGLE-3 (Li et al. 2025): one layer that reads features of several layers of its target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from localrt.common.errors import UnsupportedModelError
from localrt.drafts.heads.files import FUSION, HeadConfig, OpenHead, input_layers
from localrt.models.architectures import llama
from localrt.models.config import DecoderConfig, Part, Places
from localrt.models.layers.block import ResidualBlock
from localrt.models.layers.parts import Attention, PassState
from localrt.models.raw_config import RawConfig
from localrt.models.weights import WeightLoader
from localrt.quant.ops.arrays import Vector

_SPECULATORS = ("Eagle3Speculator", "Eagle3DraftModel")


class FusedAttention:
    """EAGLE-3's attention: its input is normed embeddings and normed features, concatenated; the
    features are the residual stream.
    """

    def __init__(
        self, block: FeatureBlock, config: DecoderConfig, weights: WeightLoader, at: Places
    ) -> None:
        ((_, place),) = at
        hidden, self._features = config.hidden_size, block.features
        self._eps, self._residual_normed = config.norm_eps, block.residual_normed
        self._attention = Attention(config, 0, weights, place)
        self._projection = weights.matrix((hidden, block.features), FUSION)
        self._feature_norm = weights.optional_vector(
            block.features_normed, block.features, "model.fc_norm.weight"
        )
        self._norms = (
            weights.vector(hidden, "model.layers.0.input_layernorm.weight"),
            weights.vector(hidden, "model.layers.0.hidden_norm.weight"),
        )

    def __call__(self, state: PassState) -> None:
        """Replace ``state.x``, the embeddings, by the residual stream after attention."""
        ops, features = state.ops, state.target_features
        assert features is not None, "a head's pass is given its target's features"
        x = ops.given_rows(features)
        if features.shape[1] == self._features:  # the target's; the head's own are narrower
            if self._feature_norm is not None:
                x = ops.norm(x, self._feature_norm, self._eps)
            x = ops.projected(x, self._projection)
        norms: tuple[Vector | None, Vector | None]
        if self._residual_normed:
            x = ops.norm(x, self._norms[1], self._eps)
            norms = (self._norms[0], None)
        else:
            norms = self._norms
        state.x = ops.joined_norms(state.x, x, norms, self._eps)
        state.x = ops.add(x, self._attention(state))


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureBlock(ResidualBlock):
    """EAGLE-3's only layer (Li et al. 2025). ``features`` is the width of the target's features,
    several layers concatenated.
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


def read_eagle3(checkpoint: OpenHead, target: DecoderConfig) -> HeadConfig:
    """Read the config of an EAGLE-3 head for ``target``."""
    config, tokens = checkpoint.config, checkpoint.tokens
    raw = RawConfig(checkpoint)
    own = llama.read_config(raw)
    if own.layers != 1:
        raise UnsupportedModelError(f"{checkpoint.path.name}: an EAGLE-3 head has one layer")
    if raw.flag("fc_norm"):
        raise UnsupportedModelError("an EAGLE-3 head with a norm for each layer is not supported")
    layers = _feature_layers(config, target.layers)
    features = raw.integer("target_hidden_size", target.hidden_size) * len(layers)
    block = FeatureBlock(
        features=features,
        features_normed=raw.flag("norm_before_fc") or raw.has_tensor("model.fc_norm.weight"),
        residual_normed=raw.flag(
            "norm_before_residual", default=checkpoint.architecture in _SPECULATORS
        ),
    )
    size = target.vocab_size if tokens is None else len(tokens)
    names = replace(own.names, attention_norm="")
    decoder = replace(own, block=block, vocab_size=size, names=names, tied_head=False)
    return HeadConfig(
        decoder=decoder, layers=layers, own_normed=raw.flag("norm_output"), tokens=tokens
    )


def _feature_layers(config: Mapping[str, object], layers: int) -> tuple[int, ...]:
    """The layers whose inputs a head reads, by default those of the paper.

    SpecForge lists, in ``eagle_config``, the layers whose outputs are read; vLLM and llama.cpp
    number inputs.
    """
    own = config.get("eagle_config")
    inside = isinstance(own, dict)
    listed = (own if isinstance(own, dict) else config).get("eagle_aux_hidden_state_layer_ids")
    if listed is None:
        return (2, layers // 2, layers - 3)
    return input_layers(listed, int(inside), layers)
