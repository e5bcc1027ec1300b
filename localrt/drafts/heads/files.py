"""Checkpoints of draft heads, and the config of a head of any kind.

A head is the MTP block in a model's files, or a folder or file with only a head.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from localrt.common.errors import CheckpointError, LocalrtError, UnsupportedModelError
from localrt.common.formatting import format_bytes
from localrt.models.checkpoints.gguf.checkpoint import GgufCheckpoint
from localrt.models.checkpoints.safetensors.folder import SafetensorsCheckpoint
from localrt.models.checkpoints.store.checkpoint import StoreCheckpoint
from localrt.models.config import DecoderConfig
from localrt.models.row_order import in_halves, rotary_rows
from localrt.models.tensor_source import HEAD, RowSource, StoredTensor
from localrt.models.weight_files import MANIFEST_NAME
from localrt.quant.ops.arrays import AFTER_LAST

Ints = npt.NDArray[np.int64]
FUSION = "model.fc.weight"
"""The matrix that projects features to a head's input."""

_TOKENS = "d2t"  # the target's token ids; in folders, minus the head's own ids
# An assistant's tokens, ordered by cluster, in folders and in GGUF files
_ORDER, _FILES_ORDER = "masked_embedding.token_ordering", "masked_embd_ordering"
_UNUSED = "t2d"
_HEAD_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
_INTEGERS = {"i32": "<i4", "i64": "<i8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """A head: its decoder, and its inputs from the target.

    Its features are the target's residual stream before each of ``layers`` (``AFTER_LAST``: the
    last one's output), after the target's final norm if ``normed``. For draft tokens, features are
    the head's own output, after its own final norm if ``own_normed``. ``tokens`` (V,) are the
    target's ids of the head's vocabulary; None means the target's vocabulary. ``output`` names its
    output matrix.

    Gemma 4's assistants read the target's keys and values in the ``places`` of its cache. All their
    rows have the position of the last known token and attend to the tokens before it.

    DFlash drafts a ``block`` of tokens at once: its input is the last known token, and ``mask`` for
    each token to draft, whose first row is ``first``. Rows attend to each other, if ``causal`` to
    earlier ones, and to the keys and values that ``ContextKeys`` computes. ``pairs`` are the names
    and shapes of ``Transitions``, which score the likeliest ``choices`` (0: all tokens). DFlash 2's
    ``kernel`` has a number of rows, and of channels in a group.
    """

    decoder: DecoderConfig
    layers: tuple[int, ...]
    normed: bool = False
    own_normed: bool = False
    tokens: Ints | None = None
    output: str = HEAD
    places: tuple[int, ...] = ()
    block: int = 0
    mask: int = 0
    first: int = 1
    causal: bool = False
    pairs: tuple[tuple[str, tuple[int, int]], ...] = ()
    choices: int = 0
    kernel: tuple[int, int] = (0, 0)


def input_layers(listed: object, first: int, layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs a head reads; those ``listed`` count from ``first``."""
    if not isinstance(listed, list) or {type(number) for number in listed} != {int}:
        raise UnsupportedModelError(f"the layers that it reads are {listed!r}")
    inputs = [number + first for number in listed]
    if not all(0 <= number <= layers for number in inputs):
        raise UnsupportedModelError(f"it reads layers {listed}, and the model has {layers}")
    return tuple(AFTER_LAST if number == layers else number for number in inputs)


class HeadFolder(SafetensorsCheckpoint):
    """A folder with a head, its layers as ``model.layers.N``. ``tokens`` is as in ``HeadConfig``;
    ``order`` lists them by cluster.
    """

    tokens: Ints | None = None
    order: Ints | None = None

    def _located(self, *, multimodal: bool) -> dict[str, StoredTensor]:
        found = super()._located(multimodal=multimodal and not self.only_predicts)
        if (offsets := _integers(found, _TOKENS)) is not None:
            self.tokens = np.arange(len(offsets)) + offsets
        self.order = _integers(found, _ORDER)
        renamed = {_plain(name): each for name, each in found.items()}
        return {
            name: replace(each, info=replace(each.info, name=name))
            for name, each in renamed.items()
        }

    def _locate(self, *, multimodal: bool) -> dict[str, RowSource]:
        tensors = super()._locate(multimodal=multimodal)
        if self.config.get("rope_is_neox_style") is False:
            tensors |= rotary_rows(tensors, self.config, self.path)
            norms = {name: each for name, each in tensors.items() if name.endswith(_HEAD_NORMS)}
            tensors |= {name: in_halves(each, 1, self.path) for name, each in norms.items()}
        return tensors

    def _wanted(self, name: str) -> bool:
        return name != _UNUSED and super()._wanted(name)


class HeadFile(GgufCheckpoint):
    """A GGUF file with a head. ``tokens`` and ``order`` are as in ``HeadFolder``."""

    tokens: Ints | None = None
    order: Ints | None = None

    def _rename(
        self, predicting: frozenset[int], *, of_block: int | None = None
    ) -> dict[str, StoredTensor]:
        found = super()._rename(predicting, of_block=of_block)
        self.tokens = _integers(found, _TOKENS)
        self.order = _integers(found, _FILES_ORDER)
        return found


class HeadStore(StoreCheckpoint):
    """A store with an MTP block. ``tokens`` and ``order`` are as in ``HeadFolder``."""

    tokens: Ints | None = None
    order: Ints | None = None


OpenHead: TypeAlias = HeadFolder | HeadFile | HeadStore


def _integers(tensors: dict[str, StoredTensor], name: str) -> Ints | None:
    """Remove the integers ``name`` from ``tensors`` and return them."""
    if (tensor := tensors.pop(name, None)) is None:
        return None
    if (kind := _INTEGERS.get(tensor.info.format.name)) is None:
        raise CheckpointError(f"{tensor.file.path}: {name} holds no integers")
    return tensor.read().data.view(kind).reshape(-1).astype(np.int64)


def _plain(name: str) -> str:
    if name.startswith("input_norm."):
        return f"model.fc_norm.{name.removeprefix('input_norm.')}"
    if name.startswith(("midlayer.", "layers.0.")):
        return f"model.layers.0.{name.split('.', 2 if name[0] == 'l' else 1)[-1]}"
    return name if name.startswith("lm_head.") else f"model.{name.removeprefix('model.')}"


def open_head(path: Path) -> OpenHead:
    """Open the head at ``path``, or the MTP block in the model's files there.

    Raises:
        CheckpointError: there is none.
    """
    if (path / MANIFEST_NAME).is_file():
        return HeadStore(path, predicts=True)
    return (HeadFolder if path.is_dir() else HeadFile)(path, predicts=True)


def prediction_notes(path: Path) -> tuple[str, ...]:
    """Return a note on the MTP block of the model at ``path``, if it has one."""
    try:
        with closing(open_head(path)) as checkpoint:
            nbytes = sum(info.nbytes for info in checkpoint.tensors.values())
    except (LocalrtError, OSError):
        return ()
    return (f"its MTP block of {format_bytes(nbytes)} drafts for it",)
