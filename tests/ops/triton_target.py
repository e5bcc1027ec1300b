"""Where the Triton kernels are tested: on a CUDA GPU, else in Triton's interpreter on the CPU.

Import this before anything that imports Triton: the interpreter is chosen when Triton is imported.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

from localrt.quant.formats import PackedTensor
from localrt.quant.formats.tiled import tile

__all__ = ["DEVICE", "tiles_of"]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if find_spec("triton") is None:
    pytest.skip("Triton is not installed: pip install 'localrt[gpu]'", allow_module_level=True)
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    if not isinstance(tl.sum, InterpretedFunction):
        pytest.skip(
            "Triton was imported before TRITON_INTERPRET=1 was set: run tests/ops alone",
            allow_module_level=True,
        )

from localrt.quant.ops.triton.formats import layout_of  # noqa: E402
from localrt.quant.ops.triton.linear import Tiles  # noqa: E402


def tiles_of(tensor: PackedTensor) -> Tiles:
    """A packed matrix as the kernels take it."""
    data = torch.from_numpy(tile(tensor)).to(DEVICE)
    layout = layout_of(tensor.format)
    assert layout is not None
    shape = (tensor.shape[0], tensor.shape[1])
    count = -(-shape[0] // 16)
    factor = None if tensor.scale == 1.0 else torch.full((count,), tensor.scale, device=DEVICE)
    return Tiles(layout, shape, data, data.view(torch.float16), data.view(torch.int32), factor)
