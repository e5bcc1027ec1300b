"""Quantizers: float32 weights and calibration statistics to packed tensors. Mathematics only."""

from localrt.quant.methods.choices import (
    METHODS,
    default_method,
    fitting_format,
    format_names,
    quantized_format,
    rotation,
)
from localrt.quant.methods.hadamard import block_hadamard
from localrt.quant.methods.hessian import HessianSum
from localrt.quant.methods.quantize import quantize, tensor_scale
from localrt.quant.methods.restore import Quantized, restore, restored_rows
from localrt.quant.methods.search import ScaleSearch, best_scales

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
