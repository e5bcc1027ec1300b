"""The search for scales by the compiled kernels: what ``quant/methods/scales.py`` finds, much
sooner.

Sums of errors are rounded differently there, so of two scales that are equally good to 1e-4, the
other may be found.
"""

from __future__ import annotations

import numpy as np

from localrt.common.errors import MissingExtraError
from localrt.quant.cpu.abi import FAMILIES, SearchArgs
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.formats.affine import AffineCodec
from localrt.quant.formats.ggml import Iq4NlCodec, KQuantCodec
from localrt.quant.formats.packed import Codec, Floats
from localrt.quant.methods.scales import ScaleSearch, best_scales, column_weights


class NativeSearch:
    """Searches on the threads of ``ops``."""

    def __init__(self, ops: NativeOps) -> None:
        self._ops = ops

    def __call__(self, codec: Codec, groups: Floats, importance: Floats | None = None) -> Floats:
        bits, minimum, width = 4, False, 1
        weights: Floats | None = None
        family = FAMILIES.get(codec.format.name)
        if isinstance(codec, AffineCodec):
            bits, minimum = codec.bits, codec.minimum
            family = FAMILIES["even-with-minimum" if minimum else "even"]
            width = 1 + minimum
        if isinstance(codec, KQuantCodec | Iq4NlCodec):
            weights = np.ascontiguousarray(column_weights(codec, importance))
            width = codec.format.block // codec.group * codec.numbers
        if family is None:
            return best_scales(codec, groups, importance)
        groups = np.ascontiguousarray(groups, np.float32)
        scales = np.empty((len(groups), width), np.float32)
        shrinks = np.array(codec.shrinks, np.float64)
        args = SearchArgs(
            groups.ctypes.data,
            scales.ctypes.data,
            shrinks.ctypes.data,
            None if weights is None else weights.ctypes.data,
            len(groups),
            0 if weights is None else len(weights),
            codec.format.block,
            len(shrinks),
            family,
            bits,
        )
        self._ops.search_scales(args)
        return scales


def fast_search(threads: int | None = None) -> ScaleSearch:
    """The compiled kernels' search if it is faster, else numpy's."""
    try:
        ops = NativeOps(threads=threads)
    except MissingExtraError:
        return best_scales
    return best_scales if ops.isa == "portable" else NativeSearch(ops)
