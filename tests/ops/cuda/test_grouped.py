"""Products with many experts at once, on the CPU: each slot has the bits of ``product``."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from localrt.quant.cuda.experts import (
    ENTRY,
    ExpertGroups,
    Side,
    grouped_down,
    grouped_gate_up,
    plan_slots,
    write_entries,
)
from localrt.quant.cuda.products import product
from localrt.quant.cuda.tensor import Tensor
from tests.ops.cuda.emulator import Emulator
from tests.ops.cuda.target import back, there
from tests.ops.cuda.test_products import Matrix, inputs, matrix, quantized

EXPERTS, USED, HIDDEN, INNER = 5, 2, 256, 80
KIND = 2


def write(table: Tensor, experts: np.ndarray, entries: np.ndarray) -> None:
    write_entries(table.device, table.address + 8 * ENTRY * experts, entries)


class Layer:
    """Experts in ``format_``; some have biases."""

    def __init__(self, format_: str) -> None:
        self.gate_up = [matrix(format_, 2 * INNER, HIDDEN, seed=e) for e in range(EXPERTS)]
        self.down = [matrix(format_, HIDDEN - 8, HIDDEN, seed=50 + e) for e in range(EXPERTS)]
        self.biases = [there(torch.randn(2 * INNER)) if e % 2 else None for e in range(EXPERTS)]
        self.side = Side(format_, INNER, HIDDEN), Side(format_, HIDDEN - 8, HIDDEN)
        self.entries = np.array([self._entry(e) for e in range(EXPERTS)])
        self.table = there(torch.full((EXPERTS, ENTRY), -1, dtype=torch.int64))
        write(self.table, np.arange(EXPERTS), self.entries)

    def _entry(self, e: int) -> list[int]:
        both, down, bias = self.gate_up[e], self.down[e], self.biases[e]
        half = INNER // 16
        up = both.data.address + both.data.size // 2
        factors = [0, 0, 0]
        if both.factor is not None and down.factor is not None:
            at = both.factor.address
            factors = [at, at + 4 * half, down.factor.address]
        places = [both.data.address, up, down.data.address, *factors]
        return [KIND, *places, 0 if bias is None else bias.address, 0]


def choices(rows: int, seed: int = 3) -> torch.Tensor:
    """(rows, USED): the first expert is the first choice of most."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.stack([torch.randperm(EXPERTS, generator=generator) for _ in range(rows)])
    order[: rows // 2] = torch.arange(EXPERTS)
    return order[:, :USED].to(torch.int32)


def slots_of(plan: ExpertGroups) -> list[tuple[int, list[int]]]:
    """The parts that are not empty: an expert, its slots."""
    parts, slots = plan.parts.to_host().tolist(), plan.slots.to_host().tolist()
    return [(e, slots[first : first + count]) for e, first, count in parts if count]


@pytest.mark.parametrize("rows", [1, 3, 8, 21, 64])
def test_plan(emulator: Emulator, rows: int) -> None:
    chosen = choices(rows) * 9  # some of 40
    entries = torch.zeros(40, ENTRY, dtype=torch.int64)
    held = np.arange(40) % 18 == 0
    entries[:, 0] = torch.from_numpy(np.where(held, KIND, KIND - 1))
    table = there(entries)
    for wanted in (np.ones(40, np.bool_), np.arange(40) % 4 == 0, np.arange(40) == 27):
        plan = plan_slots(there(chosen), table, KIND, wanted)
        parts = slots_of(plan)
        assert all(len(slots) <= plan.size for _, slots in parts)
        found = sorted((slot, expert) for expert, slots in parts for slot in slots)
        both = enumerate(chosen.reshape(-1).tolist())
        assert found == [(slot, expert) for slot, expert in both if wanted[expert] and held[expert]]


# A variant of the kernel for each: one slot, four, eight, and 24 of an expert at once.
@pytest.mark.parametrize(
    ("name", "rows", "fine"),
    [
        *(("q4_0", rows, False) for rows in (1, 3, 7, 50)),
        *(("q4_0", rows, True) for rows in (1, 3, 50)),
        ("nvfp4", 3, False),
        ("nf4", 7, False),
        ("q6_k", 12, False),
        ("q4_k", 7, False),
        ("mxfp4", 12, False),
    ],
)
def test_slots_are_those_of_products(emulator: Emulator, name: str, rows: int, fine: bool) -> None:
    layer, x, chosen = Layer(name), inputs(rows, HIDDEN), choices(rows)
    hidden = torch.randn(rows * USED, HIDDEN)
    plan = plan_slots(there(chosen), layer.table, KIND, np.ones(EXPERTS, np.bool_))
    records = quantized(x, fine=fine)
    inner = back(grouped_gate_up(records, plan, layer.table, layer.side[0], "swiglu_oai", 2.0))
    down = there(torch.full((rows * USED, HIDDEN - 8), float("nan")))
    grouped_down(quantized(hidden, fine=fine), down, plan, layer.table, layer.side[1])
    out = back(down)

    def alone(row: torch.Tensor, weight: Matrix, wanted: torch.Tensor, **how: object) -> bool:
        got = there(torch.empty(1, len(wanted), dtype=wanted.dtype))
        product(quantized(row[None], fine=fine), weight, got, **how)  # type: ignore[arg-type]
        return torch.equal(back(got)[0], wanted)

    for slot, expert in enumerate(chosen.reshape(-1).tolist()):
        if slot % max(1, rows // 6):  # some of them
            continue
        how = {"bias": layer.biases[expert], "gate": "swiglu_oai", "limit": 2.0}
        assert alone(x[slot // USED], layer.gate_up[expert], inner[slot], **how)
        assert alone(hidden[slot], layer.down[expert], out[slot])


def test_only_the_wanted_are_computed(emulator: Emulator) -> None:
    layer, chosen = Layer("q4_0"), choices(3)
    wanted = np.arange(EXPERTS) == 1
    layer.entries[~wanted, 1:] = -1  # the others are nowhere
    layer.table.put(layer.entries)
    plan = plan_slots(there(chosen), layer.table, KIND, wanted)
    down = there(torch.full((3 * USED, HIDDEN - 8), float("nan")))
    rows = quantized(torch.randn(3 * USED, HIDDEN))
    grouped_down(rows, down, plan, layer.table, layer.side[1])
    out = back(down)
    assert torch.equal(out.isfinite().all(1), chosen.reshape(-1) == 1)
    assert torch.equal(out.isnan().all(1), chosen.reshape(-1) != 1)


def test_entries_are_written_where_they_belong(emulator: Emulator) -> None:
    table = there(torch.zeros(100, ENTRY, dtype=torch.int64))
    experts = np.arange(1, 100, 2)  # more than one launch has room for
    entries = np.arange(50 * ENTRY, dtype=np.int64).reshape(50, ENTRY) << 40
    write(table, experts, entries)
    found = table.to_host()
    assert np.array_equal(found[1::2], entries)
    assert not found[::2].any()
