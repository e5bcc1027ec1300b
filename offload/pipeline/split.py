"""A dense MLP whose matrices GPU and CPU share by rows, so that both compute at once.

No card has run this yet.

The unit is cut into pieces: the first rows of gate, up and down are resident on the GPU, some may
be copied there in each pass, and the CPU computes the others from RAM. Each row is summed by one
processor, in the usual order. Long passes (prompts) copy the CPU's piece too, and the GPU computes
all rows. Pieces are never evicted, since a piece is not one contiguous range of the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import numpy as np

from localrt.common.files import PAGE
from localrt.models.checkpoints.store.manifest import StoredUnit, UnitTensor
from localrt.models.config import DecoderConfig, Part
from localrt.models.decoder import load_mlp
from localrt.models.layers.parts import GatedMlp, PassState, SplitMlp
from localrt.models.weights import VectorKey, WeightLoader
from localrt.offload.device.gpu import Clock, Slab
from localrt.offload.pipeline.lane import Lane, StreamedState
from localrt.offload.pipeline.stage import JoinedParts, PassingParts, Stage
from localrt.offload.placement import Where, host_piece, link_piece
from localrt.quant.formats.packed import Bytes, Floats
from localrt.quant.formats.tiled import TILE_ROWS
from localrt.quant.ops.adapters import Rows
from localrt.quant.ops.arrays import Memory, Vector
from localrt.quant.ops.protocol import Check, HostOps, Ops


@dataclass(frozen=True, slots=True)
class MlpPiece:
    """Some rows of an MLP as a unit: the concatenated ``ranges`` of the whole unit's bytes.
    ``rows`` are the numbers of rows of gate (and of up) and of down.
    """

    unit: StoredUnit
    rows: tuple[int, int]
    ranges: tuple[tuple[int, int], ...]
    rows_by_tensor: Mapping[str, Rows]

    def adapt(self, ops: Ops) -> None:
        """Tell adapters which rows of the tensors the piece has."""
        if ops.adapters is None:
            return
        for name, rows in self.rows_by_tensor.items():
            ops.adapters.pieces.setdefault(name.partition("[")[0], {})[name] = rows

    def take(self, unit_data: Bytes, out: Bytes) -> None:
        """Copy the piece out of the whole unit's bytes."""
        at = 0
        for start, stop in self.ranges:
            out[at : at + stop - start] = unit_data[start:stop]
            at += stop - start


