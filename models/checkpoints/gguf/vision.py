"""The vision encoder in an ``mmproj`` GGUF file, presented like the publisher's folder.

llama.cpp's converter shortens names, splits some tensors, adds 1 to Gemma's norm, turns the halves
of Pixtral's rotary rows into pairs, puts the colour first in a patch's columns, and the columns of
Gemma's table of positions before its rows. Reading undoes all of that: names, shapes and values are
those of ``VisionFolder``, and so are the keys of ``config`` and ``processor``. Keys that do not
follow from the file are missing: families have the publishers' defaults.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from localrt.common.errors import CheckpointError, UnsupportedModelError
from localrt.models.checkpoints.gguf.file import GgufFile
from localrt.models.checkpoints.gguf.vision_families import (
    BLOCK,
    FAMILIES,
    SECOND_KERNEL,
    ClipMetadata,
    Keys,
    Shapes,
    VisionFamily,
    deep_blocks,
)
from localrt.models.checkpoints.safetensors_header import is_raw, unread_type_error
from localrt.models.row_order import JoinedRows, OrderedColumns, in_halves, regrouped, without_one
from localrt.models.tensor_source import DerivedRows, RowSource, SourcedCheckpoint, matrix_shape
from localrt.quant.formats.packed import Bytes

ARCHITECTURE = "clip"
"""The architecture name of ``mmproj`` files."""

_COLOURS = 3
_MOST_PIXELS = 1 << 28
_KINDS = re.compile(r"(?P<stem>.+?)(?P<kind>\.(?:weight|bias|(?:in|out)put_(?:min|max)))?")
_LEFT_OUT = ("a.", "mm.a.", "v.token_embd.")  # audio encoders; a row of the decoder's embeddings
_QKV = ("attn_q", "attn_k", "attn_v")


class VisionGguf(SourcedCheckpoint):
    """See ``TensorSource``. ``config`` and ``processor`` have the keys of a ``config.json`` and an
    image processor; ``decoders`` are the architectures of the GGUF files that it is for, with a
    hidden size of ``columns``.

    Raises:
        CheckpointError: not a GGUF file, truncated or malformed.
        UnsupportedModelError: it is not a vision encoder, or an unknown one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GgufFile(path)
        try:
            metadata = ClipMetadata(self._file.metadata)
            family = self._family()
            stored = self._stored()
            shapes: Shapes = {name: tensor.info.shape for name, tensor in stored.items()}
            self.decoders = family.decoders
            self.architecture = family.kind
            self.config: Mapping[str, object]
            self.processor: Mapping[str, object]
            self.config, self.processor = _vision_config(family, metadata, shapes)
            self.columns: int = self.config["text_config"]["hidden_size"]
            heads = self.config["vision_config"]["num_attention_heads"]
            super().__init__(_Reading(family, path, heads, stored).sources())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _family(self) -> VisionFamily:
        metadata, path = self._file.metadata, self.path
        if (kind := metadata.text("general.architecture")) != ARCHITECTURE:
            raise UnsupportedModelError(f"{path} is a model ({kind!r}), not an mmproj file")
        if metadata.flag("clip.has_vision_encoder") is False:
            raise UnsupportedModelError(f"{path} holds no vision tower")
        name = metadata.text("clip.vision.projector_type") or metadata.text("clip.projector_type")
        if (family := FAMILIES.get(name or "")) is None:
            raise UnsupportedModelError(
                f"{path}: pictures of the projector type {name!r:.80} are not known "
                f"(known: {', '.join(FAMILIES)})"
            )
        if name == "pixtral" and "mm.patch_merger.weight" in self._file.tensors:
            return replace(family, kind="mistral3")
        if name == "glm4v" and "v.norm_embd.weight" not in self._file.tensors:
            return replace(family, kind="glm_ocr")
        return family

    def _stored(self) -> dict[str, RowSource]:
        """The encoder's tensors by the file's names."""
        found: dict[str, RowSource] = {}
        for name, tensor in self._file.tensors.items():
            if name.startswith(_LEFT_OUT):
                continue
            found[name] = regrouped(tensor)
            if is_raw(found[name].info.format):
                raise unread_type_error(self.path, name, tensor.info.format.name.upper())
        if not found:
            raise UnsupportedModelError(f"{self.path} holds no vision tower")
        return found


