"""SigLIP, the core of several families' encoders: patches, learned positions, blocks, a norm.

The families' modules prepare pictures and project the encoded patches to rows. A grid is the (rows,
columns) of patches of a picture or a tile, within which patches attend to one another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import numpy as np

from localrt.models.encoders import BlockConfig, BlockNames, EncoderBlock, Linear, Norm, Units
from localrt.models.vision.encoder import interpolated
from localrt.models.vision.picture import Patches, activation, integer, number
from localrt.models.weights import WeightLoader
from localrt.quant.formats.packed import Floats
from localrt.quant.ops.arrays import large_floats
from localrt.quant.ops.protocol import Check
from localrt.quant.ops.vision import PatchLayout, VisionSteps

Grid = tuple[int, int]

TENSOR_PREFIXES = ("vision_tower.vision_model.", "vision_tower.")
"""Prefixes of tensor names: in files on the hub, and in files written by transformers 5."""

_LARGEST_SIDE = 4096  # largest side of a picture in pixels

_NAMES = BlockNames(
    norm1="layer_norm1",
    norm2="layer_norm2",
    out="self_attn.out_proj",
    up=("mlp.fc1",),
    down="mlp.fc2",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SiglipEncoder:
    """A SigLIP model whose tensor names begin with one of ``prefixes``.

    ``patch`` is the side of a patch in pixels. Positions are learned for ``side`` by ``side``
    patches; other grids interpolate them by ``weights`` of each axis, or use the nearest. With
    ``token``, it is InternViT: a class token before the patches, layer scale, no norm at the end.
    """

    block: BlockConfig
    layers: int
    patch: int
    side: int
    weights: Callable[[int, int], Floats] | None
    token: bool
    prefixes: tuple[str, ...]
    merger: tuple[int, BlockConfig] | None = None  # of squares, behind the block of this number

    def __call__(
        self,
        patches: Patches,
        grids: Sequence[Grid],
        units: Units,
        steps: VisionSteps,
        check: Check | None,
    ) -> list[Floats]:
        """The encoded patches (n, D) of each grid."""
        # One grid at a time, because a step's intermediate results are large; results share one
        # array.
        token, end = int(self.token), 0
        ends = list(accumulate(token + rows * columns for rows, columns in grids))
        x = large_floats((ends[-1], self.block.hidden))
        encoded = [x[first:end] for first, end in pairwise([0, *ends])]
        embed, first, table = units.read(self._embeddings)
        for rows, grid in zip(encoded, grids, strict=True):
            start, end = end, end + prod(grid)
            embedded = embed(patches[start:end], steps)
            rows[:token], rows[token:] = first, steps.add(embedded, self._positions(table, grid))
        on_device = [steps.put(rows) for rows in encoded]
        for layer in range(self.layers):
            block = units.read(partial(self._block, layer))
            for rows in on_device:
                if check is not None:
                    check()
                rows[:] = block(rows, PatchLayout(ends=(len(rows),)), steps)
            del block  # free it before the next one is read
            if self.merger is not None and layer == self.merger[0]:
                prefix = f"{self.prefixes[-1]}vit_merger."
                merge = units.read(partial(EncoderBlock.load, self.merger[1], prefix))
                for n, grid in enumerate(grids):
                    x = merged(steps.get(on_device[n]), grid, 2).reshape(-1, self.block.hidden)
                    squares = PatchLayout(ends=list(range(4, len(x) + 1, 4)))
                    on_device[n] = merge(steps.put(x), squares, steps)
        norm = None if token else units.read(self._norm)
        for n, (rows, x) in enumerate(zip(encoded, on_device, strict=True)):
            x = steps.get(norm(x, steps) if norm else x)
            rows[: len(x)], encoded[n] = x, rows[token : len(x)]
        return encoded

    def _embeddings(self, weights: WeightLoader) -> tuple[Linear, Floats, Floats]:
        """The patches' matrix, the rows before patches (0 or 1, D), the positions of patches."""
        prefix, hidden = f"{self._prefix(weights)}embeddings.", self.block.hidden
        embed = Linear.load(weights, (hidden, 3 * self.patch**2), f"{prefix}patch_embedding")
        side, token = self.side, int(self.token)
        table = weights.array((token + side**2, hidden), f"{prefix}position_embedding.weight")
        first = table[:token] + (weights.array((hidden,), f"{prefix}cls_token") if token else 0)
        return embed, first, table[token:].reshape(side, side, hidden)

    def _block(self, layer: int, weights: WeightLoader) -> EncoderBlock:
        prefix = f"{self._prefix(weights)}encoder.layers.{layer}."
        return EncoderBlock.load(self.block, prefix, weights)

    def _norm(self, weights: WeightLoader) -> Norm:
        name = f"{self._prefix(weights)}post_layernorm"
        return Norm.load(weights, name, self.block.hidden, self.block.eps)

    def _prefix(self, weights: WeightLoader) -> str:
        present = (p for p in self.prefixes if weights.has(f"{p}embeddings.patch_embedding.bias"))
        return next(present, self.prefixes[0])

    def _positions(self, table: Floats, grid: Grid) -> Floats:
        """The positions of a grid, (rows * columns, D), from ``table`` (side, side, D)."""
        rows, columns = grid
        if self.weights is not None:
            table = interpolated(table, rows, columns, self.weights)
        else:
            table = table[np.arange(rows) * self.side // rows]
            table = table[:, np.arange(columns) * self.side // columns]
        return table.reshape(rows * columns, -1)


def merged(x: Floats, grid: Grid, factor: int) -> Floats:
    """Concatenate each square of ``factor`` * ``factor`` patches to one row, top left first:
    (n, D) to (n / factor**2, factor**2 * D).
    """
    rows, columns = grid
    x = x.reshape(rows // factor, factor, columns // factor, factor, -1)
    return x.transpose(0, 2, 1, 3, 4).reshape(rows * columns // factor**2, -1)


def read_siglip(
    vision: Mapping[str, object],
    *,
    side: int,
    prefixes: tuple[str, ...] = TENSOR_PREFIXES,
    hidden: int = 768,
    heads: int = 12,
    patch: int = 16,
    inner: int = 3072,
    layers: int = 12,
    weights: Callable[[int, int], Floats] | None = None,
    token: bool = False,
) -> SiglipEncoder:
    """The SigLIP model of a ``vision_config``; the arguments are the publisher's defaults.

    Raises:
        ValueError: a value makes no sense.
    """
    hidden, heads = (
        integer(vision, "hidden_size", hidden),
        integer(vision, "num_attention_heads", heads),
    )
    if hidden % heads:
        raise ValueError(f"hidden_size {hidden} is not a multiple of {heads} heads")
    if not side:
        raise ValueError("image_size is smaller than patch_size")
    if integer(vision, "num_channels", 3) != 3:
        raise ValueError("num_channels must be 3")
    block = BlockConfig(
        hidden=hidden,
        inner=integer(vision, "intermediate_size", inner),
        heads=heads,
        eps=number(vision, "layer_norm_eps", 1e-6),
        activation=activation(vision, "hidden_act", "gelu_pytorch_tanh"),
        names=replace(_NAMES, scale1="scale1.weight", scale2="scale2.weight") if token else _NAMES,
    )
    return SiglipEncoder(
        block=block,
        layers=integer(vision, "num_hidden_layers", layers),
        patch=pixels(vision, "patch_size", patch),
        side=side,
        weights=weights,
        token=token,
        prefixes=prefixes,
    )


def pixels(settings: Mapping[str, object], key: str, default: int | None = None) -> int:
    """A number of pixels.

    Raises:
        ValueError: the value is not one, or too large for any real model.
    """
    value = integer(settings, key, default)
    if value > _LARGEST_SIDE:
        raise ValueError(f"{key} must be at most {_LARGEST_SIDE}, is {value}")
    return value


def text_size(config: Mapping[str, Any]) -> int:
    """The decoder's hidden size.

    Raises:
        ValueError: the config does not have it.
    """
    return integer(config["text_config"], "hidden_size")
