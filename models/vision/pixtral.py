"""Pixtral's encoder: Llama's blocks over patches, with two-dimensional rotary positions.

Pixtral 12B (``llava``) projects every patch; Mistral Small 3 and Ministral 3 (``mistral3``) merge
squares of patches first. In a prompt, a special token ends each line of a picture.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from localrt.common.errors import OptionError, UnsupportedModelError
from localrt.models.encoders import BlockConfig, BlockNames, Linear, Norm, Units, run_blocks
from localrt.models.vision.encoder import EncodedPicture, PreparedPicture, VisionEncoder
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
    resize,
)
from localrt.models.weights import WeightLoader
from localrt.quant.ops.mathematics import power, turns
from localrt.quant.ops.protocol import Check
from localrt.quant.ops.vision import PatchLayout, VisionActivation, VisionSteps

_EPS = 1e-5  # independent of the config, as in transformers
_PROJECTOR = "multi_modal_projector."
_NAMES = BlockNames(
    norm1="attention_norm",
    norm2="ffn_norm",
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    out="attention.o_proj",
    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
)


def read_encoder(config: Mapping[str, Any], processor: Mapping[str, Any]) -> PixtralEncoder:
    """See ``registry.read_encoder``."""
    vision, text = config["vision_config"], config["text_config"]
    merging = config["model_type"] == "mistral3"
    if vision.get("model_type", "pixtral") != "pixtral":
        raise UnsupportedModelError(f"the vision tower {vision['model_type']!r:.60} is not known")
    if (layer := config.get("vision_feature_layer", -1)) not in (-1, [-1]):
        raise ValueError(f"vision_feature_layer must be -1, is {layer!r:.60}")
    if (strategy := config.get("vision_feature_select_strategy", "full")) != "full":
        raise ValueError(f"vision_feature_select_strategy must be 'full', is {strategy!r:.60}")
    rope = vision.get("rope_parameters") or vision
    if (kind := rope.get("rope_type", "axial")) not in ("axial", "default"):
        raise ValueError(f"rope_type must be 'axial', is {kind!r:.60}")
    hidden, heads = integer(vision, "hidden_size", 1024), integer(vision, "num_attention_heads", 16)
    if hidden % (4 * heads):
        raise ValueError(f"hidden_size must be a multiple of {4 * heads}, is {hidden}")
    block = BlockConfig(
        hidden=hidden,
        inner=integer(vision, "intermediate_size", 4096),
        heads=heads,
        eps=_EPS,
        activation=activation(vision, "hidden_act"),
        names=_NAMES,
        rms=True,
        bias=False,
        mlp_bias=False,
    )
    patch = integer(vision, "patch_size", 16)
    merge = integer(config, "spatial_merge_size", 2) if merging else 1
    edges = _edges(processor.get("size") or {"longest_edge": vision.get("image_size", 1024)})
    largest = math.prod(edge + patch * merge for edge in edges)
    if largest > MOST_PIXELS:
        raise ValueError(f"pictures may have {largest} pixels: the most is {MOST_PIXELS}")
    return PixtralEncoder(
        block=block,
        layers=integer(vision, "num_hidden_layers", 24),
        patch=patch,
        theta=number(rope, "rope_theta", 10_000.0),
        merge=merge,
        norm_eps=number(text, "rms_norm_eps", 1e-5) if merging else None,
        out=integer(text, "hidden_size"),
        activation=activation(config, "projector_hidden_act"),
        bias=bool(config.get("multimodal_projector_bias", not merging)),
        edges=edges,
        placeholder=str(processor.get("image_token", "[IMG]")),
        line_end=str(processor.get("image_break_token", "[IMG_BREAK]")),
        end=str(processor.get("image_end_token", "[IMG_END]")),
        resample=resampling(processor, BICUBIC),
        scaling=Scaling.read(processor, CLIP_MEAN, CLIP_STD),
    )


def _edges(size: Mapping[str, object]) -> tuple[int, int]:
    if size.get("longest_edge") is not None:
        return (integer(size, "longest_edge"),) * 2
    return integer(size, "height"), integer(size, "width")


@dataclass(frozen=True, slots=True, kw_only=True)
class PixtralEncoder(VisionEncoder):
    """See the module. A picture's ``grid`` is its (rows, columns) of patches.

    ``merge`` patches in each direction become one row of the decoder with ``out`` columns.
    ``edges`` are the largest height and width of a picture; ``line_end`` and ``end`` are the tokens
    after a line and after the picture.
    """

    block: BlockConfig
    layers: int
    patch: int
    theta: float
    merge: int
    norm_eps: float | None  # for the norm before merging; None: patches are not merged
    out: int
    activation: VisionActivation  # the projector's activation
    bias: bool  # whether the projector has biases
    edges: tuple[int, int]
    placeholder: str
    line_end: str
    end: str
    resample: int
    scaling: Scaling

    def with_max_rows(self, rows: int) -> PixtralEncoder:
        side = max(math.isqrt(rows), 1) * self.patch * self.merge
        height, width = (min(edge, side) for edge in self.edges)
        return replace(self, edges=(height, width))

    def prepare(self, picture: Picture) -> PreparedPicture:
        square, height, width = self.patch * self.merge, picture.height, picture.width
        ratio = max(height / self.edges[0], width / self.edges[1])
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        if not height or not width:
            raise OptionError(
                f"a picture of {picture.width} x {picture.height} pixels is too narrow "
                "for this model"
            )
        lines, columns = -(-height // square), -(-width // square)
        pixels = resize(picture, lines * square, columns * square, self.resample)
        return PreparedPicture(
            patches=self.scaling(cut(pixels, self.patch)),
            grid=(lines * self.merge, columns * self.merge),
            pieces=(*((columns, self.line_end) * lines)[:-1], self.end),
        )

    def encode(
        self, picture: PreparedPicture, units: Units, steps: VisionSteps, check: Check | None = None
    ) -> EncodedPicture:
        embed, norm = units.read(self._embedding)
        x = norm(embed(picture.patches[:], steps), steps)
        prefix, layout = "vision_tower.transformer.layers.", self._layout(*picture.grid)
        x = run_blocks(self.block, prefix, self.layers, x, layout, units, steps, check)
        if self.norm_eps is not None:
            (rows, columns), side = picture.grid, self.merge
            norm, merging = units.read(self._merger)
            x = norm(x, steps).reshape(rows // side, side, columns // side, side, -1)
            # A merged row is ordered by column, then by the square's patches.
            x = x.transpose(0, 2, 4, 1, 3).reshape(len(x) * x.shape[2], -1)
            x = merging(x, steps)
        first, second = units.read(self._projector)
        return EncodedPicture(second(first(x, steps), steps))

    def _layout(self, rows: int, columns: int) -> PatchLayout:
        """Rotary positions: even frequencies rotate by the patch's row, odd ones by its column."""
        size = self.block.size
        frequencies = power(self.theta, -np.arange(0, size, 2) / size).astype(np.float32)
        row, column = np.divmod(np.arange(rows * columns, dtype=np.float32)[:, None], columns)
        angles = np.hstack([row * frequencies[0::2], column * frequencies[1::2]])
        cos, sin = turns(angles)
        return PatchLayout(ends=(len(angles),), cos=cos, sin=sin)

    def _embedding(self, weights: WeightLoader) -> tuple[Linear, Norm]:
        hidden = self.block.hidden
        shape = (hidden, 3 * self.patch**2)
        return (
            Linear.load(weights, shape, "vision_tower.patch_conv", bias=False),
            Norm.load(weights, "vision_tower.ln_pre", hidden, _EPS, rms=True),
        )

    def _merger(self, weights: WeightLoader) -> tuple[Norm, Linear]:
        assert self.norm_eps is not None, "patches are merged"
        hidden = self.block.hidden
        shape, name = (hidden, hidden * self.merge**2), f"{_PROJECTOR}patch_merger.merging_layer"
        return (
            Norm.load(weights, f"{_PROJECTOR}norm", hidden, self.norm_eps, rms=True),
            Linear.load(weights, shape, name, bias=False),
        )

    def _projector(self, weights: WeightLoader) -> tuple[Linear, Linear]:
        first, second = (self.out, self.block.hidden), (self.out, self.out)
        return (
            Linear.load(
                weights,
                first,
                f"{_PROJECTOR}linear_1",
                bias=self.bias,
                activation=self.activation,
            ),
            Linear.load(weights, second, f"{_PROJECTOR}linear_2", bias=self.bias),
        )