def _vision_config(
    family: VisionFamily, metadata: ClipMetadata, shapes: Shapes
) -> tuple[Keys, Keys]:
    """The keys of ``config.json``, and of an image processor."""
    size = metadata.count("vision.embedding_length")
    inner = metadata.count("vision.feed_forward_length", 0, least=0)
    least = min(1, len(family.block))  # of blocks, and heads
    eps = metadata.number("vision.attention.layer_norm_epsilon", 1e-6)
    vision = {
        "hidden_size": size,
        "intermediate_size": inner or _inner(shapes, size),
        "num_attention_heads": metadata.count("vision.attention.head_count", least=least),
        "num_hidden_layers": metadata.count("vision.block_count", least=least),
        "image_size": metadata.count("vision.image_size"),
        "patch_size": metadata.count("vision.patch_size"),
        "layer_norm_eps": eps,
        "hidden_act": metadata.activation(),
        "out_hidden_size": _columns(family, metadata, shapes),
    }
    text: Keys = {"hidden_size": vision["out_hidden_size"], "rms_norm_eps": eps}
    config = {"model_type": family.kind, "vision_config": vision, "text_config": text}
    processor: dict[str, object] = {
        "image_mean": metadata.colours("vision.image_mean"),
        "image_std": metadata.colours("vision.image_std"),
    }
    for key in ("min_pixels", "max_pixels"):
        if f"clip.vision.image_{key}" in metadata.pairs:
            processor[key] = metadata.count(f"vision.image_{key}", most=_MOST_PIXELS)
    own = family.keys(metadata, vision, shapes)
    vision |= own.pop("vision_config", {})
    text |= own.pop("text_config", {})
    processor |= own.pop("processor", {})
    return {**config, **own}, processor


def _columns(family: VisionFamily, metadata: ClipMetadata, shapes: Shapes) -> int:
    """The decoder's hidden size; some early files have a wrong ``projection_dim``."""
    if len(shape := shapes.get(family.out, ())) != 2:
        raise CheckpointError(f"{metadata.pairs.path} has no matrix {family.out!r}")
    return shape[1 if family.kind == "gemma3" else 0]  # Gemma 3's is transposed


def _inner(shapes: Shapes, size: int) -> int:
    """The MLP's inner size, which early files of Qwen2-VL do not state."""
    found = [each for name in ("up", "down") for each in shapes.get(f"v.blk.0.ffn_{name}.bias", ())]
    return max(found, default=size)


