"""The torch implementation that also sums H = X^T X over the inputs of chosen matrices.

For quantizers, which need a layer's inputs. It does not know which layer a matrix belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor as Tensor  # for callers too

from localrt.quant.methods.gptq import HessianSum
from localrt.quant.reference.ops import TorchOps


def calibration_format() -> str:
    """The compute format for passes over calibration text on this machine's CPU.

    bf16 if the CPU multiplies bf16 natively, four times as fast as float32; else float32, since
    emulation is slow.
    """
    able = torch.cpu.get_capabilities()
    return "bf16" if able.get("avx512_bf16") or able.get("amx_bf16") else "f32"


class CalibrationOps(TorchOps):
    """See ``TorchOps``. Chosen weights are watched."""

    def __init__(self, *, compute_format: str = "bf16", threads: int | None = None) -> None:
        super().__init__(compute_format=compute_format, threads=threads)
        self._sums: dict[int, tuple[Tensor, HessianSum]] = {}

    def watch(self, weights: Iterable[Tensor]) -> None:
        """Forget all sums and begin new ones for ``weights``: columns^2 * 4 bytes each."""
        self._sums = {id(weight): (weight, HessianSum(weight.shape[1])) for weight in weights}

    def take_hessian(self, weight: Tensor) -> npt.NDArray[np.float32]:
        """H of a watched weight's inputs as estimated, (columns, columns); it is forgotten."""
        return self._sums.pop(id(weight))[1].estimate()

    def copy(self, x: Tensor) -> Tensor:
        """An array of its own: a block may overwrite the one that it gets."""
        return x.clone()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The product; inputs of a watched weight are counted."""
        watched = self._sums.get(id(weight))
        if watched is not None:
            watched[1].add(x.float().numpy())
        return super().linear(x, weight, bias)
