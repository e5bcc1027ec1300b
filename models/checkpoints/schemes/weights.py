"""Common parts of schemes: checked config values, and the tensors of a quantized weight.

An unknown value is an error that names the key and the supported values: a partly understood scheme
would silently give wrong weights. A ``Scheme`` knows the suffixes of its tensors' names, and builds
one source from a weight's tensors. Weights that were not quantized have none of these tensors and
stay unchanged. Tensors of all experts of a layer have three axes; they are read as one matrix of
all experts' rows in order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypeVar

from localrt.common.errors import CheckpointError, UnsupportedModelError
from localrt.models.row_order import StackedRows
from localrt.models.tensor_source import RowSource, StoredTensor
from localrt.quant.formats import Format

T = TypeVar("T")
_PAIR = re.compile(r"(\d{1,9})x(\d{1,9})")


@dataclass(frozen=True, slots=True)
class Keys:
    """Config ``values`` found at ``where``: a file's path, and the keys that lead there."""

    values: Mapping[str, object]
    where: str

    def value(self, key: str) -> Any:
        """The unchecked value; None if there is none."""
        return self.values.get(key)

    def number(self, key: str, default: int | None = None) -> int:
        """An integer.

        Raises:
            CheckpointError: the value is not an integer, or missing without a ``default``.
        """
        found = self.values.get(key, default)
        if type(found) is not int or abs(found) > 1 << 30:
            raise self.wrong(key, "should be a whole number")
        return found

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        found = self.values.get(key, default)
        if type(found) is not bool:
            raise self.wrong(key, "should be true or false")
        return found

    def one_of(self, key: str, known: Sequence[T], default: T) -> T:
        """Return the value, which must be a supported one.

        Raises:
            UnsupportedModelError: it is not; the message lists the supported ones.
        """
        found = self.values.get(key, default)
        for value in known:
            if type(value) is type(found) and value == found:
                return value
        names = ", ".join(str(value) for value in known if value is not None)
        raise UnsupportedModelError(
            f"{self.where}: {key} is {_short(found)}, of which localrt reads {names}; use the "
            "original model, or a GGUF file of it"
        )

    def inner(self, key: str) -> Keys | None:
        """The object of a key; None if there is none, or an empty one."""
        found = self.values.get(key)
        if not found:
            return None
        if not isinstance(found, Mapping):
            raise self.wrong(key, "should be an object")
        return Keys(found, f"{self.where}: {key[:80]}")

    def all_inner(self, key: str) -> Iterator[Keys]:
        """Every object within the object of a key."""
        outer = self.inner(key)
        for name in () if outer is None else outer.values:
            found = outer.inner(name) if outer is not None else None
            if found is not None:
                yield found

    def pair(self, key: str) -> tuple[int, int] | None:
        """Two integers of at least 1, as a list or like "128x128"; None if there are none."""
        found = self.values.get(key)
        if isinstance(found, str) and (match := _PAIR.fullmatch(found)):
            found = [int(match[1]), int(match[2])]
        if found is None:
            return None
        if isinstance(found, list) and len(found) == 2 and all(type(n) is int for n in found):
            first, second = found
            if 0 < first < 1 << 30 and 0 < second < 1 << 30:
                return first, second
        raise self.wrong(key, "should be two whole numbers of at least 1")

    def wrong(self, key: str, reason: str) -> CheckpointError:
        """The error for a malformed value."""
        found = self.values.get(key)
        return CheckpointError(f"{self.where}: {key} {reason}, is {_short(found)}")

    def unread(self, key: str, what: str) -> UnsupportedModelError:
        """The error for an unsupported scheme."""
        return UnsupportedModelError(
            f"{self.where}: {key} asks for {what}, which localrt cannot read; use the original "
            "model, or a GGUF file of it"
        )


def weights_alone(kind: str, bits: int, input_bits: int) -> str:
    """The note about a scheme that quantizes activations, too."""
    letters = "FP" if kind == "float" else "INT"
    return (
        f"published for {letters}{bits} weights and {input_bits}-bit activations "
        f"(W{bits}A{input_bits}): localrt runs it as weight-only"
    )


def _short(value: object) -> str:
    """A value shortened to fit a one-line message."""
    return repr(value)[:60]


UNUSED = (
    # settings of activations and caches are ignored: only weights are read
    ".input_scale",
    ".input_global_scale",
    ".input_zero_point",
    ".output_scale",
    ".activation_scale",
    ".k_scale",
    ".v_scale",
)
_TABLE = ".ngram_embedding."  # ``checkpoints/family_tensors.py`` joins these and their scales


