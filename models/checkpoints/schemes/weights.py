"""What makes up a quantized weight: tensors of a file whose names begin alike.

A ``Scheme`` knows how its tensors' names end, and makes one source of those of a weight. A weight
that the scheme left out has none of them, and stays what it is. Tensors of all experts of a layer
have three axes; they are read as one matrix whose rows are all experts', one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from localrt.common.errors import CheckpointError
from localrt.models.checkpoints.base import RowSource, StoredTensor
from localrt.models.checkpoints.expert_stacks import StackedRows
from localrt.quant.formats import Format

UNUSED = (
    # what is known of activations and caches: weights alone are read here
    ".input_scale",
    ".input_global_scale",
    ".input_zero_point",
    ".output_scale",
    ".activation_scale",
    ".k_scale",
    ".v_scale",
)

_TABLE = ".ngram_embedding."  # which ``checkpoints/family_tensors.py`` joins, scales and all


@dataclass(frozen=True, slots=True)
class Parts:
    """The tensors of one weight by how their names end; ``name`` is the weight's."""

    name: str
    stem: str
    tensors: Mapping[str, StoredTensor]

    def find(self, ending: str) -> StoredTensor | None:
        """The tensor whose name ends so, if there is one."""
        return self.tensors.get(ending)

    def need(self, ending: str) -> StoredTensor:
        """The same; ``CheckpointError`` if there is none."""
        found = self.tensors.get(ending)
        if found is None:
            other = next(iter(self.tensors.values()))
            raise CheckpointError(
                f"{other.file.path}: tensor {self.stem + ending!r} of {other.info.name!r} is "
                "missing: download the model again"
            )
        return found


class Scheme(Protocol):
    """A way of quantizing, as a model's config describes it."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of it, a line each."""

    @property
    def typical(self) -> str:
        """The format that its weights mostly are here, as far as the config tells."""

    @property
    def endings(self) -> Mapping[str, str]:
        """How names of its tensors end, and how the weight's name ends in their place."""

    def source(self, parts: Parts) -> RowSource | None:
        """The weight; None if it was left out, and its one tensor is what it seems.

        Raises:
            CheckpointError: tensors are missing, or do not fit each other or the config.
            UnsupportedModelError: the weight is packed in a way that is not read here.
        """


def published_tensors(
    stored: Mapping[str, StoredTensor], scheme: Scheme | None
) -> dict[str, RowSource]:
    """``stored`` with one source in the place of each quantized weight's tensors."""
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
    """Three axes as two: rows of all experts."""
    shape = tensor.info.shape
    if len(shape) != 3:
        return tensor
    return replace(tensor, info=replace(tensor.info, shape=(shape[0] * shape[1], shape[2])))


def require_shape(
    tensor: StoredTensor, format_: Format | None, *shape: int | None, why: str = ""
) -> None:
    """Raise ``CheckpointError`` unless a tensor has this type and shape; None is at least 1.

    ``why`` the shape is this one.
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
    """The refusal of a tensor, which tells what it is."""
    info = tensor.info
    kind = info.format.name.upper()
    return CheckpointError(
        f"{tensor.file.path}: tensor {info.name[:200]!r} {info.shape} in {kind} {reason}"
    )
