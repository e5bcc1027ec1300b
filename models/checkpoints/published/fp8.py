"""FP8 as transformers calls it: ``quant_method`` fp8 (DeepSeek, Qwen, Mistral) and fbgemm_fp8.

A weight's scale is ``weight_scale_inv`` or ``weight_scale``. Experts of a layer may be one tensor,
with no ``.weight`` behind its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from localrt.models.checkpoints.published.coded_rows import group_of
from localrt.models.checkpoints.published.fp8_rows import fp8_rows
from localrt.models.checkpoints.published.keys import Keys, weights_alone
from localrt.models.checkpoints.published.weights import Parts
from localrt.models.checkpoints.safetensors_header import E5M2
from localrt.models.checkpoints.stored_tensor import RowSource
from localrt.quant.formats import F8_E4M3, E4m3Codec
from localrt.quant.formats.published import GROUPS

__all__ = ["Fp8"]

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
        """See ``Scheme``."""
        group = group_of(self.block[1]) if self.block else GROUPS[0]
        return E4m3Codec(group).format.name if group else "f32"

    @property
    def endings(self) -> Mapping[str, str]:
        """See ``Scheme``."""
        return _ENDINGS

    def source(self, parts: Parts) -> RowSource | None:
        """See ``Scheme``."""
        kind = _WEIGHT if parts.name.endswith(_WEIGHT) else _STACK
        scales = next((parts.find(kind + end) for end in _SCALES if parts.find(kind + end)), None)
        codes = parts.need(kind)
        if scales is None:
            if codes.info.format not in (F8_E4M3, E5M2):
                return None
            scales = parts.need(kind + _SCALES[0])
        return fp8_rows(parts.name, codes, scales, self.block)
