"""Base of the vision encoders: prepared pictures, and rows for the decoder.

A family's file reads its config, prepares pictures as its publisher's processor does, and defines
the layers before and after the blocks (``models/encoders/block.py``). Tensors are named as in the
publisher's files, without a leading ``model.``. An encoder knows no prompts and no sessions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.models.encoders.block import Units
from localrt.models.vision.picture import Picture
from localrt.models.vision.pixels import Patches
from localrt.quant.formats.packed import Floats
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
