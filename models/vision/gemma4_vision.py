"""Gemma 4's encoder: Gemma's blocks with learned positions and two-dimensional rotary positions.

A picture keeps its shape and gets as many patches as its budget of rows allows; a square of patches
becomes one row. The decoder's per-layer inputs of these rows are those of padding. In the larger
models, a picture's rows attend to one another in layers with a window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from localrt.models.raw_config import with_default_values
from localrt.models.vision.encoder import (
    Block,
    BlockConfig,
    BlockNames,
    EncodedPicture,
    Linear,
    PreparedPicture,
    Units,
    VisionEncoder,
)
from localrt.models.vision.picture import MOST_PIXELS, Picture
from localrt.models.vision.pixels import (
    BICUBIC,
    Scaling,
    activation,
    integer,
    number,
    resampling,
    resize,
)
from localrt.models.weights import WeightLoader
from localrt.quant.formats.packed import Floats
from localrt.quant.ops.protocol import Check
from localrt.quant.ops.vision import PatchLayout, VisionSteps

_BEGIN, _ROW, _END = "<|image>", "<|image|>", "<image|>"
_NAMES = BlockNames(
    norm1="input_layernorm",
    norm2="pre_feedforward_layernorm",
    qkv=("self_attn.q_proj.linear", "self_attn.k_proj.linear", "self_attn.v_proj.linear"),
    out="self_attn.o_proj.linear",
    up=("mlp.gate_proj.linear", "mlp.up_proj.linear"),
    down="mlp.down_proj.linear",
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
    post_norm1="post_attention_layernorm",
    post_norm2="post_feedforward_layernorm",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4VisionConfig:
    """``pool`` patches in each direction become one row of the decoder with ``out`` columns; a
    picture has at most ``rows`` of them. Each table has ``positions`` rows.
    """

    block: BlockConfig
    layers: int
    patch: int
    positions: int
    theta: float
    pool: int
    rows: int
    standardize: bool
    out: int

    @property
    def longest(self) -> int:
        """The largest number of patches in one direction."""
        return self.rows * self.pool


def read_encoder(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Gemma4Encoder:
    """See ``registry.read_encoder``."""
    vision = config["vision_config"]
    text = with_default_values(config["text_config"], "Gemma4ForConditionalGeneration")
    rope = vision.get("rope_parameters") or {}
    if (kind := rope.get("rope_type", "axial")) not in ("axial", "default"):
        raise ValueError(f"rope_type must be 'axial', is {kind!r:.60}")
    heads, size = integer(vision, "num_attention_heads", 12), integer(vision, "head_dim", 64)
    if (groups := integer(vision, "num_key_value_heads", heads)) != heads:
        raise ValueError(f"num_key_value_heads must be {heads}, is {groups}")
    if size % 4:
        raise ValueError(f"head_dim must be a multiple of 4, is {size}")
    if text.get("pad_token_id"):
        raise ValueError(f"pad_token_id must be 0, is {text['pad_token_id']!r:.60}")
    block = BlockConfig(
        hidden=integer(vision, "hidden_size", 768),
        inner=integer(vision, "intermediate_size", 3072),
        heads=heads,
        eps=number(vision, "rms_norm_eps", 1e-6),
        activation=activation(vision, "hidden_activation", "gelu_pytorch_tanh"),
        names=_NAMES,
        rms=True,
        bias=False,
        mlp_bias=False,
        head_dim=size,
        scale=1.0,
        value_norm=True,
        axes=2,
        clipped=bool(vision.get("use_clipped_linears")),
    )
    sizes = Gemma4VisionConfig(
        block=block,
        layers=integer(vision, "num_hidden_layers", 16),
        patch=integer(vision, "patch_size", 16),
        positions=integer(vision, "position_embedding_size", 10_240),
        theta=number(rope, "rope_theta", 100.0),
        pool=integer(vision, "pooling_kernel_size", 3),
        rows=integer(processor, "max_soft_tokens", 280),
        standardize=bool(vision.get("standardize")),
        out=integer(text, "hidden_size"),
    )
    if sizes.longest > sizes.positions:
        raise ValueError(
            f"position_embedding_size must be at least {sizes.longest} for {sizes.rows} rows of a "
            f"picture, is {sizes.positions}"
        )
    largest = sizes.rows * (sizes.pool * sizes.patch) ** 2
    if largest > MOST_PIXELS:
        raise ValueError(f"pictures may have {largest} pixels: the most is {MOST_PIXELS}")
    return Gemma4Encoder(sizes, processor, text.get("use_bidirectional_attention") == "vision")


class Gemma4Encoder(VisionEncoder):
    """See above. The ``grid`` of a picture is its (rows, columns) of patches."""

    placeholder = _ROW
    row_token = "<pad>"  # a row has the per-layer inputs of padding
    full_layers_causal = True

    def __init__(
        self, config: Gemma4VisionConfig, processor: Mapping[str, object], bidirectional: bool
    ) -> None:
        self.config, self.bidirectional = config, bidirectional
        # Most processors of other models normalize by default; this one does not.
        self._scaling = Scaling.read({"do_normalize": False, **processor})
        self._resample = resampling(processor, BICUBIC)

    def prepare(self, picture: Picture) -> PreparedPicture:
        patch, pool = self.config.patch, self.config.pool
        lines, columns = self._squares(picture.height, picture.width)
        rows, across = lines * pool, columns * pool
        pixels = resize(picture, rows * patch, across * patch, self._resample)
        patches = pixels.reshape(rows, patch, across, patch, 3).swapaxes(1, 2)
        return PreparedPicture(
            patches=self._scaling(patches.reshape(rows * across, -1), by_colour=False),
            grid=(rows, across),
            pieces=(_BEGIN, lines * columns, _END),
        )

    def _squares(self, height: int, width: int) -> tuple[int, int]:
        """The largest grid (rows, columns) of the picture's shape within the budget."""
        config = self.config
        factor = math.sqrt(config.rows * (config.pool * config.patch) ** 2 / (height * width))
        side = config.pool * config.patch
        lines, columns = math.floor(factor * height / side), math.floor(factor * width / side)
        if not lines:
            return 1, min(width // height, config.rows)
        if not columns:
            return min(height // width, config.rows), 1
        return lines, columns

    def encode(
        self, picture: PreparedPicture, units: Units, steps: VisionSteps, check: Check | None = None
    ) -> EncodedPicture:
        config = self.config
        embed = units.read(partial(_Embedding.load, config))
        rows, columns = picture.grid
        row, column = np.divmod(np.arange(rows * columns), columns)
        x = embed.patches(2 * picture.patches[:] - 1, steps)
        x += embed.columns[column] + embed.rows[row]
        layout = self._layout(row, column)
        x = steps.put(x)
        for layer in range(config.layers):
            if check is not None:
                check()
            prefix = f"vision_tower.encoder.layers.{layer}."
            x = units.read(partial(Block.load, config.block, prefix))(x, layout, steps)
        project = units.read(partial(_Projector.load, config))
        return EncodedPicture(project(steps.get(x), picture.grid, steps))

    def _layout(self, row: Any, column: Any) -> PatchLayout:
        """Rotary positions: the column rotates the first half of a head, the row the second."""
        half = self.config.block.size // 2
        frequencies = self.config.theta ** -(np.arange(0, half, 2, dtype=np.float32) / half)
        angles = np.hstack(
            [each[:, None] * frequencies for each in (column, row)], dtype=np.float32
        )
        return PatchLayout(ends=(len(angles),), cos=np.cos(angles), sin=np.sin(angles))


@dataclass(frozen=True, slots=True, eq=False)
class _Embedding:
    patches: Linear
    columns: Floats  # (longest, D)
    rows: Floats

    @classmethod
    def load(cls, config: Gemma4VisionConfig, weights: WeightLoader) -> _Embedding:
        prefix, hidden = "vision_tower.patch_embedder.", config.block.hidden
        shape = (hidden, 3 * config.patch**2)
        # The table of columns, then that of rows; only the part that pictures reach is read.
        tables = (2 * config.positions, hidden), f"{prefix}position_embedding_table"
        columns, rows = (
            weights.array(*tables, first, first + config.longest) for first in (0, config.positions)
        )
        return cls(Linear.load(weights, shape, f"{prefix}input_proj", bias=False), columns, rows)


@dataclass(frozen=True, slots=True, eq=False)
class _Projector:
    config: Gemma4VisionConfig
    mean: Floats | None
    factor: Floats | None
    out: Linear

    @classmethod
    def load(cls, config: Gemma4VisionConfig, weights: WeightLoader) -> _Projector:
        hidden = config.block.hidden
        mean = factor = None
        if config.standardize:
            mean = weights.array((hidden,), "vision_tower.std_bias")
            factor = weights.array((hidden,), "vision_tower.std_scale")
        name = "embed_vision.embedding_projection"
        out = Linear.load(weights, (config.out, hidden), name, bias=False)
        return cls(config, mean, factor, out)

    def __call__(self, x: Floats, grid: tuple[int, int], steps: VisionSteps) -> Floats:
        """The decoder's rows from encoded patches (rows * columns, D)."""
        (rows, columns), pool = grid, self.config.pool
        x = x.reshape(rows // pool, pool, columns // pool, pool, -1).mean((1, 3))
        x = x.reshape(-1, x.shape[-1]) * np.float32(math.sqrt(x.shape[-1]))
        if self.mean is not None and self.factor is not None:
            x = (x - self.mean) * self.factor
        return self.out(steps.rms_norm(x, None, self.config.block.eps), steps)
