"""Grouped GEMM: a mixture's experts of one kind in two launches, wherever they are in memory.

Experts of a kind differ only in their addresses, which are in a table on the GPU: the GPU assigns
the work to blocks, and starts before the host knows the routing. A slot is one expert chosen by one
row (see ``quant/ops/experts.py``); its bits are those of ``product`` with that expert alone.
Experts without a kind (bf16, or parts in several formats) are computed one by one like a dense MLP,
after the host has waited for the routing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from ctypes import Structure, c_uint32, c_uint64
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.common.errors import OptionError
from localrt.common.option_names import option
from localrt.quant.cuda.device import Device
from localrt.quant.cuda.formats import HEAVY, format_macros
from localrt.quant.cuda.launch import arguments, declarations, launch, pointers
from localrt.quant.cuda.linear import linear
from localrt.quant.cuda.products import GATES, OUT, Records, TiledMatrix, chains_of, quantize
from localrt.quant.cuda.programs import Program
from localrt.quant.cuda.routing import (
    MOST_EXPERTS,
    CudaRouting,
    choose,
    on_gpu,
    put_rows,
    router_logits,
)
from localrt.quant.cuda.steps import move_rows, rotate_blocks
from localrt.quant.cuda.tensor import (
    BFLOAT16,
    FLOAT32,
    INT32,
    INT64,
    Dtype,
    Tensor,
    empty,
    upload,
    zeros,
)
from localrt.quant.cuda.weight import (
    CudaWeight,
)
from localrt.quant.formats import FORMATS
from localrt.quant.formats.affine import AFFINE
from localrt.quant.formats.tiled import TILE_ROWS
from localrt.quant.ops.experts import (
    ExpertSpec,
    ExpertWeights,
    PlainExpertTable,
    RouterSpec,
    RouterWeights,
    Routing,
    slots_of,
)

ENTRY = 9
"""Words of an expert's entry: the number of its kind, from 1, or 0 if it is absent; the addresses
of the tiles of gate, up and down, of their factors, and of the biases of gate and up, and of down.

Without a gate, up replaces it.
"""
_ENTRY_NBYTES = 8 * ENTRY
_MOST_ENTRIES = declarations("entries.cu").constants["MOST_ENTRIES"]
# Formats that count as heavy for experts.
_HEAVY = HEAVY | {*(name for name, codec in AFFINE.items() if codec.bits == 6)}
_Bits = c_uint32 * (MOST_EXPERTS // 32)


@dataclass(frozen=True, slots=True)
class Side:
    """Gate and up, or down, of experts computed together; sizes are those of one matrix."""

    format: str
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """The slots of some experts, grouped by expert, and the blocks that compute them; on the GPU.

    ``parts`` (most, 3) int32 are, for each block, an expert, the index of its first slot in
    ``slots``, and the number of slots, at most ``size``. A row of x has ``used`` slots.
    """

    parts: Tensor
    slots: Tensor
    size: int
    used: int


_Plan = arguments("plan.cu", "Plan")


class _Entries(Structure):
    _fields_ = (
        ("words", c_uint64 * (_MOST_ENTRIES * ENTRY)),
        ("entries", c_uint64 * _MOST_ENTRIES),
    )


_Grouped = arguments("grouped.cu", "Grouped")


def write_entries(
    device: Device, addresses: npt.NDArray[np.int64], entries: npt.NDArray[np.int64]
) -> None:
    """Write ``entries`` (n, ENTRY) at ``addresses`` (n,) in tables on the device.

    Kernels that are started later see them.
    """
    for first in range(0, len(addresses), _MOST_ENTRIES):
        some = slice(first, first + _MOST_ENTRIES)
        args = _Entries()
        count = len(addresses[some])
        np.ctypeslib.as_array(args.words)[: count * ENTRY] = entries[some].reshape(-1)
        np.ctypeslib.as_array(args.entries)[:count] = addresses[some]
        launch(device, _ENTRIES, (1, 1, 1), count * ENTRY, args)


def plan_slots(
    chosen: Tensor, table: Tensor, number: int, wanted: npt.NDArray[np.bool_]
) -> ExpertGroups:
    """Plan a pass whose rows chose the experts ``chosen`` (R, K) int32, with any stride. Only the
    ``wanted`` (E,) experts of kind ``number`` in the table (E, ENTRY) are planned.
    """
    rows, used = chosen.shape
    experts, slots = int(np.count_nonzero(wanted)), rows * used
    size = rows_at_once(rows, used, len(wanted))
    whole = (slots + min(experts, slots) * (size - 1)) // size
    most = max(1, min(whole, experts * -(-rows // size)))
    parts = empty(most, 3, dtype=INT32, device=chosen.device)
    order = empty(slots, dtype=INT32, device=chosen.device)
    bits = np.packbits(wanted, bitorder="little")
    args = _Plan(
        *pointers(table, chosen, parts, order),
        slots,
        used,
        chosen.strides[0],
        most,
        size,
        number,
        _Bits.from_buffer_copy(bits.tobytes().ljust(MOST_EXPERTS // 8, b"\0")),
    )
    launch(chosen.device, _PLAN, (1, 1, 1), -(-len(wanted) // 32) * 32, args)
    return ExpertGroups(parts, order, size, used)


def rows_at_once(rows: int, used: int, experts: int) -> int:
    """How many slots of one expert a block computes; results do not depend on it."""
    if rows <= 4:
        return 1 if rows == 1 else 4
    each = rows * used / experts
    return 8 if each <= 6 or rows <= 8 else 16 if each <= 12 else 24


def grouped_gate_up(
    x: Records, plan: ExpertGroups, table: Tensor, side: Side, activation: str, limit: float
) -> Tensor:
    """activation(gate) * up for each slot of the plan, bf16: (R * K, F), other rows undefined.

    For ``relu2``, which has no gate, activation(up).
    """
    slots = len(plan.slots)
    out = empty(slots, side.rows, dtype=BFLOAT16, device=table.device)
    _launch(x, out, plan, table, side, activation, limit, plan.used)
    return out


def grouped_down(
    inner: Records, out: Tensor, plan: ExpertGroups, table: Tensor, side: Side
) -> None:
    """Multiply the plan's slots of ``inner`` (R * K, F) by down, to ``out`` (R * K, D), float32."""
    _launch(inner, out, plan, table, side, None, 0.0, 1)


