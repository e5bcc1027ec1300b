"""What GPTQ knows of a layer's inputs: H = 2 X^T X / n, summed over calibration activations.

It does not know which layer, nor where activations come from.
"""

from __future__ import annotations

import math

import numpy as np

from localrt.errors import LocalrtError
from localrt.quant.formats.codec import Floats

__all__ = ["HessianSum", "require_finite_hessian"]

_BLOCK_ROWS = 2048
_SHRINKAGE = 0.4


class HessianSum:
    """Accumulates H for a matrix with ``columns`` inputs. Memory: columns^2 * 4 bytes, and a block.

    Activations are gathered first: few large products are several times as fast as many small
    ones, and a symmetric one costs half.
    """

    def __init__(self, columns: int) -> None:
        self._sum = np.zeros((columns, columns), np.float32, order="F")  # the upper triangle
        self._block = np.empty((_BLOCK_ROWS, columns), np.float32)
        self._held = 0
        self.rows = 0

    def add(self, inputs: Floats) -> None:
        """Count activations (n, columns)."""
        done = 0
        while done < len(inputs):
            count = min(len(inputs) - done, _BLOCK_ROWS - self._held)
            self._block[self._held : self._held + count] = inputs[done : done + count]
            self._held += count
            done += count
            if self._held == _BLOCK_ROWS:
                self._flush()
        self.rows += len(inputs)

    def matrix(self) -> Floats:
        """H, (columns, columns): a new array. Zero without activations."""
        self._flush()
        upper = self._sum * np.float32(2 / max(self.rows, 1))
        diagonal = np.diagonal(upper).copy()
        upper += upper.T.copy()
        np.fill_diagonal(upper, diagonal)
        return upper

    def estimate(self) -> Floats:
        """H as it would be of more activations: a multiple of the identity is added.

        Few of them for so many columns make it seem certain of what is chance (Ledoit and Wolf
        2004). How much was measured: of the error on other text than what was calibrated on,
        between a tenth, at nine rows a column, and a third, at less than two, are spared.
        """
        whole = self.matrix()
        share = _SHRINKAGE * math.sqrt(len(whole) / max(self.rows, 1))
        whole[np.diag_indices_from(whole)] += share * whole.diagonal().mean()
        return whole

    def _flush(self) -> None:
        from scipy.linalg.blas import ssyrk

        if self._held:
            columns_first = self._block[: self._held].T  # Fortran order, without a copy
            self._sum = ssyrk(1.0, columns_first, beta=1.0, c=self._sum, overwrite_c=1)
            self._held = 0


def require_finite_hessian(hessian: Floats, name: str) -> None:
    """Raise ``LocalrtError`` that names the weight if H holds NaN or infinity."""
    if not np.isfinite(hessian).all():
        raise LocalrtError(
            f"{name or 'a tensor'}: the calibration activations hold NaN or infinity: the model "
            "cannot be calibrated with this text; use method rtn"
        )
