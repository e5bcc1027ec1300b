"""One weight, one format, one method: rtn, gptq or mr-gptq.

All search for the scales of least error first. ``gptq`` then chooses codes by the statistics of the
inputs, and ``mr-gptq`` rotates the inputs by a block Hadamard before (MR-GPTQ, Egiazarian et al.
2025). Layers, models and calibration text are the driver's business.
"""

from __future__ import annotations

import numpy as np

from localrt.errors import OptionError
from localrt.quant.formats import Codec, Format, assemble, codec_of
from localrt.quant.formats.codec import Floats
from localrt.quant.formats.pack import require_finite, require_whole_groups
from localrt.quant.methods.choices import METHODS, rotation
from localrt.quant.methods.gptq import gptq_codes
from localrt.quant.methods.hadamard import block_hadamard
from localrt.quant.methods.restore import Quantized
from localrt.quant.methods.search import ScaleSearch, best_scales

__all__ = ["quantize", "tensor_scale"]


def quantize(
    values: Floats,
    format_: Format,
    *,
    method: str = "rtn",
    hessian: Floats | None = None,
    name: str = "",
    scale: float | None = None,
    hadamard: int | None = None,
    search: ScaleSearch = best_scales,
) -> Quantized:
    """``values`` (rows, columns), float32, in ``format_``. Deterministic.

    Args:
        values: the weight, (out, in).
        format_: one of localrt's own formats.
        method: one of ``METHODS``.
        hessian: H of the inputs, (columns, columns): for all methods but rtn, where GGUF's formats
            take the importance of columns from it.
        name: the weight's name, for messages and the result.
        scale: the tensor's factor (NVFP4), from ``tensor_scale``, where matrices share one.
        hadamard: block size of the rotation; 0 for none; None leaves it to the method.
        search: what finds the scales.

    Raises:
        CheckpointError: the weights hold NaN or infinity.
        LocalrtError: H does.
        OptionError: unknown method, a format that localrt does not quantize to, columns that are
            not whole groups, or a method without the statistics that it needs.
    """
    if method not in METHODS:
        raise OptionError(f"method must be one of {', '.join(METHODS)}, is {method!r}")
    if method != "rtn" and hessian is None:
        raise OptionError(f"method {method} needs calibration text: give --calibration")
    codec = codec_of(format_)
    require_finite(values, name)
    require_whole_groups(values.shape[1], codec, name)
    if hadamard is None:
        hadamard = rotation(format_) if method == "mr-gptq" else 0
    if hadamard:
        values = block_hadamard(values, hadamard)
        if hessian is not None:
            hessian = block_hadamard(block_hadamard(hessian, hadamard).T, hadamard)
    if scale is None:
        scale = tensor_scale(codec, values)
    if scale != 1.0:
        values = values / np.float32(scale)
    groups = values.reshape(-1, format_.block)
    calibrated = None if method == "rtn" else hessian
    scales = search(codec, groups, None if hessian is None else np.diagonal(hessian))
    if calibrated is None:
        codes = codec.encode(groups, scales)
    else:
        by_row = scales.reshape(
            len(values), values.shape[1] // codec.group, -1
        )  # (rows, groups, k)
        codes = gptq_codes(values, by_row, codec, calibrated, name=name).reshape(groups.shape)
    tensor = assemble(codec, codes, scales, values.shape, name=name, scale=scale)
    return Quantized(tensor, hadamard)


def tensor_scale(codec: Codec, *matrices: Floats) -> float:
    """The factor that ``matrices`` would share: 1 for all formats but NVFP4."""
    return codec.tensor_scale(max(float(np.abs(m).max(initial=0)) for m in matrices))
