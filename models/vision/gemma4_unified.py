"""Gemma 4 12B has no encoder: patches are normed, projected and get positions. These rows see one
another in all layers of the decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from localrt.models.encoders.block import Linear, Norm, Units
from localrt.models.vision.encoder import EncodedPicture, PreparedPicture
from localrt.models.vision.gemma4_vision import Gemma4Pictures, read_pictures
from localrt.models.vision.pixels import integer, number
from localrt.models.weights import WeightLoader
from localrt.quant.formats.packed import Floats
from localrt.quant.ops.protocol import Check
from localrt.quant.ops.vision import VisionSteps

_LAYER_NORM_EPS = 1e-5  # torch's default


def read_encoder(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Gemma4Unified:
    """See ``registry.read_encoder``."""
    vision, text = config["vision_config"], config["text_config"]
    encoder = Gemma4Unified(
        hidden=integer(vision, "mm_embed_dim", 3840),
        positions=integer(vision, "mm_posemb_size", 1120),
        eps=number(vision, "rms_norm_eps", 1e-6),
        patch=integer(vision, "patch_size", 16) * integer(vision, "pooling_kernel_size", 3),
        pool=1,
        **read_pictures(text, processor),
    )
    if encoder.rows > (most := encoder.positions):
        raise ValueError(f"mm_posemb_size must be at least max_soft_tokens, is {most}")
    return encoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Unified(Gemma4Pictures):
    """See the module. ``hidden`` is the width of projected patches, ``positions`` the length of
    both tables, ``eps`` that of the last norm.
    """

    hidden: int
    positions: int
    eps: float

    def encode(
        self, picture: PreparedPicture, units: Units, steps: VisionSteps, check: Check | None = None
    ) -> EncodedPicture:
        rows, columns = picture.grid
        row, column = np.divmod(np.arange(rows * columns), columns)
        norm1, embed, norm2, tables, norm3 = units.read(self._embedding)
        x = norm2(embed(norm1(picture.patches[:], steps), steps), steps)
        x = norm3(x + tables[column, 0] + tables[row, 1], steps)
        if check is not None:
            check()
        project = units.read(self._projector)
        return EncodedPicture(project(steps.rms_norm(x, None, self.eps), steps))

    def _embedding(self, weights: WeightLoader) -> tuple[Norm, Linear, Norm, Floats, Norm]:
        """The matrix of patches between two norms; both tables as (N, 2, D); the last norm."""
        prefix, pixels, hidden = "vision_embedder.", 3 * self.patch**2, self.hidden
        norm = partial(Norm.load, weights, eps=_LAYER_NORM_EPS)
        # Only the part that pictures reach is read.
        table = weights.array(
            (2 * self.positions, hidden), f"{prefix}pos_embedding", 0, 2 * self.rows
        )
        return (
            norm(f"{prefix}patch_ln1", pixels),
            Linear.load(weights, (hidden, pixels), f"{prefix}patch_dense"),
            norm(f"{prefix}patch_ln2", hidden),
            table.reshape(-1, 2, hidden),
            norm(f"{prefix}pos_norm", hidden),
        )

    def _projector(self, weights: WeightLoader) -> Linear:
        name = "embed_vision.embedding_projection"
        return Linear.load(weights, (self.out, self.hidden), name, bias=False)
