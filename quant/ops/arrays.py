"""The arrays of the compute steps, which nothing above an implementation looks into.

Only this room knows what they are: numpy's own, torch tensors, or a residual stream with a sum
still pending. Who must look at activations from outside a pass has them copied to the host.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = [
    "Array",
    "Pass",
    "Vector",
    "Weight",
    "copy_to_host",
    "put_from_host",
    "to_host",
    "vector_to_host",
]

Array: TypeAlias = Any  # activations, (R, ...)
Weight: TypeAlias = Any  # a matrix as the implementation keeps it, (out, in)
Vector: TypeAlias = Any  # a norm weight or a bias, (n,)
Pass: TypeAlias = Any  # what an implementation derives once from a Batch


def copy_to_host(x: Array, out: npt.NDArray[np.float32]) -> None:
    """Copy activations (R, D) into ``out``; ``x`` stays what it is."""
    if not isinstance(x, np.ndarray):
        settle = getattr(x, "settle", None)
        tensor = x if settle is None else settle()
        x = tensor.detach().float().cpu().numpy()
    out[:] = x


def to_host(x: Array) -> npt.NDArray[np.float32]:
    """Float32 numbers of numpy or torch, on the host."""
    if isinstance(x, np.ndarray):
        return x
    host: npt.NDArray[np.float32] = x.detach().cpu().numpy()
    return host


def put_from_host(x: Array, values: npt.NDArray[np.float32]) -> None:
    """Fill ``x``, numbers of numpy or torch, with ``values`` of its shape."""
    if isinstance(x, np.ndarray):
        x[:] = values
    else:
        x.copy_(x.new_tensor(values))


def vector_to_host(vector: Vector, out: npt.NDArray[np.float32]) -> None:
    """Copy a norm's weights or a bias (D,) into ``out``."""
    values = getattr(vector, "values", None)
    copy_to_host(values if isinstance(values, np.ndarray) else vector, out)
