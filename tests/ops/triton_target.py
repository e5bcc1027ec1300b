"""Where the card's kernels are tested: on a CUDA GPU, else on the CPU, Triton's in its interpreter.

Import this before anything that imports Triton: the interpreter is chosen when Triton is imported.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
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
    from triton.runtime import interpreter

    if not isinstance(tl.sum, interpreter.InterpretedFunction):
        pytest.skip(
            "Triton was imported before TRITON_INTERPRET=1 was set: run tests/ops alone",
            allow_module_level=True,
        )

from localrt.quant.ops.cuda.launch import emulate  # noqa: E402
from localrt.quant.ops.cuda.products import TiledMatrix  # noqa: E402
from tests.ops.cuda.emulator import Emulator  # noqa: E402


def patch_once_a_launch() -> None:
    """The interpreter patches ``triton.language`` anew for every call of a device function, which
    takes a quarter of the time: once a launch is enough.
    """
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[frozenset[str]] = set()

    @cache
    def languages(fn: Any) -> frozenset[str]:
        modules = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        return frozenset(module.__name__ for module in modules)

    def patch_new(fn: Any) -> Any:
        if languages(fn) in patched:
            return interpreter._LangPatchScope()
        patched.add(languages(fn))
        return patch(fn)

    def launch_anew(self: Any, *args: Any, **options: Any) -> None:
        patched.clear()
        with np.errstate(over="ignore"):  # it is infinity, as on a card
            launch(self, *args, **options)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_new, launch_anew


if DEVICE == "cpu":
    patch_once_a_launch()
    emulate(Emulator())


def tiles_of(tensor: PackedTensor) -> TiledMatrix:
    """A packed matrix as the kernels take it."""
    data = torch.from_numpy(tile(tensor)).to(DEVICE)
    shape = (tensor.shape[0], tensor.shape[1])
    count = -(-shape[0] // 16)
    factor = None if tensor.scale == 1.0 else torch.full((count,), tensor.scale, device=DEVICE)
    return TiledMatrix(tensor.format.name, shape, data, factor)
