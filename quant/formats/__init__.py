"""What a packed weight is: formats, packed tensors, packing, and unpacking to float32."""

from localrt.quant.formats.affine import AFFINE, AffineCodec
from localrt.quant.formats.catalog import CODECS, FORMATS, GROUP_CODECS
from localrt.quant.formats.convert import assemble, codec_of, pack, unpack
from localrt.quant.formats.fp4 import F8_E4M3, NF4, NVFP4
from localrt.quant.formats.ggml import (
    BF16,
    F16,
    F32,
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
    TQ2_0,
)
from localrt.quant.formats.packed import Codec, Exactness, Format, GroupCodec, PackedTensor
from localrt.quant.formats.published import (
    PUBLISHED,
    BrainCodec,
    E4m3Codec,
    Nf4FloatCodec,
    ZeroPointCodec,
)

__all__ = [
    "AFFINE",
    "BF16",
    "CODECS",
    "F8_E4M3",
    "F16",
    "F32",
    "FORMATS",
    "GGML_FORMATS",
    "GGML_UNREAD",
    "GROUP_CODECS",
    "MXFP4",
    "NF4",
    "NVFP4",
    "PUBLISHED",
    "Q4_0",
    "Q4_1",
    "Q4_K",
    "Q5_0",
    "Q5_1",
    "Q5_K",
    "Q6_K",
    "Q8_0",
    "TQ2_0",
    "AffineCodec",
    "BrainCodec",
    "Codec",
    "E4m3Codec",
    "Exactness",
    "Format",
    "GroupCodec",
    "Nf4FloatCodec",
    "PackedTensor",
    "ZeroPointCodec",
    "assemble",
    "codec_of",
    "pack",
    "unpack",
]
