"""Cosines and sines by which attention adds the bias that quantized keys leave out.

See ``KeyBias`` in ``quant/csrc/kv.h``: a position is a block of 256 and a place in it, and the
angle of the one is turned by that of the other.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from localrt.quant.ops.native.kv import BLOCK
from localrt.quant.ops.protocol import Rope

__all__ = ["Turns"]

Floats = npt.NDArray[np.float32]


class Turns:
    """The tables of one rotary embedding, of as many positions as were asked for."""

    def __init__(self, rope: Rope) -> None:
        self._rope = rope
        places = self._angles(np.arange(BLOCK), 1.0)  # (256, pairs, 2)
        tiles = places.reshape(BLOCK // 16, 16, *places.shape[1:])
        self._near = np.ascontiguousarray(tiles.transpose(0, 2, 3, 1))  # (16, pairs, 2, 16)
        self._far: Floats = np.empty((0, *places.shape[1:]), np.float32)

    def addresses(self, positions: int) -> tuple[int, int]:
        """Where the tables of places and of blocks lie; the latter reach ``positions``.

        They stay there until more positions are asked for.
        """
        blocks = -(-positions // BLOCK)
        if blocks > len(self._far):
            self._far = self._angles(BLOCK * np.arange(2 * blocks), self._rope.scale)
        return self._near.ctypes.data, self._far.ctypes.data

    def _angles(self, positions: npt.NDArray[np.int64], scale: float) -> Floats:
        angles = positions[:, None] * np.asarray(self._rope.inv_freq, np.float64)
        return (np.stack([np.cos(angles), np.sin(angles)], axis=-1) * scale).astype(np.float32)
