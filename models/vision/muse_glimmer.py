"""Muse-Glimmer's encoder: Qwen's windows, rotary positions of columns before those of rows, and a
table of positions with zeros around it. The norm of its rows is that of the decoder's embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from math import ceil, floor
from typing import Any

import numpy as np

from localrt.models.encoders.block import Linear, Norm, Units
from localrt.models.vision.encoder import PreparedPicture, VisionEncoder
from localrt.models.vision.picture import Picture
from localrt.models.vision.pixels import LANCZOS, Scaling, integer, number
from localrt.models.vision.positions import framed, interpolated
from localrt.models.vision.qwen_vl import PLAIN, QwenEncoder, Step, qwen_blocks, qwen_config
from localrt.models.weights import WeightLoader
from localrt.quant.formats.packed import Floats
from localrt.quant.ops.vision import Rows, VisionSteps

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_NAMES = replace(PLAIN, qkv=tuple(f"attn.{part}_proj" for part in "qkv"))
_FULL, _WINDOW = "full_attention", "window_attention"


def read_encoder(config: Mapping[str, Any], processor: Mapping[str, Any]) -> VisionEncoder:
    """See ``registry.read_encoder``."""
    own = dict(config["vision_config"])
    own["depth"] = integer(own, "num_hidden_layers", 50)
    own["num_heads"] = integer(own, "num_attention_heads", 16)
    own["temporal_patch_size"] = integer(own, "patch_temporal", 2)
    own["spatial_merge_size"] = integer(own, "merge_size", 2)
    depth, merge, side = own["depth"], own["spatial_merge_size"], integer(own, "pos_emb_height", 32)
    usual = [_WINDOW if n % 4 and n < depth else _FULL for n in range(1, depth + 1)]
    kinds = own.get("layer_types") or usual
    if side % merge or len(kinds) != depth or not {_FULL, _WINDOW}.issuperset(kinds):
        raise ValueError(f"windows of {side} patches in blocks {kinds!r:.60} are not supported")
    if (act := config.get("projector_hidden_act", "gelu")) != "gelu":
        raise ValueError(f"projector_hidden_act must be 'gelu', is {act!r:.60}")
    sizes = integer(own, "hidden_size", 1536), integer(own, "intermediate_size", 8960)
    most = integer(processor, "max_image_tokens", 4096) * merge**2
    found = qwen_config(
        {**config, "vision_config": own},
        {"max_pixels": most * integer(own, "patch_size", 14) ** 2},
        replace(qwen_blocks(own, *sizes, "gelu", _NAMES), eps=number(own, "layer_norm_eps", 1e-5)),
        integer(config["text_config"], "hidden_size"),
        depth=depth,
        patch=14,
        pixels=(1, 1),
        scaling=Scaling.read(processor, _MEAN, _STD),
        window=side // merge,
        full=frozenset(n for n in range(depth) if kinds[n] == _FULL),
        side=side,
        inner=integer(config, "projector_hidden_size", 4096),
    )
    return MuseGlimmerEncoder(found)


class MuseGlimmerEncoder(QwenEncoder):
    """See ``QwenEncoder``."""

    patches = "vision_tower.patch_embedder.patch_embedding"
    positions = "vision_tower.patch_embedder.position_embedding_table"
    prefix = "vision_tower.layers."
    weights, resample = staticmethod(framed), LANCZOS
    placeholder = picture_text = "<|patch|>"

    def prepare(self, picture: Picture) -> PreparedPicture:
        plain = super().prepare(picture)
        pieces = ("<|image_start|>", *plain.pieces, "<|image_end|>")
        return replace(plain, pieces=pieces, offsets=None, advance=0)

    def _size(self, height: int, width: int) -> tuple[int, int]:
        """The shape nearest to the picture's, of whole squares next to its size."""
        side = self.config.patch * self.config.merge
        most, lines, columns = self.config.pixels[1] // side**2, height / side, width / side
        if lines * columns > most:
            shape = columns / lines
            lines = (most / shape) ** 0.5
            columns = lines * shape
        # Of equally near ones the first of the set, as in transformers.
        near = set(product((floor(lines), ceil(lines)), (floor(columns), ceil(columns))))
        grids = [(h, w) for h, w in near if 0 < h * w <= most]
        grids = grids or [(min(max(1, round(lines)), most), min(max(1, round(columns)), most))]
        h, w = min(grids, key=lambda grid: abs(grid[0] / grid[1] - height / width))
        return h * side, w * side

    def _frames(self, patches: Floats) -> Floats:
        """Repeat the only frame: (N, frames * C * patch * patch)."""
        return np.tile(patches, self.config.frames)

    def _normed(self, x: Floats, units: Units, steps: VisionSteps) -> Floats:
        own = self.config.blocks
        return units.read(partial(Norm.of_block, own, name="vision_tower.ln_pre"))(x, steps)

    def _rotations(self, h: int, w: int) -> tuple[Floats, Floats]:
        cos, sin = (np.roll(x, x.shape[1] // 2, axis=1) for x in super()._rotations(h, w))
        return cos, sin

    def _positions(self, table: Floats, h: int, w: int) -> Floats:
        """The publisher's, which are those of a picture of (w, h) patches, line by line."""
        return self._in_squares(interpolated(table, w, h, self.weights).reshape(h, w, -1))

    def _load_merger(self, name: str, weights: WeightLoader) -> Step:
        config, hidden, inner = self.config, self.config.blocks.hidden, self.config.inner
        wide = config.square * hidden
        last = Norm.of_block(config.blocks, weights, "vision_tower.ln_post")
        first, second = (
            Linear.load(weights, shape, f"vision_adapter.{name}", bias=False, activation="gelu")
            for shape, name in (((inner, wide), "fc1"), ((inner, inner), "fc2"))
        )
        project = Linear.load(weights, (config.out, inner), "vision_projection", bias=False)

        def merged(x: Rows, steps: VisionSteps) -> Floats:
            x = steps.get(last(x, steps)).reshape(-1, config.square, hidden).swapaxes(1, 2)
            return project(second(first(x.reshape(-1, wide), steps), steps), steps)

        return merged
