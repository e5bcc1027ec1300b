"""Multi-token prediction (MTP, DeepSeek-V3, section 2.2): one more layer of the model's kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from localrt.common.errors import UnsupportedModelError
from localrt.drafts.heads.files import FUSION, HeadConfig
from localrt.models.config import DecoderConfig, Part
from localrt.models.layers.block import ResidualBlock
from localrt.models.layers.parts import PassState
from localrt.models.registry import read_config
from localrt.models.tensor_source import Checkpoint
from localrt.models.weights import WeightLoader
from localrt.quant.ops.arrays import AFTER_LAST, Vector, Weight


@dataclass(frozen=True, slots=True, eq=False)
class Fusion:
    """A layer's input: embeddings and features, normed, concatenated and projected."""

    projection: Weight  # (D, 2 F)
    norms: tuple[Vector | None, Vector | None]  # for embeddings and for features; None: no norm
    eps: float

    def __call__(self, state: PassState) -> None:
        """Replace ``state.x``, the embeddings, by the layer's input."""
        ops, features = state.ops, state.target_features
        assert features is not None, "a head's pass is given its target's features"
        both = ops.joined_norms(state.x, ops.given_rows(features), self.norms, self.eps)
        state.x = ops.projected(both, self.projection)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionBlock(ResidualBlock):
    """``Fusion`` followed by a layer of the model's kind."""

    def before(self, config: DecoderConfig, weights: WeightLoader) -> Sequence[Part]:
        hidden, offset = config.hidden_size, config.norm_offset

        def norm(name: str) -> Vector:
            return weights.vector(hidden, f"model.pre_fc_norm_{name}.weight", offset=offset)

        projection = weights.matrix((hidden, 2 * hidden), FUSION)
        return (Fusion(projection, (norm("embedding"), norm("hidden")), config.norm_eps),)


def read_prediction(checkpoint: Checkpoint, target: DecoderConfig) -> HeadConfig:
    """Read the config of an MTP block of ``target``."""
    decoder = read_config(checkpoint)
    if decoder.architecture != target.architecture:
        raise UnsupportedModelError(
            f"it is an MTP block of {decoder.architecture}, and the model is {target.architecture}"
        )
    if type(decoder.block) is not ResidualBlock:
        raise UnsupportedModelError(f"the MTP block of {decoder.architecture} is not supported")
    decoder = replace(decoder, block=PredictionBlock(scale=decoder.block.scale))
    return HeadConfig(decoder=decoder, layers=(AFTER_LAST,), normed=True, own_normed=True)
