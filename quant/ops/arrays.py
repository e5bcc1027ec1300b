"""The arrays of the compute steps, which nothing above an implementation looks into.

They are numpy's own, torch's tensors, a GPU's memory, or a residual stream with a sum still
pending. Code outside a pass copies activations to the host to read them.

Memory straight from the system: page-aligned for reads and pinning, given back when freed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol, Self, TypeAlias
from weakref import ref

import numpy as np
import numpy.typing as npt
from typing_extensions import TypeVar

from localrt.system import map_zeros

Hidden: TypeAlias = Any
"""The hidden states of a pass, (R, D): a residual stream in its implementation's own form."""

Array: TypeAlias = Any
"""Any other activations, (R, ...), in its implementation's own form."""

Weight: TypeAlias = Any
"""A matrix as its implementation keeps it, (out, in)."""

Vector: TypeAlias = Any
"""A norm weight or a bias as its implementation keeps it, (n,)."""

Pass: TypeAlias = Any
"""What an implementation has derived from a ``Batch``."""


def copy_to_host(x: object, out: npt.NDArray[np.float32]) -> None:
    """Copy activations (R, D) into ``out``; ``x`` is unchanged."""
    x = getattr(x, "settle", lambda: x)()
    if hasattr(x, "copy_to") and out.flags.c_contiguous:
        x.copy_to(out)
    else:
        out[:] = to_host(x)


def to_host(x: Any) -> npt.NDArray[np.float32]:
    """Numbers of numpy, of torch or in a GPU's memory, as float32 on the host."""
    x = getattr(x, "settle", lambda: x)()
    if isinstance(x, np.ndarray):
        return x
    host: npt.NDArray[np.float32]
    host = x.to_host() if hasattr(x, "to_host") else x.detach().float().cpu().numpy()
    return host


def put_from_host(x: Any, values: npt.NDArray[np.float32]) -> None:
    """Fill ``x``, numbers as ``to_host`` takes them, with ``values`` of its shape."""
    if isinstance(x, np.ndarray):
        x[:] = values
    elif hasattr(x, "to_host"):
        x.put(values)
    else:
        x.copy_(x.new_tensor(values))


def vector_to_host(vector: object, out: npt.NDArray[np.float32]) -> None:
    """Copy a norm's weights or a bias (D,) into ``out``."""
    values = getattr(vector, "values", None)
    copy_to_host(values if isinstance(values, np.ndarray) else vector, out)


class Memory(Protocol):
    """Bytes in RAM or on a GPU."""

    @property
    def nbytes(self) -> int:
        """How many."""

    def __getitem__(self, index: slice, /) -> Self:
        """Some of them, where they are."""


class DeviceMemory(Memory, Protocol):
    """Bytes on a GPU."""

    @property
    def address(self) -> int:
        """Where they begin."""


MemoryT = TypeVar("MemoryT", bound=Memory, default=Memory)


_LARGE_PAGE = 1 << 21
_LARGE_ARRAY = 1 << 20
_LARGEST_REGION = 64 << 20
_LINE = 64


def aligned_buffer(nbytes: int) -> npt.NDArray[np.uint8]:
    """``nbytes`` of zeros at a page boundary, resident only once touched, in large pages if any.

    The memory goes back to the system when the last view of it is gone.
    """
    if nbytes == 0:
        return np.empty(0, np.uint8)
    return np.frombuffer(map_zeros(nbytes, large_pages=True), np.uint8)


def large_floats(shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """An array whose values are not set; one of megabytes goes back to the system when it is freed.

    The C library would keep it: beneath a memory budget each megabyte is missing elsewhere. A row
    of logits is kept, of 262,144 tokens too: new memory would take 0.2 ms for each.
    """
    nbytes = 4 * math.prod(shape)
    if nbytes <= _LARGE_ARRAY:
        return np.empty(shape, np.float32)
    return aligned_buffer(nbytes).view(np.float32).reshape(shape)


class Regions:
    """Memory for arrays that live about as long as one another, side by side in large pages.

    In the C library's small ones a pass over weights takes up to a third longer. A region goes back
    to the system when the last view of it is gone. What nobody has taken is not resident.
    """

    def __init__(self) -> None:
        self._region: ref[npt.NDArray[np.uint8]] | None = None  # which its views keep
        self._size = self._taken = 0
        self._lock = Lock()

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return ``nbytes`` that may hold anything; ``cut`` may give some of them back."""
        with self._lock:
            region = None if self._region is None else self._region()
            if region is None or nbytes > region.size - self._taken:
                self._size = min(max(_LARGE_PAGE, 2 * self._size), _LARGEST_REGION)
                region = aligned_buffer(max(nbytes, self._size))
                self._region, self._taken = ref(region), 0
            start = self._taken
            self._taken = min(region.size, start + -(-nbytes // _LINE) * _LINE)
            return region[start : start + nbytes]

    def cut(self, taken: npt.NDArray[np.uint8], nbytes: int) -> npt.NDArray[np.uint8]:
        """Return the first ``nbytes`` of what was taken; the rest is free if it was taken last."""
        with self._lock:
            region = None if self._region is None else self._region()
            start = -1 if region is None else taken.ctypes.data - region.ctypes.data
            if start + -(-taken.size // _LINE) * _LINE == self._taken:
                self._taken = start + -(-nbytes // _LINE) * _LINE
            return taken[:nbytes]


AFTER_LAST = -1
"""Stands for the residual stream after the last layer, where layers are listed."""

CARRIED = -2
"""Stands for what an assistant makes of its own output, to be given to the next draft token."""


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """Where a pass copies its residual stream: as it is before each of ``layers``, or after the
    last, side by side in ``rows`` (R, len(layers) * D).
    """

    layers: tuple[int, ...]
    rows: npt.NDArray[np.float32]

    @property
    def within(self) -> bool:
        """Whether any is taken before the pass has ended."""
        return any(layer != AFTER_LAST for layer in self.layers)

    def of(self, layer: int) -> npt.NDArray[np.float32] | None:
        """Return the columns for ``layer``, (R, D), if it is listed."""
        if layer not in self.layers:
            return None
        at, width = self.layers.index(layer), self.rows.shape[1] // len(self.layers)
        return self.rows[:, at * width : (at + 1) * width]

    def copy(self, layers: Sequence[int], first: int, out: npt.NDArray[np.float32]) -> None:
        """Fill ``out`` (n, len(layers) * D) from the rows that begin with ``first``."""
        width = out.shape[1] // len(layers)
        for at, layer in enumerate(layers):
            own = self.of(layer)
            assert own is not None, "the pass has recorded it"
            out[:, at * width : (at + 1) * width] = own[first : first + len(out)]