@cache
def grouped_program(
    format_: str, size: int, gate: str | None, out: Dtype, *, fine: bool = False
) -> Program:
    """The kernel for ``size`` slots of an expert at once."""
    size *= 2 if fine else 1
    return Program.of(
        "grouped",
        **format_macros(format_),
        PAIRS_=1,
        WIDTH="ONE" if size == 1 else "FEW" if size <= 4 else "MANY",
        NT_=max(1, size // 8),
        GATE=GATES[gate] if gate else 0,
        OUT=OUT[out],
        BLOCKS=2 if size <= 8 and format_ not in _HEAVY else 1,
        FINE=int(fine),
    )


def _launch(
    x: Records,
    y: Tensor,
    plan: ExpertGroups,
    table: Tensor,
    side: Side,
    gate: str | None,
    limit: float,
    per: int,
) -> None:
    tiles, steps = -(-side.rows // 16), side.columns // 32
    args = _Grouped(
        *pointers(x.data, y, table, plan.parts, plan.slots),
        _tile_bytes(side.format, side.columns),
        x.stride,
        y.strides[0],
        per,
        side.rows,
        tiles,
        steps,
        limit,
    )
    program = grouped_program(side.format, plan.size, gate, y.dtype, fine=x.fine)
    paired = gate not in (None, "relu2")
    grid = (tiles if paired else -(-tiles // 2), len(plan.parts), 1)
    launch(y.device, program, grid, 32 * chains_of(side.format, side.columns), args)


@cache
def _tile_bytes(format_: str, columns: int) -> int:
    """Bytes of a tile of ``TILE_ROWS`` rows."""
    return TILE_ROWS * FORMATS[format_].row_bytes(columns)


_PLAN = Program.of("plan")
_ENTRIES = Program.of("entries")
_ALIGNED = 16  # bytes: what the kernels' widest loads need


@dataclass(frozen=True, slots=True)
class ExpertKind:
    """The common layout of experts in one launch. ``rotated`` are the Hadamard block sizes of x and
    of inner rows; ``fine`` is as in ``CudaWeight``.
    """

    gate_up: Side
    down: Side
    rotated: tuple[int, int]
    fine: bool


class CudaExpertTable(PlainExpertTable):
    """See ``ExpertTable``. ``kind_of[expert]`` is the number of its kind, or -1.

    Raises:
        OptionError: a layer has more experts than the kernels choose among.
    """

    def __init__(self, count: int) -> None:
        if count > MOST_EXPERTS:
            raise OptionError(
                f"a GPU chooses among {MOST_EXPERTS} experts of a layer at most, and this has "
                f"{count}: use {option('device', 'cpu')}"
            )
        super().__init__(count)
        self.kinds: list[ExpertKind] = []  # kinds seen so far
        self.kind_of = np.full(count, -1, np.int64)
        self._places: npt.NDArray[np.int64] = np.zeros((count, ENTRY), np.int64)
        self._without_kind = False  # whether an expert without a kind was added
        self.present = np.zeros(count, np.bool_)  # experts that must be in the GPU's table
        self._stale = set[int]()  # experts that changed since it was written
        self._entries: Tensor | None = None

    @property
    def capturable(self) -> bool:
        return bool((self.kind_of >= 0).all())

    @property
    def sharable(self) -> bool | None:
        return False if self._without_kind else True if self.kinds else None

    def put(self, expert: int, weights: ExpertWeights) -> None:
        super().put(expert, weights)
        described = _describe(weights)
        if described is None:
            self._without_kind = True
            self._remove(expert)
            return
        kind, self._places[expert, 1:] = described
        if kind not in self.kinds:
            self.kinds.append(kind)
        self.kind_of[expert] = self.kinds.index(kind)
        self._places[expert, 0] = self.kind_of[expert] + 1
        self.present[expert] = True
        self._stale.add(expert)

    def drop(self, expert: int) -> None:
        super().drop(expert)
        self._remove(expert)

    def _remove(self, expert: int) -> None:
        self.kind_of[expert] = -1
        if self.present[expert]:
            self.present[expert], self._places[expert] = False, 0
            self._stale.add(expert)

    def entries(self, device: Device) -> Tensor:
        """(E, ENTRY) int64 on the device: the up-to-date table, for kernels that start now."""
        write_tables(device, [self])
        return self.memory(device)

    def take_stale(
        self, device: Device
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
        """The addresses (n,) and values (n, ENTRY) of entries to write; None if there are none."""
        memory = self.memory(device)
        if not self._stale:
            return None
        stale = np.array(sorted(self._stale))
        self._stale.clear()
        return memory.address + _ENTRY_NBYTES * stale, self._places[stale]

    def memory(self, device: Device) -> Tensor:
        """The memory of the table, which may be out of date."""
        if self._entries is None:
            self._entries = zeros(
                *self._places.shape, dtype=INT64, device=device, pool=device.persistent
            )
        return self._entries


def write_tables(device: Device, tables: Iterable[CudaExpertTable]) -> None:
    """Bring the tables on the device up to date, for kernels that start now."""
    stale = [entries for table in tables if (entries := table.take_stale(device)) is not None]
    if stale:
        addresses, values = map(np.concatenate, zip(*stale, strict=True))
        write_entries(device, addresses, values)


def _describe(weights: ExpertWeights) -> tuple[ExpertKind, list[int]] | None:
    """An expert's kind and addresses; None where the grouped kernels cannot compute it."""
    inner = weights.down.shape[1]
    both = _gate_and_up(weights.gate_up, inner)
    down = weights.down.parts[0]
    if both is None or len(weights.down.parts) != 1 or not isinstance(down, TiledMatrix):
        return None
    (gate, gate_factor), (up, up_factor), format_ = both
    biases = weights.gate_up_bias, weights.down_bias
    kind = ExpertKind(
        Side(format_, inner, weights.gate_up.shape[1]),
        Side(down.format, *weights.down.shape),
        (weights.gate_up.hadamard, weights.down.hadamard),
        weights.gate_up.fine,
    )
    factors = [gate_factor, up_factor, _address(down.factor)]
    places = [gate, up, _address(down.data), *factors, *map(_address, biases)]
    return None if any(place % _ALIGNED for place in places[:3]) else (kind, places)


def _gate_and_up(
    weight: CudaWeight, inner: int
) -> tuple[tuple[int, int], tuple[int, int], str] | None:
    """The addresses of gate's tiles and factors, of up's, and their format; without a gate, up
    replaces it.
    """
    tiles = [part for part in weight.parts if isinstance(part, TiledMatrix)]
    first = tiles[0] if tiles else None
    if first is None or len(tiles) != len(weight.parts):
        return None
    at, factor = first.data.address, _address(first.factor)
    if len(tiles) == 1 and weight.shape[0] == inner:
        return (at, factor), (0, 0), first.format
    if len(tiles) == 1 and inner % 16 == 0:
        up = at + inner // 16 * first.tile_bytes
        return (at, factor), (up, factor and factor + inner // 16 * 4), first.format
    if len(tiles) == 2 and tiles[1].shape[0] == inner and tiles[1].format == first.format:
        return (at, factor), (tiles[1].data.address, _address(tiles[1].factor)), first.format
    return None


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.address


def route_rows(normed: Tensor, rows: Tensor, weights: RouterWeights, spec: RouterSpec) -> Routing:
    """The experts of normed rows (R, D), float32; ``rows`` are the same in bf16."""
    gate: Any = weights.gate
    if gate.hadamard or not all(isinstance(part, Tensor) for part in gate.parts):
        logits = linear(rows, gate, dtype=FLOAT32)
    else:
        shape = (len(normed), gate.shape[0])
        logits = empty(*shape, dtype=FLOAT32, device=normed.device)
        first = 0
        for part in gate.parts:
            stop = first + len(part)
            router_logits(normed, part, logits[:, first:stop])
            first = stop
    results = choose(logits, weights.gate_bias, weights.choice_bias, spec, weights.expert_scale)
    return CudaRouting(results, len(logits), spec.ranked, spec.used)


def run_kinds(
    normed: Tensor,
    routing: Routing,
    table: CudaExpertTable,
    spec: ExpertSpec,
    slots: Tensor,
    experts: Sequence[int] | npt.NDArray[np.int32] | None,
    compute_alone: Callable[[int, Tensor], Tensor],
) -> None:
    """Fill slots, computing all experts of a kind together.

    ``compute_alone`` computes the rows of an expert without a kind. A row's bits depend on its
    expert alone; without a kind, also on the number of rows in the pass.
    """
    kinds = table.kind_of
    wanted = np.ones(len(kinds), np.bool_)
    if experts is not None:
        asked = np.asarray(experts, np.intp)
        wanted[:] = False
        wanted[asked[asked < len(kinds)]] = True
    if (others := wanted & (kinds < 0)).any():
        for expert, filled in slots_of(routing, others.nonzero()[0].tolist()):
            run_alone(normed, filled, routing.used, slots, partial(compute_alone, expert))
    chosen: Tensor | None = None
    for number, kind in enumerate(table.kinds):
        if not (same := wanted & (kinds == number)).any():
            continue
        if chosen is None:
            chosen = on_gpu(routing, normed.device).chosen_on_gpu
            entries = table.entries(normed.device)
        plan = plan_slots(chosen, entries, number + 1, same)
        run_kind(normed, plan, entries, kind, spec, slots)


def run_alone(
    normed: Tensor,
    filled: npt.NDArray[np.intp],
    used: int,
    slots: Tensor,
    compute: Callable[[Tensor], Tensor],
) -> None:
    """Fill the slots ``filled`` (n,) of one expert with its results."""
    rows = empty(len(filled), normed.shape[1], dtype=normed.dtype, device=normed.device)
    move_rows(normed, rows, index=upload(filled // used, normed.device))
    put_rows(compute(rows), filled, slots)


def run_present(
    normed: Tensor, routing: CudaRouting, table: CudaExpertTable, spec: ExpertSpec, slots: Tensor
) -> None:
    """Fill the slots of experts that are in the table when the kernels run, of all kinds so far."""
    entries = table.memory(normed.device)
    everyone = np.ones(len(table.kind_of), np.bool_)
    for number, kind in enumerate(table.kinds, 1):
        plan = plan_slots(routing.chosen_on_gpu, entries, number, everyone)
        run_kind(normed, plan, entries, kind, spec, slots)


def run_kind(
    normed: Tensor,
    plan: ExpertGroups,
    entries: Tensor,
    kind: ExpertKind,
    spec: ExpertSpec,
    slots: Tensor,
) -> None:
    """Compute two products, with the rotations that the weights need."""
    outer, within = kind.rotated
    x = quantize(rotate_blocks(normed, outer) if outer else normed, fine=kind.fine)
    inner = grouped_gate_up(x, plan, entries, kind.gate_up, spec.activation, spec.limit)
    if within:
        inner = rotate_blocks(inner, within)
    grouped_down(quantize(inner, fine=kind.fine), slots, plan, entries, kind.down)
