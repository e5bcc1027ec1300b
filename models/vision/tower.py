"""What every vision tower is: a picture made ready, blocks of a transformer, rows for the decoder.

A family's file reads its config, prepares pictures as its publisher's processor does, and says what
comes before and behind the blocks. Tensors are named as in the publisher's files, without a leading
``model.``. It knows no prompts and no sessions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from localrt.models.vision.picture import Picture
from localrt.models.vision.pixels import Patches
from localrt.models.weights import WeightLoader
from localrt.quant.formats.packed import Floats
from localrt.quant.ops.arrays import Vector
from localrt.quant.ops.protocol import Check
from localrt.quant.ops.vision import Heads, Places, VisionActivation, VisionSteps

_Unit = TypeVar("_Unit")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """A picture as its tower reads it, and what stands for it in a prompt.

    ``patches`` (N, P) are the tower's input, of which ``together`` pass a block at once (0: all);
    ``grid`` is what else the family needs to know of them (rows and columns of patches, tiles).
    ``pieces`` replace the template's placeholder: texts, and numbers of rows. ``offsets`` (n, 3)
    are the rotary positions of the rows (time, height, width) from the first one on; the text
    behind the picture goes on ``advance`` positions after it. None: a row takes one position like
    any token.
    """

    patches: Patches
    grid: Any
    pieces: tuple[str | int, ...]
    offsets: npt.NDArray[np.int64] | None = None
    advance: int = 0
    together: int = 0

    @property
    def rows(self) -> int:
        """How many rows the decoder gets."""
        return sum(piece for piece in self.pieces if isinstance(piece, int))


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """What a tower makes of a picture: ``rows`` (n, D) in the place of embeddings; ``deep`` are
    added to the residual stream behind the decoder's first layers, one each (n, D).
    """

    rows: Floats
    deep: tuple[Floats, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.rows.nbytes + sum(rows.nbytes for rows in self.deep)


class Units(ABC):
    """A tower's weights by units, which are read when they are needed."""

    @abstractmethod
    def read(self, make: Callable[[WeightLoader], _Unit]) -> _Unit:
        """What ``make`` loads."""


class Tower(ABC):
    """A family of vision towers.

    ``placeholder`` is the text that the chat template writes for a picture, ``row_token`` (the
    same, if it is empty) the token that stands for one of its rows. ``written`` (the same, if it is
    empty) is the placeholder with what templates write around it. ``both_ways``: a picture's rows
    see one another in the decoder too, and belong into one pass; with ``full_layers_causal`` only
    in layers that have a window. ``deep_layers`` is how many of the decoder's layers ``Seen.deep``
    is for. ``note`` is what to say when the model is loaded.
    """

    placeholder: str
    row_token: str = ""
    written: str = ""
    both_ways: bool = False
    full_layers_causal: bool = False
    deep_layers: int = 0
    note: str = ""

    @abstractmethod
    def prepare(self, picture: Picture) -> Prepared:
        """Resize, normalize, cut into patches.

        Raises:
            OptionError: its shape is one that the model cannot see.
        """

    def within(self, rows: int) -> Tower:
        """The tower; if it sees any size, it makes pictures of more than ``rows`` rows smaller."""
        return self

    def attended(self, prepared: Prepared) -> float:
        """How many patches one of them sees, of all blocks' average."""
        return prepared.together or len(prepared.patches)

    @abstractmethod
    def see(
        self, prepared: Prepared, units: Units, steps: VisionSteps, check: Check | None = None
    ) -> Seen:
        """The decoder's rows of a picture; ``check`` is called between units and may raise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockNames:
    """A block's tensors, below its prefix. Of several names the rows are stacked."""

    norm1: str
    norm2: str
    qkv: tuple[str, ...]
    out: str
    up: tuple[str, ...]
    down: str
    q_norm: str = ""
    k_norm: str = ""
    post_norm1: str = ""
    post_norm2: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """A tower's blocks. Two names in ``up`` make a gated MLP: gate, then up."""

    hidden: int
    inner: int
    heads: int
    eps: float
    activation: VisionActivation
    names: BlockNames
    rms: bool = False  # RMSNorm, without biases, instead of LayerNorm
    bias: bool = True  # of the attention's matrices
    mlp_bias: bool = True
    head_dim: int = 0  # 0: hidden / heads
    scale: float | None = None  # of queries; None: the head size ** -0.5
    value_norm: bool = False  # values are normed, without a weight
    axes: int = 1  # each turns an equal part of a head, of which halves are turned against another
    clipped: bool = False  # see ``Clipped``

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
        """The norm that ``name`` names."""
        bias = weights.optional_vector(not rms, size, f"{name}.bias")
        return cls(weights.vector(size, f"{name}.weight"), bias, eps, rms)

    def __call__(self, x: Floats, steps: VisionSteps) -> Floats:
        if self.rms:
            return steps.rms_norm(x, self.weight, self.eps)
        return steps.layer_norm(x, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """A matrix, its bias, an activation."""

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
    ) -> Linear:
        """The rows of ``names`` stacked: (D, F) in all."""
        matrix = weights.matrix(shape, *(f"{name}.weight" for name in names))
        biases = weights.optional_vector(bias, shape[0], *(f"{name}.bias" for name in names))
        return cls(matrix, biases, activation)

    def __call__(self, x: Floats, steps: VisionSteps) -> Floats:
        return steps.linear(x, self.weight, self.bias, self.activation)


