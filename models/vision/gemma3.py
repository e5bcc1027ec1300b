"""Gemma 3's encoder: SigLIP on a square picture, then average pooling of patches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from localrt.models.encoders import Linear, Norm, Units
from localrt.models.vision.encoder import EncodedPicture, PreparedPicture, VisionEncoder
from localrt.models.vision.picture import (
    BILINEAR,
    Picture,
    Scaling,
    cut,
    integer,
    resampling,
    resize,
)
from localrt.models.vision.siglip import (
    TENSOR_PREFIXES,
    SiglipEncoder,
    pixels,
    read_siglip,
    text_size,
)
from localrt.models.weights import WeightLoader
from localrt.quant.ops.protocol import Check
from localrt.quant.ops.vision import VisionSteps

_NO_CROPS = "pictures are seen as a whole: this model's setting to pan and scan is not followed"


def read_encoder(config: Mapping[str, Any], processor: Mapping[str, Any]) -> VisionEncoder:
    """See ``registry.read_encoder``."""
    vision = config["vision_config"]
    size = pixels(vision, "image_size", 224)
    side = size // pixels(vision, "patch_size", 16)
    rows = math.isqrt(integer(config, "mm_tokens_per_image", 256))
    if side % rows:
        raise ValueError(f"{side} patches a side are no multiple of {rows} rows a side")
    return Gemma3Encoder(
        siglip=read_siglip(vision, side=side, prefixes=TENSOR_PREFIXES),
        size=size,
        rows=rows,
        out=text_size(config),
        resample=resampling(processor, BILINEAR),
        scaling=Scaling.read(processor),
        note=_NO_CROPS if processor.get("do_pan_and_scan") else "",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Encoder(VisionEncoder):
    """See the module. A picture is ``size`` pixels square, and ``rows`` ** 2 rows of the
    decoder.
    """

    siglip: SiglipEncoder
    size: int
    rows: int
    out: int  # the decoder's hidden size
    resample: int
    scaling: Scaling
    note: str

    placeholder = "<start_of_image>"
    row_token = "<image_soft_token>"
    bidirectional = True

    def prepare(self, picture: Picture) -> PreparedPicture:
        image = resize(picture, self.size, self.size, self.resample)
        return PreparedPicture(
            patches=self.scaling(cut(image, self.siglip.patch)),
            grid=((self.siglip.side,) * 2,),
            pieces=(f"\n\n{self.placeholder}", self.rows**2, "<end_of_image>\n\n"),
        )

    def encode(
        self, picture: PreparedPicture, units: Units, steps: VisionSteps, check: Check | None = None
    ) -> EncodedPicture:
        (x,) = self.siglip(picture.patches, picture.grid, units, steps, check)
        x = x.reshape(self.rows, self.siglip.side // self.rows, self.rows, -1, x.shape[-1])
        norm, projector = units.read(self._projector)
        return EncodedPicture(
            projector(norm(x.mean((1, 3)).reshape(self.rows**2, -1), steps), steps)
        )

    def _projector(self, weights: WeightLoader) -> tuple[Norm, Linear]:
        hidden, eps = self.siglip.block.hidden, self.siglip.block.eps
        norm = weights.vector(hidden, "multi_modal_projector.mm_soft_emb_norm.weight", offset=1.0)
        matrix = weights.transposed(
            (self.out, hidden), "multi_modal_projector.mm_input_projection_weight"
        )
        return Norm(norm, None, eps, rms=True), Linear(matrix)
