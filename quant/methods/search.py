"""The scales of groups with the least rounding error: a search over how far to clip.

Each of the codec's shrinks is tried, and the one with the smallest sum of |error|^2.4 is kept, as
MR-GPTQ (Egiazarian et al. 2025) has it: between the square, which clips much, and the maximum,
which clips nothing.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

import numpy as np

from localrt.quant.formats.codec import Codec, Floats
from localrt.quant.formats.gguf_codecs import Iq4NlCodec, KQuantCodec
from localrt.quant.methods.weighted_scales import best_weighted_scales

__all__ = ["ScaleSearch", "best_scales"]


class ScaleSearch(Protocol):
    """``best_scales``, or what finds the same sooner."""

    def __call__(self, codec: Codec, groups: Floats, importance: Floats | None = None) -> Floats:
        """See ``best_scales``."""


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
