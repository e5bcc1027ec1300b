"""Pixtral's encoder: Llama's blocks over patches, with two-dimensional rotary positions.

Pixtral 12B (``llava``) projects every patch; Mistral Small 3 and Ministral 3 (``mistral3``) merge
squares of patches first. In a prompt, a special token ends each line of a picture.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from localrt.common.errors import OptionError, UnsupportedModelError
from localrt.models.raw_config import with_default_values
from localrt.models.vision.encoder import (
    Block,
    BlockConfig,
    BlockNames,
    EncodedPicture,
    Linear,
    Norm,
    PreparedPicture,
    Units,
    VisionEncoder,
)
from localrt.models.vision.picture import MOST_PIXELS, Picture
from localrt.models.vision.pixels import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    Scaling,
    activation,
    cut,
    integer,
    number,
    resampling,
    resize,
)
from localrt.models.weights import WeightLoader
from localrt.quant.formats.packed import Floats
from localrt.quant.ops.protocol import Check
from localrt.quant.ops.vision import PatchLayout, VisionActivation, VisionSteps

_EPS = 1e-5  # whatever the config says, as in transformers
_ARCHITECTURES = {
    "llava": "LlavaForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
}
_NAMES = BlockNames(
    norm1="attention_norm",
    norm2="ffn_norm",
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    out="attention.o_proj",
    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PixtralConfig:
    """``merge`` patches in each direction become one row of the decoder with ``out`` columns.

    ``edges`` are the largest height and width of a picture; ``tokens`` are for a row, the end of a
    line and the end of a picture.
    """

    block: BlockConfig
    layers: int
    patch: int
    theta: float
    merge: int
    norm_eps: float | None  # of the norm before merging; None: patches are not merged
    out: int
    activation: VisionActivation  # of the projector
    bias: bool  # of the projector
    edges: tuple[int, int]
    tokens: tuple[str, str, str]


def read_encoder(config: Mapping[str, Any], processor: Mapping[str, Any]) -> PixtralEncoder:
    """See ``registry.read_encoder``."""
    family = str(config["model_type"])
    vision, merging = config["vision_config"], family == "mistral3"
    text = with_default_values(config["text_config"], _ARCHITECTURES[family])
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
    sizes = PixtralConfig(
        block=block,
        layers=integer(vision, "num_hidden_layers", 24),
        patch=integer(vision, "patch_size", 16),
        theta=number(rope, "rope_theta", 10_000.0),
        merge=integer(config, "spatial_merge_size", 2) if merging else 1,
        norm_eps=number(text, "rms_norm_eps", 1e-5) if merging else None,
        out=integer(text, "hidden_size"),
        activation=activation(config, "projector_hidden_act"),
        bias=bool(config.get("multimodal_projector_bias", not merging)),
        edges=_edges(processor.get("size") or {"longest_edge": vision.get("image_size", 1024)}),
        tokens=(
            str(processor.get("image_token", "[IMG]")),
            str(processor.get("image_break_token", "[IMG_BREAK]")),
            str(processor.get("image_end_token", "[IMG_END]")),
        ),
    )
    largest = math.prod(edge + sizes.patch * sizes.merge for edge in sizes.edges)
    if largest > MOST_PIXELS:
        raise ValueError(f"pictures may have {largest} pixels: the most is {MOST_PIXELS}")
    return PixtralEncoder(sizes, processor)


def _edges(size: Mapping[str, object]) -> tuple[int, int]:
    if size.get("longest_edge") is not None:
        return (integer(size, "longest_edge"),) * 2
    return integer(size, "height"), integer(size, "width")


class PixtralEncoder(VisionEncoder):
    """See above. The ``grid`` of a picture is its (rows, columns) of patches."""

    def __init__(self, config: PixtralConfig, processor: Mapping[str, object]) -> None:
        self.config = config
        self.placeholder = config.tokens[0]
        self._scaling = Scaling.read(processor, CLIP_MEAN, CLIP_STD)
        self._resample = resampling(processor, BICUBIC)

    def with_max_rows(self, rows: int) -> PixtralEncoder:
        side = max(math.isqrt(rows), 1) * self.config.patch * self.config.merge
        height, width = (min(edge, side) for edge in self.config.edges)
        encoder = copy(self)
        encoder.config = replace(self.config, edges=(height, width))
        return encoder

    def prepare(self, picture: Picture) -> PreparedPicture:
        config = self.config
        _, line_end, end = config.tokens
        square = config.patch * config.merge
        height, width = picture.height, picture.width
        ratio = max(height / config.edges[0], width / config.edges[1])
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        if not height or not width:
            raise OptionError(
                f"a picture of {picture.width} x {picture.height} pixels is too narrow "
                "for this model"
            )
        lines, columns = -(-height // square), -(-width // square)
        pixels = resize(picture, lines * square, columns * square, self._resample)
        return PreparedPicture(
            patches=self._scaling(cut(pixels, config.patch)),
            grid=(lines * config.merge, columns * config.merge),
            pieces=(*((columns, line_end) * lines)[:-1], end),
        )

    def encode(
        self, picture: PreparedPicture, units: Units, steps: VisionSteps, check: Check | None = None
    ) -> EncodedPicture:
        config = self.config
        embed = units.read(partial(_Embedding.load, config))
        x = embed.norm(embed.patches(picture.patches[:], steps), steps)
        layout = self._layout(*picture.grid)
        x = steps.put(x)
        for layer in range(config.layers):
            if check is not None:
                check()
            prefix = f"vision_tower.transformer.layers.{layer}."
            x = units.read(partial(Block.load, config.block, prefix))(x, layout, steps)
        project = units.read(partial(_Projector.load, config))
        return EncodedPicture(project(steps.get(x), picture.grid, steps))

    def _layout(self, rows: int, columns: int) -> PatchLayout:
        """Rotary positions: even frequencies rotate by the patch's row, odd ones by its column."""
        size = self.config.block.size
        frequencies = self.config.theta ** -(np.arange(0, size, 2, dtype=np.float32) / size)
        row, column = np.divmod(np.arange(rows * columns, dtype=np.float32)[:, None], columns)
        angles = np.hstack([row * frequencies[0::2], column * frequencies[1::2]])
        return PatchLayout(ends=(len(angles),), cos=np.cos(angles), sin=np.sin(angles))


