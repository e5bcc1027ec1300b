"""Gemma 3n's and Gemma 4's tensors in the form that the model takes.

The table of per-layer embeddings has a row for each layer of each token here: the same bytes, so
that what a token needs lies together in tiles, and little else is read with it. A layer's router of
streams is used by two units, each of which has a copy; its coefficients are vectors. Keys and
values of layers that attend to an earlier one's are published in some files, and are left out. It
knows config keys and tensors, no files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from localrt.errors import CheckpointError
from localrt.models.checkpoints.stored_tensor import Bytes, RowSource, StoredTensor

__all__ = ["gemma_tensors"]

_TABLE = "model.embed_tokens_per_layer.weight"
_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.(.+)", re.DOTALL)
_KEYS_AND_VALUES = re.compile(r"self_attn\.([kv]_(proj|norm)|qkv_proj)\..+")
_COPIED = {
    "altup.modality_router.weight": "altup.{}_router.weight",
    "altup.router_norm.weight": "altup.{}_norm.weight",
}
_FLAT = ("altup.prediction_coefs.weight", "altup.correction_coefs.weight")
_STREAM_SCALE = "altup.correct_output_scale"
_PURPOSES = ("prediction", "correction")


def gemma_tensors(
    stored: Mapping[str, RowSource], config: Mapping[str, Any]
) -> dict[str, RowSource]:
    """``stored`` as the model takes it. Other architectures' tensors are as they were.

    Raises:
        CheckpointError: the table's rows cannot be cut into the layers'.
    """
    width, shared = (
        number if type(number := config.get(key)) is int and number > 0 else 0
        for key in ("hidden_size_per_layer_input", "num_kv_shared_layers")
    )
    if not (width or shared):
        return dict(stored)
    layers = config.get("num_hidden_layers")
    first_shared = layers - shared if type(layers) is int else 0  # a config without is refused
    found: dict[str, RowSource] = {}
    for name, tensor in stored.items():
        match = _LAYER.fullmatch(name)
        if name == _TABLE and width:
            found[name] = _by_layer(tensor, width)
        elif match is None:
            found[name] = tensor
        elif _is_unused(match[2], int(match[1]) >= first_shared, config):
            continue
        else:
            prefix = name.removesuffix(match[2])
            found |= {part.info.name: part for part in _parts(tensor, prefix, match[2])}
    return found


def _is_unused(stem: str, shares: bool, config: Mapping[str, Any]) -> bool:
    """Whether the model does without a layer's tensor; ``shares``: it has no keys of its own."""
    if stem == _STREAM_SCALE:
        return config.get("altup_correct_scale") is False
    return shares and _KEYS_AND_VALUES.fullmatch(stem) is not None


def _by_layer(tensor: RowSource, width: int) -> RowSource:
    """The table with ``width`` columns."""
    info = tensor.info
    if len(info.shape) != 2 or info.shape[1] % width or width % info.format.block:
        raise CheckpointError(
            f"tensor {info.name} {info.shape} in {info.format.name} does not hold {width} numbers "
            "for each layer (hidden_size_per_layer_input)"
        )
    parts = info.shape[1] // width
    shorter = replace(info, shape=(info.shape[0] * parts, width))
    if isinstance(tensor, StoredTensor):
        return replace(tensor, info=shorter)
    return _ShorterRows(shorter, tensor, parts)


@dataclass(frozen=True, slots=True)
class _ShorterRows(RowSource):
    """The rows of ``whole``, each as ``parts`` rows."""

    whole: RowSource
    parts: int

    @property
    def scale(self) -> float:
        """See ``RowSource``."""
        return self.whole.scale

    @property
    def rows_together(self) -> int:
        """Those of a whole row."""
        return self.parts

    def _read(self, start: int, stop: int) -> Bytes:
        first = start // self.parts
        data = self.whole.read(first, -(-stop // self.parts)).data.reshape(-1, self.row_bytes)
        return data[start - first * self.parts : stop - first * self.parts]


def _parts(tensor: RowSource, prefix: str, stem: str) -> Iterator[RowSource]:
    """What one tensor of a layer is."""
    info = tensor.info
    if (copies := _COPIED.get(stem)) is not None:
        for purpose in _PURPOSES:
            yield replace(tensor, info=replace(info, name=prefix + copies.format(purpose)))
    elif stem in _FLAT and len(info.shape) == 2:
        yield replace(tensor, info=replace(info, shape=(info.shape[0] * info.shape[1],)))
    else:
        yield tensor
