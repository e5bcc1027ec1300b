"""The encoder of MiniCPM-V 4.6: SigLIP on a whole picture, and on slices of a large one. Squares of
patches are merged behind one of the blocks (not with ``4x``), and of the result by the projector.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from localrt.common.errors import OptionError
from localrt.models.vision import siglip
from localrt.models.vision.encoder import PreparedPicture, VisionEncoder
from localrt.models.vision.lfm2_vl import Projector, TiledEncoder
from localrt.models.vision.picture import (
    BICUBIC,
    MOST_PIXELS,
    Picture,
    Scaling,
    cut,
    integer,
    resampling,
    resize,
)

_NUMBER = re.compile(r"\.(\d+)\.$")  # of a block
_ONLY: dict[str, Any] = {"merger_times": 1}
_ONLY |= {key: [2, 2] for key in ("merge_kernel_size", "window_kernel_size")}


def read_encoder(config: Mapping[str, Any], processor: Mapping[str, object]) -> VisionEncoder:
    """See ``registry.read_encoder``."""
    vision, out = config["vision_config"], siglip.text_size(config)
    patch, layer = siglip.pixels(vision, "patch_size", 16), config.get("insert_layer_id", 6)
    mode = "4x" if config.get("downsample_mode") == "4x" else "16x"
    for key, only in {**_ONLY, "patch_size": patch, "downsample_mode": mode}.items():
        if (own := {**config, **vision, **processor}.get(key, only)) != only:
            raise ValueError(f"{key} must be {only}, is {own!r:.60}")
    tower = siglip.read_siglip(vision, side=siglip.pixels(vision, "image_size", 224) // patch)
    if layer not in range(tower.layers):
        raise ValueError(f"insert_layer_id must be one of {tower.layers} blocks, is {layer!r:.60}")
    wide, names = 4 * tower.block.hidden, tower.block.names
    names = replace(names, norm2="pre_norm", up=("linear_1",), down="linear_2")
    merger = replace(tower.block, merge=4, activation="gelu_tanh", names=names)
    most = integer(processor, "max_slice_nums", 9)
    return MiniCpmEncoder(
        siglip=replace(tower, merger=(layer, merger) if mode == "16x" else None),
        factor=2,
        window=2 if mode == "16x" else 1,
        tile=siglip.pixels(processor, "scale_resolution", 448),
        tiles=(1, most if processor.get("slice_mode") is not False else 1),
        projector=Projector(wide, wide, out, "gelu", True, True, "merger.mlp.0.", "pre_norm", 1e-6),
        resample=resampling(processor, BICUBIC),
        scaling=Scaling.read(processor),
        number="" if processor.get("use_image_id") is False else "<image_id>{}</image_id>",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniCpmEncoder(TiledEncoder):
    """See the module. A slice has about the pixels of a tile."""

    number: str

    placeholder = "<|image_pad|>"

    def prepare(self, picture: Picture) -> PreparedPicture:
        height, width, patch = picture.height, picture.width, self.siglip.patch
        pieces: list[str | int] = []
        lines, columns = self.layout(height, width)
        whole = self._fitting(height, width, grow=lines * columns == 1)
        parts = [resize(picture, *whole, self.resample)]
        if lines * columns > 1:
            h, w = _rounded(height, lines) / lines, _rounded(width, columns) / columns
            slices = self.cut(picture, lines, columns, *self._fitting(h, w, grow=True))
            parts += [*slices.reshape(-1, *slices.shape[2:])]
        grids = tuple((part.shape[0] // patch, part.shape[1] // patch) for part in parts)
        for number, (h, w) in enumerate(grids):
            name = "slice" if number else "image"
            begin = "\n" if number > 1 and number % columns == 1 % columns else ""
            pieces += [f"{begin}<{name}>", h * w // (2 * self.window) ** 2, f"</{name}>"]
        return PreparedPicture(
            patches=self.scaling(np.concatenate([cut(part, patch) for part in parts])),
            chunk_patches=max(map(math.prod, grids)),
            grid=grids,
            pieces=tuple(pieces),
        )

    def block_work(self, block: str, width: int, picture: PreparedPicture) -> tuple[int, float]:
        rows, attention = VisionEncoder.block_work(self, block, width, picture)
        merger, number = self.siglip.merger, _NUMBER.search(block)
        behind = merger is not None and number is not None and int(number[1]) > merger[0]
        return (rows // 4, attention / 4) if behind else (rows, attention)

    def layout(self, height: int, width: int) -> tuple[int, int]:
        """The grid (rows, columns) of slices whose shape is nearest to the picture's."""
        count = min(math.ceil(height * width / self.tile**2), self.tiles[1])
        counts = [n for n in (count - 1, count, count + 1) if 1 < n <= self.tiles[1]]
        grids = [(r, n // r) for n in counts for r in range(1, n + 1) if n % r == 0]
        shape = math.log(width / height)
        differences = [(abs(shape - math.log(c / r)), -r, c) for r, c in grids]
        _, lines, columns = min(differences) if count > 1 else (0, -1, 1)
        return -lines, columns

    def _fitting(self, height: float, width: float, *, grow: bool) -> tuple[int, int]:
        """The nearest size in whole rows of the decoder, of about a tile's pixels."""
        shape, square = width / height, 2 * self.window * self.siglip.patch
        if grow or height * width > self.tile**2:
            height = int(self.tile / math.sqrt(shape))
            width = int(height * shape)
        h, w = _rounded(height, square), _rounded(width, square)
        if h * w * self.tiles[1] > MOST_PIXELS:
            raise OptionError("a picture of this shape has too many pixels for the model")
        return h, w


def _rounded(length: float, unit: int) -> int:
    """The nearest multiple of ``unit``, and at least one."""
    return max(round(length / unit), 1) * unit
