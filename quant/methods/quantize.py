"""One weight, one format, one method: rtn, gptq or mr-gptq, and what a format gets by default.

All search for the scales of least error first. ``gptq`` then chooses codes by the statistics of the
inputs, and ``mr-gptq`` rotates the inputs by a block Hadamard before (MR-GPTQ, Egiazarian et al.
2025). The tables say what measured best: the method with and without calibration text, the rotation
of mr-gptq, and what a matrix falls back to whose rows are no whole groups. Change them when
``benchmarks.quality`` says so. Layers, models and calibration text are the driver's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from localrt.common.errors import OptionError
from localrt.common.option_names import option
from localrt.quant.formats import (
    AFFINE,
    BF16,
    CODECS,
    F16,
    FORMATS,
    PUBLISHED,
    Codec,
    Format,
    assemble,
    codec_of,
)
from localrt.quant.formats.convert import require_finite, require_whole_groups
from localrt.quant.formats.packed import Floats
from localrt.quant.formats.tiled import tile_span
from localrt.quant.methods.gptq import gptq_codes
from localrt.quant.methods.rotation import Quantized, block_hadamard
from localrt.quant.methods.scales import ScaleSearch, best_scales

METHODS = ("rtn", "gptq", "mr-gptq")
_CALIBRATED = frozenset({"int4", "nf4", "mxfp4", "nvfp4"})
"""Formats, or families of affine ones, that get mr-gptq with calibration text. Else: rtn.

From five bits on, calibration gains nothing that perplexity shows.
"""
_PLAIN = frozenset({"q2_k", "q3_k", "iq4_nl"})
"""Formats that get gptq: rotated weights would be no one else's to read."""
_ROTATIONS: Mapping[str, int] = MappingProxyType({"nvfp4": 16, "q2_k": 128, "q3_k": 128})
"""Block of mr-gptq's rotation where it is not the format's block."""
_SMALLER: Mapping[str, str] = MappingProxyType(
    {"nf4": "int4-g32", "q2_k": "iq4_nl", "q3_k": "iq4_nl"}
)
"""What a format that has one group only falls back to."""


def default_method(format_: Format, *, calibrated: bool) -> str:
    """The method for ``format_``, with or without calibration text."""
    family = format_.name.partition("-")[0]
    if calibrated and family in _PLAIN:
        return "gptq"
    return "mr-gptq" if calibrated and family in _CALIBRATED else "rtn"


def rotation(format_: Format) -> int:
    """Block size of mr-gptq's Hadamard rotation of a matrix in ``format_``."""
    return _ROTATIONS.get(format_.name, format_.block)


def quantized_format(name: str) -> Format:
    """The format called ``name``, if localrt can quantize to it or store it.

    Raises:
        OptionError: it cannot; lists what there is.
    """
    if name in CODECS:
        return CODECS[name].format
    if name in (F16.name, BF16.name):
        return FORMATS[name]
    raise OptionError(f"{option('format')} must be one of {format_names()}, is {name!r}")


def format_names() -> str:
    """All names that ``quantized_format`` knows, in one line."""
    return "int4-g32 (int4, int8; g32, g64, g128; g32m with minima), " + ", ".join(
        [*(name for name in CODECS if name[:5] not in ("int4-", "int8-")), F16.name, BF16.name]
    )


def fitting_format(format_: Format, columns: int) -> Format:
    """``format_``, or what comes closest to it for rows of ``columns`` weights.

    The same bits in smaller groups, and bf16 where no groups fit.
    """
    found: Format | None = format_
    while found is not None and columns % tile_span(found):
        found = _smaller(found)
    return found or BF16


def _smaller(format_: Format) -> Format | None:
    name = _SMALLER.get(format_.name, "")
    if format_.name in AFFINE:
        codec = AFFINE[format_.name]
        name = f"int{codec.bits}-g{codec.group // 2}{'m' * codec.minimum}"
    if format_.name in PUBLISHED:
        name = format_.name.replace(f"-g{format_.block}", f"-g{format_.block // 2}")
        return PUBLISHED[name].format if name in PUBLISHED and name != format_.name else None
    return CODECS[name].format if name in CODECS else None


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
        raise OptionError(f"method {method} needs calibration text: give {option('calibration')}")
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
