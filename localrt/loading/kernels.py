"""Compiles a GPU's kernels while a model's weights load, so that they are ready for a prompt.

Dry runs of the model find the kernels: tensors have shapes and formats but no values, and ``Ops``
compute nothing. Equal layers are run once. Compiled kernels are kept on disk. Only our CUDA
kernels need this.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from localrt.loading.context import LoadContext
from localrt.models.checkpoints.store.checkpoint import StoreCheckpoint
from localrt.models.config import DecoderConfig, Part, memory_places
from localrt.models.decoder import load_attention, load_mlp, load_norm, load_resident_mlp
from localrt.models.layers.inputs import InputTable
from localrt.models.layers.moe import ResidentExperts
from localrt.models.layers.parts import Embedding, GatedMlp, Head, PassState, SplitMlp
from localrt.models.tensor_source import EMBEDDING, HEAD, TensorInfo, TensorSource, WeightBlock
from localrt.models.weights import WeightLoader
from localrt.offload.pipeline.split import matrices_of, split_unit
from localrt.offload.placement import Placement, host_piece
from localrt.quant.formats import F32, PackedTensor
from localrt.quant.formats.tiled import TiledTensor
from localrt.quant.ops.arrays import Hidden
from localrt.quant.ops.attention import AttentionSpec
from localrt.quant.ops.protocol import Batch, Ops, Span, implementation
from localrt.system import return_free_memory

_OF_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")


class RehearsedOps(Ops, Protocol):
    """Records kernels without launching them."""

    @property
    def lengths(self) -> Sequence[int]:
        """The numbers of rows for which kernels differ."""

    def stream(self, rows: int, width: int) -> Hidden:
        """Return placeholder activations: (rows, width)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part of a model that a GPU computes: layer numbers, and the rows of each head piece.

    ``longest``: layers whose MLP the GPU computes in the longest passes only. ``split``: of MLPs
    shared with the CPU, the rows of each piece, the CPU's last.
    """

    attention: frozenset[int]
    mlp: frozenset[int]
    longest: frozenset[int] = frozenset()
    embedding: bool = False
    head: tuple[int, ...] = ()
    split: Mapping[int, Sequence[tuple[int, int]]] = field(default_factory=dict)

    @classmethod
    def whole(cls, config: DecoderConfig) -> Share:
        """Return the whole model."""
        layers = range(config.layers)
        return cls(
            attention=frozenset(layer for layer in layers if config.memory_of(layer)),
            mlp=frozenset(layer for layer in layers if config.has_mlp(layer)),
            embedding=True,
            head=(config.vocab_size,),
        )


class _Outline:
    """The tensors of ``source`` without their values. See ``TensorSource``."""

    def __init__(self, source: TensorSource) -> None:
        self.path, self.architecture = source.path, source.architecture
        self.tensors: Mapping[str, TensorInfo] = source.tensors
        self.rotations: dict[str, int] = {}
        if isinstance(source, StoreCheckpoint):
            tensors = (tensor for unit in source.manifest.units for tensor in unit.tensors)
            self.rotations = {tensor.name: tensor.hadamard for tensor in tensors}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> PackedTensor:
        """Return one row of zeros under the tensor's shape."""
        shape = self.tensors[name].shape
        return PackedTensor(name, F32, shape, np.zeros((1, 4 * shape[-1]), np.uint8))

    def piece(self, config: DecoderConfig, layer: int, rows: tuple[int, int]) -> _Outline:
        """Return a copy whose ``layer`` has gate and down with that many rows."""
        gates, down, stacked = matrices_of(config, layer)
        counts = {**dict.fromkeys(gates, stacked * rows[0]), down: rows[1]}
        other, infos = copy(self), dict(self.tensors)
        for name, count in counts.items():
            infos[name] = replace(infos[name], shape=(count, infos[name].shape[1]))
        other.tensors = infos
        return other

    def blocks(self, name: str, max_bytes: int = 2 << 20) -> Iterator[WeightBlock]:
        """Yield the whole matrix without its bytes."""
        yield self.matrix(name)

    def matrix(self, name: str) -> TiledTensor:
        """Return a matrix without its bytes."""
        info, nothing = self.tensors[name], np.zeros(0, np.uint8)
        shape, rotation = (info.shape[0], info.shape[1]), self.rotations.get(name, 0)
        return TiledTensor(name, info.format, shape, nothing, hadamard=rotation)

    def kinds(self, config: DecoderConfig, share: Share) -> list[int]:
        """Return one layer of each kind."""
        tensors: dict[int, list[object]] = {layer: [] for layer in range(config.layers)}
        for name, info in self.tensors.items():
            if (found := _OF_LAYER.fullmatch(name)) is not None and int(found[1]) in tensors:
                rotation = self.rotations.get(name, 0)
                tensors[int(found[1])].append((found[2], info.shape, info.format.name, rotation))
        kinds: dict[object, int] = {}
        for layer in range(config.layers):
            sides = [layer in side for side in (share.attention, share.mlp, share.longest)]
            if any(sides):
                own = (
                    *sides,
                    share.split.get(layer),
                    config.memory_of(layer),
                    config.mixture(layer),
                    *tensors[layer],
                )
                kinds.setdefault(own, layer)
        return list(kinds.values())


