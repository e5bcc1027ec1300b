"""What a picture costs: tokens, memory, products. Known from shapes, before anything is read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from localrt.models.checkpoints.base import TensorSource
from localrt.models.vision.picture import Picture
from localrt.models.vision.registry import read_tower
from localrt.models.vision.source import vision_source
from localrt.models.vision.tower import Prepared
from localrt.quant.formats.packed import Format

SIDE = 896
"""Of the picture that forecasts are about, in pixels."""

_UNIT = re.compile(r".*?\.\d+\.")


@dataclass(frozen=True, slots=True)
class PictureCost:
    """A picture's ``tokens``; the bytes of the tower's weights in its files, and those that memory
    needs while the picture is read; how many ``products`` of numbers are added.
    """

    tokens: int
    tower_bytes: int
    room_bytes: int
    products: int


def picture_cost(path: Path, projectors: Sequence[Path] = ()) -> PictureCost | None:
    """What a square picture of ``SIDE`` pixels costs the model at ``path``; None if it sees none.

    Raises:
        LocalrtError: its tower cannot be used.
    """
    source = vision_source(path, projectors)
    if source is None:
        return None
    with closing(source):
        tower = read_tower(source.config, source.processor)
        prepared = tower.prepare(Picture(np.zeros((SIDE, SIDE, 3), np.uint8)))
        sizes, products = TowerSizes.of(source), 0
        for info in source.tensors.values():
            if info.name.endswith("weight") and len(info.shape) > 1 and not _is_table(info.name):
                in_block = _UNIT.match(info.name) is not None
                rows = len(prepared.patches) if in_block else prepared.rows
                products += rows * prod(info.shape)
        seen = tower.attended(prepared)
        return PictureCost(
            tokens=prepared.rows,
            tower_bytes=sum(info.nbytes for info in source.tensors.values()),
            room_bytes=sizes.room(prepared),
            products=products
            + round(2 * sizes.blocks * sizes.narrow * len(prepared.patches) * seen),
        )


@dataclass(frozen=True, slots=True)
class TowerSizes:
    """A tower's blocks, the columns of their rows and of their widest matrix, and the bytes of the
    largest unit of weights.
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
    ) -> TowerSizes:
        """By its tensors; matrices take ``weight_nbytes`` (the ``Ops``'), or as many as stored."""
        units: Counter[str] = Counter()
        blocks, narrow, wide = set[str](), 1 << 30, 0
        for name, info in source.tensors.items():
            if len(info.shape) != 2 or _is_table(name):
                continue
            shape = info.shape[0], info.shape[1]
            unit = _UNIT.match(name)
            nbytes = info.nbytes if weight_nbytes is None else weight_nbytes(shape, info.format)
            units[unit[0] if unit else name] += nbytes
            if unit:
                blocks.add(unit[0])
                narrow, wide = min(narrow, *shape), max(wide, *shape)
        return cls(len(blocks), min(narrow, wide), wide, max(units.values(), default=0))

    def room(self, prepared: Prepared) -> int:
        """The most bytes that a picture takes on its way through the tower, with its weights."""
        rows = len(prepared.patches)
        together = prepared.together or rows
        floats = rows * self.narrow + together * (4 * self.narrow + 3 * self.wide)
        return 2 * self.unit_bytes + prepared.patches.nbytes + 4 * floats

    def host_room(self, prepared: Prepared) -> int:
        """The same of RAM, where a GPU has the blocks: patches as numbers, rows before and behind
        the blocks, a unit's weights on their way.
        """
        rows = len(prepared.patches)
        floats = 12 * prepared.patches.nbytes + 20 * rows * self.narrow
        return min(self.room(prepared), prepared.patches.nbytes + floats + 2 * self.unit_bytes)


def _is_table(name: str) -> bool:
    """Whether it holds positions, of which a picture takes few."""
    return "position" in name or "pos_embed" in name
