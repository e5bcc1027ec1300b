"""Gemma 4's tower: Gemma's blocks with tables of positions and a rotation by rows and columns.

A picture keeps its shape and gets as many patches as its budget of rows allows; squares of them
become one row. In the decoder, these rows count as padding where it looks up per-layer inputs. The
larger models let them see one another, in layers that have a window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from localrt.models.raw_config import with_default_values
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
from localrt.models.vision.tower import (
    Block,
    BlockConfig,
    BlockNames,
    Linear,
    Prepared,
    Seen,
    Tower,
    Units,
)
from localrt.models.weights import WeightLoader
from localrt.quant.formats.packed import Floats
from localrt.quant.ops.protocol import Check
from localrt.quant.ops.vision import Places, VisionSteps

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
    """``pool`` patches in each direction become one row of the decoder, ``out`` wide; a picture has
    at most ``rows`` of them. ``positions`` are those of each table.
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
        """The most patches in one direction."""
        return self.rows * self.pool


def read_tower(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Gemma4Tower:
    """See ``registry.read_tower``."""
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
    own = Gemma4VisionConfig(
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
    if own.longest > own.positions:
        raise ValueError(
            f"position_embedding_size must be at least {own.longest} for {own.rows} rows of a "
            f"picture, is {own.positions}"
        )
    largest = own.rows * (own.pool * own.patch) ** 2
    if largest > MOST_PIXELS:
        raise ValueError(f"pictures may have {largest} pixels: the most is {MOST_PIXELS}")
    return Gemma4Tower(own, processor, text.get("use_bidirectional_attention") == "vision")


class Gemma4Tower(Tower):
    """See above. The ``grid`` of a ``Prepared`` picture are its rows and columns of patches."""

    placeholder = _ROW
    row_token = "<pad>"  # whose per-layer inputs a row gets
    full_layers_causal = True

    def __init__(
        self, config: Gemma4VisionConfig, processor: Mapping[str, Any], both_ways: bool
    ) -> None:
        self.config, self.both_ways = config, both_ways
        # Most processors of other models normalize by default; this one does not.
        self._scaling = Scaling.read({"do_normalize": False, **processor})
        self._resample = resampling(processor, BICUBIC)

    def prepare(self, picture: Picture) -> Prepared:
        patch, pool = self.config.patch, self.config.pool
        lines, columns = self._squares(picture.height, picture.width)
        rows, across = lines * pool, columns * pool
        pixels = resize(picture, rows * patch, across * patch, self._resample)
        patches = pixels.reshape(rows, patch, across, patch, 3).swapaxes(1, 2)
        return Prepared(
            patches=self._scaling(patches.reshape(rows * across, -1), by_colour=False),
            grid=(rows, across),
            pieces=(_BEGIN, lines * columns, _END),
        )

    def _squares(self, height: int, width: int) -> tuple[int, int]:
        """Lines and columns of the largest grid of the picture's shape within the budget."""
        config = self.config
        factor = math.sqrt(config.rows * (config.pool * config.patch) ** 2 / (height * width))
        side = config.pool * config.patch
        lines, columns = math.floor(factor * height / side), math.floor(factor * width / side)
        if not lines:
            return 1, min(width // height, config.rows)
        if not columns:
            return min(height // width, config.rows), 1
        return lines, columns

    def see(
        self, prepared: Prepared, units: Units, steps: VisionSteps, check: Check | None = None
    ) -> Seen:
        config = self.config
        embed = units.read(partial(_Embedding.load, config))
        rows, columns = prepared.grid
        row, column = np.divmod(np.arange(rows * columns), columns)
        x = embed.patches(2 * prepared.patches[:] - 1, steps)
        x += embed.columns[column] + embed.rows[row]
        places = self._places(row, column)
        x = steps.put(x)
        for layer in range(config.layers):
            if check is not None:
                check()
            prefix = f"vision_tower.encoder.layers.{layer}."
            x = units.read(partial(Block.load, config.block, prefix))(x, places, steps)
        project = units.read(partial(_Projector.load, config))
        return Seen(project(steps.get(x), prepared.grid, steps))

    def _places(self, row: Any, column: Any) -> Places:
        """Columns turn one half of a head, rows the other."""
        half = self.config.block.size // 2
        frequencies = self.config.theta ** -(np.arange(0, half, 2, dtype=np.float32) / half)
        angles = np.hstack(
            [each[:, None] * frequencies for each in (column, row)], dtype=np.float32
        )
        return Places(ends=(len(angles),), cos=np.cos(angles), sin=np.sin(angles))


@dataclass(frozen=True, slots=True, eq=False)
class _Embedding:
    patches: Linear
    columns: Floats  # (most, D)
    rows: Floats

    @classmethod
    def load(cls, config: Gemma4VisionConfig, weights: WeightLoader) -> _Embedding:
        prefix, hidden = "vision_tower.patch_embedder.", config.block.hidden
        shape = (hidden, 3 * config.patch**2)
        # The table of columns, then that of rows; pictures have far fewer than published.
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
        """The decoder's rows for those of patches (rows * columns, D)."""
        (rows, columns), pool = grid, self.config.pool
        x = x.reshape(rows // pool, pool, columns // pool, pool, -1).mean((1, 3))
        x = x.reshape(-1, x.shape[-1]) * np.float32(math.sqrt(x.shape[-1]))
        if self.mean is not None and self.factor is not None:
            x = (x - self.mean) * self.factor
        return self.out(steps.rms_norm(x, None, self.config.block.eps), steps)
