"""The search for scales by the compiled kernels: what ``methods/search.py`` finds, much sooner.

Sums of errors are rounded differently there, so that of two scales which are equally good to 1e-4
the other one may be found.
"""

from __future__ import annotations

import numpy as np

from localrt.errors import MissingExtraError
from localrt.quant.formats.affine import AffineCodec
from localrt.quant.formats.codec import Codec, Floats
from localrt.quant.methods.search import ScaleSearch, best_scales
from localrt.quant.ops.native.abi import FAMILIES, SearchArgs
from localrt.quant.ops.native.ops import NativeOps

__all__ = ["NativeSearch", "fast_search"]


class NativeSearch:
    """Searches on the threads of ``ops``."""

    def __init__(self, ops: NativeOps) -> None:
        self._ops = ops

    def __call__(self, codec: Codec, groups: Floats) -> Floats:
        """See ``best_scales``."""
        bits, minimum = 4, False
        family = FAMILIES.get(codec.format.name)
        if isinstance(codec, AffineCodec):
            bits, minimum = codec.bits, codec.minimum
            family = FAMILIES["even-with-minimum" if minimum else "even"]
        if family is None:
            return best_scales(codec, groups)
        groups = np.ascontiguousarray(groups, np.float32)
        scales = np.empty((len(groups), 1 + minimum), np.float32)
        shrinks = np.array(codec.shrinks, np.float64)
        args = SearchArgs(
            groups.ctypes.data,
            scales.ctypes.data,
            shrinks.ctypes.data,
            len(groups),
            codec.format.block,
            len(shrinks),
            family,
            bits,
        )
        self._ops.search_scales(args)
        return scales


def fast_search(threads: int | None = None) -> ScaleSearch:
    """The compiled kernels' search where it is the faster one, else numpy's."""
    try:
        ops = NativeOps(threads=threads)
    except MissingExtraError:
        return best_scales
    return best_scales if ops.isa == "portable" else NativeSearch(ops)
