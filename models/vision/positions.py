"""Learned positions of a square grid of patches, interpolated to the grid of a picture."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from localrt.quant.formats.packed import Floats
from localrt.quant.ops.mathematics import Doubles, product


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
