"""LFM2-VL's encoder: SigLIP 2 (NaFlex) on a whole picture, or on tiles and a thumbnail of a large
one. A square of encoded patches becomes one row of the decoder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from localrt.common.errors import OptionError
from localrt.models.encoders import Linear, Norm, Units
from localrt.models.vision.encoder import (
    EncodedPicture,
    PreparedPicture,
    VisionEncoder,
    antialiased,
)
from localrt.models.vision.picture import (
    BILINEAR,
    MOST_PIXELS,
    Picture,
    Pixels,
    Scaling,
    activation,
    cut,
    integer,
    number,
    resampling,
    resize,
)
from localrt.models.vision.siglip import (
    TENSOR_PREFIXES,
    SiglipEncoder,
    merged,
    pixels,
    read_siglip,
    text_size,
)
from localrt.models.weights import WeightLoader
from localrt.quant.ops.protocol import Check
from localrt.quant.ops.vision import VisionActivation, VisionSteps


def read_encoder(config: Mapping[str, Any], processor: Mapping[str, object]) -> VisionEncoder:
    """See ``registry.read_encoder``."""
    vision, factor = config["vision_config"], integer(config, "downsample_factor", 2)
    patches = integer(vision, "num_patches", 256)
    side = math.isqrt(patches)
    if side**2 != patches:
        raise ValueError(f"num_patches must be a square, is {patches}")
    siglip = read_siglip(vision, side=side, prefixes=TENSOR_PREFIXES, weights=antialiased)
    for key, own in (("encoder_patch_size", siglip.patch), ("downsample_factor", factor)):
        if integer(processor, key, own) != own:
            raise ValueError(f"the image processor's {key} must be {own}, is {processor[key]}")
    square, tile = siglip.patch * factor, pixels(processor, "tile_size", 512)
    if tile % square:
        raise ValueError(f"tile_size must be a multiple of {square}, is {tile}")
    tiles = integer(processor, "min_tiles", 2), integer(processor, "max_tiles", 10)
    rows = integer(processor, "min_image_tokens", 64), integer(processor, "max_image_tokens", 256)
    for key, (least, most) in (("tiles", tiles), ("image_tokens", rows)):
        if least > most:
            raise ValueError(f"min_{key} must be at most max_{key} ({most}), is {least}")
    if max(tiles[1] * tile**2, rows[1] * square**2) > MOST_PIXELS:
        raise ValueError(f"max_tiles and max_image_tokens exceed {MOST_PIXELS} pixels")
    return Lfm2VlEncoder(
        siglip=siglip,
        factor=factor,
        tile=tile,
        tiles=tiles if processor.get("do_image_splitting") is not False else (1, 1),
        whole=processor.get("use_thumbnail") is not False,
        rows=rows,
        tolerance=number(processor, "max_pixels_tolerance", 2.0),
        marked=processor.get("use_image_special_tokens") is not False,
        projector=Projector(
            factor**2 * siglip.block.hidden,
            integer(config, "projector_hidden_size", 2560),
            text_size(config),
            activation(config, "projector_hidden_act"),
            config.get("projector_bias") is not False,
            config.get("projector_use_layernorm") is not False,
        ),
        resample=resampling(processor, BILINEAR),
        scaling=Scaling.read(processor),
    )


@dataclass(frozen=True, slots=True)
class Projector:
    """Sizes of the projector: an optional norm, a matrix, an activation, a matrix."""

    size: int
    inner: int
    out: int
    activation: VisionActivation
    bias: bool = True
    normed: bool = True
    prefix: str = "multi_modal_projector."
    norm: str = "layer_norm"
    eps: float = 1e-5  # not in configs

    def load(self, weights: WeightLoader) -> list[Norm | Linear]:
        """The projector's layers in order."""
        prefix, inner, bias = self.prefix, self.inner, self.bias
        first, second = (inner, self.size), (self.out, inner)
        steps: list[Norm | Linear] = [
            Linear.load(weights, first, f"{prefix}linear_1", bias=bias, activation=self.activation),
            Linear.load(weights, second, f"{prefix}linear_2", bias=bias),
        ]
        if self.normed:
            steps.insert(0, Norm.load(weights, prefix + self.norm, self.size, self.eps))
        return steps


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledEncoder(VisionEncoder):
    """SigLIP on tiles of ``tile`` pixels square; ``tiles`` are (least, most) of a picture."""

    tile: int
    tiles: tuple[int, int]
    resample: int
    scaling: Scaling
    siglip: SiglipEncoder
    factor: int  # patches per row of the decoder, in each direction
    projector: Projector
    window: int = 1  # side in patches of the squares that SigLIP itself merges

    def layout(self, height: int, width: int) -> tuple[int, int]:
        """The grid (rows, columns) of tiles whose shape is nearest to the picture's; of the same
        shape, the largest that the picture's pixels fill by more than half.
        """
        few, many = self.tiles
        every = ((c, r) for c in range(1, many + 1) for r in range(1, many // c + 1))
        grids = sorted((c * r, c, r) for c, r in every if few <= c * r)
        differences = [abs(width / height - c / r) for _, c, r in grids]
        least = min(differences)
        nearest = [g for g, d in zip(grids, differences, strict=True) if d == least]
        filled = [g for g in nearest[1:] if height * width > 0.5 * self.tile**2 * g[0]]
        _, columns, lines = (filled or nearest[:1])[-1]
        return lines, columns

    def cut(self, picture: Picture, lines: int, columns: int, h: int = 0, w: int = 0) -> Pixels:
        """Tiles (lines, columns, h, w, 3) of the resized picture, by default square."""
        h, w = h or self.tile, w or self.tile
        large = resize(picture, lines * h, columns * w, self.resample)
        return large.reshape(lines, h, columns, w, 3).swapaxes(1, 2)

    def encode(
        self, picture: PreparedPicture, units: Units, steps: VisionSteps, check: Check | None = None
    ) -> EncodedPicture:
        encoded = self.siglip(picture.patches, picture.grid, units, steps, check)
        projector, rows = units.read(self.projector.load), []
        for x, (height, width) in zip(encoded, picture.grid, strict=True):
            x = merged(x, (height // self.window, width // self.window), self.factor)
            for step in projector:
                x = step(x, steps)
            rows.append(x)
        return EncodedPicture(np.concatenate(rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm2VlEncoder(TiledEncoder):
    """See above. ``rows`` are (least, most) of a picture. One with more than ``tolerance`` times
    the pixels of the most rows becomes tiles, plus a thumbnail if ``whole``. If ``marked``,
    special tokens surround the picture and name each tile.
    """

    whole: bool
    rows: tuple[int, int]
    tolerance: float
    marked: bool

    placeholder = "<image>"

    def prepare(self, picture: Picture) -> PreparedPicture:
        patch, height, width = self.siglip.patch, picture.height, picture.width
        parts: list[tuple[str, Pixels]] = []
        lines, columns = (1, 1) if self._is_small(height, width) else self.layout(height, width)
        if lines * columns > 1:
            squares = self.cut(picture, lines, columns)
            for line, column in np.ndindex(lines, columns):
                name = f"<|img_row_{line + 1}_col_{column + 1}|>"
                parts.append((name, squares[line, column]))
        if self.whole or not parts:
            pixels = resize(picture, *self._fitting(height, width), self.resample)
            parts.append(("<|img_thumbnail|>" if parts else "", pixels))
        grids = [(len(pixels) // patch, pixels.shape[1] // patch) for _, pixels in parts]
        pieces: list[str | int] = []
        text = "<|image_start|>"
        for (name, _), (rows, columns) in zip(parts, grids, strict=True):
            pieces += [text + name, rows * columns // self.factor**2]
            text = ""
        pieces.append("<|image_end|>")
        return PreparedPicture(
            patches=self.scaling(
                np.concatenate([self._patches(pixels) for _, pixels in parts]), by_colour=False
            ),
            chunk_patches=max(rows * columns for rows, columns in grids),
            grid=tuple(grids),
            pieces=tuple(p for p in pieces if self.marked or isinstance(p, int)),
        )

    def _patches(self, pixels: Pixels) -> Pixels:
        """Patches with channels last: (N, patch * patch * 3)."""
        patches = cut(pixels, self.siglip.patch)
        return patches.reshape(len(patches), 3, -1).swapaxes(1, 2).reshape(len(patches), -1)

    def _is_small(self, height: int, width: int) -> bool:
        """Whether the picture needs no tiles."""
        least, square = self.siglip.patch, self.siglip.patch * self.factor
        area = math.prod(max(least, round(x / square) * square) for x in (height, width))
        return area <= self.rows[1] * square**2 * self.tolerance

    def _fitting(self, height: int, width: int) -> tuple[int, int]:
        """The nearest size in whole rows of the decoder, within ``rows``.

        Raises:
            OptionError: the picture is too narrow.
        """
        square = self.siglip.patch * self.factor
        least, most = (count * square**2 for count in self.rows)
        h, w = (max(1, round(x / square)) * square for x in (height, width))
        if h * w > most:
            shrink = math.sqrt(height * width / most)
            h, w = (max(1, math.floor(x / shrink / square)) * square for x in (height, width))
        elif h * w < least:
            grow = math.sqrt(least / (height * width))
            h, w = (math.ceil(x * grow / square) * square for x in (height, width))
        if h * w > most:
            raise OptionError(f"a picture of {width} x {height} pixels is too narrow for the model")
        return h, w
