"""Converts model families' tensors to the form that the decoder expects.

Qwen3-Next has two matrices for DeltaNet's projections, with rows grouped by key head; Qwen3.5 has
separate matrices. Whole packed rows are moved, which changes no value.

Gemma 4's table of per-layer embeddings gets a row for each layer of each token: the same bytes, but
a token's rows share tiles. Unused K and V matrices of layers that attend to an earlier layer's keys
and values are left out.

DeepSeek's matrices from latents to keys and values are published as one (``kv_b_proj``) or, in
newer GGUF files, per head: ``v_b_proj``, and ``k_b_proj`` transposed, which maps a query into the
latent space. The model takes the latter two as matrices of stacked heads. Rows for values are
unchanged bytes of the published matrix. Keys are transposed, so they are converted: unquantized
formats stay, GGUF's types become f16 (an error below their own), other groups f32 (exact).

The table of hashed n-grams is published in hundreds of parts and becomes one matrix. Files also
have the hash constants, which follow from the config, and the scales of a table in FP8.

Knows config keys and tensors, no files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from localrt.common.errors import CheckpointError
from localrt.models.row_order import JoinedRows, regrouped
from localrt.models.tensor_source import DerivedRows, RowSource, StoredTensor, TensorInfo
from localrt.quant.formats import BF16, F16, F32, GROUP_CODECS, Format, PackedTensor, pack, unpack
from localrt.quant.formats.packed import Bytes


def family_tensors(
    stored: Mapping[str, RowSource], config: Mapping[str, object]
) -> dict[str, RowSource]:
    """Return ``stored`` in the decoder's form. Other families' tensors stay unchanged.

    Raises:
        CheckpointError: a tensor does not fit the config, or is missing.
    """
    tensors = dict(stored)
    for in_models_form in (_latent_tensors, _gemma_tensors, delta_tensors):
        tensors = in_models_form(tensors, config)
    return _ngram_tensors(tensors)


def _sizes(config: Mapping[str, object], *keys: str) -> list[int]:
    """The config's values of ``keys``.

    Raises:
        CheckpointError: one is not a positive integer.
    """
    found = []
    for key in keys:
        number = config.get(key)
        if type(number) is not int or number < 1:
            raise CheckpointError(f"config {key} must be a positive integer, is {number!r:.60}")
        found.append(number)
    return found


_BOTH: Mapping[str, tuple[tuple[str, str], ...]] = {
    # the published matrix and its parts in order; "v" are rows of values
    "linear_attn.in_proj_qkvz.weight": (("in_proj_qkv", "qkv"), ("in_proj_z", "z")),
    "linear_attn.in_proj_ba.weight": (("in_proj_b", "b"), ("in_proj_a", "a")),
}


def delta_tensors(
    stored: Mapping[str, RowSource], config: Mapping[str, object]
) -> dict[str, RowSource]:
    """``stored`` with Qwen3-Next's matrices replaced by Qwen3.5's.

    Other architectures' tensors stay unchanged.

    Raises:
        CheckpointError: a matrix does not fit the config.
    """
    found: dict[str, RowSource] = {}
    for name, tensor in stored.items():
        published = next((stem for stem in _BOTH if name.endswith(stem)), None)
        if published is None:
            found[name] = tensor
        else:
            prefix = name.removesuffix(published)
            found |= _split(tensor, f"{prefix}linear_attn.", _BOTH[published], config)
    return found


def _split(
    tensor: RowSource,
    prefix: str,
    contents: tuple[tuple[str, str], ...],
    config: Mapping[str, object],
) -> dict[str, RowSource]:
    groups, heads, key, value_size = _sizes(
        config,
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
    )
    each = heads // groups
    value = each * value_size
    sizes = {"q": key, "k": key, "v": value, "z": value, "b": each, "a": each}
    whole = sum(sizes[part] for _, parts in contents for part in parts)
    info = tensor.info
    if len(info.shape) != 2 or info.shape[0] != groups * whole or heads % groups:
        raise CheckpointError(
            f"wrong shape: {info.name} {info.shape}; the config asks for {groups} key heads of "
            f"{whole} rows"
        )
    found: dict[str, RowSource] = {}
    begin = 0
    for stem, parts in contents:
        runs = []
        for part in parts:
            runs.append((begin, sizes[part]))
            begin += sizes[part]
        rows = groups * sum(count for _, count in runs)
        name = f"{prefix}{stem}.weight"
        own = TensorInfo(name, (rows, info.shape[1]), info.format, rows * tensor.row_bytes)
        found[name] = _PartsOfGroups(own, tensor, groups, tuple(runs))
    return found


@dataclass(frozen=True, slots=True)
class _PartsOfGroups(DerivedRows):
    """Some rows of each of the ``groups`` equal groups of ``whole``: ``runs`` are (first row,
    count).

    All groups' rows of the first run come first.
    """

    groups: int
    runs: tuple[tuple[int, int], ...]

    def _read(self, start: int, stop: int) -> Bytes:
        pieces = [self.whole.read(*rows).data for rows in self._places(start, stop)]
        return np.concatenate([piece.reshape(-1, self.row_bytes) for piece in pieces])

    def _places(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Rows ``start`` to ``stop`` as row numbers in the published matrix."""
        size, at = self.whole.rows // self.groups, 0
        for begin, count in self.runs:
            for group in range(self.groups):
                first, last = max(start, at), min(stop, at + count)
                if first < last:
                    there = group * size + begin - at
                    yield first + there, last + there
                at += count


