"""Quantizers: float32 weights and calibration statistics to packed tensors. Mathematics only."""

from localrt.quant.methods.gptq import HessianSum
from localrt.quant.methods.quantize import (
    METHODS,
    default_method,
    fitting_format,
    format_names,
    quantize,
    quantized_format,
    rotation,
    tensor_scale,
)
from localrt.quant.methods.rotation import Quantized, block_hadamard, restore, restored_rows
from localrt.quant.methods.scales import ScaleSearch, best_scales

__all__ = [
    "METHODS",
    "HessianSum",
    "Quantized",
    "ScaleSearch",
    "best_scales",
    "block_hadamard",
    "default_method",
    "fitting_format",
    "format_names",
    "quantize",
    "quantized_format",
    "restore",
    "restored_rows",
    "rotation",
    "tensor_scale",
]