def split_unit(
    config: DecoderConfig, layer: int, unit: StoredUnit, shares: tuple[float, float]
) -> list[MlpPiece]:
    """The pieces of the GPU, the link (without rows if its share is 0), and the CPU. GPU and link
    get at most ``shares`` of the rows.

    Each piece has the unit's vectors; other uncut tensors are in the GPU's piece.
    """
    inner, hidden = config.inner_size(layer), config.hidden_size
    gates, down, stacked = matrices_of(config, layer)
    assert stacked == 1 or not inner % TILE_ROWS, "a tile would have rows of gate and up"
    cuts = [_cuts(rows, shares) for rows in (inner, hidden)]
    if any(stop == start for _, start, stop, _ in cuts):
        cuts = [_cuts(rows, (shares[0], 0.0)) for rows in (inner, hidden)]

    def piece(number: int, name: str) -> MlpPiece:
        tensors, ranges, rows_by_tensor, at = list[UnitTensor](), list[tuple[int, int]](), {}, 0
        (first, stop), (first_down, stop_down) = (cut[number : number + 2] for cut in cuts)
        for tensor in unit.tensors:
            piece_tensor, begins = replace(tensor, offset=at), [tensor.offset]
            cut = tensor.name == down or tensor.name in gates
            if cut:
                spans = [(first_down, stop_down)]
                if tensor.name in gates:
                    spans = [(n * inner + first, n * inner + stop) for n in range(stacked)]
                rows = np.concatenate([np.arange(*span) for span in spans])
                piece_name = f"{tensor.name}[{spans[0][0]}:{spans[0][1]}]"
                piece_tensor = replace(
                    piece_tensor, name=piece_name, shape=(len(rows), tensor.shape[1])
                )
                row_bytes = tensor.nbytes // -(-tensor.shape[0] // TILE_ROWS * TILE_ROWS)
                begins = [tensor.offset + start * row_bytes for start, _ in spans]
                rows_by_tensor[piece_name] = rows
            elif len(tensor.shape) > 1 and number:
                continue
            ranges += [(begin, begin + piece_tensor.nbytes // len(begins)) for begin in begins]
            tensors.append(piece_tensor)
            at += piece_tensor.nbytes
        nbytes = -(-at // PAGE) * PAGE
        piece_unit = replace(unit, name=name, nbytes=nbytes, sha256="", tensors=tuple(tensors))
        return MlpPiece(
            piece_unit, (stop - first, stop_down - first_down), tuple(ranges), rows_by_tensor
        )

    names = unit.name, link_piece(unit.name), host_piece(unit.name)
    return [piece(number, name) for number, name in enumerate(names)]


def matrices_of(config: DecoderConfig, layer: int) -> tuple[list[str], str, int]:
    """The names of the gate and up tensors, that of down, and how many matrices each of the former
    stacks.
    """
    names, prefix = config.names_of(layer), f"model.layers.{layer}."
    gates = [f"{prefix}{name}.weight" for name in names.gate_up]
    stacked = (2 if config.mlp_of(layer).gated else 1) // len(gates)
    return gates, f"{prefix}{names.down}.weight", stacked


def _cuts(rows: int, shares: tuple[float, float]) -> list[int]:
    """Row bounds of the pieces: at whole tiles; GPU and CPU each get at least one."""
    tiles = rows // TILE_ROWS
    gpu = min(max(int(tiles * shares[0]), 1), tiles - 1)
    link = min(int(tiles * shares[1]), tiles - 1 - gpu)
    return [0, gpu * TILE_ROWS, (gpu + link) * TILE_ROWS, rows]


class PieceStage(Stage):
    """A piece of a ``SplitStage``; not a step of the pass by itself."""

    fixed = True
    mlp: GatedMlp

    def __init__(
        self,
        piece: MlpPiece,
        where: Where,
        lane: Lane,
        config: DecoderConfig,
        layer: int,
        gpu: Lane | None = None,
    ) -> None:
        super().__init__(piece.unit, where, lane, _no_part, gpu=gpu)
        self.piece, self.config, self.layer = piece, config, layer
        piece.adapt(lane.ops)
        self._mlp = partial(GatedMlp, config, layer, rows=piece.rows)

    def put(self, memory: Memory, slab: Slab | None = None) -> None:
        self.memory, self.slab = memory, slab
        self.mlp = self._mlp(self.lane.weights(self.unit, memory))

    def free(self) -> None:
        if self.memory is not None:
            self.memory = self.slab = None
            del self.mlp


def _no_part(weights: WeightLoader) -> Part:
    raise AssertionError("it is no step of a pass")


class HostPiece(PieceStage):
    """The CPU's piece, in pinned RAM; see ``HostRows``. The GPU computes at the same time with
    ``copied``, a unit in its ring.
    """

    def __init__(
        self,
        piece: MlpPiece,
        lane: Lane,
        gpu: Lane,
        config: DecoderConfig,
        layer: int,
        clock: Clock,
    ) -> None:
        super().__init__(piece, Where.RAM, lane, config, layer, gpu)
        self._gpu_lane, self._clock = gpu, clock
        self._ops = cast(HostOps, lane.ops)
        piece.adapt(gpu.ops)
        self._gpu_vectors: dict[VectorKey, Vector] = {}
        self.copied: StoredUnit | None = None

    def on_gpu(self, memory: Memory) -> GatedMlp:
        """The piece's rows in the GPU's ring."""
        return self._mlp(self._gpu_lane.weights(self.unit, memory, self._gpu_vectors))

    def free(self) -> None:
        if self.memory is not None and self.gpu is not None:
            self.gpu.free_host(cast(Bytes, self.memory))
        super().free()
        self._gpu_vectors.clear()

    def begin(self, check: Check | None) -> None:
        if self.copied is not None:
            self._gpu_lane.acquire(self.copied, check)

    def gate(self, x: Floats) -> Floats:
        with self._clock.task("cpu", self.name):
            rows: Floats = self._ops.norm_gate_rows(x, self.mlp.weights, self.mlp.spec)
            return rows

    def down(self, inner: Floats) -> Floats:
        if self.copied is not None:
            self._gpu_lane.release([self.copied])
        with self._clock.task("cpu", self.name):
            rows: Floats = self._ops.projected(inner, self.mlp.weights.down)
            return rows


class SplitStage(Stage):
    """Computes the whole MLP with all pieces. Its unit is the link piece, which is copied in
    each pass, or the GPU's piece if there is none.

    In passes of ``crossing`` rows or more (0: in none) the CPU's piece is copied to the GPU too.
    """

    fixed = True

    def __init__(
        self,
        pieces: Sequence[MlpPiece],
        gpu: Lane,
        host: HostPiece,
        crossing: int,
        joined: JoinedParts,
    ) -> None:
        gpu_piece, link, _ = pieces
        has_link = link.rows[0] > 0
        self.mlp_name = gpu_piece.unit.name
        self.piece = link if has_link else gpu_piece
        self.piece.adapt(gpu.ops)
        self.host, self._crossing = host, crossing
        gpu_stage = PieceStage(gpu_piece, Where.VRAM, gpu, host.config, host.layer)
        self.gpu_pieces = [gpu_stage] if has_link else []
        self._mlp = partial(GatedMlp, host.config, host.layer, rows=self.piece.rows)
        where = Where.LINK if has_link else Where.VRAM
        super().__init__(self.piece.unit, where, gpu, self._part, joined)
        self._passing = PassingParts()
        host.copied = self.unit if where.copied else None
        self.stages: list[SplitStage | PieceStage] = [*self.gpu_pieces, self, host]
        self._whole = _WholeMlp(self)

    def _part(self, weights: WeightLoader) -> Part:
        """The part that a pass calls."""
        shared = self.build(weights, None)

        def part(state: PassState) -> None:
            (self._cross if self._is_crossing(state) else shared)(state)

        return part

    def build(self, weights: WeightLoader, host_memory: Memory | None) -> Part:
        """The layer's MLP; ``host_memory`` is the CPU's piece if it has been copied to the GPU."""
        mlps = [*(piece.mlp for piece in self.gpu_pieces), self._mlp(weights)]
        if host_memory is not None:
            mlps.append(self.host.on_gpu(host_memory))
        split = SplitMlp(mlps, self.host if host_memory is None else None)
        return load_mlp(self.host.config, self.host.layer, weights, None, split)

    def build_whole(self, memories: Sequence[Memory]) -> Part:
        """The part that the GPU computes alone, with copied pieces in ``memories``."""
        *copied, host_memory = memories
        memory = copied[0] if copied else cast(Memory, self.memory)
        return self.build(self.lane.weights(self.unit, memory, self._vectors), host_memory)

    def bind_ring(self) -> None:
        if not self.where.copied:
            return
        memory = self.lane.place(self.unit)
        part = self._passing.at(
            (memory,), lambda: self._part(self.lane.weights(self.unit, memory, self._vectors))
        )
        if part is not self.part:
            self.part = part
            self._moved()

    def _is_crossing(self, state: PassState) -> bool:
        rows = state.rows if isinstance(state, StreamedState) else 0  # graphs have few rows
        return 0 < self._crossing <= rows

    def _cross(self, state: PassState) -> None:
        self.lane.run(self._whole, cast(StreamedState, state))

    def free(self) -> None:
        super().free()
        self.part = None
        self._whole.parts.clear()


class _WholeMlp:
    """A ``Step`` in which the GPU computes all rows."""

    timed = True

    def __init__(self, stage: SplitStage) -> None:
        copied = [stage.unit] if stage.where.copied else []
        self.name, self.ring_units = stage.mlp_name, [*copied, stage.host.unit]
        self.parts, self._make = PassingParts(), stage.build_whole

    def part_of(self, memories: Sequence[Memory]) -> Part:
        """The part on the units of the ring."""
        return self.parts.at(memories, lambda: self._make(memories))