def rehearse(source: TensorSource, config: DecoderConfig, ops: RehearsedOps, share: Share) -> None:
    """Run passes of all lengths through the ``share`` of a model without reading weights."""
    outline = _Outline(source)
    weights = WeightLoader(outline, ops)
    layers = outline.kinds(config, share)
    tables = [each for each in config.block.tables(config) if isinstance(each, InputTable)]
    attention = [layer for layer in layers if layer in share.attention]
    with ops.scope():
        always: list[Part] = []
        if share.embedding:
            table = weights.matrix((config.vocab_size, config.hidden_size), EMBEDDING)
            always.append(Embedding(table, config.embedding_scale))
            parts = [(each, weights.matrix(each.shape, each.tensor)) for each in tables]
            always += [each.part(matrix) for each, matrix in parts]
        places = memory_places(config.memory_of(layer) for layer in attention)
        for layer, at in zip(attention, places, strict=True):
            always.append(load_attention(config, layer, weights, at))
        experts = ResidentExperts()
        mlps = {
            layer: load_resident_mlp(config, layer, weights, ops, experts)
            for layer in layers
            if layer in share.mlp | share.longest and layer not in share.split
        }
        always += [part for layer, part in mlps.items() if layer in share.mlp]
        long = [part for layer, part in mlps.items() if layer in share.longest]
        for layer in share.split.keys() & set(layers):
            loaders = (
                (WeightLoader(outline.piece(config, layer, rows), ops), rows)
                for rows in share.split[layer]
            )
            pieces = [GatedMlp(config, layer, loader, rows=rows) for loader, rows in loaders]
            shared = SplitMlp(pieces[:-1], _Idle())
            always.append(load_mlp(config, layer, weights, None, shared))
            if layer in share.longest:
                long.append(load_mlp(config, layer, weights, None, SplitMlp(pieces, None)))
        head = _head(outline, config, weights, ops, share)
        for rows in ops.lengths:
            last = rows == max(ops.lengths)
            memory = [spec for layer in attention for spec in config.memory_of(layer)]
            # Layers that read another's keys and values have places of their own here.
            memory = [
                replace(spec, reads=None) if isinstance(spec, AttentionSpec) else spec
                for spec in memory
            ]
            cache = ops.kv_cache(memory, rows)
            batch = Batch.extend([(cache, [0] * rows)])
            if rows > 1 and not last:  # trees take all kernels that chains do
                batch = replace(batch, spans=(Span(cache, rows, np.tri(rows, dtype=np.bool_)),))
            step = ops.begin(batch)
            wanted = np.arange(rows)[-1:] if last else np.arange(rows)
            state = PassState(ops, step, ops.stream(rows, config.hidden_size), wanted)
            for each in tables:
                state.inputs = ops.stream(rows, each.layers * each.shape[1])
            for part in (*always, *(long if last else ()), *head):
                part(state)


