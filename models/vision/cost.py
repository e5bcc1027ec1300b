"""The cost of a picture in tokens, memory and multiplications, from shapes alone."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from localrt.models.tensor_source import TensorSource
from localrt.models.vision.encoder import PreparedPicture
from localrt.models.vision.picture import Picture
from localrt.models.vision.registry import read_encoder, vision_source
from localrt.quant.formats.packed import Format

SIDE = 896
"""The side of the picture assumed in forecasts, in pixels."""

_UNIT = re.compile(r".*?\.\d+\.")


@dataclass(frozen=True, slots=True)
class PictureCost:
    """A picture's ``tokens``; the size of the encoder's files; the memory that encoding takes; the
    number of multiplications.
    """

    tokens: int
    encoder_bytes: int
    room_bytes: int
    products: int


def picture_cost(path: Path, projectors: Sequence[Path] = ()) -> PictureCost | None:
    """Cost of a picture of ``SIDE`` pixels square; None if the model has no vision encoder.

    Raises:
        LocalrtError: the encoder cannot be used.
    """
    source = vision_source(path, projectors)
    if source is None:
        return None
    with closing(source):
        encoder = read_encoder(source.config, source.processor)
        prepared = encoder.prepare(Picture(np.zeros((SIDE, SIDE, 3), np.uint8)))
        blocks, products = defaultdict[str, list[tuple[str, tuple[int, ...]]]](list), 0.0
        for name, info in source.tensors.items():
            if name.endswith("weight") and len(info.shape) > 1 and not _is_table(name):
                unit = _UNIT.match(name)
                blocks[unit[0] if unit else ""].append((name, info.shape))
        for block, weights in blocks.items():
            rows, attention = prepared.rows, 0.0
            if block and any("att" in name for name, _ in weights):
                width = min(side for _, shape in weights for side in shape[:2])
                rows, attention = encoder.block_work(block, width, prepared)
            products += rows * (sum(prod(shape) for _, shape in weights) + attention)
        return PictureCost(
            tokens=prepared.rows,
            encoder_bytes=sum(info.nbytes for info in source.tensors.values()),
            room_bytes=EncoderSizes.of(source).room(prepared),
            products=round(products),
        )


@dataclass(frozen=True, slots=True)
class EncoderSizes:
    """Sizes of an encoder: number of blocks, their smallest and largest dimension (without blocks,
    those of all matrices), bytes of the largest unit of weights.
    """

    blocks: int
    narrow: int
    wide: int
    unit_bytes: int

    @classmethod
    def of(
        cls,
        source: TensorSource,
        weight_nbytes: Callable[[tuple[int, int], Format], int] | None = None,
    ) -> EncoderSizes:
        """Sizes from the tensors; ``weight_nbytes`` is that of ``Ops``; None: as stored."""
        units: Counter[str] = Counter()
        blocks, inside, outside = set[str](), list[int](), list[int]()
        for name, info in source.tensors.items():
            if len(info.shape) != 2 or _is_table(name):
                continue
            shape = info.shape[0], info.shape[1]
            unit = _UNIT.match(name)
            nbytes = info.nbytes if weight_nbytes is None else weight_nbytes(shape, info.format)
            units[unit[0] if unit else name] += nbytes
            if unit:
                blocks.add(unit[0])
            (inside if unit else outside).extend(shape)
        sides = inside or outside or [0]
        return cls(len(blocks), min(sides), max(sides), max(units.values(), default=0))

    def room(self, prepared: PreparedPicture) -> int:
        """Peak memory of encoding a picture in bytes, weights included."""
        rows = len(prepared.patches)
        chunk_patches = prepared.chunk_patches or rows
        floats = rows * self.narrow + chunk_patches * (4 * self.narrow + 3 * self.wide)
        return 2 * self.unit_bytes + prepared.patches.nbytes + 4 * floats

    def host_room(self, prepared: PreparedPicture) -> int:
        """Peak RAM if a GPU computes the blocks: patches in float32, rows before and after the
        blocks, the weights of the unit being copied.
        """
        rows = len(prepared.patches)
        floats = 12 * prepared.patches.nbytes + 20 * rows * self.narrow
        return min(self.room(prepared), prepared.patches.nbytes + floats + 2 * self.unit_bytes)


def _is_table(name: str) -> bool:
    """Whether the tensor is a table of positions, of which a picture uses few rows."""
    return "position" in name or "pos_embed" in name
