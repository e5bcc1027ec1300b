"""FP8 as transformers calls it: ``quant_method`` fp8 (DeepSeek, Qwen, Mistral) and fbgemm_fp8.

A weight's scale is ``weight_scale_inv`` or ``weight_scale``. Experts of a layer may be one tensor,
with no ``.weight`` behind its name.

FP8 weights: E4M3 or E5M2 codes, and a scale for the tensor, its rows, or blocks of it.

DeepSeek and Qwen publish blocks of 128 x 128 with ``weight_scale_inv``, which is multiplied like
any other scale. E4M3 keeps its byte; E5M2, which nobody publishes models in, becomes float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from localrt.models.checkpoints.base import RowSource, StoredTensor
from localrt.models.checkpoints.safetensors.header import E5M2
from localrt.models.checkpoints.schemes.keys import Keys, weights_alone
from localrt.models.checkpoints.schemes.rows import CodedRows, Decoded, Grid, group_of, weight_info
from localrt.models.checkpoints.schemes.weights import Parts, require_shape, wrong
from localrt.quant.formats import F8_E4M3, E4m3Codec, Format, GroupCodec
from localrt.quant.formats.packed import Bytes, Floats
from localrt.quant.formats.published import GROUPS


def fp8_rows(
    name: str, codes: StoredTensor, scales: StoredTensor, block: tuple[int, int] | None
) -> RowSource:
    """The matrix ``name``; ``block`` is (rows, columns) that share a scale, if the config says.

    Raises:
        CheckpointError: no matrix in FP8, or scales that do not fit it.
    """
    if codes.info.format not in (F8_E4M3, E5M2):
        raise wrong(codes, "should be FP8, as its scales say")
    require_shape(codes, None, None, None)
    rows, columns = codes.info.shape
    grid = Grid.of(scales, rows, columns, block)
    group = group_of(grid.width, columns) if codes.info.format == F8_E4M3 else 0
    codec: GroupCodec = E4m3Codec(group)
    if not group:
        codec = Decoded(E4m3Codec(GROUPS[0]) if codes.info.format == F8_E4M3 else _E5m2())
    return _Fp8Rows(weight_info(name, rows, columns, codec.format), codec, codes, grid)


@dataclass(frozen=True, slots=True)
class _Fp8Rows(CodedRows):
    codes: StoredTensor
    grid: Grid

    def _codes(self, start: int, stop: int) -> Bytes:
        return self.codes.read(start, stop).data

    def _scales(self, start: int, stop: int) -> Floats:
        columns, block = self.info.shape[1], self.codec.format.block
        return self.grid.of_rows(start, stop, columns, block)[..., None]


@dataclass(frozen=True, slots=True)
class _E5m2:
    """The upper half of a float16: see ``GroupCodec``."""

    format: Format = E5M2

    def decode(self, codes: Bytes, scales: Floats) -> Floats:
        values = (codes.astype("<u2") << 8).view("<f2").astype(np.float32)
        return values * scales

    def join(self, codes: Bytes, scales: Floats) -> Bytes:
        raise NotImplementedError

    def split(self, blocks: Bytes) -> tuple[Bytes, Floats]:
        raise NotImplementedError


_WEIGHT, _STACK = ".weight", "_proj"
_SCALES = ("_scale_inv", "_scale")
_ENDINGS: Mapping[str, str] = MappingProxyType(
    {
        **{kind + scale: kind for kind in (_WEIGHT, _STACK) for scale in _SCALES},
        **{kind: kind for kind in (_WEIGHT, _STACK)},
    }
)


@dataclass(frozen=True, slots=True)
class Fp8:
    """See ``Scheme``. ``block`` is (rows, columns) that share a scale; None: rows, or all."""

    block: tuple[int, int] | None
    notes: tuple[str, ...]

    @classmethod
    def of(cls, keys: Keys) -> Fp8:
        """Of a ``quantization_config``.

        Raises:
            UnsupportedModelError: another type of number.
            CheckpointError: a key is malformed.
        """
        keys.one_of("fmt", ("e4m3", "float8_e4m3fn", None), None)
        return cls(keys.pair("weight_block_size"), (weights_alone("float", 8, 8),))

    @property
    def typical(self) -> str:
        group = group_of(self.block[1]) if self.block else GROUPS[0]
        return E4m3Codec(group).format.name if group else "f32"

    @property
    def endings(self) -> Mapping[str, str]:
        return _ENDINGS

    def source(self, parts: Parts) -> RowSource | None:
        kind = _WEIGHT if parts.name.endswith(_WEIGHT) else _STACK
        scales = next((parts.find(kind + end) for end in _SCALES if parts.find(kind + end)), None)
        codes = parts.need(kind)
        if scales is None:
            if codes.info.format not in (F8_E4M3, E5M2):
                return None
            scales = parts.need(kind + _SCALES[0])
        return fp8_rows(parts.name, codes, scales, self.block)