@dataclass(frozen=True, slots=True, eq=False)
class _Embedding:
    patches: Linear
    norm: Norm

    @classmethod
    def load(cls, config: PixtralConfig, weights: WeightLoader) -> _Embedding:
        hidden = config.block.hidden
        shape = (hidden, 3 * config.patch**2)
        return cls(
            Linear.load(weights, shape, "vision_tower.patch_conv", bias=False),
            Norm.load(weights, "vision_tower.ln_pre", hidden, _EPS, rms=True),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Projector:
    merge: int
    norm: Norm | None
    merging: Linear | None
    first: Linear
    second: Linear

    @classmethod
    def load(cls, config: PixtralConfig, weights: WeightLoader) -> _Projector:
        hidden, out, eps, bias = config.block.hidden, config.out, config.norm_eps, config.bias
        prefix, activation = "multi_modal_projector.", config.activation
        norm = merging = None
        if eps is not None:
            norm = Norm.load(weights, f"{prefix}norm", hidden, eps, rms=True)
            merging = Linear.load(
                weights,
                (hidden, hidden * config.merge**2),
                f"{prefix}patch_merger.merging_layer",
                bias=False,
            )
        return cls(
            config.merge,
            norm,
            merging,
            Linear.load(
                weights, (out, hidden), f"{prefix}linear_1", bias=bias, activation=activation
            ),
            Linear.load(weights, (out, out), f"{prefix}linear_2", bias=bias),
        )

    def __call__(self, x: Floats, grid: tuple[int, int], steps: VisionSteps) -> Floats:
        """The decoder's rows from encoded patches (rows * columns, D)."""
        if self.norm is not None and self.merging is not None:
            (rows, columns), side = grid, self.merge
            x = self.norm(x, steps).reshape(rows // side, side, columns // side, side, -1)
            # Order of a merged row: column by column, and in it the square's patches.
            x = x.transpose(0, 2, 4, 1, 3).reshape(len(x) * x.shape[2], -1)
            x = self.merging(x, steps)
        return self.second(self.first(x, steps), steps)
