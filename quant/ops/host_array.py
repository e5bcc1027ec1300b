"""Activations of any ``Ops`` as numpy's float32, for who looks at them from outside a pass.

Only this room knows what an implementation's arrays are: numpy's own, torch tensors, or a residual
stream with a sum still pending.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from localrt.quant.ops.protocol import Array, Vector

__all__ = ["copy_to_host", "vector_to_host"]


def copy_to_host(x: Array, out: npt.NDArray[np.float32]) -> None:
    """Copy activations (R, D) into ``out``; ``x`` stays what it is."""
    if not isinstance(x, np.ndarray):
        settle = getattr(x, "settle", None)
        tensor = x if settle is None else settle()
        x = tensor.detach().float().cpu().numpy()
    out[:] = x


def vector_to_host(vector: Vector, out: npt.NDArray[np.float32]) -> None:
    """Copy a norm's weights or a bias (D,) into ``out``."""
    values = getattr(vector, "values", None)
    copy_to_host(values if isinstance(values, np.ndarray) else vector, out)
