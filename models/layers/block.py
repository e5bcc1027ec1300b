"""The block of most architectures: attention, then an MLP, each added to the residual stream.

Recurrent layers replace attention or run in parallel with it. Blocks with several streams or with
per-layer inputs are in ``hyper_connections.py`` and ``inputs.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from localrt.models.config import Block, DecoderConfig, Layer, Part, Places
from localrt.models.layers.attention import LatentAttention
from localrt.models.layers.compressed import CompressedAttention
from localrt.models.layers.parts import Attention, Normed, PassState, Residual, SideBySide
from localrt.models.layers.recurrent import Recurrent
from localrt.models.weights import WeightLoader
from localrt.quant.ops.arrays import Vector, Weight
from localrt.quant.ops.attention import CompressedSpec, LatentIndexSpec, LatentSpec
from localrt.quant.ops.protocol import LayerSpec, ParallelOps
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelBlock(Block):
    """``x + attention(n) + mlp(n)``, where n is the LayerNorm of x without a bias, or its RMSNorm
    if not ``centered``.

    ``averaged``: the sum of routed and shared experts is halved.
    """

    final_norm = False  # the last layer's unit has it

    centered: bool = True
    averaged: bool = False

    def attention(
        self, config: DecoderConfig, layer: int, weights: WeightLoader, at: Places
    ) -> Part:
        ((spec, place),) = at
        norm = weights.vector(config.hidden_size, f"model.layers.{layer}.input_layernorm.weight")
        mixer = load_mixer(config, layer, weights, spec, place)
        return _Attention(mixer, norm, config.norm_eps, self.centered)

    def mlp(self, config: DecoderConfig, layer: int, weights: WeightLoader, mlp: Layer) -> Part:
        spec = config.mixture(layer)
        return _Mlp(mlp, 0.5 if self.averaged and spec is not None and spec.shared else 1.0)

    def after(self, config: DecoderConfig, weights: WeightLoader) -> Sequence[Part]:
        norm = weights.vector(config.hidden_size, "model.norm.weight", scale=config.logit_scale)
        return (_LastNorm(norm, config.norm_eps, self.centered),)

    def numbers_beside(self, config: DecoderConfig) -> int:
        return config.hidden_size


@dataclass(frozen=True, slots=True, eq=False)
class _Attention:
    """Norms the residual stream, and adds attention to it."""

    layer: Layer
    norm: Vector
    eps: float
    centered: bool

    def __call__(self, state: PassState) -> None:
        """Update ``state.x``; ``state.inputs`` are the normed rows."""
        x, ops = state.x, cast(ParallelOps, state.ops)
        state.x = state.inputs = ops.layer_norm(x, self.norm, self.eps, centered=self.centered)
        state.x = state.ops.add(x, self.layer(state))

    def matrices(self) -> dict[str, Weight]:
        return self.layer.matrices()


@dataclass(frozen=True, slots=True, eq=False)
class _Mlp:
    """Adds an MLP of the normed rows to the residual stream."""

    layer: Layer
    scale: float

    def __call__(self, state: PassState) -> None:
        """Update ``state.x``."""
        x = state.x
        assert state.inputs is not None, "attention has made them"
        state.x, state.inputs = state.inputs, None
        state.x = state.ops.add(x, self.layer(state), self.scale)

    def matrices(self) -> dict[str, Weight]:
        return self.layer.matrices()


@dataclass(frozen=True, slots=True, eq=False)
class _LastNorm:
    """The norm before the head."""

    norm: Vector
    eps: float
    centered: bool

    def __call__(self, state: PassState) -> None:
        """Update ``state.x``."""
        ops = cast(ParallelOps, state.ops)
        state.x = ops.layer_norm(state.x, self.norm, self.eps, centered=self.centered)
