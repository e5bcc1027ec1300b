"""What one model sees: its tower, the pictures of its conversations, and the tower's weights.

A picture's rows stand in a prompt as negative token ids, made from its contents: whatever compares
tokens (kept and saved caches, sequences that share a prefix) thereby compares pictures. A picture
is encoded when a pass first needs its rows, and kept while there is room.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from localrt.common.errors import OptionError
from localrt.models.checkpoints.base import TensorSource
from localrt.models.vision.picture import Picture
from localrt.models.vision.tower import Check, Prepared, Seen, Tower, Units
from localrt.models.weights import WeightLoader
from localrt.quant.formats.packed import Floats
from localrt.quant.ops.protocol import Given, Ops
from localrt.quant.ops.vision import VisionSteps

_KEPT = 64  # prepared pictures
_MOST_ROWS_NBYTES = 256 << 20  # of encoded pictures
_Unit = TypeVar("_Unit")


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """A picture of a prompt: the ids of its rows, in order, and what they stand for."""

    ids: tuple[int, ...]
    prepared: Prepared


class Sight:
    """See above. Not thread-safe: ``place`` excepted, it is used within the engine's turns."""

    def __init__(self, tower: Tower, source: TensorSource, ops: Ops, token: int) -> None:
        self.tower = tower
        self.token = token
        self.units = LoadedUnits(source, ops)
        self._steps = VisionSteps(ops)
        self._placed: OrderedDict[bytes, Placed] = OrderedDict()
        self._seen: OrderedDict[bytes, Seen] = OrderedDict()
        self._where: dict[int, tuple[bytes, int]] = {}  # a row's picture and number, by its id

    def place(self, picture: Picture) -> Placed:
        """The picture as a prompt has it; the same picture has the same ids."""
        placed = self._placed.get(picture.digest)
        if placed is None:
            prepared = self.tower.prepare(picture)
            placed = Placed(_row_ids(picture.digest, prepared.rows), prepared)
            for row, number in enumerate(placed.ids):
                self._where[number] = picture.digest, row
            self._placed[picture.digest] = placed
        self._placed.move_to_end(picture.digest)
        return placed

    def knows(self, token: int) -> bool:
        """Whether the id stands for a row of a picture."""
        return token in self._where

    def given(self, tokens: npt.NDArray[np.int64], check: Check | None = None) -> Given | None:
        """What a pass over these tokens gets from pictures; None if there are none."""
        index = np.flatnonzero(tokens < 0)
        if not len(index):
            return None
        rows: list[Floats] = []
        deep: list[list[Floats]] = [[] for _ in range(self.tower.deep_layers)]
        for token in tokens[index].tolist():
            digest, row = self._find(token)
            seen = self._look(digest, check)
            rows.append(seen.rows[row])
            for layer, values in zip(deep, seen.deep, strict=True):
                layer.append(values[row])
        return Given(index, np.stack(rows), tuple(np.stack(layer) for layer in deep))

    def _find(self, token: int) -> tuple[bytes, int]:
        found = self._where.get(token)
        if found is None:
            raise OptionError("token ids below 0 stand for pictures, and there is no such picture")
        return found

    def _look(self, digest: bytes, check: Check | None) -> Seen:
        seen = self._seen.get(digest)
        if seen is None:
            prepared = self._placed[digest].prepared
            seen = self.tower.see(prepared, self.units, self._steps, check)
            self._seen[digest] = seen
            while sum(each.nbytes for each in self._seen.values()) > _MOST_ROWS_NBYTES:
                if len(self._seen) == 1:
                    break
                self._seen.popitem(last=False)
        self._seen.move_to_end(digest)
        return seen


class LoadedUnits(Units):
    """Units that stay in memory until ``drop``."""

    def __init__(self, source: TensorSource, ops: Ops) -> None:
        self._source, self._ops = source, ops
        self._kept: dict[str, Any] = {}

    def get(self, name: str, make: Callable[[WeightLoader], _Unit]) -> _Unit:
        unit: _Unit | None = self._kept.get(name)
        if unit is None:
            unit = self._kept[name] = make(WeightLoader(self._source, self._ops))
        return unit

    def drop(self) -> None:
        """Free all weights; they are read again when they are needed."""
        self._kept.clear()


def _row_ids(digest: bytes, rows: int) -> tuple[int, ...]:
    """Ids below 0 that no other picture has."""
    stream = hashlib.shake_128(digest).digest(8 * rows)
    numbers = np.frombuffer(stream, np.int64) | np.int64(-(1 << 63))
    return tuple(numbers.tolist())