def _head(
    outline: _Outline, config: DecoderConfig, weights: WeightLoader, ops: Ops, share: Share
) -> list[Part]:
    if not share.head:
        return []
    norm, name = load_norm(config, weights), EMBEDDING if config.tied_head else HEAD
    whole, parts = outline.matrix(name), list[Part]()
    for rows in sorted(set(share.head)):
        piece = replace(whole, shape=(rows, config.hidden_size))
        parts.append(Head(config, norm, ops.weight(piece.shape, [piece])))
    return parts


class _Idle:
    """A host that computes nothing: see ``HostRows``."""

    def begin(self, check: Callable[[], None] | None) -> None: ...

    def gate(self, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return np.zeros((1, 1), np.float32)

    down = gate


_MOST_THREADS = 4  # each thread takes a core and 30 MB of RAM
_LOOK_S = 0.1


@contextmanager
def compiling(
    source: TensorSource,
    config: DecoderConfig,
    ops: Ops,
    context: LoadContext,
    share: Share | None = None,
) -> Iterator[None]:
    """Compile the kernels that ``ops`` need for ``share`` (default: the whole model) while the
    ``with`` body runs, and wait for the rest at its end.

    Raises:
        LocalrtError: a kernel does not compile.
        CancelledError: loading was cancelled.
    """
    if ops.name != "cuda":
        yield
        return
    from localrt.quant.cuda.dry_run import DryRunOps
    from localrt.quant.cuda.ops import CudaOps  # these two import the driver

    dry_run = DryRunOps(implementation(ops, CudaOps))
    rehearse(source, config, cast(RehearsedOps, dry_run), share or Share.whole(config))
    pool = ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), "localrt-compile")
    try:
        work = [pool.submit(dry_run.prepare, program) for program in dry_run.programs]
        yield
        _wait(work, context)
    finally:
        pool.shutdown(cancel_futures=True)
        return_free_memory()  # left over from the compiler


def share_of_gpu(store: StoreCheckpoint, config: DecoderConfig, placement: Placement) -> Share:
    """Return the part of a model that ``placement`` has the GPU compute."""

    def layers(kind: str) -> frozenset[int]:
        names = {layer: f"layers.{layer}.{kind}" for layer in range(config.layers)}
        return frozenset(n for n, name in names.items() if name in on_gpu)

    on_gpu = {name for name, where in placement.where.items() if where.on_gpu}
    mlps = {f"layers.{layer}.mlp": layer for layer in range(config.layers)}
    crossing = frozenset(
        layer for name, layer in mlps.items() if {name, host_piece(name)} & placement.crossing
    )
    units = {unit.name: unit for unit in store.manifest.units}
    split = {
        mlps[name]: tuple(
            piece.rows
            for piece in split_unit(config, mlps[name], units[name], shares)
            if piece.rows[0]
        )
        for name, shares in placement.split.items()
    }
    matrix = EMBEDDING if config.tied_head else HEAD
    head = [unit.tensors[0] for unit in store.manifest.units if unit.name in on_gpu]
    return Share(
        attention=layers("attention"),
        mlp=layers("mlp"),
        longest=crossing,
        head=tuple(tensor.shape[0] for tensor in head if tensor.name == matrix),
        split=split,
    )


def _wait(work: list[Future[None]], context: LoadContext) -> None:
    left = set(work)
    while left:
        ended, left = wait(left, _LOOK_S, FIRST_COMPLETED)
        for future in ended:
            future.result()
        context.check()
        if left:
            context.report("compile", len(work) - len(left), len(work), "kernels")
