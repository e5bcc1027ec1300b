"""Attention and an MLP in parallel, which read the same normed rows (Cohere)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from localrt.models.config import Block, DecoderConfig, Layer, Part, Places
from localrt.models.layers.block import load_mixer
from localrt.models.layers.parts import PassState
from localrt.models.weights import WeightLoader
from localrt.quant.ops.arrays import Vector, Weight
from localrt.quant.ops.protocol import ParallelOps


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
