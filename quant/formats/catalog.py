"""Every format by its name, and the codecs of those that localrt packs itself.

Tables only. ggml's types that localrt reads are among the formats; its quantizers are not ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from localrt.quant.formats.affine import AFFINE
from localrt.quant.formats.codec import Codec, GroupCodec
from localrt.quant.formats.fp4 import F8_E4M3, MXFP4_CODEC, NVFP4_CODEC
from localrt.quant.formats.ggml import GGML_FORMATS
from localrt.quant.formats.gguf_codecs import GGUF_CODECS
from localrt.quant.formats.nf4 import NF4_CODEC
from localrt.quant.formats.packed import Format
from localrt.quant.formats.published import PUBLISHED

__all__ = ["CODECS", "FORMATS", "GROUP_CODECS"]

CODECS: Mapping[str, Codec] = MappingProxyType(
    {**AFFINE, "nf4": NF4_CODEC, "mxfp4": MXFP4_CODEC, "nvfp4": NVFP4_CODEC, **GGUF_CODECS}
)
"""The codec of every format that localrt packs itself, by the format's name."""

GROUP_CODECS: Mapping[str, GroupCodec] = MappingProxyType({**CODECS, **PUBLISHED})
"""The same, and the codecs of what is published in groups and only read here."""

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
