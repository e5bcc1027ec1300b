"""The torch implementation, watched: sums H = X^T X of what chosen matrices are multiplied with.

For quantizers, which need a layer's inputs and put other values in its place. It does not know
which layer a matrix belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from localrt.quant.ops.torch_ops import TorchOps

__all__ = ["CalibrationOps"]


class CalibrationOps(TorchOps):
    """See ``TorchOps``. Weights can be watched, read and overwritten."""

    def __init__(
        self, *, compute_format: str = "bf16", device: str = "cpu", threads: int | None = None
    ) -> None:
        super().__init__(compute_format=compute_format, device=device, threads=threads)
        self._sums: dict[int, tuple[Tensor, Tensor, int]] = {}

    def watch(self, weights: Iterable[Tensor]) -> None:
        """Forget all sums, and begin those of ``weights``: columns^2 * 4 bytes each."""
        self._sums = {}
        for weight in weights:
            columns = weight.shape[1]
            total = torch.zeros(columns, columns, dtype=torch.float32, device=weight.device)
            self._sums[id(weight)] = (weight, total, 0)

    def hessian(self, weight: Tensor) -> npt.NDArray[np.float32]:
        """H = 2 X^T X / rows of a watched weight's inputs, (columns, columns)."""
        _, total, rows = self._sums[id(weight)]
        host: npt.NDArray[np.float32] = (total * (2 / max(rows, 1))).cpu().numpy()
        return host

    def values(self, weight: Tensor) -> npt.NDArray[np.float32]:
        """A matrix in float32, copied to the host."""
        host: npt.NDArray[np.float32] = weight.float().cpu().numpy().copy()
        return host

    def replace(self, weight: Tensor, values: npt.NDArray[np.float32]) -> None:
        """Overwrite a matrix, in the compute dtype."""
        weight.copy_(torch.from_numpy(values))

    def copy(self, x: Tensor) -> Tensor:
        """An array of its own: a block may overwrite the one that it gets."""
        return x.clone()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The product; inputs of a watched weight are counted."""
        watched = self._sums.get(id(weight))
        if watched is not None:
            _, total, rows = watched
            inputs = x.float()
            total.addmm_(inputs.T, inputs)
            self._sums[id(weight)] = (weight, total, rows + len(inputs))
        return super().linear(x, weight, bias)
