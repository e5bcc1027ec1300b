"""Packed weights: formats, packed tensors, packing, and unpacking to float32.

These modules do not know where bytes come from. Start reading at ``packed.py``, then ``tiled.py``.

A format is a block of weights along a row: bits, group, scales. GGUF's types are read as they are.
Our own are affine groups (``int4`` to ``int8``, groups of 32 to 128, a scale or a scale and a
minimum), ``nf4`` (groups of 64), ``mxfp4`` (32, power-of-two scales) and ``nvfp4`` (16, E4M3
scales, one factor for the tensor). Some checkpoints have groups that these cannot hold exactly; for
them there are formats that localrt reads and computes with, but does not quantize to
(``published.py``). Each family's file is the plain reference; a codec knows one group at a time.
``unpack`` returns float32 for every format, bit for bit what the ``gguf`` package returns.

Codebook types (IQ1, IQ2, IQ3) store indices of entries of four or eight columns (``codebook.py``).
The kernels look a step's 64 or 128 indices up at once: with AVX-512 VBMI by byte permutations of
the whole table in registers, which takes fewer instructions than a load for each index, elsewhere
and on GPUs by loads. The entries come from the ``gguf`` package; the native library receives them
before the first matrix that needs them.

All kernels read tiles (``tiled.py``): 16 rows side by side, so that one 512-bit register holds the
same four columns of 16 rows and one ``vpdpbusd`` adds 64 products. A tile is exactly as large as
its 16 rows. The layout is the same on CPU and GPU, in memory and on disk.
"""

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
    LevelFloatCodec,
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
    "LevelFloatCodec",
    "PackedTensor",
    "ZeroPointCodec",
    "assemble",
    "codec_of",
    "pack",
    "unpack",
]
