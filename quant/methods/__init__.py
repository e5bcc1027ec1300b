"""Quantizers: float32 weights and calibration statistics to packed tensors. Mathematics only.

It knows neither models nor files. Start reading at ``quantize.py``.

``quant/methods`` has the mathematics: a search for the scales with the least error (|d|^2.4), GPTQ
with activation order, damping and static groups, and MR-GPTQ, which first rotates the inputs by a
block Hadamard matrix. The inputs' statistics are an estimate from some thousand tokens, of as many
columns: they are shrunk towards a multiple of the identity, the more the fewer tokens there are,
which spares up to a third of the error on other text (``quant/methods/gptq.py``).
``quant/methods/quantize.py`` has the tables of defaults, taken from ``docs/quality.md``.

The search tries up to a hundred clipping steps for every group. The kernels do it
(``quant/cpu/csrc/scale_search.h``) about ten times as fast as numpy, which is their test. Both find
the same scale except where two are equally good to 1e-4, about one group in three thousand; all
instruction sets find the same. GGUF's blocks are searched by weighted squares instead, each try
improved by least squares (``quant/methods/scales.py``, ``quant/cpu/csrc/weighted_search.h``: six to
fifteen times as fast as numpy on one thread). Rounding SmolLM2 to int4-g32 takes 2.7 s on two
cores, to NF4 3.1 s. With numpy's search it takes 13.4 and 17.4 s; llama.cpp's conversion to Q4_0,
which does not search, takes 0.3 s.
"""

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