_TABLE = "model.embed_tokens_per_layer.weight"
_KEYS_AND_VALUES = re.compile(
    r"model\.layers\.(\d{1,9})\.self_attn\.([kv]_(proj|norm)|qkv_proj)\..+"
)


def _gemma_tensors(
    stored: Mapping[str, RowSource], config: Mapping[str, object]
) -> dict[str, RowSource]:
    """``stored`` with the table in the decoder's form, and without unused tensors."""
    width, shared = (
        number if type(number := config.get(key)) is int and number > 0 else 0
        for key in ("hidden_size_per_layer_input", "num_kv_shared_layers")
    )
    if not (width or shared):
        return dict(stored)
    layers = config.get("num_hidden_layers")
    first_shared = layers - shared if type(layers) is int else 0  # 0 is refused later
    found: dict[str, RowSource] = {}
    for name, tensor in stored.items():
        match = _KEYS_AND_VALUES.fullmatch(name)
        if name == _TABLE and width:
            found[name] = _by_layer(tensor, width)
        elif match is None or int(match[1]) < first_shared:
            found[name] = tensor
    return found


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
class _ShorterRows(DerivedRows):
    """The rows of ``whole``, each split into ``parts`` rows."""

    parts: int

    @property
    def rows_together(self) -> int:
        """The rows of one whole row."""
        return self.parts

    def _read(self, start: int, stop: int) -> Bytes:
        first = start // self.parts
        data = self.whole.read(first, -(-stop // self.parts)).data.reshape(-1, self.row_bytes)
        return data[start - first * self.parts : stop - first * self.parts]


_BOTH_PROJECTIONS, _KEYS, _VALUES = "kv_b_proj.weight", "k_b_proj.weight", "v_b_proj.weight"


def _latent_tensors(
    stored: Mapping[str, RowSource], config: Mapping[str, object]
) -> dict[str, RowSource]:
    """``stored`` with the published matrices replaced by the decoder's."""
    if not isinstance(config.get("kv_lora_rank"), int):
        return dict(stored)
    found: dict[str, RowSource] = {}
    for name, tensor in stored.items():
        if name.endswith(f".self_attn.{_BOTH_PROJECTIONS}"):
            stem = name.removesuffix(_BOTH_PROJECTIONS)
            found[stem + _KEYS], found[stem + _VALUES] = _split_heads(tensor, stem, config)
        elif name.endswith((f".self_attn.{_KEYS}", f".self_attn.{_VALUES}")):
            found[name] = _joined(tensor)
        else:
            found[name] = tensor
    return found


def _joined(tensor: RowSource) -> RowSource:
    """The per-head matrices as one; their rows are already consecutive."""
    info = tensor.info
    if len(info.shape) != 3 or not isinstance(tensor, StoredTensor):
        return tensor
    heads, rows, columns = info.shape
    return replace(tensor, info=replace(info, shape=(heads * rows, columns)))


def _split_heads(
    tensor: RowSource, stem: str, config: Mapping[str, object]
) -> tuple[RowSource, RowSource]:
    """Split the published matrix into keys and values; ``stem`` begins their names."""
    heads, nope, value = _sizes(config, "num_attention_heads", "qk_nope_head_dim", "v_head_dim")
    tensor = regrouped(tensor)
    info = tensor.info
    if len(info.shape) != 2 or info.shape[0] != heads * (nope + value):
        raise CheckpointError(
            f"wrong shape: {info.name} {info.shape}; the config asks for {heads} heads of "
            f"{nope} + {value} rows"
        )
    latent = info.shape[1]
    format_ = _key_format(info.format)
    key_bytes = heads * latent * format_.row_bytes(nope)
    keys = TensorInfo(stem + _KEYS, (heads * latent, nope), format_, key_bytes)
    value_bytes = heads * value * info.format.row_bytes(latent)
    values = TensorInfo(stem + _VALUES, (heads * value, latent), info.format, value_bytes)
    return _TransposedKeys(keys, tensor, heads), _ValueRows(values, tensor, heads)


def _key_format(format_: Format) -> Format:
    """The format of transposed keys."""
    if format_ in (F32, F16, BF16):
        return format_
    return F32 if format_.name in GROUP_CODECS else F16


@dataclass(frozen=True, slots=True)
class _OfHeads(RowSource):
    """A matrix derived from the heads of ``both``, the published matrix."""

    both: RowSource
    heads: int

    @property
    def rows_together(self) -> int:
        """Rows per head: whole heads are read, so that no row is read twice."""
        return self.rows // self.heads

    def _covering(self, start: int, stop: int) -> tuple[PackedTensor, int, int]:
        """The published rows of the heads that contain rows ``start`` to ``stop``.

        Also returns the index of ``start`` among those rows, and the rows per published head.
        """
        span = self.both.rows // self.heads
        first, last = start // self.rows_together, -(-stop // self.rows_together)
        whole = self.both.read(first * span, last * span)
        return whole, start - first * self.rows_together, span


class _ValueRows(_OfHeads):
    """A head's last rows, unchanged."""

    __slots__ = ()

    @property
    def scale(self) -> float:
        return self.both.scale

    def _read(self, start: int, stop: int) -> Bytes:
        rows, begin, span = self._covering(start, stop)
        heads = rows.data.reshape(-1, span, self.row_bytes)[:, span - self.rows_together :]
        return heads.reshape(-1, self.row_bytes)[begin : begin + stop - start]


class _TransposedKeys(_OfHeads):
    """A head's first rows, transposed."""

    __slots__ = ()

    def _read(self, start: int, stop: int) -> Bytes:
        rows, begin, span = self._covering(start, stop)
        nope = self.info.shape[1]
        heads = unpack(rows).reshape(-1, span, self.rows_together)[:, :nope]
        whole = heads.swapaxes(1, 2).reshape(-1, nope)
        taken = np.ascontiguousarray(whole[begin : begin + stop - start])
        return pack(taken, self.info.format, name=self.info.name).data


_NGRAM_TABLE = "model.ngram_embedding.weight"
_PART = re.compile(
    r"model\.layers\.\d{1,9}\.ple\.ple_embedding\.ngram_embedding\.(?:shard_(\d{1,9})\.)?weight"
)
_SCALE = re.compile(rf"({_PART.pattern})_scale(?:_inv)?")
_CONSTANTS = (
    ".ple_embedding.layer_multipliers",
    ".ple_embedding.ngram_heads_vocab_sizes",
    ".ple_embedding.ngram_heads_offsets",
)


def is_hash_constant(name: str) -> bool:
    """Whether a tensor holds hash constants, which also follow from the config."""
    return name.endswith(_CONSTANTS)


def _ngram_tensors(stored: Mapping[str, RowSource]) -> dict[str, RowSource]:
    """``stored`` with the table's parts replaced by one table."""
    parts: dict[int, RowSource] = {}
    found: dict[str, RowSource] = {}
    scales: set[float] = set()
    for name, tensor in stored.items():
        match = _PART.fullmatch(name)
        if _SCALE.fullmatch(name):
            scales.update(_scale_of(tensor))
        elif match is None:
            found[name] = tensor
        elif (number := int(match[1] or 0)) in parts:
            raise CheckpointError(f"tensor {name} appears twice: one table of n-grams is read")
        else:
            parts[number] = tensor
    if len(scales) > 1:
        raise CheckpointError("the parts of the table of n-grams are times different numbers")
    if parts:
        ordered = [parts[number] for number in sorted(parts)]
        found[_NGRAM_TABLE] = _joined_tables(ordered, max(parts), scales.pop() if scales else 1.0)
    return found


def _scale_of(tensor: RowSource) -> list[float]:
    if math.prod(tensor.info.shape) != 1:
        raise CheckpointError(
            f"tensor {tensor.info.name} {tensor.info.shape}: a table of n-grams has one scale here"
        )
    return unpack(tensor.read()).reshape(-1).tolist()


def _joined_tables(parts: list[RowSource], last: int, scale: float) -> RowSource:
    first = parts[0].info
    if len(parts) != last + 1:
        raise CheckpointError(
            f"{first.name}: {len(parts)} of {last + 1} parts are there; download the model again"
        )
    for part in parts:
        info = part.info
        if len(info.shape) != 2 or (info.shape[1], info.format) != (first.shape[-1], first.format):
            raise CheckpointError(
                f"tensor {info.name} {info.shape} in {info.format.name} is no part of a table with "
                f"rows of {first.shape[-1]} in {first.format.name}"
            )
    ends = np.cumsum([part.rows for part in parts]).tolist()
    nbytes = sum(part.info.nbytes for part in parts)
    info = replace(first, name=_NGRAM_TABLE, shape=(ends[-1], first.shape[1]), nbytes=nbytes)
    return JoinedRows(info, tuple(parts), tuple(ends), scale)
