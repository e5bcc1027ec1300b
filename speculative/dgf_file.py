"""A draft head on disk: a folder with ``dgf.json`` and ``dgf.safetensors``.

Matrices are packed (``int8-g32`` by default, or bf16) and kept as bytes, vectors as float32, the
draft vocabulary as int32 token ids in rising order. ``DgfWeights`` is a ``TensorSource``, so that
parts of ``models/decoder.py`` are built from it. It knows no target's weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.errors import CheckpointError, StorageError
from localrt.files import atomic_write
from localrt.models.checkpoints.base import TensorInfo
from localrt.quant.formats import BF16, CODECS, F32, PackedTensor, pack
from localrt.speculative.dgf import DgfConfig

__all__ = ["CONFIG_FILE", "DgfWeights", "is_dgf_folder", "read_dgf", "read_dgf_config", "write_dgf"]

CONFIG_FILE = "dgf.json"
_WEIGHTS_FILE = "dgf.safetensors"
_KIND, _VERSION = "localrt-dgf", 1
_VOCABULARY = "draft_tokens"
_PREFERRED = ("int8-g32", "int8-g16")  # the first whose groups divide all rows
_LARGEST_CONFIG = 1 << 20

Values = Mapping[str, npt.NDArray[np.float32]]
Ints = npt.NDArray[np.int64]


class DgfWeights:
    """The weights of a head under ``path``. ``draft_tokens`` (draft vocabulary,) are token ids.

    ``about`` is what was measured when it was trained, for people.
    """

    architecture = "dgf"

    def __init__(
        self,
        path: Path,
        config: DgfConfig,
        draft_tokens: Ints,
        packed: Mapping[str, PackedTensor],
        about: Mapping[str, Any],
    ) -> None:
        self.path = path
        self.config = config
        self.draft_tokens = draft_tokens
        self.about = about
        self._packed = packed
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(name, tensor.shape, tensor.format, tensor.nbytes)
            for name, tensor in packed.items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(tensor.nbytes for tensor in self._packed.values())

    def read(self, name: str, start: int = 0, stop: int | None = None) -> PackedTensor:
        """See ``TensorSource``."""
        tensor = self._packed[name]
        if len(tensor.shape) == 1 or (start == 0 and stop is None):
            return tensor
        return tensor.take_rows(np.arange(tensor.shape[0])[start:stop])

    def blocks(self, name: str, max_bytes: int = 2 << 20) -> Iterator[PackedTensor]:
        """See ``TensorSource``: in one piece."""
        yield self._packed[name]


def is_dgf_folder(path: Path) -> bool:
    """Whether a draft head lies there, by its config's name."""
    return (path / CONFIG_FILE).is_file()


def write_dgf(
    path: Path,
    config: DgfConfig,
    draft_tokens: Ints,
    values: Values,
    *,
    weight_format: str | None = None,
    about: Mapping[str, Any] | None = None,
) -> int:
    """Write a head to the folder ``path``; returns its bytes. The config comes last.

    ``values`` are float32 arrays by the names of ``DgfConfig.shapes``. ``weight_format`` is that of
    the matrices: ``"int8-g32"``, ``"bf16"``, ...; None takes int8 in groups that fit.

    Raises:
        ValueError: a weight is missing, or of another shape.
        CheckpointError: NaN or infinity among the values.
        StorageError: the disk is full or fails.
    """
    from safetensors.numpy import save

    shapes = config.shapes()
    if {name: array.shape for name, array in values.items()} != shapes:
        raise ValueError("the weights are not those of the config")
    if draft_tokens.shape != (config.draft_vocab,):
        raise ValueError(f"there are {len(draft_tokens)} draft tokens, not {config.draft_vocab}")
    format_name = weight_format or _fitting_format(shapes)
    format_ = BF16 if format_name == "bf16" else CODECS[format_name].format
    arrays: dict[str, npt.NDArray[Any]] = {_VOCABULARY: draft_tokens.astype(np.int32)}
    for name, array in values.items():
        kind = format_ if array.ndim == 2 else F32
        packed = pack(np.ascontiguousarray(array, np.float32), kind, name=name)
        arrays[name] = packed.data if array.ndim == 2 else array.astype(np.float32)
    record = {
        "kind": _KIND,
        "version": _VERSION,
        "weight_format": format_name,
        "head": config.to_dict(),
        "about": dict(about or {}),
    }
    try:
        path.mkdir(parents=True, exist_ok=True)
        with (
            atomic_write(path / CONFIG_FILE) as config_file,  # renamed last
            atomic_write(path / _WEIGHTS_FILE) as weights_file,
        ):
            config_file.write(json.dumps(record, indent=1).encode() + b"\n")
            weights_file.write(save(arrays))
        return sum((path / name).stat().st_size for name in (_WEIGHTS_FILE, CONFIG_FILE))
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}") from error


