"""Gemma 3's tower: SigLIP over a square picture; of the encoded patches, squares are averaged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from localrt.models.vision.picture import Picture
from localrt.models.vision.pixels import BILINEAR, Scaling, cut, integer, resampling, resize
from localrt.models.vision.siglip import (
    VISION_TOWER,
    Encoder,
    pixels,
    read_encoder,
    text_size,
)
from localrt.models.vision.tower import Linear, Norm, Prepared, Seen, Tower, Units
from localrt.models.weights import WeightLoader
from localrt.quant.ops.protocol import Check
from localrt.quant.ops.vision import VisionSteps

_NO_CROPS = "pictures are seen as a whole: this model's setting to pan and scan is not followed"


def read_tower(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Tower:
    """See ``registry.read_tower``."""
    vision = config["vision_config"]
    size = pixels(vision, "image_size", 224)
    side = size // pixels(vision, "patch_size", 16)
    rows = math.isqrt(integer(config, "mm_tokens_per_image", 256))
    if side % rows:
        raise ValueError(f"{side} patches a side are no multiple of {rows} rows a side")
    return Gemma3Tower(
        encoder=read_encoder(vision, side=side, prefixes=VISION_TOWER),
        size=size,
        rows=rows,
        out=text_size(config),
        resample=resampling(processor, BILINEAR),
        scaling=Scaling.read(processor),
        note=_NO_CROPS if processor.get("do_pan_and_scan") else "",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Tower(Tower):
    """See above. ``size`` is a picture's side in pixels, ``rows`` that in the decoder's rows."""

    encoder: Encoder
    size: int
    rows: int
    out: int  # columns of the decoder's rows
    resample: int
    scaling: Scaling
    note: str

    placeholder = "<start_of_image>"
    row_token = "<image_soft_token>"
    both_ways = True

    def prepare(self, picture: Picture) -> Prepared:
        image = resize(picture, self.size, self.size, self.resample)
        return Prepared(
            patches=self.scaling(cut(image, self.encoder.patch)),
            grid=((self.encoder.side,) * 2,),
            pieces=(f"\n\n{self.placeholder}", self.rows**2, "<end_of_image>\n\n"),
        )

    def see(
        self, prepared: Prepared, units: Units, steps: VisionSteps, check: Check | None = None
    ) -> Seen:
        (x,) = self.encoder(prepared.patches, prepared.grid, units, steps, check)
        x = x.reshape(self.rows, self.encoder.side // self.rows, self.rows, -1, x.shape[-1])
        norm, projector = units.read(self._projector)
        return Seen(projector(norm(x.mean((1, 3)).reshape(self.rows**2, -1), steps), steps))

    def _projector(self, weights: WeightLoader) -> tuple[Norm, Linear]:
        hidden, eps = self.encoder.block.hidden, self.encoder.block.eps
        norm = weights.vector(hidden, "multi_modal_projector.mm_soft_emb_norm.weight", offset=1.0)
        matrix = weights.transposed(
            (self.out, hidden), "multi_modal_projector.mm_input_projection_weight"
        )
        return Norm(norm, None, eps, rms=True), Linear(matrix)
