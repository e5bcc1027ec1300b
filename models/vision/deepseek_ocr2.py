"""DeepSeek-OCR 2's encoder: SAM's on square tiles of a picture and on all of it, and behind it a
text model whose learned queries become the decoder's rows.

SAM's blocks attend within windows, or to a whole view; convolutions make a row of 4 by 4 patches.
There are as many queries as rows of a view: they see these, and the queries before them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from localrt.models.encoders import block as encoders
from localrt.models.encoders.block import Block, BlockConfig, BlockNames, Linear, Norm, Units
from localrt.models.vision import pixels, positions, siglip
from localrt.models.vision.encoder import EncodedPicture, PreparedPicture, VisionEncoder
from localrt.models.vision.lfm2_vl import Tiling
from localrt.models.vision.picture import Picture
from localrt.models.weights import WeightLoader
from localrt.quant.formats.packed import Floats
from localrt.quant.ops.mathematics import power, product, turns
from localrt.quant.ops.protocol import Check
from localrt.quant.ops.vision import HALF_CAUSAL, Heads, PatchLayout, Rows, VisionSteps

_QUERIES = {144: "query_768", 256: "query_1024"}  # of a tile and of a whole picture
_GREY = [127] * 3
_ONLY: dict[str, Any] = {"qkv_bias": True, "use_abs_pos": True, "use_rel_pos": True}
_ONLY |= {"use_sliding_window": False, "rope_type": "default", "background_color": _GREY}
"""Supported values, which are the defaults."""
_BLOCK = {"norm1": "norm1", "norm2": "norm2", "out": "attn.proj", "down": "mlp.lin2"}
_NAMES = BlockNames(**_BLOCK, qkv=("attn.qkv",), up=("mlp.lin1",))
_POSITIONS = "rel_pos_h", "rel_pos_w"  # in a block's ``extra_norms``
_NECK = {"neck.0": "neck.1", "neck.2": "neck.3", "net_2": "", "net_3": ""}
_LAYERS = "qwen2_model.model.model."


def read_encoder(config: Mapping[str, Any], processor: Mapping[str, Any]) -> VisionEncoder:
    """See ``registry.read_encoder``."""
    vision, out = config["vision_config"], siglip.text_size(config)
    sam, text = (vision.get(f"{part}_config") or {} for part in ("sam", "encoder"))
    rope, patch = text.get("rope_parameters") or {}, siglip.pixels(sam, "patch_size", 16)
    sizes = {"tile_size": 48 * patch, "height": 64 * patch, "image_size": 64 * patch}
    given = {**processor, **(processor.get("size") or {}), **rope, **text, **sam}
    for key, only in {**_ONLY, **sizes}.items():
        if (own := given.get(key, only)) != only:
            raise ValueError(f"{key} must be {only!r}, is {own!r:.60}")
    sam = {"hidden_act": "gelu", **sam, "intermediate_size": sam.get("mlp_dim", 3072)}
    text = {"hidden_act": "silu", **text, "layer_norm_eps": text.get("rms_norm_eps")}
    cubic = partial(positions.antialiased, by_cubes=True)
    first = siglip.read_siglip(sam, side=64, weights=cubic)
    behind = siglip.read_siglip(text, side=1, hidden=4096, heads=32, inner=22016, layers=32)
    kv_heads = pixels.integer(text, "num_key_value_heads", behind.block.heads)
    channels = sam.get("downsample_channels") or [512, 896]
    if len(channels) != 2:
        raise ValueError(f"downsample_channels must be two, are {channels!r:.60}")
    more: dict[str, Any] = {"names": BlockNames(), "rms": True, "out_bias": False}
    return DeepseekOcrEncoder(
        sam=Sam(
            **{each.name: getattr(first, each.name) for each in fields(first)},
            window=pixels.integer(sam, "window_size", 14),
            full=frozenset(sam.get("global_attn_indexes", (2, 5, 8, 11))),
            widths=(pixels.integer(sam, "output_channels", 256), *channels),
        ),
        behind=replace(behind.block, kv_heads=kv_heads, mlp_bias=False, **more),
        depth=behind.layers,
        theta=pixels.number(rope, "rope_theta", 10_000),
        out=out,
        tile=48 * patch,
        tiles=(2, 6),  # the publisher's processor leaves no choice
        resample=pixels.resampling(processor, pixels.BICUBIC),
        scaling=pixels.Scaling.read(processor),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sam(siglip.SiglipEncoder):
    """Blocks attend in squares of ``window`` patches a side, or those ``full`` to a view."""

    window: int
    full: frozenset[int]
    widths: tuple[int, ...]  # columns behind each convolution but the first

    def neck(self, weights: WeightLoader) -> list[Linear | Norm]:
        """A convolution of single rows, three of 3 by 3; norms are behind the first two."""
        width, columns, found = self.widths[0], self.block.hidden, list[Linear | Norm]()
        for name, own in zip(_NECK, (width, *self.widths), strict=True):
            found.append(Linear.load(weights, (own, columns), f"sam_model.{name}", bias=False))
            if norm := _NECK[name]:
                found.append(Norm.load(weights, f"sam_model.{norm}", width, 1e-6))
            columns = 9 * own
        return found

    def _embeddings(self, weights: WeightLoader) -> tuple[Linear, Floats, Floats]:
        side, hidden = self.side, self.block.hidden
        embed = Linear.load(weights, (hidden, 3 * self.patch**2), "sam_model.patch_embed.proj")
        table = weights.array((1, side**2 * hidden), "sam_model.pos_embed")
        return embed, table[:0, :hidden], table.reshape(side, side, hidden)

    def _block(self, layer: int, weights: WeightLoader) -> Block:
        prefix, far = f"sam_model.blocks.{layer}.", self.side if layer in self.full else self.window
        block = _SamBlock.load(replace(self.block, names=_NAMES), prefix, weights)
        for name in _POSITIONS:
            shape = 2 * far - 1, self.block.size
            block.extra_norms[name] = weights.array(shape, f"{prefix}attn.{name}")
        return block

    def _norm(self, weights: WeightLoader) -> Any:
        return lambda x, steps: x  # there is none


class _SamBlock(Block):
    """A block whose queries also meet positions relative to theirs, those of lines and of columns.

    Heads are widened by a number for each line and column of a window: in a query what it gets of
    that one's position, in a key 1 at its own line and column. Windows are filled up with zeros.
    """

    def _attention(self, x: Rows, layout: PatchLayout, steps: VisionSteps) -> Rows:
        config, side = self.config, math.isqrt(layout.ends[0])
        window = min(side, (len(self.extra_norms[_POSITIONS[0]]) + 1) // 2)
        heads, size, count = config.heads, config.size, -(-side // window)
        place: Any = np.full((count * window,) * 2, side**2)  # a row of zeros, behind the last
        place[:side, :side] = np.arange(side**2).reshape(side, side)
        place = place.reshape(count, window, count, window).swapaxes(1, 2).ravel()
        rows = np.pad(steps.get(x), ((0, 1), (0, 0)))[place]
        qkv = steps.get(self.qkv(steps.put(rows), steps))
        q, k, v = np.moveaxis(qkv.reshape(count**2, window, window, 3, heads, size), 3, 0)
        at, wide = np.arange(window), size + 2 * window
        out = np.zeros((*q.shape[:3], 3, heads, -(-wide // 8) * 8), np.float32)
        met = self._met(_POSITIONS[0], q), self._met(_POSITIONS[1], q.swapaxes(1, 2)).swapaxes(1, 2)
        out[..., 0, :, :wide] = np.concatenate([q * np.float32(size**-0.5), *met], -1)
        out[..., 1, :, :size], out[..., 2, :, :size] = k, v
        out[:, at, :, 1, :, size + at] = out[:, :, at, 1, :, size + window + at] = 1
        alone: Heads[Any] = Heads(count=heads, size=out.shape[-1], scale=1.0, eps=config.eps)
        ends = PatchLayout(ends=range(window**2, len(place) + 1, window**2))
        seen = steps.get(steps.heads(steps.put(out.reshape(len(place), -1)), alone, ends))
        seen = seen.reshape(len(place), heads, -1)[np.argsort(place)[: side**2], :, :size]
        return self.out(steps.put(seen.reshape(side**2, -1)), steps)

    def _met(self, name: str, q: Floats) -> Floats:
        """Queries (V, N, N, H, E) times positions by their first place: (V, N, N, H, N)."""
        table, at = self.extra_norms[name], np.arange(q.shape[1])
        table = product(positions.linear(len(table), 2 * len(at) - 1), table)
        table = table[at[:, None] - at + len(at) - 1].swapaxes(1, 2)
        met: Floats = (q.reshape(*q.shape[:2], -1, q.shape[-1]) @ table).reshape(*q.shape[:4], -1)
        return met


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekOcrEncoder(Tiling):
    """See the module; ``depth`` blocks are ``behind``."""

    sam: Sam
    behind: BlockConfig
    depth: int
    theta: float
    out: int

    placeholder = "<image>"
    picture_text = "<image>\n"

    def prepare(self, picture: Picture) -> PreparedPicture:
        patch, height, width = self.sam.patch, picture.height, picture.width
        size, largest = self.sam.side * patch, max(height, width)
        h, w = (max(round(each * (size / largest)), 1) for each in (height, width))
        whole, top, left = np.full((size, size, 3), _GREY[0], np.uint8), size - h, size - w
        shown = pixels.resize(picture, h, w, self.resample)
        whole[top // 2 : top // 2 + h, left // 2 : left // 2 + w] = shown
        views = [whole]
        if largest > self.tile:
            tiles = self.cut(picture, *self.layout(height, width))
            views = [*tiles.reshape(-1, *tiles.shape[2:]), whole]
        grid = tuple((len(view) // patch,) * 2 for view in views)
        return PreparedPicture(
            patches=self.scaling(np.concatenate([pixels.cut(each, patch) for each in views])),
            chunk_patches=self.sam.side**2,
            grid=grid,
            pieces=(sum(side**2 // 16 for side, _ in grid) + 1,),
        )

    def block_work(self, block: str, width: int, picture: PreparedPicture) -> tuple[int, float]:
        """Of SAM's blocks with windows filled up and heads widened; a text block sees as many
        queries as rows, and the first half sees itself, the second all before.
        """
        sides, patches = [side for side, _ in picture.grid], len(picture.patches)
        if block.startswith(_LAYERS):
            lengths = [side**2 // 8 for side in sides]
            seen = 0.625 * sum(length**2 for length in lengths) / sum(lengths)
            return sum(lengths), 2.0 * self.behind.hidden * seen
        layer, config, products = int(block.split(".")[-2]), self.sam.block, 0
        for side in sides:
            window = side if layer in self.sam.full else min(side, self.sam.window)
            wide = -(-(config.size + 2 * window) // 8) * 8
            products += 2 * config.heads * wide * (-(-side // window) * window**2) ** 2
        return patches, products / patches

    def encode(
        self, picture: PreparedPicture, units: Units, steps: VisionSteps, check: Check | None = None
    ) -> EncodedPicture:
        encoded = self.sam(picture.patches, picture.grid, units, steps, check)
        neck, parts = units.read(self.sam.neck), list[Floats]()
        for x, (side, _) in zip(encoded, picture.grid, strict=True):
            rows = _convolved(x, side, neck, steps)
            name = f"qwen2_model.{_QUERIES[len(rows)]}.weight"
            queries = units.read(partial(WeightLoader.array, shape=rows.shape, name=name))
            parts.append(np.concatenate([rows, queries]))
        half, ends = self.behind.size // 2, list(accumulate(map(len, parts)))
        at = np.concatenate([np.arange(len(part)) for part in parts])
        cos, sin = turns(at[:, None] * power(self.theta, -np.arange(half) / half))
        layout = PatchLayout(ends=ends, cos=cos, sin=sin, window=HALF_CAUSAL)
        x, run = np.concatenate(parts), encoders.run_blocks
        x = run(self.behind, f"{_LAYERS}layers.", self.depth, x, layout, units, steps, check)
        kept = [x[end - len(part) // 2 : end] for end, part in zip(ends, parts, strict=True)]
        norm, project, last = units.read(self._projector)
        x = project(norm(np.concatenate(kept), steps), steps)
        return EncodedPicture(np.concatenate([steps.get(x), last]))

    def _projector(self, weights: WeightLoader) -> tuple[Norm, Linear, Floats]:
        norm = Norm.load(weights, f"{_LAYERS}norm", self.behind.hidden, self.behind.eps, rms=True)
        project = Linear.load(weights, (self.out, self.behind.hidden), "projector.layers")
        return norm, project, weights.array((self.out,), "view_seperator").reshape(1, -1)


def _convolved(x: Rows, side: int, neck: list[Linear | Norm], steps: VisionSteps) -> Rows:
    """A view's patches (side * side, D) as a sixteenth as many rows."""
    for number, step in enumerate(neck):
        if number in (2, 4, 5):
            padded = np.pad(x.reshape(side, side, -1), ((1, 1), (1, 1), (0, 0)))
            around = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (0, 1))
            stride = 1 if number == 2 else 2
            x, side = around[::stride, ::stride].reshape(-1, 9 * x.shape[1]), side // stride
        x = steps.get(step(steps.put(x), steps))
    return x