@dataclass(frozen=True, slots=True)
class Parts:
    """The tensors of one weight by suffix; ``name`` is the weight's."""

    name: str
    stem: str
    tensors: Mapping[str, StoredTensor]

    def find(self, ending: str) -> StoredTensor | None:
        """The tensor with this suffix, if there is one."""
        return self.tensors.get(ending)

    def need(self, ending: str) -> StoredTensor:
        """The tensor with this suffix; ``CheckpointError`` if there is none."""
        found = self.tensors.get(ending)
        if found is None:
            other = next(iter(self.tensors.values()))
            raise CheckpointError(
                f"{other.file.path}: tensor {self.stem + ending!r} of {other.info.name!r:.80} is "
                "missing: download the model again"
            )
        return found


class Scheme(Protocol):
    """A way of quantizing, as a model's config describes it."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the user about the scheme."""

    @property
    def typical(self) -> str:
        """The format of most weights, according to the config."""

    endings: ClassVar[Mapping[str, str]]
    """Its tensors' name suffixes, and the suffix of the weight's name that replaces them."""

    def source(self, parts: Parts) -> RowSource | None:
        """The weight's source; None if the weight is not quantized.

        Raises:
            CheckpointError: tensors are missing, or do not fit each other or the config.
            UnsupportedModelError: an unsupported packing.
        """


def published_tensors(
    stored: Mapping[str, StoredTensor], scheme: Scheme | None
) -> dict[str, RowSource]:
    """``stored`` with each quantized weight's tensors replaced by one source."""
    if scheme is None:
        return dict(stored)
    found: dict[str, RowSource] = {}
    weights: dict[str, Parts] = {}
    tensors: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        if _TABLE in name:
            found[name] = tensor
            continue
        if name.endswith(UNUSED):
            continue
        ending = next((known for known in scheme.endings if name.endswith(known)), None)
        if ending is None:
            found[name] = tensor
            continue
        stem = name.removesuffix(ending)
        weight = stem + scheme.endings[ending]
        if weight not in weights:
            tensors[weight] = {}
            weights[weight] = Parts(weight, stem, tensors[weight])
        tensors[weight][ending] = tensor
    for name, parts in weights.items():
        source = _source(scheme, parts)
        if source is not None:
            found[name] = source
            continue
        for tensor in parts.tensors.values():
            found[tensor.info.name] = tensor
    return found


def _source(scheme: Scheme, parts: Parts) -> RowSource | None:
    shapes = {len(tensor.info.shape) for tensor in parts.tensors.values()}
    if len(parts.tensors) == 1 or max(shapes) != 3:
        return scheme.source(parts)
    stacks = [tensor for tensor in parts.tensors.values() if len(tensor.info.shape) == 3]
    experts = stacks[0].info.shape[0]
    if not experts or any(tensor.info.shape[0] != experts for tensor in stacks):
        raise wrong(stacks[0], "and what belongs to it are not for as many experts")
    flat = {ending: _flat(tensor) for ending, tensor in parts.tensors.items()}
    source = scheme.source(replace(parts, tensors=flat))
    return None if source is None else StackedRows.of(source, experts)


def _flat(tensor: StoredTensor) -> StoredTensor:
    """Merge the first two of three axes: rows of all experts."""
    shape = tensor.info.shape
    if len(shape) != 3:
        return tensor
    return replace(tensor, info=replace(tensor.info, shape=(shape[0] * shape[1], shape[2])))


def require_shape(
    tensor: StoredTensor, format_: Format | None, *shape: int | None, why: str = ""
) -> None:
    """Raise ``CheckpointError`` unless a tensor has this type and shape; None: any size above 0.

    ``why`` explains the shape.
    """
    info = tensor.info
    fits = len(info.shape) == len(shape) and all(
        size == wanted if wanted is not None else size > 0
        for size, wanted in zip(info.shape, shape, strict=True)
    )
    if not fits or format_ not in (None, info.format):
        sizes = ", ".join("n" if size is None else str(size) for size in shape)
        kind = "" if format_ is None else f" in {format_.name.upper()}"
        raise wrong(tensor, f"should be ({sizes}){kind}{why and f' {why}'}")


def wrong(tensor: StoredTensor, reason: str) -> CheckpointError:
    """The error for a tensor that does not fit; it names the tensor's type and shape."""
    info = tensor.info
    kind = info.format.name.upper()
    return CheckpointError(
        f"{tensor.file.path}: tensor {info.name[:200]!r} {info.shape} in {kind} {reason}"
    )
