"""Loads checkpoint tensors as weights of an ``Ops``: checks shapes, and that none is unused.

Knows names and shapes. A tensor that the architecture never asked for is an error: a model without
one of its parts would give silently wrong text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.common.errors import CheckpointError, UnsupportedModelError
from localrt.models.tensor_source import TensorSource, WeightBlock
from localrt.quant.formats import F32, PackedTensor, pack, unpack
from localrt.quant.ops.arrays import Vector, Weight
from localrt.quant.ops.protocol import Ops

Transform = Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]]
"""Of a vector's values as published to those that are computed with; equal ones do the same."""

VectorKey = tuple[tuple[str, ...], float, float, Transform | None]
"""The names of a vector's tensors, or one of constants; what is added to their values, what these
are times, and what becomes of them.
"""

# Derived from the config, read elsewhere, or of another modality: not part of the text model.
_IGNORED_PARTS = (
    *("confidence_head.", "conf_proj."),  # DSpark's expected acceptance
    "rotary_emb.inv_freq",
    "rope_freqs.weight",
    "rope_factors_",
    "vision_tower.",
    "visual.",
    "vision_model.",
    "multi_modal_projector.",
)


def is_ignored(name: str) -> bool:
    """Whether a checkpoint's tensor may be ignored, as no part of the text model."""
    return any(part in name for part in _IGNORED_PARTS)


_EXPERT = re.compile(r"model\.layers\.(\d+)\..*\.experts\.(\d+)\..*")


def missing_tensor(name: str) -> str:
    """The message about a tensor that a checkpoint lacks."""
    expert = _EXPERT.fullmatch(name)
    if expert is None:
        return f"tensor {name} is missing"
    return (
        f"layer {expert[1]} lacks expert {expert[2]}: tensor {name} is missing; "
        "download the model again"
    )


