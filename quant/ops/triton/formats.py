"""Which tiled formats the GPU kernels read, and how: numbers that a kernel is compiled for.

The layout itself is specified in ``quant/formats/tiled.py``. This module imports no Triton: whether
a format has a kernel can be asked anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from localrt.quant.formats.affine import AFFINE
from localrt.quant.formats.packed import Format
from localrt.quant.formats.tiled import TILE_ROWS, tile_span

__all__ = ["CODES", "SCALES", "TritonLayout", "layout_of"]

CODES = {"whole": 0, "e2m1": 1, "nf4": 2}
"""What a code stands for: itself minus ``zero``, or a level."""

SCALES = {"f16": 0, "e8m0": 1, "e4m3": 2, "q4_k": 3, "q6_k": 4}
"""How a scale is stored. ``q4_k`` and ``q6_k`` have two levels."""


@dataclass(frozen=True, slots=True)
class TritonLayout:
    """One format as the kernels see it: value = scale * (code - zero), plus a minimum.

    ``halves``: each 16 columns have a scale of their own, not each 32 or more.
    """

    bits: int
    codes: int
    zero: int
    scales: int
    minimum: bool
    halves: bool
    span_steps: int  # steps of 32 columns in a span
    head: int  # bytes of a span's head

    @property
    def span_bytes(self) -> int:
        """Bytes of a span: 16 rows."""
        return self.head + self.span_steps * 64 * self.bits

    def tile_bytes(self, columns: int) -> int:
        """Bytes of 16 rows of ``columns``."""
        return columns // (32 * self.span_steps) * self.span_bytes


# bits, codes, zero, scales, minimum, halves
_KNOWN: dict[str, tuple[int, str, int, str, bool, bool]] = {
    "q4_0": (4, "whole", 8, "f16", False, False),
    "q4_1": (4, "whole", 0, "f16", True, False),
    "q5_0": (5, "whole", 16, "f16", False, False),
    "q5_1": (5, "whole", 0, "f16", True, False),
    "q8_0": (8, "whole", 128, "f16", False, False),
    "q4_k": (4, "whole", 0, "q4_k", True, False),
    "q5_k": (5, "whole", 0, "q4_k", True, False),
    "q6_k": (6, "whole", 32, "q6_k", False, True),
    "mxfp4": (4, "e2m1", 0, "e8m0", False, False),
    "nvfp4": (4, "e2m1", 0, "e4m3", False, True),
    "nf4": (4, "nf4", 0, "f16", False, False),
    **{
        name: (codec.bits, "whole", codec.zero, "f16", codec.minimum, codec.group == 16)
        for name, codec in AFFINE.items()
    },
}


def layout_of(format_: Format) -> TritonLayout | None:
    """How the kernels read ``format_``; None where they cannot."""
    known = _KNOWN.get(format_.name)
    if known is None:
        return None
    bits, codes, zero, scales, minimum, halves = known
    span = tile_span(format_)
    head = TILE_ROWS * (format_.row_bytes(span) - span * bits // 8)
    if bits == 8 and minimum:
        zero = 128  # the kernels unpack signed bytes; the minimum takes the difference
    return TritonLayout(bits, CODES[codes], zero, SCALES[scales], minimum, halves, span // 32, head)
