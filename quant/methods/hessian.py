"""What GPTQ knows of a layer's inputs: H = 2 X^T X / n, summed over calibration activations.

It does not know which layer, nor where activations come from.
"""

from __future__ import annotations

import numpy as np

from localrt.errors import LocalrtError
from localrt.quant.formats.codec import Floats

__all__ = ["HessianSum", "require_finite_hessian"]


class HessianSum:
    """Accumulates H for a matrix with ``columns`` inputs. Memory: columns^2 * 4 bytes."""

    def __init__(self, columns: int) -> None:
        self._sum = np.zeros((columns, columns), np.float32)
        self.rows = 0

    def add(self, inputs: Floats) -> None:
        """Count activations (n, columns)."""
        self._sum += inputs.T @ inputs
        self.rows += len(inputs)

    def matrix(self) -> Floats:
        """H, (columns, columns): a new array. Zero without activations."""
        return self._sum * np.float32(2 / max(self.rows, 1))


def require_finite_hessian(hessian: Floats, name: str) -> None:
    """Raise ``LocalrtError`` that names the weight if H holds NaN or infinity."""
    if not np.isfinite(hessian).all():
        raise LocalrtError(
            f"{name or 'a tensor'}: the calibration activations hold NaN or infinity: the model "
            "cannot be calibrated with this text; use method rtn"
        )
