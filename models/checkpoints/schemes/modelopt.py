"""NVIDIA's ModelOpt: NVFP4 and FP8, described in ``hf_quant_config.json`` or the config itself.

NVFP4 is ``weight`` (rows, columns / 2) in bytes, ``weight_scale`` for 16 columns in E4M3, and
``weight_scale_2``, which is times all. FP8 is ``weight`` and ``weight_scale``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from localrt.models.checkpoints.base import RowSource
from localrt.models.checkpoints.safetensors.header import RAW_BYTES
from localrt.models.checkpoints.schemes.fp4 import nvfp4_rows
from localrt.models.checkpoints.schemes.fp8 import fp8_rows
from localrt.models.checkpoints.schemes.keys import Keys, weights_alone
from localrt.models.checkpoints.schemes.weights import Parts, wrong
from localrt.quant.formats import F8_E4M3, NVFP4

_WEIGHT, _SCALE, _FACTOR = ".weight", ".weight_scale", ".weight_scale_2"
_ACTIVATION_BITS = {"NVFP4": 4, "FP8": 8, "FP8_PER_CHANNEL_PER_TOKEN": 8, "W4A8_NVFP4_FP8": 8}
_ALONE = ("NVFP4_AWQ", "W4A16_NVFP4", "FP8_PB_WO")  # weights are all that is quantized
_MIXED = "MIXED_PRECISION"

_ENDINGS: Mapping[str, str] = MappingProxyType(dict.fromkeys((_WEIGHT, _SCALE, _FACTOR), _WEIGHT))


@dataclass(frozen=True, slots=True)
class ModelOpt:
    """See ``Scheme``."""

    notes: tuple[str, ...]
    typical: str

    @classmethod
    def of(cls, keys: Keys) -> ModelOpt:
        """Of a ``quantization_config``, or of the ``quantization`` in ``hf_quant_config.json``.

        Raises:
            UnsupportedModelError: an algorithm that is not read here.
        """
        known = (*_ACTIVATION_BITS, *_ALONE)
        algorithms = [keys.one_of("quant_algo", (*known, _MIXED), "")]
        if algorithms[0] == _MIXED:
            layers = keys.all_inner("quantized_layers")
            algorithms = [layer.one_of("quant_algo", known, "") for layer in layers]
        notes = [
            weights_alone("float", 4 if "FP4" in name else 8, _ACTIVATION_BITS[name])
            for name in dict.fromkeys(algorithms)
            if name in _ACTIVATION_BITS
        ]
        fp8 = all("FP4" not in name for name in algorithms)
        return cls(tuple(notes), "e4m3-g128" if fp8 else NVFP4.name)

    @property
    def endings(self) -> Mapping[str, str]:
        return _ENDINGS

    def source(self, parts: Parts) -> RowSource | None:
        weight = parts.need(_WEIGHT)
        if weight.info.format == RAW_BYTES:
            scale, factor = parts.need(_SCALE), parts.need(_FACTOR)
            return nvfp4_rows(parts.name, weight, scale, factor, inverse=False)
        if weight.info.format == F8_E4M3:
            return fp8_rows(parts.name, weight, parts.need(_SCALE), None)
        if len(parts.tensors) > 1:
            raise wrong(
                weight, "has scales, and is neither NVFP4 nor FP8: download the model again"
            )
        return None
