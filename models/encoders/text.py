"""Encoders of texts: tokens to hidden states, in which every token attends to all of its text, or
in some layers to the tokens around it.

A model that ranks reads a query and a document as one text and gives it a score. All weights stay
in memory. Tensors are named as those of decoders where they are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from localrt.models.encoders.block import Block, BlockConfig, Linear, Norm
from localrt.models.tensor_source import EMBEDDING
from localrt.models.weights import WeightLoader
from localrt.quant.formats import PackedTensor, unpack
from localrt.quant.formats.packed import Floats
from localrt.quant.ops.attention import Rope
from localrt.quant.ops.protocol import Check, LayerSpec
from localrt.quant.ops.vision import PatchLayout, VisionSteps

POSITIONS, TYPES = "model.embed_positions.weight", "model.embed_types.weight"
SCORE = "classifier.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderLayer:
    """A layer: its block, its rotary positions, and how many tokens away it sees; 0 means all."""

    block: BlockConfig
    rope: Rope | None = None
    window: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """An encoder's config, independent of the file format. The layers' blocks are of one width.

    Embeddings are multiplied by ``scale``, and get rows of a table of ``positions``, if there are
    any: the first that a text uses is ``first_position``. A model that ``ranks`` scores pairs;
    their second texts have the second of several ``types``.
    """

    memory: ClassVar[tuple[LayerSpec, ...]] = ()
    architecture: str
    vocab_size: int
    context_length: int
    stack: tuple[EncoderLayer, ...]
    positions: int = 0
    first_position: int = 0
    types: int = 0
    scale: float = 1.0
    ranks: bool = False

    @property
    def layers(self) -> int:
        """How many there are."""
        return len(self.stack)

    @property
    def block(self) -> BlockConfig:
        """The first layer's."""
        return self.stack[0].block

    def scratch_nbytes(self, rows: int) -> int:
        """Bytes of a pass of ``rows``, or of the longest text, beside the weights."""
        return 8 * max(rows, self.context_length) * (4 * self.block.hidden + self.block.inner)


@dataclass(frozen=True, slots=True, eq=False)
class TextEncoder:
    """An encoder in memory. ``table`` has the embeddings, packed: passes take rows of them."""

    config: EncoderConfig
    table: PackedTensor
    positions: Floats | None
    types: Floats | None
    norm: Norm
    blocks: tuple[Block, ...]
    head: tuple[Linear, ...]

    @classmethod
    def load(cls, config: EncoderConfig, weights: WeightLoader) -> TextEncoder:
        """Read every weight.

        Raises:
            CheckpointError: a tensor is missing, or has another shape than the config.
        """
        block, width = config.block, config.block.hidden
        head = {"pooler": width, "classifier": 1} if config.ranks else {}
        layers = ((each.block, f"model.layers.{at}.") for at, each in enumerate(config.stack))
        return cls(
            config,
            weights.packed((config.vocab_size, width), EMBEDDING),
            weights.array((config.positions, width), POSITIONS) if config.positions else None,
            weights.array((config.types, width), TYPES) if config.types else None,
            Norm.of_block(block, weights, "model.embed_norm"),
            tuple(Block.load(block, layer, weights) for block, layer in layers),
            tuple(Linear.load(weights, (rows, width), name) for name, rows in head.items()),
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
        if self.config.scale != 1:
            x = x * np.float32(self.config.scale)
        if self.positions is not None:
            x = x + self.positions[self.config.first_position + places]
        if self.types is not None:
            x = x + self.types[np.concatenate(list(map(self._types, texts)))]
        x = self.norm(x, steps)
        layouts = dict[EncoderLayer, PatchLayout]()
        for layer, block in zip(self.config.stack, self.blocks, strict=True):
            if check is not None:
                check()
            if layer not in layouts:
                cos, sin = layer.rope.turns(places) if layer.rope else (None, None)
                layouts[layer] = PatchLayout(ends=ends, window=layer.window, cos=cos, sin=sin)
            x = block(x, layouts[layer], steps)
        if not self.head:
            return np.split(x, ends[:-1])
        dense, out = self.head
        pooled = np.tanh(dense(x[np.array(ends) - lengths], steps))
        return np.split(out(pooled, steps), len(texts))

    def _types(self, text: Sequence[int]) -> npt.NDArray[np.intp]:
        """A pair's separator is its last token: the second text begins behind the first of it."""
        types = np.zeros(len(text), np.intp)
        if self.config.ranks and self.config.types > 1:
            types[list(text).index(text[-1]) + 1 :] = 1
        return types
