"""Base of the vision encoders: prepared pictures, and rows for the decoder.

A family's file reads its config, prepares pictures as its publisher's processor does, and defines
the layers before and after the blocks (``models/encoders.py``). Tensors are named as in the
publisher's files, without a leading ``model.``. An encoder knows no prompts and no sessions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.models.encoders import Units
from localrt.models.vision.picture import Patches, Picture
from localrt.quant.formats.packed import Floats
from localrt.quant.ops.mathematics import Doubles, product
from localrt.quant.ops.protocol import Check
from localrt.quant.ops.vision import VisionSteps


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedPicture:
    """A picture as input of its encoder and as part of a prompt.

    ``patches`` (N, P) are the encoder's input; a block computes ``chunk_patches`` at once (0: all).
    ``grid`` is their layout, depending on the family (rows and columns of patches, tiles).
    ``pieces`` replace the template's placeholder: texts, and integers for numbers of rows.
    ``offsets`` (n, 3) are the rows' rotary positions (time, height, width) relative to the first;
    the text after the picture continues ``advance`` positions after it. None: a row takes one
    position, as a token.
    """

    patches: Patches
    grid: Any
    pieces: tuple[str | int, ...]
    offsets: npt.NDArray[np.int64] | None = None
    advance: int = 0
    chunk_patches: int = 0

    @property
    def rows(self) -> int:
        """Number of rows for the decoder."""
        return sum(piece for piece in self.pieces if isinstance(piece, int))


@dataclass(frozen=True, slots=True, eq=False)
class EncodedPicture:
    """A picture as input of the decoder: ``rows`` (n, D) replace embeddings; each of ``deep``
    (n, D) is added to the residual stream after one of the decoder's first layers.
    """

    rows: Floats
    deep: tuple[Floats, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size of all rows in bytes."""
        return self.rows.nbytes + sum(rows.nbytes for rows in self.deep)


class VisionEncoder(ABC):
    """A family of vision encoders.

    ``placeholder`` is the text that the chat template writes for a picture; ``row_token`` is the
    token for one of its rows, ``picture_text`` the placeholder with the text that templates write
    around it (both default to the placeholder). ``bidirectional``: a picture's rows attend to one
    another in the decoder too, and must be in one pass; with ``full_layers_causal`` they do so only
    in layers with a window. ``deep_layers`` is the length of ``EncodedPicture.deep``. ``note`` is
    shown when the model is loaded. ``number`` is the text before a conversation's pictures, where
    ``{}`` is a picture's number from 0.
    """

    placeholder: str
    row_token: str = ""
    picture_text: str = ""
    bidirectional: bool = False
    full_layers_causal: bool = False
    deep_layers: int = 0
    note: str = ""
    number: str = ""

    @abstractmethod
    def prepare(self, picture: Picture) -> PreparedPicture:
        """Resize, normalize, cut into patches.

        Raises:
            OptionError: the model does not support the picture's shape.
        """

    def with_max_rows(self, rows: int) -> VisionEncoder:
        """The encoder that shrinks pictures to ``rows`` rows; itself if their number is fixed."""
        return self

    def block_work(self, block: str, width: int, picture: PreparedPicture) -> tuple[int, float]:
        """How many rows go through a block, and how many multiplications its attention adds to each
        row. ``block`` begins the names of its tensors, ``width`` is the width of its rows.
        """
        rows = len(picture.patches)
        return rows, 2.0 * width * (picture.chunk_patches or rows)

    @abstractmethod
    def encode(
        self, picture: PreparedPicture, units: Units, steps: VisionSteps, check: Check | None = None
    ) -> EncodedPicture:
        """Compute the decoder's rows; ``check`` is called between units and may raise."""


def interpolated(
    table: Floats, rows: int, columns: int, weights: Callable[[int, int], Floats]
) -> Floats:
    """A table (side, side, D) at (rows, columns, D), by ``weights`` of each axis (see below)."""
    side = len(table)
    down = product(weights(side, rows), table)
    across = product(weights(side, columns), down.swapaxes(0, 1))
    return np.ascontiguousarray(across.swapaxes(0, 1))


def aligned(size: int, count: int) -> Floats:
    """Weights (count, size) of linear interpolation between the first and the last value."""
    at = np.arange(count, dtype=np.float32) * np.float32(size - 1) / np.float32(max(count - 1, 1))
    distances = np.abs(np.arange(size, dtype=np.float32) - at[:, None])
    return np.asarray(np.maximum(1 - distances, 0), np.float32)


def antialiased(size: int, count: int) -> Floats:
    """Weights (count, size) of linear interpolation from ``size`` values to ``count``,
    antialiased: the kernel's unit is one step, and at least one value.
    """
    step = size / count
    centres = (np.arange(count)[:, None] + 0.5) * step - 0.5
    away = np.abs(np.arange(size) - centres) / max(step, 1.0)
    weights = np.maximum(1 - away, 0)
    return np.asarray(weights / weights.sum(1, keepdims=True), np.float32)


def linear(size: int, count: int) -> Floats:
    """Weights (count, size) of the two nearest of ``size`` values; the outer ones continue."""
    distances = np.abs(np.arange(size) - np.clip(_centres(size, count), 0, size - 1)[:, None])
    return np.asarray(np.maximum(1 - distances, 0), np.float32)


def cubic(size: int, count: int) -> Floats:
    """Weights (count, size) of the four nearest of ``size`` values; the outer ones continue."""
    centres, weights = _centres(size, count), np.zeros((count, size), np.float32)
    for tap in (-1, 0, 1, 2):
        place = np.floor(centres) + tap
        index = np.clip(place, 0, size - 1).astype(np.int64)
        weights[np.arange(count), index] += _cubic(np.abs(place - centres))
    return weights


def _cubic(x: Floats | Doubles) -> Floats:
    """Keys' kernel, with torch's parameter."""
    a = -0.75
    near, far = ((a + 2) * x - (a + 3)) * x * x + 1, a * (((x - 5) * x + 8) * x - 4)
    return np.where(x <= 1, near, np.where(x < 2, far, 0))


def _centres(size: int, count: int) -> Floats:
    return (np.arange(count) + 0.5) * (size / count) - 0.5
