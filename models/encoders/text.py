"""Encoders of texts: tokens to hidden states. A token attends to all of its text, or around it.

A model that ranks reads a query and a document as one text and gives it a score. All weights stay
in memory. Tensors are named as those of decoders where they are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from localrt.models.encoders.block import Block, BlockConfig, Linear, Norm
from localrt.models.layers.inputs import GATE, OUT, POST_NORM, PROJECTION, PROJECTION_NORM
from localrt.models.tensor_source import EMBEDDING
from localrt.models.weights import WeightLoader
from localrt.quant.formats import PackedTensor, unpack
from localrt.quant.formats.packed import Floats
from localrt.quant.ops.protocol import Check, LayerSpec
from localrt.quant.ops.vision import PatchLayout, VisionSteps, activate

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
class InputGate:
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
    blocks: tuple[Block, ...]
    projection: tuple[_Part, ...]  # of embeddings to each layer's own inputs
    gates: tuple[InputGate, ...]
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
            InputGate(
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
            tuple(Block.load(*each, weights) for each in blocks),
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
