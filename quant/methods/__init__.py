"""Quantizers: float32 weights and calibration statistics to packed tensors. Mathematics only."""

from localrt.quant.methods.hadamard import block_hadamard
from localrt.quant.methods.hessian import HessianSum
from localrt.quant.methods.quantize import METHODS, Quantized, quantize, restore, tensor_scale

__all__ = [
    "METHODS",
    "HessianSum",
    "Quantized",
    "block_hadamard",
    "quantize",
    "restore",
    "tensor_scale",
]