@dataclass(frozen=True, slots=True, eq=False)
class Clipped:
    """Matrices side by side, each with the least and largest value that it takes and gives."""

    parts: tuple[tuple[Linear, float, float, float, float], ...]

    @classmethod
    def load(cls, weights: WeightLoader, shape: tuple[int, int], *names: str) -> Clipped:
        """Of ``names`` that end in ``.linear``, beside which the bounds are; (D, F) in all."""
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
        found = [
            steps.clip(linear(steps.clip(x, least, most), steps), low, high)
            for linear, least, most, low, high in self.parts
        ]
        return found[0] if len(found) == 1 else steps.joined(found)


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Norm, attention, norm, MLP, each added to the rows."""

    config: BlockConfig
    norm1: Norm
    norm2: Norm
    qkv: Linear | Clipped
    out: Linear | Clipped
    up: Linear | Clipped
    down: Linear | Clipped
    beside: dict[str, Vector] = field(default_factory=dict)  # further norms

    @classmethod
    def load(cls, config: BlockConfig, prefix: str, weights: WeightLoader) -> Block:
        """The block whose tensors' names begin with ``prefix``."""
        hidden, inner, names = config.hidden, config.inner, config.names
        wide = config.heads * config.size

        def norm(name: str) -> Norm:
            return Norm.load(weights, prefix + name, hidden, config.eps, rms=config.rms)

        def linear(
            shape: tuple[int, int], *own: str, bias: bool, **options: Any
        ) -> Linear | Clipped:
            of = [prefix + name for name in own]
            if config.clipped:
                return Clipped.load(weights, shape, *of)
            return Linear.load(weights, shape, *of, bias=bias, **options)

        gated = len(names.up) == 2
        sizes = {
            **dict.fromkeys((names.q_norm, names.k_norm), config.size),
            **dict.fromkeys((names.post_norm1, names.post_norm2), hidden),
        }
        return cls(
            config,
            norm(names.norm1),
            norm(names.norm2),
            linear((3 * wide, hidden), *names.qkv, bias=config.bias),
            linear((hidden, wide), names.out, bias=config.bias),
            linear(
                ((2 if gated else 1) * inner, hidden),
                *names.up,
                bias=config.mlp_bias,
                activation=None if gated else config.activation,
            ),
            linear((hidden, inner), names.down, bias=config.mlp_bias),
            {n: weights.vector(s, f"{prefix}{n}.weight") for n, s in sizes.items() if n},
        )

    def __call__(self, x: Floats, places: Places, steps: VisionSteps) -> Floats:
        """The rows (R, D) behind the block."""
        config, names = self.config, self.config.names
        x = steps.add(x, self._normed(names.post_norm1, self._attention(x, places, steps), steps))
        inner = self.up(self.norm2(x, steps), steps)
        if len(names.up) == 2:
            inner = steps.gated(inner, config.activation)
        return steps.add(x, self._normed(names.post_norm2, self.down(inner, steps), steps))

    def _attention(self, x: Floats, places: Places, steps: VisionSteps) -> Floats:
        config, names = self.config, self.config.names
        heads = Heads(
            count=config.heads,
            size=config.size,
            scale=config.size**-0.5 if config.scale is None else config.scale,
            eps=config.eps,
            q_norm=self.beside.get(names.q_norm),
            k_norm=self.beside.get(names.k_norm),
            value_norm=config.value_norm,
            axes=config.axes,
        )
        qkv = self.qkv(self.norm1(x, steps), steps)
        return self.out(steps.heads(qkv, heads, places), steps)

    def _normed(self, name: str, x: Floats, steps: VisionSteps) -> Floats:
        return steps.rms_norm(x, self.beside[name], self.config.eps) if name else x
