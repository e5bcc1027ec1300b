"""Encoders: the blocks that pictures and texts share, and encoders of texts (BERT's kind).

A block's input are rows, and the segments in which these attend to one another; a family's file
defines the layers before and after the blocks. In an encoder of texts a token attends to all of its
text, or around it. A model that ranks (cross-encoder) reads a query and a document as one text and
gives it a score. All weights stay in memory. Tensors are named as those of decoders where they are
the same.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any, ClassVar, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from localrt.models.layers.inputs import GATE, OUT, POST_NORM, PROJECTION, PROJECTION_NORM
from localrt.models.tensor_source import EMBEDDING
from localrt.models.weights import WeightLoader
from localrt.quant.formats import PackedTensor, unpack
from localrt.quant.formats.packed import Floats
from localrt.quant.ops.arrays import Vector
from localrt.quant.ops.attention import Rope
from localrt.quant.ops.protocol import Check, LayerSpec
from localrt.quant.ops.vision import Heads, PatchLayout, VisionActivation, VisionSteps, activate

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
class EncoderBlock:
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
    def load(cls, config: BlockConfig, prefix: str, weights: WeightLoader) -> EncoderBlock:
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
        x = units.read(partial(EncoderBlock.load, config, f"{prefix}{layer}."))(x, layout, steps)
    return steps.get(x)


POSITIONS, TYPES = "model.embed_positions.weight", "model.embed_types.weight"
SCORE = "classifier.weight"
_Part: TypeAlias = Callable[[Floats, VisionSteps], Floats]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """An encoder's config, independent of the file format. All blocks have one width.

    Embeddings are multiplied by ``scale``, and get rows of a table of ``positions``, if there are
    any: the first that a text uses is ``first_position``. A model that ``ranks`` scores pairs;
    their second texts have the second of several ``types``. The first token's state, or with
    ``mean_ranks`` the mean, is scored. ``dense`` are the rows of matrices behind the last layer,
    ``inputs`` the width of inputs that every layer has of its own, if there are any.
    """

    memory: ClassVar[tuple[LayerSpec, ...]] = ()
    architecture: str = ""  # as in ``DecoderConfig``
    vocab_size: int
    context_length: int
    layers: tuple[BlockConfig, ...]
    positions: int = 0
    first_position: int = 0
    types: int = 0
    scale: float = 1.0
    ranks: bool = False
    mean_ranks: bool = False
    dense: tuple[int, ...] = ()
    inputs: int = 0

    def scratch_nbytes(self, rows: int) -> int:
        """Bytes of a pass of ``rows`` beside the weights."""
        block = self.layers[0]
        return 8 * rows * (4 * block.hidden + block.inner + len(self.layers) * self.inputs)


@dataclass(frozen=True, slots=True, eq=False)
class EncoderInputGate:
    """Adds a layer's own inputs to x: ``(x + norm(out(gate(x) * inputs))) * total``."""

    gate: Linear
    out: Linear
    norm: Norm
    total: float

    def __call__(self, x: Floats, inputs: Floats, steps: VisionSteps) -> Floats:
        """The sum (R, D), for inputs (R, E)."""
        added = self.norm(self.out(self.gate(x, steps) * inputs, steps), steps)
        return (x + added) * np.float32(self.total)


