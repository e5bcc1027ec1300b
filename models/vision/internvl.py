"""InternVL's encoder: InternViT on square tiles of a picture, and on all of it as one more tile. A
square of encoded patches becomes one row of the decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from localrt.models.vision import lfm2_vl, siglip
from localrt.models.vision.encoder import PreparedPicture, VisionEncoder, cubic
from localrt.models.vision.picture import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    MOST_PIXELS,
    Picture,
    Scaling,
    activation,
    cut,
    integer,
    number,
    resampling,
)

_DEFAULTS = {"hidden_act": "gelu", "hidden_size": 1024, "intermediate_size": 4096}
_DEFAULTS |= {"num_hidden_layers": 24, "num_attention_heads": 16, "patch_size": 14}
_ONLY = {"use_qk_norm": False, "norm_type": "layer_norm", "use_mean_pooling": True}
_ONLY |= {"vision_feature_layer": -1, "vision_feature_select_strategy": "default"}
"""Supported values, which are the defaults."""


def read_encoder(config: Mapping[str, Any], processor: Mapping[str, Any]) -> VisionEncoder:
    """See ``registry.read_encoder``.

    The publisher's processor makes tiles, whatever the image processor's ``crop_to_patches`` says.
    """
    vision, out = {**_DEFAULTS, **config["vision_config"]}, siglip.text_size(config)
    for key, only in _ONLY.items():
        if (own := {**config, **vision}.get(key, only)) != only:
            raise ValueError(f"{key} must be {only!r}, is {own!r:.60}")
    for key, own in vision.items():
        if isinstance(own, list) and len(own) == 2 and own[0] == own[1]:
            vision[key] = own[0]  # height and width
    size, patch = siglip.pixels(vision, "image_size", 448), siglip.pixels(vision, "patch_size")
    sizes, ratio = processor.get("size") or {}, number(config, "downsample_ratio", 0.5)
    tile, factor = siglip.pixels(sizes, "height", size), round(1 / ratio)
    if siglip.pixels(sizes, "width", tile) != tile or not factor or tile // patch % factor:
        raise ValueError(f"size must be a square of a multiple of {factor} patches, is {sizes}")
    ends = (("min", 1), ("max", 12))
    few, many = (integer(processor, f"{end}_patches", count) for end, count in ends)
    if few > many or many * tile**2 > MOST_PIXELS:
        raise ValueError(f"min_patches {few} and max_patches {many} make no sense")
    tower = siglip.read_siglip(vision, side=size // patch, weights=cubic, token=True)
    wide, act = factor**2 * tower.block.hidden, activation(config, "projector_hidden_act")
    return InternVlEncoder(
        siglip=tower,
        factor=factor,
        tile=tile,
        tiles=(few, many),
        projector=lfm2_vl.Projector(wide, out, out, act),
        resample=resampling(processor, BICUBIC),
        scaling=Scaling.read(processor, CLIP_MEAN, CLIP_STD),
    )


class InternVlEncoder(lfm2_vl.TiledEncoder):
    """See the module."""

    placeholder = "<IMG_CONTEXT>"

    def prepare(self, picture: Picture) -> PreparedPicture:
        patch, side = self.siglip.patch, self.tile // self.siglip.patch
        squares = self.cut(picture, *self.layout(picture.height, picture.width))
        tiles = [*squares.reshape(-1, *squares.shape[2:])]
        if len(tiles) > 1:
            tiles.append(self.cut(picture, 1, 1)[0, 0])
        return PreparedPicture(
            patches=self.scaling(np.concatenate([cut(each, patch) for each in tiles])),
            chunk_patches=side**2,
            grid=((side, side),) * len(tiles),
            pieces=("<img>", len(tiles) * (side // self.factor) ** 2, "</img>"),
        )
