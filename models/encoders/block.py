"""The blocks of encoders, of pictures and of texts.

A family's file defines the layers before and after the blocks. A block knows neither pictures nor
texts: its input are rows, and the segments in which these attend to one another.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from localrt.models.weights import WeightLoader
from localrt.quant.formats.packed import Floats
from localrt.quant.ops.arrays import Vector
from localrt.quant.ops.attention import Rope
from localrt.quant.ops.protocol import Check
from localrt.quant.ops.vision import Heads, PatchLayout, VisionActivation, VisionSteps

_Unit = TypeVar("_Unit")


class Units(ABC):
    """Reads an encoder's weights unit by unit, on demand."""

    @abstractmethod
    def read(self, make: Callable[[WeightLoader], _Unit]) -> _Unit:
        """The unit that ``make`` loads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockNames:
    """Names of a block's tensors below its prefix, by default decoders'. Several are stacked."""

    norm1: str = "input_layernorm"  # may be empty
    norm2: str = "post_attention_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    q_norm: str = ""
    k_norm: str = ""
    post_norm1: str = ""
    post_norm2: str = ""
    scale1: str = ""  # factors of the columns of the attention's output, with their ending
    scale2: str = ""  # of the MLP's


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """Sizes of an encoder's blocks. Two names in ``up`` mean a gated MLP: gate, then up."""

    hidden: int
    inner: int
    heads: int
    eps: float
    activation: VisionActivation
    names: BlockNames
    kv_heads: int = 0  # see ``Heads``
    rms: bool = False  # RMSNorm, without biases, instead of LayerNorm
    norm_bias: bool = True  # of LayerNorm
    norm_offset: float = 0.0  # what files leave out of norms' weights
    fused_gate: bool = False  # whether one matrix has gate and up
    bias: bool = True  # whether the attention's matrices have biases
    out_bias: bool = True  # whether its output's has one then
    mlp_bias: bool = True
    head_dim: int = 0  # 0: hidden / heads
    scale: float | None = None  # scale of queries; None: head size ** -0.5
    value_norm: bool = False  # RMSNorm of values, without a weight
    axes: int = 1  # axes of rotary positions, see ``Heads``
    clipped: bool = False  # see ``Clipped``
    norms_sums: bool = (
        False  # whether the norms are of sums with the residual (BERT), not of inputs
    )
    rope: Rope | None = None  # of texts
    window: int = 0  # how many tokens away a text's tokens see; 0: all
    merge: int = 1  # how many rows in succession the MLP makes one of, added to their mean

    def __post_init__(self) -> None:
        if self.rope is not None and 2 * len(self.rope.inv_freq) != self.size:
            raise ValueError("rotary positions of a part of each head are not supported")

    @property
    def size(self) -> int:
        """The head size."""
        return self.head_dim or self.hidden // self.heads


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """LayerNorm, or RMSNorm without a bias."""

    weight: Vector
    bias: Vector | None
    eps: float
    rms: bool

    @classmethod
    def load(
        cls, weights: WeightLoader, name: str, size: int, eps: float, *, rms: bool = False
    ) -> Norm:
        """The norm ``name``."""
        bias = weights.optional_vector(not rms, size, f"{name}.bias")
        return cls(weights.vector(size, f"{name}.weight"), bias, eps, rms)

    @classmethod
    def of_block(cls, config: BlockConfig, weights: WeightLoader, name: str) -> Norm:
        """The norm ``name`` of rows, as a block has it."""
        size, has_bias = config.hidden, config.norm_bias and not config.rms
        bias = weights.optional_vector(has_bias, size, f"{name}.bias")
        weight = weights.vector(size, f"{name}.weight", offset=config.norm_offset)
        return cls(weight, bias, config.eps, config.rms)

    def __call__(self, x: Floats, steps: VisionSteps) -> Floats:
        if self.rms:
            return steps.rms_norm(x, self.weight, self.eps)
        return steps.layer_norm(x, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """A matrix with its bias and activation."""

    weight: Any
    bias: Vector | None = None
    activation: VisionActivation | None = None

    @classmethod
    def load(
        cls,
        weights: WeightLoader,
        shape: tuple[int, int],
        *names: str,
        bias: bool = True,
        activation: VisionActivation | None = None,
        scale: str = "",
    ) -> Linear:
        """The matrices ``names``, stacked to (D, F); or one with a bias, both times ``scale``."""
        if scale:
            return cls(*weights.scaled(shape, names[0], scale), activation)
        matrix = weights.matrix(shape, *(f"{name}.weight" for name in names))
        biases = weights.optional_vector(bias, shape[0], *(f"{name}.bias" for name in names))
        return cls(matrix, biases, activation)

    def __call__(self, x: Floats, steps: VisionSteps) -> Floats:
        return steps.linear(x, self.weight, self.bias, self.activation)


@dataclass(frozen=True, slots=True, eq=False)
class Clipped:
    """Matrices whose outputs are concatenated; inputs and outputs of each are clipped."""

    parts: tuple[tuple[Linear, float, float, float, float], ...]

    @classmethod
    def load(cls, weights: WeightLoader, shape: tuple[int, int], *names: str) -> Clipped:
        """The matrices ``names``, (D, F) in all, and their bounds; names end in ``.linear``."""
        part = shape[0] // len(names), shape[1]

        def load(name: str) -> tuple[Linear, float, float, float, float]:
            input_, output = (name.removesuffix("linear") + end for end in ("input_", "output_"))
            return (
                Linear.load(weights, part, name, bias=False),
                weights.scalar(f"{input_}min"),
                weights.scalar(f"{input_}max"),
                weights.scalar(f"{output}min"),
                weights.scalar(f"{output}max"),
            )

        return cls(tuple(load(name) for name in names))

    def __call__(self, x: Floats, steps: VisionSteps) -> Floats:
        outputs = [
            steps.clip(linear(steps.clip(x, least, most), steps), low, high)
            for linear, least, most, low, high in self.parts
        ]
        return outputs[0] if len(outputs) == 1 else steps.joined(outputs)


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A transformer block: norm, attention, residual; norm, MLP, residual. Or, if ``norms_sums``,
    each norm after its residual.
    """

    config: BlockConfig
    norm1: Norm | None
    norm2: Norm
    qkv: Linear | Clipped
    out: Linear | Clipped
    up: Linear | Clipped
    down: Linear | Clipped
    extra_norms: dict[str, Any] = field(default_factory=dict)  # keys as in ``BlockNames``

    @classmethod
    def load(cls, config: BlockConfig, prefix: str, weights: WeightLoader) -> Block:
        """The block whose tensor names begin with ``prefix``."""
        hidden, inner, names = config.hidden, config.merge * config.inner, config.names
        wide, shared = config.heads * config.size, config.kv_heads or config.heads

        def linear(
            shape: tuple[int, int], *suffixes: str, bias: bool, **options: Any
        ) -> Linear | Clipped:
            tensors = [prefix + suffix for suffix in suffixes]
            if config.clipped:
                return Clipped.load(weights, shape, *tensors)
            return Linear.load(weights, shape, *tensors, bias=bias, **options)

        joined, out_bias = config.merge * hidden, config.bias and config.out_bias
        gated = config.fused_gate or len(names.up) == 2
        scales = [name and prefix + name for name in (names.scale1, names.scale2)]
        vector = partial(weights.vector, offset=config.norm_offset)
        sizes = {
            **dict.fromkeys((names.q_norm, names.k_norm), config.size),
            **dict.fromkeys((names.post_norm1, names.post_norm2), hidden),
        }
        return cls(
            config,
            Norm.of_block(config, weights, prefix + names.norm1) if names.norm1 else None,
            Norm.of_block(replace(config, hidden=joined), weights, prefix + names.norm2),
            linear((wide + 2 * shared * config.size, hidden), *names.qkv, bias=config.bias),
            linear((hidden, wide), names.out, bias=out_bias, scale=scales[0]),
            linear(
                ((2 if gated else 1) * inner, joined),
                *names.up,
                bias=config.mlp_bias,
                activation=None if gated else config.activation,
            ),
            linear((hidden, inner), names.down, bias=config.mlp_bias, scale=scales[1]),
            {n: vector(s, f"{prefix}{n}.weight") for n, s in sizes.items() if n},
        )

    def __call__(self, x: Floats, layout: PatchLayout, steps: VisionSteps) -> Floats:
        """The block's output (R, D)."""
        names = self.config.names
        if self.norm1 and self.config.norms_sums:
            x = self.norm1(steps.add(x, self._attention(x, layout, steps)), steps)
            return self.norm2(steps.add(x, self._mlp(x, steps)), steps)
        attended = self._attention(self.norm1(x, steps) if self.norm1 else x, layout, steps)
        x = steps.add(x, self._normed(names.post_norm1, attended, steps))
        if self.config.merge > 1:
            rows = steps.get(x).reshape(-1, self.config.merge, self.config.hidden)
            wide = steps.put(rows.reshape(len(rows), -1))
            inner = steps.get(self._mlp(self.norm2(wide, steps), steps))
            merged: Floats = steps.put(inner + rows.mean(1))
            return merged
        inner = self._mlp(self.norm2(x, steps), steps)
        return steps.add(x, self._normed(names.post_norm2, inner, steps))

    def _mlp(self, x: Floats, steps: VisionSteps) -> Floats:
        inner = self.up(x, steps)
        if inner.shape[-1] > self.config.merge * self.config.inner:
            inner = steps.gated(inner, self.config.activation)
        return self.down(inner, steps)

    def _attention(self, x: Floats, layout: PatchLayout, steps: VisionSteps) -> Floats:
        config, names = self.config, self.config.names
        heads = Heads(
            count=config.heads,
            size=config.size,
            scale=1 / math.sqrt(config.size) if config.scale is None else config.scale,
            eps=config.eps,
            q_norm=self.extra_norms.get(names.q_norm),
            k_norm=self.extra_norms.get(names.k_norm),
            value_norm=config.value_norm,
            axes=config.axes,
            kv_count=config.kv_heads,
        )
        return self.out(steps.heads(self.qkv(x, steps), heads, layout), steps)

    def _normed(self, name: str, x: Floats, steps: VisionSteps) -> Floats:
        return steps.rms_norm(x, self.extra_norms[name], self.config.eps) if name else x


def run_blocks(
    config: BlockConfig,
    prefix: str,
    count: int,
    x: Floats,
    layout: PatchLayout,
    units: Units,
    steps: VisionSteps,
    check: Check | None,
) -> Floats:
    """Patches (N, D) after ``count`` blocks, whose tensors' names begin with ``prefix`` and a
    number; ``check`` is called before each.
    """
    x = steps.put(x)
    for layer in range(count):
        if check is not None:
            check()
        x = units.read(partial(Block.load, config, f"{prefix}{layer}."))(x, layout, steps)
    return steps.get(x)
