"""The vision encoders of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5.

A picture keeps its aspect ratio: it is resized to whole squares of a few patches. A square's
patches are adjacent in all arrays and become one row of the decoder. Rotary positions are
two-dimensional, in the encoder and in the decoder (M-RoPE). The encoders also take videos, so a
patch spans several frames; a picture repeats its only frame.

Shapes below: N patches, C colours, D columns; a picture of (h, w) patches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from localrt.common.errors import OptionError
from localrt.models.encoders import BlockConfig, BlockNames, EncoderBlock, Linear, Norm, Units
from localrt.models.vision.encoder import (
    EncodedPicture,
    PreparedPicture,
    VisionEncoder,
    aligned,
    interpolated,
)
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
    resize,
)
from localrt.models.weights import WeightLoader
from localrt.quant.formats.packed import Floats
from localrt.quant.ops.mathematics import power, turns
from localrt.quant.ops.protocol import Check
from localrt.quant.ops.vision import PatchLayout, VisionSteps

Number = TypeVar("Number", bound=np.generic)
Step = Callable[[Any, VisionSteps], Any]  # of rows
_EPS = 1e-6  # for all norms; not in configs
_COLOURS = 3
_MOST_ASPECT = 200
_MOST_FRAMES = 16
_BLOCK = {"norm1": "norm1", "norm2": "norm2", "out": "attn.proj"}
_QKV = ("attn.qkv",)
_UP = ("mlp.gate_proj", "mlp.up_proj")
GATED = BlockNames(**_BLOCK, qkv=_QKV, up=_UP, down="mlp.down_proj")
PLAIN = BlockNames(**_BLOCK, qkv=_QKV, up=("mlp.fc1",), down="mlp.fc2")


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenConfig:
    """Sizes of an encoder. Blocks attend within windows of ``window`` by ``window`` squares, those
    in ``full`` to the whole picture; with ``window`` 0 all blocks do. Positions are learned for
    ``side`` by ``side`` patches (0: none). Outputs of the blocks ``deep`` also become rows of the
    decoder. ``pixels`` are the least and the most of a picture.
    """

    blocks: BlockConfig
    depth: int
    out: int  # the decoder's hidden size
    patch: int
    frames: int
    merge: int  # patches per row of the decoder, in each direction
    theta: float
    pixels: tuple[int, int]
    scaling: Scaling
    window: int = 0
    full: frozenset[int] = frozenset()
    side: int = 0
    deep: tuple[int, ...] = ()
    inner: int = 0  # of a merger's MLP

    def __post_init__(self) -> None:
        blocks = self.blocks
        if blocks.hidden % (4 * blocks.heads):
            raise ValueError(
                f"the vision tower's hidden size ({blocks.hidden}) must be a multiple of 4 times "
                f"its heads ({blocks.heads})"
            )
        if not list(self.deep) == sorted(n for n in set(self.deep) if 0 <= n < self.depth):
            raise ValueError(
                f"deepstack_visual_indexes must ascend below depth ({self.depth}), are "
                f"{list(self.deep)}"
            )
        side = self.patch * self.merge
        if not side**2 <= self.pixels[1] <= MOST_PIXELS or self.pixels[0] > self.pixels[1]:
            raise ValueError(
                f"a picture of {side} x {side} pixels and more must have {self.pixels[0]} to "
                f"{self.pixels[1]} pixels, and {MOST_PIXELS} at most"
            )
        if self.frames > _MOST_FRAMES:
            raise ValueError(f"temporal_patch_size must be at most {_MOST_FRAMES}")

    @property
    def plain(self) -> bool:
        """Whether tensors have Qwen2-VL's names."""
        return not self.side

    @property
    def square(self) -> int:
        """Patches per row of the decoder."""
        return self.merge**2


def read_encoder(config: Mapping[str, Any], processor: Mapping[str, object]) -> VisionEncoder:
    """See ``registry.read_encoder``."""
    return QwenEncoder(_read_config(config, processor))


