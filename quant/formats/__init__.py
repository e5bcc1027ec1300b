"""What a packed weight is: formats, packed tensors, and their unpacking to float32."""

from localrt.quant.formats.ggml import (
    BF16,
    F16,
    F32,
    FORMATS,
    GGML_FORMATS,
    GGML_UNREAD,
    MXFP4,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
)
from localrt.quant.formats.packed import Exactness, Format, PackedTensor
from localrt.quant.formats.unpack import unpack

__all__ = [
    "BF16",
    "F16",
    "F32",
    "FORMATS",
    "GGML_FORMATS",
    "GGML_UNREAD",
    "MXFP4",
    "Q4_0",
    "Q4_1",
    "Q4_K",
    "Q5_0",
    "Q5_1",
    "Q5_K",
    "Q6_K",
    "Q8_0",
    "Exactness",
    "Format",
    "PackedTensor",
    "unpack",
]
