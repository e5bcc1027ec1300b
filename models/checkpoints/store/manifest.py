"""The manifest of a store: what was packed, how, and where every unit is.

``manifest.json`` describes a store completely; ``offload/store`` writes it, and ``checkpoint.py``
reads weights with it. Every field and range is checked, so that a damaged or hostile manifest
causes a one-line error. This module knows neither packing nor architectures.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from localrt.common.errors import CheckpointError, UnsupportedModelError
from localrt.common.files import PAGE, json_sum
from localrt.models.checkpoints.safetensors_header import read_json
from localrt.quant.formats import F32, FORMATS, Exactness, Format
from localrt.quant.formats.tiled import TILE_ROWS, padded_rows, tile_span

STORE_VERSION = 1
LAYOUT = "tiles-16"
"""The name of the layout of ``quant/formats/tiled.py``. Another layout needs another name."""

PREDICTION = "mtp"
"""A model's MTP block: its unit's name, the prefix of its tensors, and its file's name."""

_VERSION_KEY, _SUM_KEY = "localrt_store", "crc32"
_LARGEST = 1 << 62
_ROTATIONS = (0, 16, 32, 64, 128)  # block sizes of the activations' rotation; 0 is none


@dataclass(frozen=True, slots=True)
class UnitTensor:
    """A tensor in a unit, or the part of one that begins at row ``row``.

    A matrix is tiles, with ``scale`` and ``hadamard`` as in ``TiledTensor``; a vector is float32
    values. ``offset`` counts from the unit's beginning.
    """

    name: str
    format: Format
    shape: tuple[int, ...]
    offset: int
    row: int = 0
    scale: float = 1.0
    hadamard: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes in the unit."""
        if len(self.shape) == 1:
            return 4 * self.shape[0]
        return padded_rows(self.shape[0]) * self.format.row_bytes(self.shape[1])


@dataclass(frozen=True, slots=True)
class StoredUnit:
    """``nbytes`` at ``offset`` of ``file``, both multiples of 4 KiB, with their ``sha256``.

    ``tile_sums`` has the CRC-32 of each tile of a table that is read by row, as hexadecimal digits;
    other units have none.
    """

    name: str
    file: str
    offset: int
    nbytes: int
    sha256: str
    tensors: tuple[UnitTensor, ...]
    tile_sums: str = ""

    def is_whole(self, data: npt.NDArray[np.uint8]) -> bool:
        """Whether ``data`` matches the unit's SHA-256."""
        return hashlib.sha256(data.data).hexdigest() == self.sha256