@dataclass(frozen=True, slots=True)
class _Reading:
    """Converts the file's tensors to the publisher's."""

    family: VisionFamily
    path: Path
    heads: int
    stored: Mapping[str, RowSource]

    def sources(self) -> dict[str, RowSource]:
        """All tensors by the publisher's names."""
        found: dict[str, RowSource] = {}
        deep = deep_blocks(self.stored)
        for name, tensor in self.stored.items():
            if name == SECOND_KERNEL or self._is_joined_later(name):
                continue
            new, made = self._named(name, deep), self._made(name, tensor)
            if new in found:
                raise CheckpointError(f"{self.path}: tensor {name!r:.80} appears twice")
            shape = matrix_shape(made.info.shape)
            found[new] = replace(made, info=replace(made.info, name=new, shape=shape))
        return found

    def _is_joined_later(self, name: str) -> bool:
        return self.family.joined and any(f".{part}." in name for part in _QKV[1:])

    def _named(self, name: str, deep: Sequence[int]) -> str:
        family = self.family
        if name in family.whole:
            return family.whole[name]
        split = _KINDS.fullmatch(name)
        stem, kind = (split["stem"], split["kind"] or "") if split else (name, "")
        block = BLOCK.match(name)
        if block is None:
            return f"{family.names[stem]}{kind}" if stem in family.names else name
        own = stem[block.end() :]
        if family.joined and own == _QKV[0]:
            own = "attn_qkv"
        if own in ("ffn_up", "ffn_down") and self._is_swapped(block[0]):
            own = "ffn_down" if own == "ffn_up" else "ffn_up"
        if own not in family.block:
            return name
        if block["deep"]:
            prefix = f"{family.deep}{deep.index(int(block['deep']))}."
        else:
            prefix = f"{family.prefix}{int(block['block'])}."
        # The bounds for clipping a matrix's inputs and outputs are next to the matrix.
        matrix = family.block[own]
        return prefix + (matrix.removesuffix(".linear") if "put_" in kind else matrix) + kind

    def _is_swapped(self, prefix: str) -> bool:
        """Whether a block of an old file has the names of its MLP's matrices swapped."""
        norm, up = self.stored.get(f"{prefix}ln1.weight"), self.stored.get(f"{prefix}ffn_up.weight")
        down = self.stored.get(f"{prefix}ffn_down.weight")
        if norm is None or up is None or down is None or up.info.shape == down.info.shape:
            return False
        return down.info.shape[-1] == norm.info.shape[-1]

    def _made(self, name: str, tensor: RowSource) -> RowSource:
        family = self.family
        if family.joined and f".{_QKV[0]}." in name:
            return self._joined([name.replace(f".{_QKV[0]}.", f".{part}.") for part in _QKV])
        if family.paired and any(f".{part}." in name for part in _QKV[:2]):
            return in_halves(tensor, self.heads, self.path)
        if name == "v.patch_embd.weight":
            if SECOND_KERNEL in self.stored:
                return self._columns([name, SECOND_KERNEL], (2, _COLOURS, -1), (1, 0, 2))
            if family.colours_last:
                return self._columns([name], (1, _COLOURS, -1), (0, 2, 1))
        if name.startswith("v.patch_norm.1."):
            return self._columns([name], (1, _COLOURS, -1), (0, 2, 1))
        if name == "v.position_embd.weight" and family.kind == "gemma4_unified":
            info = replace(tensor.info, shape=matrix_shape(tensor.info.shape))
            return _InTurns(info, replace(tensor, info=info))
        if name == "mm.soft_emb_norm.weight":
            return without_one(tensor)
        return tensor

    def _joined(self, names: Sequence[str]) -> RowSource:
        """The rows of queries, keys and values, or their biases."""
        parts = [self._tensor(name) for name in names]
        first = parts[0].info
        if any((p.info.shape, p.info.format) != (first.shape, first.format) for p in parts):
            raise CheckpointError(
                f"{self.path}: {' and '.join(names)} differ in their shapes or formats"
            )
        shape = (len(parts) * first.shape[0], *first.shape[1:])
        ends = tuple(int(end) for end in np.cumsum([part.rows for part in parts]))
        info = replace(first, shape=shape, nbytes=len(parts) * first.nbytes)
        return JoinedRows(info, tuple(parts), ends, 1.0)

    def _columns(
        self, names: Sequence[str], shape: tuple[int, ...], axes: tuple[int, ...]
    ) -> RowSource:
        """Convolution kernels as one matrix: its columns are those of the file, in ``shape``,
        permuted to ``axes``. Of a vector, the values are.
        """
        parts = [self._tensor(name) for name in names]
        first = parts[0].info
        rows = first.shape[:-1][:1]  # none, of a vector
        columns = math.prod(first.shape[len(rows) :])
        if first.format.block != 1 or columns % _COLOURS:
            raise CheckpointError(
                f"{self.path}: {names[0]!r} {first.shape} in {first.format.name} is no kernel of "
                f"{_COLOURS} colours"
            )
        if any((p.info.shape, p.info.format) != (first.shape, first.format) for p in parts):
            raise CheckpointError(f"{self.path}: {' and '.join(names)} differ in their shapes")
        order: npt.NDArray[np.int64] = np.arange(len(parts) * columns).reshape(shape)
        info = replace(
            first,
            shape=(*rows, len(parts) * columns),
            nbytes=len(parts) * first.nbytes,
        )
        return OrderedColumns(info, tuple(parts), order.transpose(axes).reshape(-1))

    def _tensor(self, name: str) -> RowSource:
        if name not in self.stored:
            raise CheckpointError(f"{self.path} has no tensor {name!r:.80}")
        return self.stored[name]


@dataclass(frozen=True, slots=True)
class _InTurns(DerivedRows):
    """The rows of both halves of ``whole`` take turns."""

    def _read(self, start: int, stop: int) -> Bytes:
        first, last, half = start // 2, (stop + 1) // 2, self.rows // 2
        parts = [self.whole.read(at + first, at + last).data for at in (0, half)]
        return np.stack(parts, 1).reshape(-1, self.row_bytes)[start - 2 * first : stop - 2 * first]
