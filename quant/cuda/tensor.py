"""Tensors in a device's memory: an address, a shape, strides and a type, for kernels.

The host cannot read them: ``upload`` and ``to_host`` copy. Nothing here computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from localrt.quant.cuda.device import Device
from localrt.quant.cuda.memory import Pool, PoolBlock
from localrt.quant.formats.convert import bf16_values


@dataclass(frozen=True, slots=True)
class Dtype:
    """An element type; numpy arrays of bf16 hold its bits."""

    name: str
    itemsize: int
    numpy: type[np.generic]

    def __str__(self) -> str:
        return self.name


FLOAT32 = Dtype("float32", 4, np.float32)
BFLOAT16 = Dtype("bfloat16", 2, np.uint16)
INT64 = Dtype("int64", 8, np.int64)
INT32 = Dtype("int32", 4, np.int32)
INT16 = Dtype("int16", 2, np.int16)
UINT8 = Dtype("uint8", 1, np.uint8)
_BY_NUMPY = {np.dtype(each.numpy): each for each in (FLOAT32, INT64, INT32, INT16, UINT8)}

_Index: TypeAlias = "int | slice | None"


@dataclass(slots=True, eq=False)
class Tensor:
    """A view of ``block``; strides are in elements. The last reference to a block frees it."""

    device: Device
    block: PoolBlock | None  # None: a tensor without memory
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Dtype

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def span(self) -> int:
        """The extent in memory, from the first element to the last."""
        if not self.size:
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of the elements; 0 once the block has been freed."""
        freed = self.block is not None and not self.block.nbytes
        return 0 if freed else self.size * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements are adjacent and in order."""
        return not self.size or all(
            size == 1 or stride == whole
            for size, stride, whole in zip(
                self.shape, self.strides, whole_strides(self.shape), strict=True
            )
        )

    def __getitem__(self, index: _Index | tuple[_Index, ...]) -> Tensor:
        """A view; takes integers, slices without steps, and None for a new dimension of 1."""
        parts = index if isinstance(index, tuple) else (index,)
        address, at = self.address, 0
        shape, strides = list[int](), list[int]()
        for part in parts:
            if part is None:
                shape.append(1)
                strides.append(0)
                continue
            size, stride = self.shape[at], self.strides[at]
            at += 1
            if isinstance(part, slice):
                start, stop, step = part.indices(size)
                assert step == 1, "views have no steps"
                shape.append(max(0, stop - start))
                strides.append(stride)
            else:
                start = part + size if part < 0 else part
                assert 0 <= start < size, f"{part} of {size}"
            address += start * stride * self.dtype.itemsize
        return self._view(
            (*shape, *self.shape[at:]), (*strides, *self.strides[at:]), self.dtype, address
        )

    def view(self, *shape: int) -> Tensor:
        """A view in another shape, where -1 is inferred; nothing is copied."""
        if -1 in shape:
            left = self.size // max(1, -prod(shape))
            shape = tuple(left if size == -1 else size for size in shape)
        assert prod(shape) == self.size, f"{self.shape} as {shape}"
        strides = whole_strides(shape)
        if not self.is_contiguous:
            strides = _strides_of(self.shape, self.strides, shape)
        return self._view(shape, strides, self.dtype)

    reshape = view  # numpy's name, for code that takes both

    def typed(self, dtype: Dtype) -> Tensor:
        """The same bytes as another type, along the last dimension."""
        assert self.strides[-1] == 1 or self.shape[-1] == 1, "they lie in order"
        own, other = self.dtype.itemsize, dtype.itemsize
        shape = (*self.shape[:-1], self.shape[-1] * own // other)
        strides = (*(stride * own // other for stride in self.strides[:-1]), 1)
        return self._view(shape, strides, dtype)

    def transpose(self, one: int, other: int) -> Tensor:
        """A view with two dimensions exchanged."""
        order = list(range(len(self.shape)))
        order[one], order[other] = order[other], order[one]
        shape = tuple(self.shape[at] for at in order)
        return self._view(shape, tuple(self.strides[at] for at in order), self.dtype)

    def _view(
        self,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: Dtype,
        address: int | None = None,
    ) -> Tensor:
        at = self.address if address is None else address
        return Tensor(self.device, self.block, at, shape, strides, dtype)

    def followed_by(self, other: Tensor) -> Tensor:
        """This tensor joined with ``other``, which follows it in the same block; both
        one-dimensional.
        """
        return self._view((self.size + other.size,), (1,), self.dtype)

    def put(self, values: Tensor | npt.NDArray[np.generic]) -> Tensor:
        """Copy contiguous values of the same type, which the host may change afterwards; returns
        self.
        """
        assert self.is_contiguous, "it is one copy"
        if isinstance(values, Tensor):
            assert values.is_contiguous, "it is one copy"
            assert (values.dtype, values.size) == (self.dtype, self.size)
            if self.size and values.block is not None:
                self.device.copy(self.address, values.address, self.nbytes)
        else:
            values = np.ascontiguousarray(values)
            assert (values.dtype, values.size) == (np.dtype(self.dtype.numpy), self.size)
            if values.size:
                self.device.stage(self.address, values)
        return self

    def __setitem__(
        self, index: _Index | tuple[_Index, ...], values: Tensor | npt.NDArray[np.generic]
    ) -> None:
        """See ``put``."""
        self[index].put(values)

    def clear(self) -> Tensor:
        """Write zeros; returns self."""
        assert self.is_contiguous, "it is one piece"
        if self.size:
            self.device.clear(self.address, self.nbytes)
        return self

    def copy_to(self, out: npt.NDArray[np.generic]) -> None:
        """Copy contiguous elements to a contiguous array of the host, and wait. While recording,
        the copy is part of the graph and nobody waits; ``out`` must then be pinned.
        """
        assert self.is_contiguous, "it is one copy"
        if self.device.recording:
            self.device.copy_out(out, self.address)
        else:
            self.device.fetch(out, self.address)

    def to_host(self) -> npt.NDArray[Any]:
        """A copy in RAM; bf16 becomes float32."""
        values = self.bits()
        return bf16_values(values) if self.dtype is BFLOAT16 else values

    def bits(self) -> npt.NDArray[Any]:
        """A copy in RAM; bf16 becomes its bits."""
        whole = np.empty(self.span, self.dtype.numpy)
        if self.size:
            self.device.fetch(whole, self.address)
        strides = [stride * self.dtype.itemsize for stride in self.strides]
        values = np.lib.stride_tricks.as_strided(whole, self.shape, strides)
        return np.ascontiguousarray(values)

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """For libraries that share the memory."""
        strides = tuple(stride * self.dtype.itemsize for stride in self.strides)
        kind = "<i2" if self.dtype is BFLOAT16 else np.dtype(self.dtype.numpy).str
        numbers = {"shape": self.shape, "strides": strides, "typestr": kind}
        return {"version": 3, "data": (self.address, False), **numbers}


def whole_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides, step = list[int](), 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _strides_of(
    shape: tuple[int, ...], strides: tuple[int, ...], other: tuple[int, ...]
) -> tuple[int, ...]:
    """The strides of a view in the shape ``other``; only contiguous dimensions can be reshaped."""
    found, at = [0] * len(other), len(other) - 1
    step, whole, done = strides[-1], 1, 1
    for place in reversed(range(len(shape))):
        whole *= shape[place]
        if place and (shape[place - 1] == 1 or strides[place - 1] == whole * step):
            continue
        while at >= 0 and (done < whole or other[at] == 1):
            found[at] = done * step
            done *= other[at]
            at -= 1
        assert done == whole, f"{shape} with strides of {strides} is not {other}"
        step, whole, done = strides[place - 1], 1, 1
    assert at == -1, f"{shape} with strides of {strides} is not {other}"
    return tuple(found)


def empty(*shape: int, dtype: Dtype = FLOAT32, device: Device, pool: Pool | None = None) -> Tensor:
    """An uninitialized tensor, in scratch memory or a ``pool``.

    Raises:
        MemoryBudgetError: the device has no room for it.
    """
    nbytes = prod(shape) * dtype.itemsize
    block = (device.pool if pool is None else pool).take(nbytes)
    return Tensor(device, block, block.address, shape, whole_strides(shape), dtype)


def zeros(*shape: int, dtype: Dtype = FLOAT32, device: Device, pool: Pool | None = None) -> Tensor:
    """See ``empty``."""
    return empty(*shape, dtype=dtype, device=device, pool=pool).clear()


def upload(
    values: npt.NDArray[np.generic],
    device: Device,
    *,
    dtype: Dtype | None = None,
    pool: Pool | None = None,
) -> Tensor:
    """A copy of ``values`` on the device; the host does not wait for it.

    Pass bf16 values as their bits, with ``dtype``.
    """
    kind = dtype or _BY_NUMPY[values.dtype]
    return empty(*values.shape, dtype=kind, device=device, pool=pool).put(values)