@dataclass(frozen=True, slots=True)
class Origin:
    """What was packed: ``fingerprint`` is a digest of its config, tensor table and first rows.

    For a packed copy, ``path`` is the model that it was made from, and ``stamp`` shows whether the
    files there have changed; stores for sharing leave both out.
    """

    name: str
    fingerprint: str
    revision: str | None = None
    path: str | None = None
    stamp: str | None = None


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a quantized store's weights were chosen.

    ``calibration`` is a digest of the text's tokens, ``compute`` the format of the passes over it.
    With ``folded`` n > 0, the values of attention (rows of v and its bias) are stored rotated by
    blocks of n, and so are the inputs of the output projection: both rotations cancel.
    """

    format: str
    head_format: str | None
    method: str
    seed: int = 0
    calibration: str | None = None
    calibration_tokens: int = 0
    compute: str | None = None
    folded: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A store's description. ``format`` is the format of most weights; ``texts`` has the SHA-256 of
    small files by name.
    """

    kind: Literal["gguf", "safetensors"]
    architecture: str
    config: Mapping[str, object]
    generation_config: Mapping[str, object]
    format: str
    exactness: Exactness
    source: Origin
    quantization: Quantization | None = None
    units: tuple[StoredUnit, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    layout: str = LAYOUT
    version: int = field(default=STORE_VERSION)

    def describes_same(self, other: Manifest) -> bool:
        """Whether both describe the same packing, finished or not."""
        return self._packing() == other._packing()

    def _packing(self) -> str:
        source = replace(self.source, path=None)
        return replace(self, units=(), texts={}, source=source).to_json()

    def to_json(self) -> str:
        """The text of the file."""
        fields = asdict(self)
        for unit, entry in zip(self.units, fields["units"], strict=True):
            for tensor, described in zip(unit.tensors, entry["tensors"], strict=True):
                described["format"] = tensor.format.name
        whole = {_VERSION_KEY: fields.pop("version"), **fields}
        whole[_SUM_KEY] = json_sum(whole)
        return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def read_manifest(path: Path) -> Manifest:
    """The manifest in a file.

    Raises:
        CheckpointError: missing, or malformed.
        UnsupportedModelError: written by a newer version of localrt.
    """
    fields = _Fields(read_json(path), str(path))
    version = fields.whole(_VERSION_KEY)
    if version != STORE_VERSION or fields.text("layout") != LAYOUT:
        raise UnsupportedModelError(
            f"{path.parent} is a store of version {version} ({fields.text('layout'):.60}); this "
            f"localrt reads version {STORE_VERSION} ({LAYOUT}): update localrt, or quantize again"
        )
    try:
        manifest = _manifest(fields)
    except (TypeError, ValueError, OverflowError) as error:
        raise fields.error(str(error)) from None
    values = dict(fields.values)
    if values.pop(_SUM_KEY, None) not in (None, json_sum(values)):  # earlier versions wrote none
        raise CheckpointError(f"{path} is damaged: copy or quantize the model again")
    return manifest


@dataclass(frozen=True, slots=True)
class _Fields:
    """A JSON object whose entries are checked when accessed."""

    values: Mapping[str, Any]
    path: str

    def error(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is malformed: {reason[:200]}")

    def of(self, key: str, kind: type | tuple[type, ...]) -> Any:
        value = self.values.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self.error(f"{key} is {value!r:.60}")
        return value

    def text(self, key: str) -> str:
        value: str = self.of(key, str)
        return value

    def whole(self, key: str) -> int:
        value: int = self.of(key, int)
        if not 0 <= value < _LARGEST:
            raise self.error(f"{key} is {value}")
        return value

    def choice(self, key: str, *choices: str) -> Any:
        value = self.text(key)
        if value not in choices:
            raise self.error(f"{key} is {value!r:.60}")
        return value

    def objects(self, key: str) -> list[_Fields]:
        entries: list[Any] = self.of(key, list)
        if not all(isinstance(entry, dict) for entry in entries):
            raise self.error(f"{key} is not a list of objects")
        return [_Fields(entry, self.path) for entry in entries]


def _manifest(fields: _Fields) -> Manifest:
    quantization = fields.values.get("quantization")
    return Manifest(
        kind=fields.choice("kind", "gguf", "safetensors"),
        architecture=fields.text("architecture"),
        config=fields.of("config", dict),
        generation_config=fields.of("generation_config", dict),
        format=fields.text("format"),
        exactness=fields.choice("exactness", "exact", "approximate"),
        source=Origin(**fields.of("source", dict)),
        quantization=None if quantization is None else _quantization(quantization),
        units=tuple(_unit(entry) for entry in fields.objects("units")),
        texts=_texts(fields),
    )


def _quantization(values: Mapping[str, Any]) -> Quantization:
    known = {**values}
    known.pop("loss", None)  # earlier versions also wrote the divergence that they had measured
    return Quantization(**known)


def _texts(fields: _Fields) -> Mapping[str, str]:
    texts: dict[str, str] = fields.of("texts", dict) if "texts" in fields.values else {}
    for name in texts:
        beyond = PurePath(name).is_absolute() or ".." in PurePath(name).parts or "\\" in name
        if beyond or not name.isprintable():
            raise fields.error(f"{name!r:.60} lies outside of this folder")
    return texts


def _unit(fields: _Fields) -> StoredUnit:
    name, file = fields.text("name"), fields.text("file")
    inside = PurePath(file).name == file and "\\" not in file and file.isprintable()
    if not inside or not file.endswith(".safetensors"):
        raise fields.error(f"unit {name!r:.60} lies in no file of this folder")
    offset, nbytes = fields.whole("offset"), fields.whole("nbytes")
    if offset % PAGE or nbytes % PAGE:
        raise fields.error(f"unit {name!r:.60} is not aligned to {PAGE} bytes")
    tensors = tuple(_tensor(entry) for entry in fields.objects("tensors"))
    end = 0
    for tensor in tensors:
        if tensor.offset < end or tensor.offset + tensor.nbytes > nbytes:
            raise fields.error(f"tensor {tensor.name!r:.80} does not lie in its unit")
        end = tensor.offset + tensor.nbytes
    sums = fields.text("tile_sums") if "tile_sums" in fields.values else ""
    tiles = -(-tensors[0].shape[0] // TILE_ROWS) if tensors else 0
    if sums and len(bytes.fromhex(sums)) != 4 * tiles:
        raise fields.error(f"unit {name!r:.60} has another number of tiles")
    return StoredUnit(name, file, offset, nbytes, fields.text("sha256"), tensors, sums)


def _tensor(fields: _Fields) -> UnitTensor:
    name = fields.text("name")
    if "[" in name:  # as names of pieces have in memory
        raise fields.error(f"tensor {name!r:.80} has a bracket in its name")
    format_ = FORMATS.get(fields.text("format"))
    if format_ is None:
        raise UnsupportedModelError(
            f"{fields.path}: tensor {name!r:.80} has the format {fields.text('format')!r:.60}, "
            "which this version does not read: pack the model again"
        )
    shape = fields.of("shape", list)
    if not all(type(axis) is int and 0 < axis < _LARGEST for axis in shape):
        raise fields.error(f"tensor {name!r:.80} has the shape {shape!r:.60}")
    scale, hadamard = float(fields.of("scale", (int, float))), fields.whole("hadamard")
    fits = (
        len(shape) == 2 and shape[1] % tile_span(format_) == 0
        if len(shape) != 1
        else format_ == F32
    )
    rotated = hadamard == 0 or (len(shape) == 2 and shape[1] % hadamard == 0)
    if not fits or not rotated or hadamard not in _ROTATIONS or not math.isfinite(scale):
        raise fields.error(f"tensor {name!r:.80} is not {format_.name} of shape {shape!r:.60}")
    return UnitTensor(
        name, format_, tuple(shape), fields.whole("offset"), fields.whole("row"), scale, hadamard
    )
