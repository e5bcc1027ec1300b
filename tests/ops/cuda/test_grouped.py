"""Products with many experts at once, on the CPU: each slot has the bits of ``product``."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from localrt.quant.cuda.experts import (
    ENTRY,
    Plan,
    Side,
    grouped_down,
    grouped_gate_up,
    plan_slots,
    write_entries,
)
from localrt.quant.cuda.products import product, quantize
from tests.ops.cuda.emulator import Emulator
from tests.ops.cuda.test_products import Matrix, inputs, matrix

EXPERTS, USED, HIDDEN, INNER = 5, 2, 256, 80
KIND = 2


class Layer:
    """Experts in ``format_``; some have biases."""

    def __init__(self, format_: str) -> None:
        self.gate_up = [matrix(format_, 2 * INNER, HIDDEN, seed=e) for e in range(EXPERTS)]
        self.down = [matrix(format_, HIDDEN - 8, HIDDEN, seed=50 + e) for e in range(EXPERTS)]
        self.biases = [torch.randn(2 * INNER) if e % 2 else None for e in range(EXPERTS)]
        self.side = Side(format_, INNER, HIDDEN), Side(format_, HIDDEN - 8, HIDDEN)
        self.table = torch.full((EXPERTS, ENTRY), -1, dtype=torch.int64)
        entries = np.array([self._entry(e) for e in range(EXPERTS)])
        write_entries(self.table, np.arange(EXPERTS), entries)

    def _entry(self, e: int) -> list[int]:
        both, down, bias = self.gate_up[e], self.down[e], self.biases[e]
        half = INNER // 16
        up = both.data.data_ptr() + both.data.numel() // 2
        factors = [0, 0, 0]
        if both.factor is not None and down.factor is not None:
            at = both.factor.data_ptr()
            factors = [at, at + 4 * half, down.factor.data_ptr()]
        places = [both.data.data_ptr(), up, down.data.data_ptr(), *factors]
        return [KIND, *places, 0 if bias is None else bias.data_ptr(), 0]


def choices(rows: int, seed: int = 3) -> torch.Tensor:
    """(rows, USED): the first expert is the first choice of most."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.stack([torch.randperm(EXPERTS, generator=generator) for _ in range(rows)])
    order[: rows // 2] = torch.arange(EXPERTS)
    return order[:, :USED].to(torch.int32)


def slots_of(plan: Plan) -> list[tuple[int, list[int]]]:
    """The parts that are not empty: an expert, its slots."""
    parts, slots = plan.parts.tolist(), plan.slots.tolist()
    return [(e, slots[first : first + count]) for e, first, count in parts if count]


@pytest.mark.parametrize("rows", [1, 3, 8, 21, 64])
def test_plan(emulator: Emulator, rows: int) -> None:
    chosen = choices(rows) * 9  # some of 40
    table = torch.zeros(40, ENTRY, dtype=torch.int64)
    there = np.arange(40) % 18 == 0
    table[:, 0] = torch.from_numpy(np.where(there, KIND, KIND - 1))
    for wanted in (np.ones(40, np.bool_), np.arange(40) % 4 == 0, np.arange(40) == 27):
        plan = plan_slots(chosen, table, KIND, wanted)
        parts = slots_of(plan)
        assert all(len(slots) <= plan.size for _, slots in parts)
        found = sorted((slot, expert) for expert, slots in parts for slot in slots)
        both = enumerate(chosen.reshape(-1).tolist())
        assert found == [
            (slot, expert) for slot, expert in both if wanted[expert] and there[expert]
        ]


# A variant of the kernel for each: one slot, four, eight, and 24 of an expert at once.
@pytest.mark.parametrize(
    ("name", "rows", "fine"),
    [
        *(("q4_0", rows, False) for rows in (1, 3, 7, 50)),
        *(("q4_0", rows, True) for rows in (1, 3, 50)),
        ("nvfp4", 3, False),
        ("q4_k", 7, False),
        ("mxfp4", 12, False),
    ],
)
def test_slots_are_those_of_products(emulator: Emulator, name: str, rows: int, fine: bool) -> None:
    layer, x, chosen = Layer(name), inputs(rows, HIDDEN), choices(rows)
    hidden = torch.randn(rows * USED, HIDDEN)
    plan = plan_slots(chosen, layer.table, KIND, np.ones(EXPERTS, np.bool_))
    records = quantize(x, fine=fine)
    inner = grouped_gate_up(records, plan, layer.table, layer.side[0], "swiglu_oai", 2.0)
    out = torch.full((rows * USED, HIDDEN - 8), float("nan"))
    grouped_down(quantize(hidden, fine=fine), out, plan, layer.table, layer.side[1])

    def alone(row: torch.Tensor, weight: Matrix, wanted: torch.Tensor, **how: object) -> bool:
        got = torch.empty(1, len(wanted), dtype=wanted.dtype)
        product(quantize(row[None], fine=fine), weight, got, **how)  # type: ignore[arg-type]
        return torch.equal(got[0], wanted)

    for slot, expert in enumerate(chosen.reshape(-1).tolist()):
        if slot % max(1, rows // 6):  # some of them
            continue
        how = {"bias": layer.biases[expert], "gate": "swiglu_oai", "limit": 2.0}
        assert alone(x[slot // USED], layer.gate_up[expert], inner[slot], **how)
        assert alone(hidden[slot], layer.down[expert], out[slot])


def test_only_the_wanted_are_computed(emulator: Emulator) -> None:
    layer, chosen = Layer("q4_0"), choices(3)
    wanted = np.arange(EXPERTS) == 1
    layer.table[~torch.from_numpy(wanted), 1:] = -1  # the others are nowhere
    plan = plan_slots(chosen, layer.table, KIND, wanted)
    out = torch.full((3 * USED, HIDDEN - 8), float("nan"))
    grouped_down(quantize(torch.randn(3 * USED, HIDDEN)), out, plan, layer.table, layer.side[1])
    assert torch.equal(out.isfinite().all(1), chosen.reshape(-1) == 1)
    assert torch.equal(out.isnan().all(1), chosen.reshape(-1) != 1)


def test_entries_are_written_where_they_belong(emulator: Emulator) -> None:
    table = torch.zeros(100, ENTRY, dtype=torch.int64)
    experts = np.arange(1, 100, 2)  # more than one launch has room for
    entries = np.arange(50 * ENTRY, dtype=np.int64).reshape(50, ENTRY) << 40
    write_entries(table, experts, entries)
    assert np.array_equal(table.numpy()[1::2], entries)
    assert not table[::2].any()
