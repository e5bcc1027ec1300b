"""The scales of groups with the least rounding error: a search over how far to clip.

Each of the codec's shrinks is tried, and the one with the smallest sum of |error|^2.4 is kept, as
MR-GPTQ (Egiazarian et al. 2025) has it: between the square, which clips much, and the maximum,
which clips nothing. In GGUF's blocks a column's errors count as much as its inputs are large
(``importance``, the diagonal of H), as they do in llama.cpp with an importance matrix. Each try of
a group's scale is improved by least squares; the best are rounded to a few bits of the block's, of
which several are tried too.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

import numpy as np

from localrt.quant.formats.ggml import IQ4_LEVELS, Iq4NlCodec, KQuantCodec
from localrt.quant.formats.packed import Codec, Floats, to_half

_BLOCKS_AT_ONCE = 256  # blocks searched at a time: they stay in the cache
_TINY = np.float32(1e-30)


def best_weighted_scales(
    codec: KQuantCodec | Iq4NlCodec, blocks: Floats, importance: Floats | None = None
) -> Floats:
    """Scales (n, k) of blocks (n, block), as the codec has them; rows are whole blocks in a line.

    ``importance`` (columns,) is what a column's squared errors are times.
    """
    weights = column_weights(codec, importance)

    def search(start: int) -> Floats:
        piece = blocks[start : start + _BLOCKS_AT_ONCE]
        rows = np.arange(start, start + len(piece)) % len(weights)
        if isinstance(codec, Iq4NlCodec):
            return _of_levels(codec, piece, weights[rows])
        x, w = (part.reshape(-1, 16, 16) for part in (piece, weights[rows]))
        return _with_minima(codec, x, w) if codec.minimum else _symmetric(codec, x, w)

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # numpy computes outside of the lock
        found = list(pool.map(search, range(0, len(blocks), _BLOCKS_AT_ONCE)))
    return np.concatenate(found) if found else codec.fit(blocks)


def column_weights(codec: KQuantCodec | Iq4NlCodec, importance: Floats | None) -> Floats:
    """What squared errors are times, (n, block): of the blocks of a row, which follow in turn."""
    block = codec.format.block
    if importance is None:
        return np.ones((1, block), np.float32)
    usual = max(float(importance.mean()), float(_TINY))
    return (importance / np.float32(usual) + np.float32(1e-4)).reshape(-1, block)


def _symmetric(codec: KQuantCodec, x: Floats, w: Floats) -> Floats:
    at = np.abs(x).argmax(axis=2)[:, :, None]
    extreme = np.take_along_axis(x, at, axis=2)
    best, gain, weight = (np.zeros(x.shape[:2], np.float32) for _ in range(3))
    for end in (-4.0, 3.0):  # the code of the farthest weight
        for shrink in codec.shrinks:
            step = extreme * np.float32(shrink / end)
            codes = np.clip(np.rint(x / np.where(step == 0, 1, step)), -4, 3)
            both, own = (w * x * codes).sum(axis=2), (w * codes * codes).sum(axis=2)
            least = both / np.maximum(own, _TINY)
            won = both * least  # how much smaller the error is than without the group
            better = won > gain
            best[better], gain[better], weight[better] = least[better], won[better], own[better]
    d, scale = _rounded(best, weight, 32)
    return _stacked(d, scale)


def _of_levels(codec: Iq4NlCodec, x: Floats, w: Floats) -> Floats:
    at = np.abs(x).argmax(axis=1)[:, None]
    extreme = np.take_along_axis(x, at, axis=1)
    best, gain = np.zeros_like(extreme), np.zeros(len(x), np.float32)
    for end in (IQ4_LEVELS[0], IQ4_LEVELS[-1]):  # the level of the farthest weight
        for shrink in codec.shrinks:
            levels = codec.decode(codec.encode(x, extreme * (shrink / end)), np.ones_like(extreme))
            both, own = (w * x * levels).sum(axis=1), (w * levels * levels).sum(axis=1)
            least = both / np.maximum(own, _TINY)
            better = both * least > gain
            best[better, 0], gain[better] = least[better], (both * least)[better]
    return to_half(best)


def _with_minima(codec: KQuantCodec, x: Floats, w: Floats) -> Floats:
    low = np.minimum(x.min(axis=2, keepdims=True), 0)
    size = np.maximum(x.max(axis=2, keepdims=True), 0) - low
    total, first = w.sum(axis=2), (w * x).sum(axis=2)
    least = np.full(x.shape[:2], np.inf, np.float32)
    step, minimum, weight = (np.zeros(x.shape[:2], np.float32) for _ in range(3))
    for shrink in codec.shrinks:
        start = low * np.float32(shrink)
        scale = size * np.float32(shrink / 3)
        codes = np.clip(np.rint((x - start) / np.where(scale == 0, 1, scale)), 0, 3)
        weighed = w * codes
        one, two, both = (
            weighed.sum(axis=2),
            (weighed * codes).sum(axis=2),
            (weighed * x).sum(axis=2),
        )
        apart = np.maximum(total * two - one * one, _TINY)
        slope = (total * both - first * one) / apart
        offset = np.minimum((two * first - one * both) / apart, 0)
        slope = np.where(offset == 0, both / np.maximum(two, _TINY), slope)
        slope = np.maximum(slope, 0)
        missed = (w * np.square(slope[:, :, None] * codes + offset[:, :, None] - x)).sum(axis=2)
        better = missed < least
        least[better], weight[better] = missed[better], two[better]
        step[better], minimum[better] = slope[better], -offset[better]
    d, scale = _rounded(step, weight, 15)
    m, number = _rounded(minimum, total, 15)
    return _stacked(d, scale, m, number)


def _rounded(wanted: Floats, weight: Floats, most: int) -> tuple[Floats, Floats]:
    """d (n, 1) in half precision, and numbers (n, 16), with wanted = d * number best.

    Numbers are 0 to ``most``, with 32 those from -32 to 31.
    """
    lowest, highest = (-32, 31) if most == 32 else (0, most)
    at = np.abs(wanted).argmax(axis=1)[:, None]
    extreme = np.take_along_axis(wanted, at, axis=1)
    end = lowest if most == 32 else highest
    best_d, best_numbers = np.zeros_like(extreme), np.zeros_like(wanted)
    least = np.full(len(wanted), np.inf, np.float32)
    for change in np.linspace(-1.2, 1.2, 25):
        d = extreme / np.float32(end + change)
        for _ in range(2):
            numbers = np.clip(np.rint(wanted / np.where(d == 0, 1, d)), lowest, highest)
            own = (weight * numbers * numbers).sum(axis=1, keepdims=True)
            d = (weight * numbers * wanted).sum(axis=1, keepdims=True) / np.maximum(own, _TINY)
        d = to_half(d)
        missed = (weight * np.square(wanted - d * numbers)).sum(axis=1)
        better = missed < least
        least[better] = missed[better]
        best_d[better], best_numbers[better] = d[better], numbers[better]
    return best_d, best_numbers


def _stacked(*parts: Floats) -> Floats:
    shape = parts[1].shape
    whole = np.stack([np.broadcast_to(part, shape) for part in parts], axis=2)
    return np.ascontiguousarray(whole, np.float32).reshape(shape[0], -1)


class ScaleSearch(Protocol):
    """``best_scales``, or what finds the same sooner."""

    def __call__(
        self, codec: Codec, groups: Floats, importance: Floats | None = None
    ) -> Floats: ...


_NORM = np.float32(2.4)
_PIECE = 1 << 16  # weights searched at a time: they stay in the cache


def best_scales(codec: Codec, groups: Floats, importance: Floats | None = None) -> Floats:
    """Scales (n, k) for groups (n, block). Infinite where a group is too large for the format.

    GGUF's formats take the ``importance`` of columns (columns,), rows being whole groups in a line.
    """
    if isinstance(codec, KQuantCodec | Iq4NlCodec):
        return best_weighted_scales(codec, groups, importance)
    step = max(1, _PIECE // codec.format.block)
    pieces = [groups[i : i + step] for i in range(0, len(groups), step)]
    if len(pieces) < 2:
        return _search(codec, groups) if pieces else codec.fit(groups)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # numpy computes outside of the lock
        return np.concatenate(list(pool.map(partial(_search, codec), pieces)))


def _search(codec: Codec, groups: Floats) -> Floats:
    with np.errstate(all="ignore"):  # an infinite scale loses every comparison
        best = codec.fit(groups)
        centre = 0 if best.shape[1] == 1 else groups.mean(axis=1, keepdims=True)
        distance = np.abs(groups - centre)
        farthest = distance.argmax(axis=1)[:, None]
        # Errors relative to the group's size neither overflow nor vanish.
        size = np.maximum(distance.max(axis=1, keepdims=True), np.finfo(np.float32).tiny)
        least = np.full(len(groups), np.inf, np.float32)
        active = np.arange(len(groups))
        for shrink in codec.shrinks:
            scales = codec.fit(groups, shrink)
            error = codec.decode(codec.encode(groups, scales), scales)
            error -= groups
            np.abs(error, out=error)
            error /= size
            error **= _NORM
            total = error.sum(axis=1)
            better = total < least[active]
            best[active[better]] = scales[better]
            least[active[better]] = total[better]
            if shrink < 1:
                # The farthest weight is clipped, ever more. Once that alone costs more than the
                # best scale does in all, nothing better can follow.
                alone = np.take_along_axis(error, farthest, axis=1)[:, 0]
                hopeful = alone <= least[active]
                if not hopeful.any():
                    break
                if not hopeful.all():
                    groups, size, farthest = groups[hopeful], size[hopeful], farthest[hopeful]
                    active = active[hopeful]
    return best
