"""Gemma 4's vision encoders.

Most models have Gemma's blocks with learned positions and two-dimensional rotary positions. A
picture keeps its aspect ratio and gets as many patches as its budget of rows allows; a square of
patches becomes one row. The decoder's per-layer inputs of these rows are those of padding. In the
larger models, a picture's rows attend to one another in layers with a window.

The 12B (``gemma4_unified``) has no encoder: patches are normed, projected and get positions. These
rows see one another in all layers of the decoder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from localrt.models.encoders import BlockConfig, BlockNames, Linear, Norm, Units, run_blocks
from localrt.models.vision.encoder import EncodedPicture, PreparedPicture, VisionEncoder
from localrt.models.vision.picture import (
    BICUBIC,
    MOST_PIXELS,
    Picture,
    Scaling,
    activation,
    integer,
    number,
    resampling,
    resize,
)
from localrt.models.weights import WeightLoader
from localrt.quant.formats.packed import Floats
from localrt.quant.ops.mathematics import power, turns
from localrt.quant.ops.protocol import Check
from localrt.quant.ops.vision import PatchLayout, VisionSteps

_BEGIN, _ROW, _END = "<|image>", "<|image|>", "<image|>"
_NAMES = BlockNames(
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


def read_encoder(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Gemma4Pictures:
    """See ``registry.read_encoder``."""
    read = _read_unified if config.get("model_type") == "gemma4_unified" else _read_encoder
    return read(config, processor)


def _read_encoder(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Gemma4Encoder:
    vision, text = config["vision_config"], config["text_config"]
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
    encoder = Gemma4Encoder(
        block=block,
        layers=integer(vision, "num_hidden_layers", 16),
        positions=integer(vision, "position_embedding_size", 10_240),
        theta=number(rope, "rope_theta", 100.0),
        standardize=bool(vision.get("standardize")),
        patch=integer(vision, "patch_size", 16),
        pool=integer(vision, "pooling_kernel_size", 3),
        **read_pictures(text, processor),
    )
    if encoder.longest > encoder.positions:
        raise ValueError(
            f"position_embedding_size must be at least {encoder.longest} for {encoder.rows} rows "
            f"of a picture, is {encoder.positions}"
        )
    return encoder


def read_pictures(text: Mapping[str, Any], processor: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``Gemma4Pictures``: those that are not in the config's ``vision_config``."""
    return {
        "rows": integer(processor, "max_soft_tokens", 280),
        "out": integer(text, "hidden_size"),
        "bidirectional": text.get("use_bidirectional_attention") == "vision",
        # Most processors of other models normalize by default; this one does not.
        "scaling": Scaling.read({"do_normalize": False, **processor}),
        "resample": resampling(processor, BICUBIC),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Pictures(VisionEncoder):
    """How all models of Gemma 4 see pictures. A picture's ``grid`` is its (rows, columns) of
    patches of ``patch`` pixels a side.

    ``pool`` patches in each direction become one row of the decoder with ``out`` columns; a picture
    has at most ``rows`` of them.
    """

    patch: int
    pool: int
    rows: int
    out: int
    bidirectional: bool
    scaling: Scaling
    resample: int

    placeholder = _ROW

    def __post_init__(self) -> None:
        largest = self.rows * (self.pool * self.patch) ** 2
        if largest > MOST_PIXELS:
            raise ValueError(f"pictures may have {largest} pixels: the most is {MOST_PIXELS}")

    def prepare(self, picture: Picture) -> PreparedPicture:
        patch, pool = self.patch, self.pool
        lines, columns = self._squares(picture.height, picture.width)
        rows, across = lines * pool, columns * pool
        pixels = resize(picture, rows * patch, across * patch, self.resample)
        patches = pixels.reshape(rows, patch, across, patch, 3).swapaxes(1, 2)
        return PreparedPicture(
            patches=self.scaling(patches.reshape(rows * across, -1), by_colour=False),
            grid=(rows, across),
            pieces=(_BEGIN, lines * columns, _END),
        )

    def _squares(self, height: int, width: int) -> tuple[int, int]:
        """The largest grid (rows, columns) with the picture's aspect ratio within the budget."""
        side = self.pool * self.patch
        factor = math.sqrt(self.rows * side**2 / (height * width))
        lines, columns = math.floor(factor * height / side), math.floor(factor * width / side)
        if not lines:
            return 1, min(width // height, self.rows)
        if not columns:
            return min(height // width, self.rows), 1
        return lines, columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Encoder(Gemma4Pictures):
    """See the module. Each table has ``positions`` rows."""

    block: BlockConfig
    layers: int
    positions: int
    theta: float
    standardize: bool

    row_token = "<pad>"  # a row has the per-layer inputs of padding
    full_layers_causal = True

    @property
    def longest(self) -> int:
        """The largest number of patches in one direction."""
        return self.rows * self.pool

    def encode(
        self, picture: PreparedPicture, units: Units, steps: VisionSteps, check: Check | None = None
    ) -> EncodedPicture:
        embed, column_table, row_table = units.read(self._embedding)
        (rows, columns), pool = picture.grid, self.pool
        row, column = np.divmod(np.arange(rows * columns), columns)
        x = embed(2 * picture.patches[:] - 1, steps)
        x += column_table[column] + row_table[row]
        prefix, layout = "vision_tower.encoder.layers.", self._layout(row, column)
        x = run_blocks(self.block, prefix, self.layers, x, layout, units, steps, check)
        x = x.reshape(rows // pool, pool, columns // pool, pool, -1).mean((1, 3))
        x = x.reshape(-1, x.shape[-1]) * np.float32(math.sqrt(x.shape[-1]))
        if self.standardize:
            mean, factor = units.read(self._standard)
            x = (x - mean) * factor
        out = units.read(self._projector)
        return EncodedPicture(out(steps.rms_norm(x, None, self.block.eps), steps))

    def _layout(self, row: Any, column: Any) -> PatchLayout:
        """Rotary positions: a head's first half is rotated by the column, the second by the row."""
        half = self.block.size // 2
        frequencies = power(self.theta, -np.arange(0, half, 2) / half).astype(np.float32)
        angles = np.hstack(
            [each[:, None] * frequencies for each in (column, row)], dtype=np.float32
        )
        cos, sin = turns(angles)
        return PatchLayout(ends=(len(angles),), cos=cos, sin=sin)

    def _embedding(self, weights: WeightLoader) -> tuple[Linear, Floats, Floats]:
        """The matrix of patches, and the tables of columns and of rows, (longest, D) each."""
        prefix, hidden = "vision_tower.patch_embedder.", self.block.hidden
        shape = (hidden, 3 * self.patch**2)
        # One table holds both; only the part that pictures reach is read.
        table = (2 * self.positions, hidden), f"{prefix}position_embedding_table"
        columns, rows = (
            weights.array(*table, first, first + self.longest) for first in (0, self.positions)
        )
        return Linear.load(weights, shape, f"{prefix}input_proj", bias=False), columns, rows

    def _standard(self, weights: WeightLoader) -> tuple[Floats, Floats]:
        shape = (self.block.hidden,)
        mean, factor = (weights.array(shape, f"vision_tower.std_{n}") for n in ("bias", "scale"))
        return mean, factor

    def _projector(self, weights: WeightLoader) -> Linear:
        name = "embed_vision.embedding_projection"
        return Linear.load(weights, (self.out, self.block.hidden), name, bias=False)


_LAYER_NORM_EPS = 1e-5  # torch's default


def _read_unified(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Gemma4Unified:
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