class WeightLoader:
    """Loads tensors into ``ops``, each once.

    ``on_bytes`` gets the packed bytes of every block. ``repack`` converts a matrix's blocks to
    another format. ``vectors`` caches vectors, which are reused for the same tensors.
    """

    def __init__(
        self,
        checkpoint: TensorSource,
        ops: Ops,
        on_bytes: Callable[[int], None] | None = None,
        *,
        repack: Callable[[WeightBlock], WeightBlock] = lambda block: block,
        vectors: dict[VectorKey, Vector] | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._ops = ops
        self._on_bytes = on_bytes
        self._repack = repack
        self._vectors = {} if vectors is None else vectors
        self._used: set[str] = set()

    def matrix(self, shape: tuple[int, int], *names: str) -> Weight:
        """The rows of ``names`` stacked in order; together they must have ``shape``."""
        self.check(shape, *names)
        self._used.update(names)
        return self._ops.weight(shape, self._blocks(names))

    def vector(
        self,
        size: int,
        *names: str,
        offset: float = 0.0,
        scale: float = 1.0,
        transform: Transform | None = None,
    ) -> Vector:
        """The concatenated values of ``names``, plus ``offset``, multiplied by ``scale``."""
        self.check((size,), *names)
        self._used.update(names)
        key = (names, offset, scale, transform)
        if key not in self._vectors:
            values = np.concatenate([self._values(name) for name in names])
            with np.errstate(all="ignore"):  # a damaged file may overflow
                values = (values + np.float32(offset)) * np.float32(scale)
                if transform is not None:
                    values = transform(values)
            self._vectors[key] = self._ops.vector(values)
        return self._vectors[key]

    def check(self, shape: tuple[int, ...], *names: str) -> None:
        """Raise ``CheckpointError`` unless ``names``, stacked, have this shape."""
        shapes = [self._shape(name) for name in names]
        fits = all(len(s) == len(shape) and s[1:] == shape[1:] for s in shapes)
        if not fits or sum(s[0] for s in shapes) != shape[0]:
            self._mismatch(names, shapes, shape)

    def array(
        self, shape: tuple[int, ...], name: str, first: int = 0, end: int | None = None
    ) -> npt.NDArray[np.float32]:
        """A tensor's values on the host, of a matrix the rows from ``first`` to ``end``."""
        self.check(shape, name)
        self._used.add(name)
        return self._values(name, first, end).reshape(-1, *shape[1:])

    def packed(self, shape: tuple[int, int], name: str) -> PackedTensor:
        """A matrix on the host, as its file has it."""
        self.check(shape, name)
        self._used.add(name)
        found = self._checkpoint.read(name)
        if self._on_bytes is not None:
            self._on_bytes(found.nbytes)
        return found

    def transposed(self, shape: tuple[int, int], name: str) -> Weight:
        """A matrix whose tensor is stored as (in, out), in float32."""
        values = np.ascontiguousarray(self.array(shape[::-1], name).T)
        return self._ops.weight(shape, [pack(values, F32, name=name)])

    def scaled(self, shape: tuple[int, int], name: str, factors: str) -> tuple[Weight, Vector]:
        """A matrix and its bias, whose rows are multiplied by a vector, in float32."""
        scale = self.array(shape[:1], factors)
        with np.errstate(all="ignore"):  # a damaged file may overflow
            rows = self.array(shape, f"{name}.weight") * scale[:, None]
            bias = self.array(shape[:1], f"{name}.bias") * scale
        return self._ops.weight(shape, [pack(rows, F32, name=name)]), self._ops.vector(bias)

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return name in self._checkpoint.tensors

    def optional_vector(self, present: bool, size: int, *names: str) -> Vector | None:
        """``vector``, or None if the model has none."""
        return self.vector(size, *names) if present else None

    def scalar(self, name: str) -> float:
        """The value of a tensor that has one."""
        if self._shape(name) != (1,):
            self._mismatch((name,), [self._shape(name)], (1,))
        self._used.add(name)
        return float(self._values(name)[0])

    def constants(self, name: str, values: npt.NDArray[np.float32]) -> Vector:
        """A vector of values that no tensor has; ``name`` identifies it in all layers."""
        key = ((name,), 0.0, 1.0, None)
        if key not in self._vectors:
            self._vectors[key] = self._ops.vector(values)
        return self._vectors[key]

    def skip(self, name: str) -> None:
        """Count a tensor as used without reading it."""
        self._used.add(name)

    def leave(self, shape: tuple[int, ...], *names: str) -> None:
        """Count tensors as used without reading them."""
        self._used.update(names)

    def finish(self) -> None:
        """Raise if the checkpoint has a tensor that nothing asked for."""
        for name in self._checkpoint.tensors:
            if name not in self._used and not is_ignored(name):
                raise UnsupportedModelError(
                    f"{self._checkpoint.path.name}: tensor {name} is not part of the "
                    f"{self._checkpoint.architecture} architecture as localrt knows it"
                )

    def _blocks(self, names: tuple[str, ...]) -> Iterator[WeightBlock]:
        for name in names:
            for block in self._checkpoint.blocks(name):
                yield self._repack(block)
                if self._on_bytes is not None:
                    self._on_bytes(block.nbytes)

    def _values(self, name: str, first: int = 0, end: int | None = None) -> npt.NDArray[np.float32]:
        packed = self._checkpoint.read(name, first, end)
        if self._on_bytes is not None:
            self._on_bytes(packed.nbytes)
        return unpack(packed).reshape(-1)

    def _shape(self, name: str) -> tuple[int, ...]:
        info = self._checkpoint.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self._checkpoint.path.name}: {missing_tensor(name)}")
        return info.shape

    def _mismatch(
        self, names: tuple[str, ...], shapes: list[tuple[int, ...]], wanted: tuple[int, ...]
    ) -> None:
        found = ", ".join(f"{n} {s}" for n, s in zip(names, shapes, strict=True))
        raise CheckpointError(
            f"{self._checkpoint.path.name}: wrong shape: {found}; the config asks for {wanted}"
        )


@dataclass(frozen=True, slots=True)
class TapsFirst:
    """A convolution's taps, transposed from the file's order to (T, channels)."""

    taps: int

    def __call__(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return np.ascontiguousarray(values.reshape(-1, self.taps).T).reshape(-1)


class AskedTensors(WeightLoader):
    """What the parts of a model would load: ``ask`` gets each shape and its tensors, unread."""

    def ask(self, shape: tuple[int, ...], *names: str) -> None:
        """A matrix or vector of this shape, which these tensors make together."""
        raise NotImplementedError

    def matrix(self, shape: tuple[int, int], *names: str) -> Any:
        self.ask(shape, *names)

    def vector(self, size: int, *names: str, **_of_values: object) -> Any:
        self.ask((size,), *names)

    def scalar(self, name: str) -> float:
        self.ask((1,), name)
        return 1.0

    def array(
        self, shape: tuple[int, ...], name: str, first: int = 0, end: int | None = None
    ) -> Any:
        self.ask(shape, name)

    def leave(self, shape: tuple[int, ...], *names: str) -> None:
        self.ask(shape, *names)

    def transposed(self, shape: tuple[int, int], name: str) -> Any:
        self.ask(shape[::-1], name)

    def constants(self, name: str, values: npt.NDArray[np.float32]) -> Any: ...


class UnreadTensors(AskedTensors):
    """For a part that is not used: ``own`` counts its tensors, and reads none."""

    def __init__(self, own: WeightLoader) -> None:
        self._own = own

    def ask(self, shape: tuple[int, ...], *names: str) -> None:
        self._own.leave(shape, *names)