def read_dgf(path: Path) -> DgfWeights:
    """The head in the folder ``path``.

    Raises:
        CheckpointError: there is none, or its files are damaged or of another version.
    """
    record = _record(path)
    config = _config(path, record)
    arrays = _arrays(path / _WEIGHTS_FILE)
    tokens = arrays.pop(_VOCABULARY, np.zeros(0, np.int32)).astype(np.int64)
    rising = tokens.ndim == 1 and bool((np.diff(tokens) > 0).all())
    inside = not tokens.size or 0 <= tokens[0] <= tokens[-1] < config.target.vocab_size
    if tokens.shape != (config.draft_vocab,) or not rising or not inside:
        raise CheckpointError(f"{path / _WEIGHTS_FILE} is damaged: its draft vocabulary")
    name = str(record.get("weight_format"))
    format_ = BF16 if name == "bf16" else CODECS[name].format if name in CODECS else None
    if format_ is None:
        raise CheckpointError(f"{path / CONFIG_FILE}: weight_format {name!r} is not known")
    packed = {}
    for weight, shape in config.shapes().items():
        data = arrays.get(weight)
        matrix = len(shape) == 2
        kind = format_ if matrix else F32
        rows = shape[0] if matrix else 1
        if data is None or data.nbytes != rows * kind.row_bytes(shape[-1]):
            raise CheckpointError(f"{path / _WEIGHTS_FILE} is damaged: tensor {weight}")
        packed[weight] = PackedTensor(
            weight, kind, shape, np.ascontiguousarray(data).view(np.uint8).reshape(rows, -1)
        )
    about = record.get("about")
    return DgfWeights(path, config, tokens, packed, about if isinstance(about, dict) else {})


def read_dgf_config(path: Path) -> DgfConfig:
    """The config of the head in the folder ``path``, without its weights.

    Raises:
        CheckpointError: there is none, or it is damaged or of another version.
    """
    return _config(path, _record(path))


def _config(path: Path, record: Mapping[str, Any]) -> DgfConfig:
    try:
        return DgfConfig.from_dict(record.get("head", {}))
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{path / CONFIG_FILE} is damaged: {error}") from error


def _fitting_format(shapes: Mapping[str, tuple[int, ...]]) -> str:
    columns = {shape[1] for shape in shapes.values() if len(shape) == 2}
    for name in _PREFERRED:
        if all(count % CODECS[name].format.block == 0 for count in columns):
            return name
    return "bf16"


def _record(path: Path) -> Mapping[str, Any]:
    file = path / CONFIG_FILE
    try:
        if file.stat().st_size > _LARGEST_CONFIG:
            raise CheckpointError(f"{file} is too large to be a draft head's")
        record = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no draft head at {path}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(record, dict) or record.get("kind") != _KIND:
        raise CheckpointError(f"{file} is no draft head's")
    if record.get("version") != _VERSION:
        raise CheckpointError(
            f"{file} is of version {record.get('version')!r}, and this localrt reads {_VERSION}: "
            "train the head again, or take a newer localrt"
        )
    return record


def _arrays(file: Path) -> dict[str, npt.NDArray[Any]]:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return dict(load_file(file))
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing") from error
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error
