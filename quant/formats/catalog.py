"""All formats by name, the codecs of those that localrt packs, and the codes in their blocks.

The formats include the ggml types that localrt reads, not ggml's quantizers. Codes are unsigned,
one byte per weight, in every format: this module knows where their bits are in a block (``ggml.py``
lists ggml's), not their values. Q8_0's int8 are offset by 128, so that they are unsigned too.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.quant.formats.affine import AFFINE
from localrt.quant.formats.fp4 import F8_E4M3, MXFP4_CODEC, NF4_CODEC, NVFP4_CODEC
from localrt.quant.formats.ggml import GGML_FORMATS, GGUF_CODECS
from localrt.quant.formats.packed import Codec, Format, GroupCodec, join_nibbles, split_nibbles
from localrt.quant.formats.published import PUBLISHED

CODECS: Mapping[str, Codec] = MappingProxyType(
    {**AFFINE, "nf4": NF4_CODEC, "mxfp4": MXFP4_CODEC, "nvfp4": NVFP4_CODEC, **GGUF_CODECS}
)
"""The codec of every format that localrt packs, by the format's name."""
GROUP_CODECS: Mapping[str, GroupCodec] = MappingProxyType({**CODECS, **PUBLISHED})
"""Those and the codecs of published formats, which localrt only reads."""
FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        format_.name: format_
        for format_ in (
            *GGML_FORMATS.values(),
            *(codec.format for codec in GROUP_CODECS.values()),
            F8_E4M3,
        )
    }
)
"""Every format that localrt can unpack, by its name."""
# Always uint8; numpy's stubs lose the type in shifts.
Codes = npt.NDArray[Any]
_PAIRS = np.array([0, 2, 4, 6], np.uint8)[:, None]


def read_codes(name: str, blocks: Codes) -> Codes:
    """Codes (n, block) of blocks (n, block_bytes)."""
    if name in GROUP_CODECS:
        return GROUP_CODECS[name].split(blocks)[0]
    count = len(blocks)
    if name == "q8_0":
        flipped: Codes = blocks[:, 2:] ^ 0x80
        return flipped
    if name in ("q4_0", "q4_1"):
        return split_nibbles(blocks[:, -16:])
    if name == "iq4_xs":
        return split_nibbles(blocks[:, -128:].reshape(count, 8, 16)).reshape(count, 256)
    if name == "tq2_0":  # each half block: 4 runs of 32 share 32 bytes of pairs
        pairs: Codes = blocks[:, :64].reshape(count, 2, 1, 32) >> _PAIRS & 3
        return pairs.reshape(count, 256)
    if name in ("q5_0", "q5_1"):
        codes = np.unpackbits(blocks[:, -20:-16], axis=1, bitorder="little")
        codes <<= 4
        codes |= split_nibbles(blocks[:, -16:])
        return codes
    if name in ("q4_k", "q5_k"):  # 64 weights share 32 bytes of nibbles
        codes = split_nibbles(blocks[:, -128:].reshape(count, 4, 32)).reshape(count, 8, 32)
        if name == "q5_k":  # byte i of the high bits holds bit 4 of weight i of each group of 32
            codes |= ((blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1) << 4
        return codes.reshape(count, 256)
    assert name == "q6_k", name  # each half block: 4 runs of 32 share 32 bytes of high pairs
    low = split_nibbles(blocks[:, :128].reshape(count, 2, 64)).reshape(count, 2, 4, 32)
    high = blocks[:, 128:192].reshape(count, 2, 1, 32) >> _PAIRS
    six: Codes = low | (high & 3) << 4
    return six.reshape(count, 256)


def write_codes(name: str, codes: Codes, blocks: Codes) -> None:
    """The inverse of ``read_codes``; blocks already have their scales."""
    count = len(blocks)
    if name in GROUP_CODECS:
        codec = GROUP_CODECS[name]
        blocks[...] = codec.join(codes, codec.split(blocks)[1])
    elif name == "q8_0":
        blocks[:, 2:] = codes ^ 0x80
    elif name == "iq4_xs":
        blocks[:, -128:] = join_nibbles(codes.reshape(count, 8, 32)).reshape(count, 128)
    elif name == "tq2_0":
        pairs = codes.reshape(count, 2, 4, 32) << _PAIRS
        blocks[:, :64] = np.bitwise_or.reduce(pairs, axis=2).reshape(count, 64)
    elif name in ("q4_0", "q4_1", "q5_0", "q5_1"):
        blocks[:, -16:] = join_nibbles(codes)
        if name in ("q5_0", "q5_1"):
            blocks[:, -20:-16] = np.packbits(codes >> 4, axis=1, bitorder="little")
    elif name in ("q4_k", "q5_k"):
        blocks[:, -128:] = join_nibbles(codes.reshape(count, 4, 64)).reshape(count, 128)
        if name == "q5_k":
            bits = (codes >> 4).reshape(count, 8, 32).swapaxes(1, 2)
            blocks[:, 16:48] = np.packbits(bits, axis=2, bitorder="little")[..., 0]
    else:
        assert name == "q6_k", name
        blocks[:, :128] = join_nibbles(codes.reshape(count, 2, 128)).reshape(count, 128)
        high = (codes >> 4).reshape(count, 2, 4, 32) << _PAIRS
        blocks[:, 128:192] = np.bitwise_or.reduce(high, axis=2).reshape(count, 64)
