"""What a format gets where nobody says otherwise: the tables of what measured best.

Method with and without calibration text, rotation of mr-gptq, and what a matrix falls back to whose
rows are no whole groups. Change the tables when ``benchmarks.quality`` says so. They know names
of formats, not weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from localrt.errors import OptionError
from localrt.option_names import option
from localrt.quant.formats import AFFINE, BF16, CODECS, F16, FORMATS, PUBLISHED, Format
from localrt.quant.formats.tiled import tile_span

__all__ = [
    "METHODS",
    "default_method",
    "fitting_format",
    "format_names",
    "quantized_format",
    "rotation",
]

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