@dataclass(frozen=True, slots=True, eq=False)
class TextEncoder:
    """An encoder in memory. ``table`` has the embeddings, packed: passes take rows of them."""

    config: EncoderConfig
    table: PackedTensor
    positions: Floats | None
    types: Floats | None
    norm: Norm | None
    blocks: tuple[EncoderBlock, ...]
    projection: tuple[_Part, ...]  # of embeddings to each layer's own inputs
    gates: tuple[EncoderInputGate, ...]
    after: tuple[_Part, ...]
    head: tuple[_Part, ...]  # of a model that ranks

    @classmethod
    def load(cls, config: EncoderConfig, weights: WeightLoader) -> TextEncoder:
        """Read every weight.

        Raises:
            CheckpointError: a tensor is missing, or has another shape than the config.
        """
        block, width = config.layers[0], config.layers[0].hidden
        norm = partial(Norm.of_block, block, weights)
        blocks = [(each, f"model.layers.{at}.") for at, each in enumerate(config.layers)]

        def linear(name: str, rows: int, columns: int = width) -> Linear:
            return Linear.load(weights, (rows, columns), name, bias=weights.has(f"{name}.bias"))

        projection: list[_Part] = []
        if size := config.inputs:  # the norm cancels the published scale of 1 / sqrt(D)
            projection = [linear(PROJECTION, len(blocks) * size), lambda x, _: x.reshape(-1, size)]
            projection += [Norm.load(weights, PROJECTION_NORM, size, block.eps * width, rms=True)]
        gates = (
            EncoderInputGate(
                replace(linear(prefix + GATE, size), activation=block.activation),
                linear(prefix + OUT, width, size),
                norm(prefix + POST_NORM),
                weights.scalar(f"{prefix}layer_scalar"),
            )
            for _, prefix in (blocks if size else ())
        )
        after: list[_Part] = [] if block.norms_sums else [norm("model.norm")]
        for number, shape in enumerate(zip(config.dense, (width, *config.dense), strict=False), 2):
            after.append(linear(f"dense_{number}", *shape))
        head: list[_Part] = []
        if config.ranks:
            head = [linear("pooler", width), lambda x, _: np.tanh(x), linear("classifier", 1)]
            if not block.norms_sums:
                head[1:2] = [lambda x, _: activate(x, "gelu"), norm("score_norm")]
        return cls(
            config,
            weights.packed((config.vocab_size, width), EMBEDDING),
            weights.array((config.positions, width), POSITIONS) if config.positions else None,
            weights.array((config.types, width), TYPES) if config.types else None,
            None if block.rms else norm("model.embed_norm"),
            tuple(EncoderBlock.load(*each, weights) for each in blocks),
            tuple(projection),
            tuple(gates),
            tuple(after),
            tuple(head),
        )

    def __call__(
        self, texts: Sequence[Sequence[int]], steps: VisionSteps, check: Check | None = None
    ) -> list[Floats]:
        """The hidden states (n, D) of each text, in one pass; of a model that ranks, its score
        (1, 1). ``check`` is called before each block.
        """
        lengths = [len(text) for text in texts]
        ends, places = list(accumulate(lengths)), np.concatenate([np.arange(n) for n in lengths])
        x = unpack(self.table.take_rows(np.concatenate(texts).astype(np.intp)))
        x = x * np.float32(self.config.scale)
        if self.positions is not None:
            x = x + self.positions[self.config.first_position + places]
        if self.types is not None:
            x = x + self.types[np.concatenate(list(map(self._types, texts)))]
        x = self.norm(x, steps) if self.norm else x
        inputs = x
        for part in self.projection:
            inputs = part(inputs, steps)
        layouts = dict[BlockConfig, PatchLayout]()
        for at, block in enumerate(self.blocks):
            if check is not None:
                check()
            if (own := block.config) not in layouts:
                cos, sin = own.rope.turns(places) if own.rope else (None, None)
                layouts[own] = PatchLayout(ends=ends, window=own.window, cos=cos, sin=sin)
            x = block(x, layouts[own], steps)
            x = self.gates[at](x, inputs[at :: len(self.blocks)], steps) if self.gates else x
        for part in self.after:  # behind the mean, matrices would give the same
            x = part(x, steps)
        if not self.head:
            return np.split(x, ends[:-1])
        begins = np.array([0, *ends[:-1]], np.intp)
        pooled = x[begins]
        if self.config.mean_ranks:
            pooled = (np.add.reduceat(x, begins) / np.array(lengths)[:, None]).astype(np.float32)
        for part in self.head:
            pooled = part(pooled, steps)
        return np.split(pooled, len(texts))

    def _types(self, text: Sequence[int]) -> npt.NDArray[np.intp]:
        """A pair's separator is its last token: the second text begins behind the first of it."""
        types = np.zeros(len(text), np.intp)
        if self.config.ranks and self.config.types > 1:
            types[list(text).index(text[-1]) + 1 :] = 1
        return types