def _read_config(config: Mapping[str, Any], processor: Mapping[str, object]) -> QwenConfig:
    vision, kind = config["vision_config"], config["model_type"]
    if kind == "qwen2_vl":
        hidden = integer(vision, "embed_dim", 1280)
        inner = int(number(vision, "mlp_ratio", 4) * hidden)
        blocks = qwen_blocks(vision, hidden, inner, "quick_gelu", PLAIN)
        out = integer(vision, "hidden_size", 3584)
        return qwen_config(config, processor, blocks, out, depth=32, patch=14)
    if kind == "qwen2_5_vl":
        hidden = integer(vision, "hidden_size", 3584)
        inner = integer(vision, "intermediate_size", 3420)
        blocks = replace(qwen_blocks(vision, hidden, inner, "silu", GATED), rms=True)
        out = integer(vision, "out_hidden_size", 3584)
        full = frozenset(_indexes(vision, "fullatt_block_indexes", (7, 15, 23, 31)))
        square = integer(vision, "patch_size", 14) * integer(vision, "spatial_merge_size", 2)
        window = max(1, integer(vision, "window_size", 112) // square)
        return qwen_config(
            config, processor, blocks, out, depth=32, patch=14, window=window, full=full
        )
    hidden = integer(vision, "hidden_size", 1152)
    inner = integer(vision, "intermediate_size", 4304)
    names = BlockNames(**_BLOCK, qkv=_QKV, up=("mlp.linear_fc1",), down="mlp.linear_fc2")
    blocks = qwen_blocks(vision, hidden, inner, "gelu_pytorch_tanh", names)
    out = integer(vision, "out_hidden_size", 3584)
    positions = integer(vision, "num_position_embeddings", 2304)
    side = math.isqrt(positions)
    if side**2 != positions:
        raise ValueError(f"num_position_embeddings must be a square, is {positions}")
    deep: tuple[int, ...] = ()
    if kind.startswith("qwen3_vl"):
        deep = _indexes(vision, "deepstack_visual_indexes", (8, 16, 24))
    return qwen_config(
        config,
        processor,
        blocks,
        out,
        depth=27,
        patch=16,
        pixels=(256**2, 4096**2),
        scaling=Scaling.read(processor),
        side=side,
        deep=deep,
    )


def qwen_blocks(
    vision: Mapping[str, object], hidden: int, inner: int, default: str, names: BlockNames
) -> BlockConfig:
    """The config of blocks with the activation ``default``."""
    return BlockConfig(
        hidden=hidden,
        inner=inner,
        heads=integer(vision, "num_heads", 16),
        eps=_EPS,
        activation=activation(vision, "hidden_act", default),
        names=names,
    )


def qwen_config(
    config: Mapping[str, Any],
    processor: Mapping[str, Any],
    blocks: BlockConfig,
    out: int,
    *,
    depth: int,
    patch: int,
    pixels: tuple[int, int] = (56**2, 1280 * 28**2),
    scaling: Scaling | None = None,
    **options: Any,
) -> QwenConfig:
    """An encoder's config; numbers are the publisher's defaults."""
    vision = config["vision_config"]
    columns = config["text_config"]["hidden_size"]
    if out != columns:
        raise ValueError(f"the tower's rows have {out} columns, the decoder's {columns}")
    colours = vision.get("in_channels", vision.get("in_chans", _COLOURS))
    if colours != _COLOURS:
        raise ValueError(f"a picture has {_COLOURS} colours, the vision tower has {colours!r:.60}")
    size = processor.get("size") or {}
    least = size.get("shortest_edge", size.get("min_pixels", pixels[0]))
    most = size.get("longest_edge", size.get("max_pixels", pixels[1]))
    return QwenConfig(
        blocks=blocks,
        depth=integer(vision, "depth", depth),
        out=out,
        patch=integer(vision, "patch_size", patch),
        frames=integer(vision, "temporal_patch_size", 2),
        merge=integer(vision, "spatial_merge_size", 2),
        theta=number(vision.get("rope_parameters") or {}, "rope_theta", 10_000),
        pixels=(
            int(number(processor, "min_pixels", least)),
            int(number(processor, "max_pixels", most)),
        ),
        scaling=scaling or Scaling.read(processor, CLIP_MEAN, CLIP_STD),
        **options,
    )


class QwenEncoder(VisionEncoder):
    """See ``VisionEncoder``. A picture's ``grid`` is (h, w). ``patches``, ``positions`` and
    ``prefix`` are names of tensors and of blocks.
    """

    patches = "visual.patch_embed.proj"
    positions = "visual.pos_embed"
    prefix = "visual.blocks."
    weights = staticmethod(aligned)  # of interpolated positions
    placeholder = "<|image_pad|>"
    picture_text = f"<|vision_start|>{placeholder}<|vision_end|>"

    def __init__(self, config: QwenConfig) -> None:
        self.config = config
        self.deep_layers = len(config.deep)

    def with_max_rows(self, rows: int) -> QwenEncoder:
        least, most = self.config.pixels
        most = min(most, max(rows, 1) * (self.config.patch * self.config.merge) ** 2)
        return type(self)(replace(self.config, pixels=(min(least, most), most)))

    def prepare(self, picture: Picture) -> PreparedPicture:
        """``patches`` (N, C * patch * patch) hold one frame."""
        config, patch, merge = self.config, self.config.patch, self.config.merge
        height, width = self._size(picture.height, picture.width)
        pixels = resize(picture, height, width, BICUBIC)
        h, w = height // patch, width // patch
        patches = config.scaling(self._in_squares(cut(pixels, patch).reshape(h, w, -1)))
        rows, columns = h // merge, w // merge
        offsets = np.zeros((rows * columns, 3), np.int64)
        offsets[:, 1:] = np.indices((rows, columns)).reshape(2, -1).T
        return PreparedPicture(
            patches=patches,
            grid=(h, w),
            pieces=(rows * columns,),
            offsets=offsets,
            advance=max(rows, columns),
        )

    def _size(self, height: int, width: int) -> tuple[int, int]:
        """The nearest size in whole squares, within the encoder's range of pixels."""
        if max(height, width) > _MOST_ASPECT * min(height, width):
            raise OptionError(
                f"the picture has {width} x {height} pixels: the model sees none that is more than "
                f"{_MOST_ASPECT} times as long as wide"
            )
        side, (least, most) = self.config.patch * self.config.merge, self.config.pixels
        sides = [round(each / side) * side for each in (height, width)]
        pixels = sides[0] * sides[1]
        if pixels > most:
            shrink = math.sqrt(height * width / most)
            sides = [max(1, int(each / shrink / side)) * side for each in (height, width)]
        elif pixels < least:
            grow = math.sqrt(least / (height * width))
            sides = [math.ceil(each * grow / side) * side for each in (height, width)]
        return sides[0], sides[1]

    def block_work(self, block: str, width: int, picture: PreparedPicture) -> tuple[int, float]:
        config, patches = self.config, len(picture.patches)
        if not config.window:
            return patches, 2.0 * width * patches
        full, inside = len(config.full), min(patches, config.square * config.window**2)
        attended = (full * patches + (config.depth - full) * inside) / config.depth
        return patches, 2.0 * width * attended

    def encode(
        self, picture: PreparedPicture, units: Units, steps: VisionSteps, check: Check | None = None
    ) -> EncodedPicture:
        config, (h, w) = self.config, picture.grid
        order, ends = self._windows(h // config.merge, w // config.merge)
        rows = (config.square * order[:, None] + np.arange(config.square)).reshape(-1)
        cos, sin = (values[rows] for values in self._rotations(h, w))
        x = self._with_frames(picture.patches[rows])
        x = units.read(self._load_patches)(x, steps)
        if config.side:
            x += self._positions(units.read(self._load_positions), h, w)[rows]
        windows = PatchLayout(ends=ends, cos=cos, sin=sin)
        whole = PatchLayout(ends=[len(x)], cos=cos, sin=sin)
        x, deep = steps.put(x), []
        for n in range(config.depth):
            if check is not None:
                check()
            layout = windows if config.window and n not in config.full else whole
            x = units.read(partial(self._load_block, n))(x, layout, steps)
            if n in config.deep:
                name = f"deepstack_merger_list.{config.deep.index(n)}"
                deep.append(self._merged(name, x, units, steps))
        merged = np.empty((len(order), config.out), np.float32)
        merged[order] = self._merged("merger", x, units, steps)
        return EncodedPicture(merged, tuple(deep))

    def _in_squares(self, values: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """(h, w, ...) as (N, ...), square by square."""
        (h, w), merge = values.shape[:2], self.config.merge
        squares = values.reshape(h // merge, merge, w // merge, merge, *values.shape[2:])
        return squares.swapaxes(1, 2).reshape(h * w, *values.shape[2:])

    def _with_frames(self, patches: Floats) -> Floats:
        """Repeat the only frame: (N, C * frames * patch * patch)."""
        one = patches.reshape(len(patches), _COLOURS, 1, -1)
        return np.repeat(one, self.config.frames, axis=2).reshape(len(patches), -1)

    def _windows(self, rows: int, columns: int) -> tuple[npt.NDArray[np.intp], Sequence[int]]:
        """The squares in order of windows, and the index of the patch at which each window ends."""
        window = self.config.window or max(rows, columns)
        row, column = np.indices((rows, columns)).reshape(2, -1)
        number = row // window * columns + column // window
        order = np.argsort(number, kind="stable")
        counts = np.unique(number, return_counts=True)[1]
        return order, (self.config.square * counts.cumsum()).tolist()

    def _rotations(self, h: int, w: int) -> tuple[Floats, Floats]:
        """Cosines and sines (N, E / 2): the first half rotates by a patch's row, the rest by its
        column.
        """
        quarter = self.config.blocks.size // 4
        exponents = -np.arange(quarter) / quarter
        frequencies = power(self.config.theta, exponents).astype(np.float32)
        patches = self._in_squares(np.indices((h, w)).transpose(1, 2, 0)).astype(np.float32)
        angles = (patches[:, :, None] * frequencies).reshape(h * w, -1)
        return turns(angles)

    def _positions(self, table: Floats, h: int, w: int) -> Floats:
        """The learned positions, interpolated to the picture's grid: (N, D)."""
        return self._in_squares(interpolated(table, h, w, self.weights))

    def _merged(self, name: str, x: Floats, units: Units, steps: VisionSteps) -> Floats:
        merger = units.read(partial(self._load_merger, name))
        return steps.get(merger(x, steps))

    def _load_patches(self, weights: WeightLoader) -> Step:
        config = self.config
        shape = config.blocks.hidden, _COLOURS * config.frames * config.patch**2
        biased = weights.has(f"{self.patches}.bias")
        return Linear.load(weights, shape, self.patches, bias=biased)

    def _load_positions(self, weights: WeightLoader) -> Floats:
        side, hidden = self.config.side, self.config.blocks.hidden
        return weights.array((side**2, hidden), f"{self.positions}.weight").reshape(side, side, -1)

    def _load_block(self, n: int, weights: WeightLoader) -> EncoderBlock:
        return EncoderBlock.load(self.config.blocks, f"{self.prefix}{n}.", weights)

    def _load_merger(self, name: str, weights: WeightLoader) -> Step:
        config, prefix, hidden = self.config, f"visual.{name}.", self.config.blocks.hidden
        wide = config.square * hidden
        norm, first, second = ("norm", "linear_fc1", "linear_fc2")
        if config.plain:
            norm, first, second = ("ln_q", "mlp.0", "mlp.2")
        joined = name != "merger"
        return Merger(
            Norm.load(
                weights, prefix + norm, wide if joined else hidden, _EPS, rms=config.blocks.rms
            ),
            Linear.load(weights, (wide, wide), prefix + first, activation="gelu"),
            Linear.load(weights, (config.out, wide), prefix + second),
            joined,
            wide,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Merger:
    """Merges a square of patches into one row; the norm is over each patch, or if ``joined`` over
    all ``wide`` columns.
    """

    norm: Norm
    first: Linear
    second: Linear
    joined: bool
    wide: int

    def __call__(self, x: Floats, steps: VisionSteps) -> Floats:
        x = self.norm(x.reshape(-1, self.wide) if self.joined else x, steps)
        return self.second(self.first(x.reshape(-1, self.wide), steps), steps)


def _indexes(values: Mapping[str, object], key: str, default: tuple[int, ...]) -> tuple[int, ...]:
    value = values.get(key, default)
    if not isinstance(value, list | tuple) or any(type(each) is not int for each in value):
        raise ValueError(f"{key} must be a list of integers, is {value!r:.60}")
    return tuple(value)
