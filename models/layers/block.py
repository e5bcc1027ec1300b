"""The block of most architectures: attention, then an MLP, each added to the residual stream.

Recurrent layers replace attention or run in parallel with it. Blocks with several streams or with
per-layer inputs are in ``hyper_connections.py`` and ``inputs.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from localrt.models.config import Block, DecoderConfig, Layer, Part, Places
from localrt.models.layers.attention import LatentAttention
from localrt.models.layers.compressed import CompressedAttention
from localrt.models.layers.parts import Attention, Normed, Residual, SideBySide
from localrt.models.layers.recurrent import Recurrent
from localrt.models.weights import WeightLoader
from localrt.quant.ops.attention import CompressedSpec, LatentIndexSpec, LatentSpec
from localrt.quant.ops.protocol import LayerSpec
from localrt.quant.ops.recurrent import RecurrentSpec


def load_mixer(
    config: DecoderConfig, layer: int, weights: WeightLoader, spec: LayerSpec, place: int
) -> Layer:
    """Load attention of any kind, or a recurrent layer; ``place`` is its index in the cache."""
    if isinstance(spec, RecurrentSpec):
        return Recurrent(config, layer, weights, spec, place)
    if isinstance(spec, CompressedSpec):
        return CompressedAttention(config, layer, weights, place)
    kind = LatentAttention if isinstance(spec, LatentSpec) else Attention
    return kind(config, layer, weights, place)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualBlock(Block):
    """``x + scale * attention(x)``, then ``x + scale * mlp(x)``.

    ``beside`` is a recurrent layer in parallel with each layer's attention: both read the same
    residual stream. ``norm_embeddings``: embeddings are normed, without weights.
    """

    scale: float = 1.0
    beside: RecurrentSpec | None = None
    norm_embeddings: bool = False

    def before(self, config: DecoderConfig, weights: WeightLoader) -> Sequence[Part]:
        if not self.norm_embeddings:
            return ()
        size = config.hidden_size
        ones = weights.constants(f"ones.{size}", np.ones(size, np.float32))
        return (Normed(ones, config.norm_eps),)

    def attention(
        self, config: DecoderConfig, layer: int, weights: WeightLoader, at: Places
    ) -> Part:
        own = [each for each in at if not isinstance(each[0], LatentIndexSpec)]
        mixers = [load_mixer(config, layer, weights, spec, place) for spec, place in own]
        parts = tuple(Residual(mixer, self._scale_of(config, mixer)) for mixer in mixers)
        return parts[0] if len(parts) == 1 else SideBySide(parts)

    def mlp(self, config: DecoderConfig, layer: int, weights: WeightLoader, mlp: Layer) -> Part:
        return Residual(mlp, self.scale * config.multipliers.mlp_out)

    def memory(self, config: DecoderConfig, layer: int) -> tuple[LayerSpec, ...]:
        own = (config.attention[layer], self.beside)
        return tuple(spec for spec in own if spec is not None)

    def _scale_of(self, config: DecoderConfig, mixer: Layer) -> float:
        factors = config.multipliers
        own = factors.recurrent_out if isinstance(mixer, Recurrent) else factors.attention_out
        return self.scale * own
