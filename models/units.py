"""The units of a model: the smallest parts that are stored, placed and moved as one.

A layer's attention (with a parallel recurrent layer) and its MLP are a unit each, with norms and
biases; a layer may have only one of the two. Every expert is a unit; a sparse layer's MLP unit has
what all rows need: norm, router, shared experts. The head is sliced by rows into units no larger
than the largest MLP, nor than 8 MB: small units need small buffers, and little more than the
missing bytes is read per token. The embedding is read by row; if it is also the head, it is sliced
like one. Per-layer embeddings and hashed n-grams are read by row too. Parts that run once, before
the first layer or after the last, belong to that layer's unit. Knows names, shapes and sizes,
neither files nor devices.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from localrt.common.errors import CheckpointError, UnsupportedModelError
from localrt.common.files import PAGE
from localrt.models.config import DecoderConfig
from localrt.models.decoder import load_attention, load_mlp
from localrt.models.layers.moe import ResidentExperts, load_expert
from localrt.models.tensor_source import EMBEDDING, HEAD, TensorInfo
from localrt.models.weights import AskedTensors, is_ignored, missing_tensor
from localrt.quant.formats.tiled import TILE_ROWS, padded_rows

TABLES = ("embedding", "inputs", "ngrams")
"""Units of which passes take single rows."""

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_LARGEST_SLICE = 8 << 20


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit's tensors in file order; ``layer`` is None outside of layers.

    ``rows`` are the unit's rows of a matrix that is sliced into several units.
    """

    name: str
    tensors: tuple[str, ...]
    layer: int | None = None
    rows: tuple[int, int] | None = None


def list_units(
    tensors: Mapping[str, TensorInfo], config: DecoderConfig, experts: int | None = None
) -> tuple[Unit, ...]:
    """Return all units of a model; ``tensors`` have their stored formats.

    The order is that of a pass: embedding, layers, final norm, head. Of each layer's experts only
    the first ``experts`` are listed, if given.

    Raises:
        CheckpointError: a required tensor is missing.
        UnsupportedModelError: a tensor belongs to no unit, or is neither matrix nor vector.
    """
    places = enumerate(config.cache_places)
    layers = [unit for n, at in places for unit in _layer_units(tensors, n, at, config, experts)]
    mlp = max(
        (
            sum(packed_nbytes(tensors[name]) for name in unit.tensors)
            for unit in layers
            if not unit.name.endswith(".attention")
        ),
        default=0,
    )
    head = EMBEDDING if config.tied_head else HEAD
    slices = list(_slices(_info(tensors, head), min(mlp, _LARGEST_SLICE)))
    rotary = tuple(name for name in tensors if name.startswith("rope_"))
    units = [
        *(() if config.tied_head else (Unit("embedding", (_info(tensors, EMBEDDING).name,)),)),
        *(
            Unit(table.unit, (_info(tensors, table.tensor).name,))
            for table in config.block.tables(config)
        ),
        *layers,
        *(
            (Unit("norm", (_info(tensors, "model.norm.weight").name,)),)
            if config.block.final_norm
            else ()
        ),
        *((Unit("rotary", rotary),) if rotary else ()),
        *slices,
    ]
    _require_all(tensors, units, tied=config.tied_head)
    return tuple(units)


def list_encoder_units(names: Iterable[str]) -> tuple[Unit, ...]:
    """The units of an encoder of texts: a layer each, and the rest, which begins a pass."""
    units: dict[int | None, list[str]] = {}
    for name in names:
        match = _LAYER.match(name)
        units.setdefault(int(match[1]) if match else None, []).append(name)
    return tuple(
        Unit("embedding" if layer is None else f"layers.{layer}", tuple(own), layer)
        for layer, own in units.items()
    )


def packed_nbytes(info: TensorInfo) -> int:
    """Bytes of a tensor in a store: whole tiles of a matrix, float32 values of a vector.

    Raises:
        UnsupportedModelError: it is neither.
    """
    if len(info.shape) == 1:
        return 4 * info.shape[0]
    if len(info.shape) != 2:
        raise UnsupportedModelError(
            f"tensor {info.name} has {len(info.shape)} dimensions: only matrices and vectors can "
            "be packed"
        )
    return padded_rows(info.shape[0]) * info.format.row_bytes(info.shape[1])


class _TensorNames(AskedTensors):
    """Records the tensors that a part asks for, instead of reading them."""

    def __init__(self, tensors: Mapping[str, TensorInfo]) -> None:
        self._tensors = tensors
        self._names: list[str] = []

    def ask(self, shape: tuple[int, ...], *names: str) -> None:
        self._names += [_info(self._tensors, name).name for name in names]

    def take(self) -> tuple[str, ...]:
        """The names since the last call, without duplicates: parallel layers share a norm."""
        names, self._names = tuple(dict.fromkeys(self._names)), []
        return names


def _layer_units(
    tensors: Mapping[str, TensorInfo],
    layer: int,
    at: tuple[int, ...],
    config: DecoderConfig,
    experts: int | None,
) -> Iterator[Unit]:
    """A layer's units: attention, MLP, experts."""
    names, spec = _TensorNames(tensors), config.mixture(layer)
    if at:
        load_attention(config, layer, names, at)
        yield Unit(f"layers.{layer}.attention", names.take(), layer)
    if config.has_mlp(layer):
        load_mlp(config, layer, names, None if spec is None else ResidentExperts())
        yield Unit(f"layers.{layer}.mlp", names.take(), layer)
    for number in range(spec.router.count if spec is not None else 0)[:experts]:
        load_expert(config, layer, number, names)
        yield Unit(f"layers.{layer}.expert.{number}", names.take(), layer)


def _slices(info: TensorInfo, limit: int) -> Iterator[Unit]:
    """Slice the head into rows of at most ``limit`` bytes.

    Slices are whole tiles and whole pages, so that the matrix is one range of its file; the
    smallest such slice is used even if it exceeds ``limit``.
    """
    rows, columns = info.shape
    tile = TILE_ROWS * info.format.row_bytes(columns)
    least = PAGE // math.gcd(tile, PAGE)
    step = max(least, limit // tile // least * least) * TILE_ROWS
    for number, start in enumerate(range(0, rows, step)):
        yield Unit(f"head.{number}", (info.name,), rows=(start, min(start + step, rows)))


def _info(tensors: Mapping[str, TensorInfo], name: str) -> TensorInfo:
    if name not in tensors:
        raise CheckpointError(missing_tensor(name))
    return tensors[name]


def _require_all(tensors: Mapping[str, TensorInfo], units: list[Unit], *, tied: bool) -> None:
    """Check that all parts are there: without one, the text would be silently wrong."""
    used = {name for unit in units for name in unit.tensors}
    for name in tensors:
        if name not in used and not is_ignored(name) and not (tied and name == HEAD):
            raise UnsupportedModelError(f"tensor {name} is not part of the architecture")
