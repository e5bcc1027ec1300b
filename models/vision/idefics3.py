"""The encoder of Idefics3, SmolVLM and SmolVLM2: SigLIP on square tiles of a picture, and on the
whole picture as one more tile. A square of encoded patches becomes one row of the decoder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from localrt.models.encoders import Linear, Units
from localrt.models.vision.encoder import EncodedPicture, PreparedPicture, VisionEncoder
from localrt.models.vision.picture import (
    LANCZOS,
    Picture,
    Scaling,
    cut,
    integer,
    resampling,
    resize,
)
from localrt.models.vision.siglip import SiglipEncoder, merged, pixels, read_siglip, text_size
from localrt.models.weights import WeightLoader
from localrt.quant.ops.protocol import Check
from localrt.quant.ops.vision import VisionSteps

_AROUND = "<fake_token_around_image>"


def read_encoder(config: Mapping[str, Any], processor: Mapping[str, Any]) -> VisionEncoder:
    """See ``registry.read_encoder``."""
    vision = config["vision_config"]
    patch = pixels(vision, "patch_size", 32)
    size = pixels(vision, "image_size", 224)
    tile = pixels(processor.get("max_image_size") or {}, "longest_edge", size)
    scale, edges = integer(config, "scale_factor", 2), processor.get("size")
    if tile < patch or tile // patch % scale:
        raise ValueError(f"{tile // patch} patches a side are no multiple of scale_factor {scale}")
    return Idefics3Encoder(
        siglip=read_siglip(
            vision,
            side=size // patch,
            prefixes=("vision_model.",),
            hidden=1152,
            heads=16,
            patch=32,
        ),
        edge=pixels(edges, "longest_edge") if edges else 4 * tile,
        tile=tile,
        split=processor.get("do_image_splitting") is not False,
        scale=scale,
        out=text_size(config),
        resample=resampling(processor, LANCZOS),
        scaling=Scaling.read(processor),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Idefics3Encoder(VisionEncoder):
    """See the module. ``edge`` is a picture's longest edge in pixels, ``tile`` a tile's edge."""

    siglip: SiglipEncoder
    edge: int
    tile: int
    split: bool
    scale: int  # patches per row of the decoder, in each direction
    out: int  # the decoder's hidden size
    resample: int
    scaling: Scaling

    placeholder = "<image>"

    def prepare(self, picture: Picture) -> PreparedPicture:
        tile, side, tiles = self.tile, self.tile // self.siglip.patch, []
        picture = self._resized(picture, *self._whole(picture.height, picture.width))
        lines = columns = 0
        if self.split:
            picture = self._resized(picture, *self._tiled(picture.height, picture.width))
            lines, columns = picture.height // tile, picture.width // tile
            squares = picture.pixels.reshape(lines, tile, columns, tile, 3).swapaxes(1, 2)
            tiles = list(squares.reshape(-1, tile, tile, 3))
        if len(tiles) == 1:
            lines = 0  # the tile is the whole picture
        else:
            tiles.append(self._resized(picture, tile, tile).pixels)
        patches = [cut(each, self.siglip.patch) for each in tiles]
        return PreparedPicture(
            patches=self.scaling(np.concatenate(patches)),
            chunk_patches=side**2,
            grid=((side, side),) * len(tiles),
            pieces=self._pieces(lines, columns, (side // self.scale) ** 2),
        )

    def _resized(self, picture: Picture, height: int, width: int) -> Picture:
        return Picture(resize(picture, height, width, self.resample))

    def _whole(self, height: int, width: int) -> tuple[int, int]:
        """The size whose longer edge is ``edge``; the shorter one is even."""
        shape = width / height
        if width >= height:
            short = int(self.edge / shape)
            return max(short + short % 2, 1), self.edge
        short = int(self.edge * shape)
        return self.edge, max(short + short % 2, 1)

    def _tiled(self, height: int, width: int) -> tuple[int, int]:
        """The size rounded up to whole tiles, the longer edge first."""

        def whole(length: int) -> int:
            return max(math.ceil(length / self.tile), 1) * self.tile

        shape = width / height
        if width >= height:
            width = whole(width)
            return whole(int(width / shape)), width
        height = whole(height)
        return height, whole(int(height * shape))

    def _pieces(self, lines: int, columns: int, rows: int) -> tuple[str | int, ...]:
        pieces: list[str | int] = []
        text = ""
        for line in range(1, lines + 1):
            for column in range(1, columns + 1):
                pieces += [f"{text}{_AROUND}<row_{line}_col_{column}>", rows]
                text = ""
            text = "\n"
        text += "\n" if lines else ""
        return (*pieces, f"{text}{_AROUND}<global-img>", rows, _AROUND)

    def encode(
        self, picture: PreparedPicture, units: Units, steps: VisionSteps, check: Check | None = None
    ) -> EncodedPicture:
        encoded = self.siglip(picture.patches, picture.grid, units, steps, check)
        project = units.read(self._projector)
        squares = (merged(*each, self.scale) for each in zip(encoded, picture.grid, strict=True))
        return EncodedPicture(np.concatenate([project(x, steps) for x in squares]))

    def _projector(self, weights: WeightLoader) -> Linear:
        shape = self.out, self.siglip.block.hidden * self.scale**2
        return Linear.load(weights, shape, "connector.modality_projection.proj", bias=False)
