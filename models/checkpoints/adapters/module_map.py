"""Maps an adapter's modules to the base's matrices and row order, and merges adapters into them.

A checkpoint presents some matrices under other names, in parts, or with reordered rows
(``safetensors/names.py``, ``family_tensors.py``, ``row_order.py``). The same functions are applied
here to a column of row numbers, to find where the base's rows went; an adapter's rows go there.
Merging is in float32; tensors that the adapter does not change are read unchanged. If embedding and
head share a table and the adapter changes one of them, they become two.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import numpy.typing as npt

from localrt.models.checkpoints.family_tensors import delta_tensors
from localrt.models.checkpoints.safetensors.names import plain_tensors
from localrt.models.checkpoints.text_model import decoder_tensor
from localrt.models.registry import find_family
from localrt.models.row_order import rotary_rows
from localrt.models.tensor_source import (
    EMBEDDING,
    HEAD,
    Checkpoint,
    RowSource,
    TensorInfo,
    WeightBlock,
)
from localrt.quant.formats import F32, PackedTensor
from localrt.quant.formats.packed import Bytes
from localrt.quant.methods.rotation import restored_rows
from localrt.quant.ops.adapters import Adapter, LowRank

Numbers = npt.NDArray[np.intp]
# Modules of encoders for images and sounds, as transformers calls them.
_ENCODERS = re.compile(
    r"(.+\.)?(visual|vision_tower|vision_model|vision_embed_tokens|audio_tower|audio_model"
    r"|multi_modal_projector|embed_vision|vision_adapter|vision_projection|embed_audio)(\..+)?",
    re.DOTALL,
)
_ONLY_MERGED = (
    # not computed by multiplying rows by a matrix
    (re.compile(r".+\.mlp\.gate\.weight", re.DOTALL), "routers"),
    (re.compile(r".+\.experts\.\d+\..+", re.DOTALL), "routed experts"),
    (re.compile(r".+\.[kv]_b_proj\.weight", re.DOTALL), "matrices of latent attention's heads"),
    (re.compile(r".+\b(ngram_embedding|embed_tokens_per_layer)\.weight", re.DOTALL), "tables"),
)
_IN_FILES = (
    # module names in folders, and the names that GGUF's are translated to
    (re.compile(r"\.feed_forward\.w1\."), ".mlp.gate_proj."),  # LFM2
    (re.compile(r"\.feed_forward\.w3\."), ".mlp.up_proj."),
    (re.compile(r"\.feed_forward\.w2\."), ".mlp.down_proj."),
    (re.compile(r"\.self_attn\.out_proj\."), ".self_attn.o_proj."),
    (re.compile(r"\.mlp\.shared_experts\."), ".mlp."),  # Granite without experts
    (re.compile(r"\.mixer\.(?=(in|out)_proj\.)"), ".mamba."),  # Nemotron-H
    (re.compile(r"\.mixer\.(?=[qkvo]_proj\.)"), ".self_attn."),
    (re.compile(r"\.mixer\.(?=(up|down)_proj\.)"), ".mlp."),
)
_COUNTED = {"moe_num_experts": 0}  # default for a config without experts
_IN_MEMORY = ".forget_gate."  # transformers' group of some of Kimi Linear's matrices
_DELTA = re.compile(r".+\.linear_attn\.(in_proj_(?P<part>qkv|z|b|a)|(?P<out>out_proj))\.weight")


@dataclass(frozen=True, slots=True)
class Place:
    """A matrix of the base: its tensor, and which rows and columns of the module belong to it.

    None: all, in order.
    """

    name: str
    rows: Numbers | None = None
    columns: Numbers | None = None


def is_beside_text(module: str) -> bool:
    """Whether a module belongs to a vision or audio encoder, not to the decoder."""
    return _ENCODERS.fullmatch(module) is not None


def text_module(module: str, base: Checkpoint) -> str:
    """The decoder's name for a published module's matrix, without multimodal prefixes."""
    whole = f"{module}.weight"
    if whole in base.tensors:
        return whole
    whole = whole.replace(_IN_MEMORY, ".")
    plain = decoder_tensor(whole, base.config, multimodal=False)
    inner = decoder_tensor(whole, base.config, multimodal=True)
    return inner if inner is not None and plain == whole else plain or whole


def why_only_merged(name: str) -> str | None:
    """Why a tensor cannot be adapted while the model runs; None if it can."""
    return next((what for pattern, what in _ONLY_MERGED if pattern.fullmatch(name)), None)


def places(
    name: str, shape: tuple[int, int], base: Checkpoint, *, pairs: bool, converted: bool
) -> list[Place]:
    """The places in ``base`` of the matrix published as ``name`` (a decoder's tensor).

    ``pairs``: rotary rows of queries and keys are published in pairs; ``converted``: rows are in
    the order of GGUF files.

    Raises:
        CheckpointError: its number of rows does not fit the base's config.
    """
    rows, columns = shape
    if name in base.tensors and not pairs and not _DELTA.fullmatch(name):
        return [Place(name)]
    numbers: RowSource = _RowNumbers(TensorInfo(name, (rows, 1), F32, rows * F32.row_bytes(1)))
    family = find_family(base.architecture)
    parts = plain_tensors(family, base.architecture, {**_COUNTED, **base.config}, {name: numbers})
    parts = delta_tensors(parts, base.config)
    if pairs:
        parts = parts | rotary_rows(parts, base.config, base.path)
    found = []
    for own, source in parts.items():
        taken = source.read().data.view("<f4").reshape(-1).astype(np.intp)
        own = own if own in base.tensors else _in_file(own, base)
        place = Place(own, None if len(taken) == rows and _in_order(taken) else taken)
        found.append(place if converted else _in_turns(place, len(taken), columns, base))
    return found


def _in_file(name: str, base: Checkpoint) -> str:
    """A tensor's name in the checkpoint of a GGUF file."""
    others = (pattern.sub(other, name) for pattern, other in _IN_FILES)
    return next((other for other in others if other in base.tensors), name)


def _in_order(numbers: Numbers) -> bool:
    return bool((numbers == np.arange(len(numbers))).all())


def _in_turns(place: Place, rows: int, columns: int, base: Checkpoint) -> Place:
    """Interleave the value heads of all key heads, as GGUF files of Qwen3.5 do."""
    match = _DELTA.fullmatch(place.name)
    turned = base.kind == "gguf" and find_family(base.architecture).gguf_by_turns
    if match is None or not turned:
        return place
    keys, heads, key, value = (
        int(cast(int, base.config[f"linear_{name}"]))
        for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    )
    width = 1 if match["part"] in ("b", "a") else value
    before = 2 * keys * key if match["part"] == "qkv" else 0
    count = columns if match["out"] else rows
    if count != before + heads * width:
        return place  # another shape: the later comparison of shapes reports it
    by_key = np.arange(before, count).reshape(keys, heads // keys, width)
    order = np.concatenate([np.arange(before), by_key.swapaxes(0, 1).reshape(-1)])
    if match["out"]:
        return Place(place.name, place.rows, order)
    return Place(place.name, order if place.rows is None else place.rows[order])


@dataclass(frozen=True, slots=True)
class _RowNumbers(RowSource):
    """A column that numbers the rows of a matrix."""

    def _read(self, start: int, stop: int) -> Bytes:
        return np.arange(start, stop, dtype="<f4").view(np.uint8)


class MergedCheckpoint:
    """A ``Checkpoint`` of ``base`` with the adapter merged; the caller closes ``base``."""

    def __init__(self, base: Checkpoint, adapter: Adapter[LowRank]) -> None:
        self._base = base
        self.path, self.stamp, self.notes = base.path, base.stamp, base.notes
        self.kind, self.architecture = base.kind, base.architecture  # rules for text still hold
        self.generation_config, self.metadata = base.generation_config, base.metadata
        self._changes: dict[str, LowRank] = dict(adapter.matrices)
        self._source = {name: name for name in base.tensors}
        self.config: Mapping[str, object] = base.config
        if HEAD not in base.tensors and (adapter.embedding or adapter.head):
            self._source[HEAD] = EMBEDDING
            self.config = {**base.config, "tie_word_embeddings": False}
        if (tokens := adapter.embedding) is not None:
            a = np.ascontiguousarray(tokens.a.T)  # (tokens, rank): a row of the table
            self._changes[EMBEDDING] = LowRank(np.ascontiguousarray(tokens.b.T), a)
        if adapter.head is not None:
            self._changes[HEAD] = adapter.head
        self.tensors: Mapping[str, TensorInfo] = {
            name: self._info(name, base.tensors[source]) for name, source in self._source.items()
        }

    def close(self) -> None:
        """Do nothing: the caller closes the base."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> PackedTensor:
        block = self._base.read(self._source.get(name, name), start, stop)
        return self._merged(name, block, start) if name in self._changes else block

    def blocks(self, name: str, max_bytes: int = 2 << 20) -> Iterator[WeightBlock]:
        at = 0
        for block in self._base.blocks(self._source.get(name, name), max_bytes):
            yield self._merged(name, block, at) if name in self._changes else block
            at += block.shape[0]

    def _info(self, name: str, info: TensorInfo) -> TensorInfo:
        if name not in self._changes:
            return replace(info, name=name)
        rows, columns = info.shape
        return TensorInfo(name, info.shape, F32, rows * F32.row_bytes(columns))

    def _merged(self, name: str, block: WeightBlock, first: int) -> PackedTensor:
        change = self._changes[name]
        values = np.concatenate(list(restored_rows(block)))
        stop = first + len(values)
        if change.factors is not None:
            values *= change.factors[first:stop, None]
        values += change.b[first:stop] @ change.a
        return PackedTensor(name, F32, values.shape, values.view(np.uint8))
