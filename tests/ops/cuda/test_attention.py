"""Attention over a KV cache, on the CPU: against float64, and bit for bit among other rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from localrt.quant.cuda import attention
from localrt.quant.cuda.attention import row_nbytes
from localrt.quant.cuda.kv import BlockedCache, LayerPlace, one_span
from localrt.quant.cuda.launch import noting
from localrt.quant.cuda.tensor import FLOAT32, UINT8, Dtype, empty
from localrt.quant.ops.attention import scratch_nbytes
from localrt.quant.ops.kv_formats import KvFormat
from tests.ops.cuda.emulator import Emulator
from tests.ops.cuda.target import DEVICE, by_torch, cache_of, kept, random
from tests.ops.layers import tree_mask

attend, rope_append = by_torch(attention.attend), by_torch(attention.rope_append)

ALLOCATED = 768
# Shares and results are bf16.
CLOSE = {"rtol": 1e-2, "atol": 4e-3}


@dataclass(frozen=True, slots=True)
class Case:
    """``tree``: each new row's parent, -1 for none. ``picture``: new rows that see one another."""

    n: int
    held: int
    heads: int = 4
    groups: int = 2
    size: int = 64
    window: int | None = None
    chunked: bool = False
    softcap: float | None = None
    sinks: bool = False
    tree: tuple[int, ...] = ()
    picture: tuple[int, int] | None = None

    def ahead(self) -> Tensor | None:
        if self.picture is None:
            return None
        (begin, end), rows = self.picture, torch.arange(self.n, dtype=torch.int32)
        return torch.where((rows >= begin) & (rows < end), end - 1 - rows, 0).int()

    def mask(self) -> Tensor:
        """(n, n): who sees whom."""
        if not self.tree:
            seen = torch.ones(self.n, self.n).tril().bool()
            if self.picture is not None:
                seen[slice(*self.picture), slice(*self.picture)] = True
            return seen
        return torch.from_numpy(tree_mask(list(self.tree)))

    def positions(self) -> Tensor:
        if self.picture is not None:
            return self.held + torch.arange(self.n)
        return self.held + self.mask().sum(1) - 1


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Queries, keys and values, sinks: below, beside and far above the scores."""
    q = random(case.n, case.heads, case.size).bfloat16()
    k, v = (random(case.groups, ALLOCATED, case.size, seed=s).bfloat16() for s in (1, 2))
    for cache in (k, v):  # what an earlier sequence has left
        cache[:, case.held + case.n :] = float("nan")
    return q, k, v, torch.linspace(-4, 40, case.heads) if case.sinks else None


def run(
    case: Case,
    *,
    longest: int | None = None,
    rows: slice | None = None,
    given: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """Of all rows; or of some, the others before them held. ``given``: queries, keys, values."""
    q, k, v, sinks = inputs(case)
    q, k, v = given or (q, k, v)
    rows = rows or slice(0, case.n)
    q, positions, held = q[rows], case.positions()[rows], case.held + rows.start
    ahead = case.ahead()
    cache, mask = cache_of(k, v), case.mask()[rows, : rows.stop].numpy() if case.tree else None
    table = one_span(
        cache.addresses,
        len(q),
        DEVICE,
        held=held,
        mask=mask,
        ahead=None if ahead is None else ahead[rows].numpy(),
        longest=longest,
    )
    result: Tensor = attend(
        q,
        table,
        cache.layers[0],
        positions,
        scale=case.size**-0.5,
        window=case.window,
        chunked=case.chunked,
        softcap=case.softcap,
        sinks=sinks,
    ).view(len(q), case.heads, -1)
    return result


def expected(case: Case) -> Tensor:
    q, k, v, sinks = inputs(case)
    total, per = case.held + case.n, case.heads // case.groups
    keys, values = (t[:, :total].double().repeat_interleave(per, 0) for t in (k, v))
    scores = torch.einsum("nhe,hle->nhl", q.double(), keys) * case.size**-0.5
    if case.softcap is not None:
        scores = torch.tanh(scores / case.softcap) * case.softcap
    seen = torch.ones(case.n, total, dtype=torch.bool)
    seen[:, case.held :] = case.mask()
    if case.window is not None:
        at = torch.cat([torch.arange(case.held), case.positions()])
        if case.chunked:
            seen &= case.positions()[:, None] // case.window == at // case.window
        else:
            seen &= case.positions()[:, None] - at < case.window
    scores.masked_fill_(~seen[:, None], float("-inf"))
    if sinks is not None:
        own = sinks.double()[None, :, None].expand(case.n, case.heads, 1)
        scores = torch.cat([scores, own], -1)
    return torch.einsum("nhl,hle->nhe", scores.softmax(-1)[..., :total], values)


TREE = (-1, 0, 0, 1, 2, 2)
LARGER = (-1, 0, 0, 1, 2, 2, 5, 3, 6)


@pytest.mark.parametrize(
    "case",
    [
        Case(n=6, held=37, picture=(1, 5)),
        Case(n=90, held=3, picture=(20, 70)),
        pytest.param(Case(n=130, held=200, picture=(5, 121), window=150), marks=pytest.mark.slow),
        Case(1, 0),
        Case(1, 600, heads=7, groups=1),
        Case(5, 254),  # new rows in two runs, two tiles of them
        Case(3, 590, window=300),
        Case(3, 598, window=300, chunked=True),
        Case(2, 40, softcap=2.0),
        Case(6, 250, tree=TREE),
        Case(6, 250, tree=TREE, window=3, sinks=True),
        Case(1, 300, sinks=True),
        Case(2, 70, size=80),
        Case(3, 300, size=512),  # values that two blocks divide
        Case(20, 250, heads=4, groups=1, size=512, picture=(2, 18), window=30),
    ],
    ids=str,
)
def test_few_rows(emulator: Emulator, case: Case) -> None:
    got = run(case)
    torch.testing.assert_close(got.double(), expected(case), **CLOSE)
    assert torch.equal(run(case, longest=ALLOCATED), got)
    emulator.seed += 1  # another order of threads and blocks
    assert torch.equal(run(case), got)


@pytest.mark.parametrize(
    "case",
    [
        *(Case(9, held, tree=LARGER) for held in (3, 249, 255)),
        Case(9, 252, tree=LARGER, window=5, sinks=True),
        Case(9, 255, tree=LARGER, window=5, chunked=True),
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in (
                Case(9, 506, tree=LARGER, size=80, window=300),
                Case(9, 249, tree=LARGER, heads=20, groups=1, softcap=2.0),  # two tiles a row
                Case(9, 252, tree=LARGER, size=512, heads=2, groups=1),
            )
        ),
    ],
    ids=str,
)
def test_tree_rows_have_the_bits_of_chains(emulator: Emulator, case: Case) -> None:
    """Of their ancestors and themselves, decoded one by one."""
    (q, k, v, _), held = inputs(case), case.held
    whole = run(case)
    for row, seen in enumerate(case.mask()):
        path = held + seen.nonzero()[:, 0]
        last = held + len(path) - 1
        alone = replace(case, n=1, held=last, tree=())
        moved = [torch.cat([t[:, :held], t[:, path], t[:, last + 1 :]], 1) for t in (k, v)]
        assert torch.equal(run(alone, given=(q[row : row + 1], *moved))[0], whole[row]), row


@pytest.mark.parametrize("window", [None, 70])
def test_batch_invariance(
    emulator: Emulator, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(41, 240, window=window)  # new rows in two runs
    whole = run(case)
    for rows in (slice(0, 1), slice(3, 8), slice(15, 16), slice(20, 41)):
        assert torch.equal(run(case, rows=rows), whole[rows]), rows
    monkeypatch.setattr("localrt.quant.ops.attention._MOST_NBYTES", 20_000)
    assert torch.equal(run(case), whole)  # a few rows at a time


@pytest.mark.parametrize(
    "case",
    [
        Case(70, 0),
        Case(65, 77, heads=3, groups=1),
        Case(80, 30, window=20, sinks=True),
        Case(80, 30, window=20, chunked=True),
        Case(66, 10, softcap=2.0, size=80),
        pytest.param(Case(65, 40, size=256, heads=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_many_rows(emulator: Emulator, case: Case) -> None:
    torch.testing.assert_close(run(case).double(), expected(case), **CLOSE)
    assert [program.name for program in emulator.launches] == ["attention"]


def test_wide_heads_of_prompts(emulator: Emulator) -> None:
    """Their rows have the bits of few rows, also where a picture's see one another."""
    for picture in (None, (20, 60)):
        case = Case(70, 200, size=512, heads=2, groups=1, picture=picture)
        whole = run(case)
        torch.testing.assert_close(whole.double(), expected(case), **CLOSE)
        if picture is None:
            assert torch.equal(run(case, rows=slice(30, 35)), whole[30:35])


def test_rope_and_append(emulator: Emulator) -> None:
    """Into the second block; ``tests/driver`` has what architectures do otherwise."""
    n, heads, groups, held, size, half = 3, 4, 2, 254, 80, 20
    qkv = random(n, (heads + 2 * groups) * size).bfloat16()
    cache = cache_of(*torch.zeros(2, groups, 512, size, dtype=torch.bfloat16))
    q = torch.empty(n, heads, size, dtype=torch.bfloat16)
    angles, weights = random(n, half), [random(size, seed=seed) for seed in (1, 2)]
    rope_append(
        qkv,
        q,
        one_span(cache.addresses, n, DEVICE, held=held),
        cache.layers[0],
        cos=angles.cos(),
        sin=angles.sin(),
        q_norm=weights[0],
        k_norm=weights[1],
        eps=1e-6,
    )
    parts = torch.split(qkv.double().view(n, -1, size), [heads, groups, groups], 1)
    k_cache, v_cache = kept(cache, 512)
    found = (q, k_cache[:, held : held + n].transpose(0, 1))
    for part, weight, got in zip(parts[:2], weights, found, strict=True):
        normed = torch.nn.functional.rms_norm(part, (size,), weight.double(), 1e-6)
        c, s = angles.cos()[:, None].double(), angles.sin()[:, None].double()
        a, b, rest = torch.split(normed, [half, half, size - 2 * half], -1)
        turned = torch.cat([a * c - b * s, b * c + a * s, rest], -1)
        torch.testing.assert_close(got.double(), turned, rtol=2**-8, atol=1e-6)
    assert torch.equal(v_cache[:, held : held + n].transpose(0, 1).double(), parts[2])
    for each in (k_cache, v_cache):
        assert not each[:, :held].any()
        assert not each[:, held + n :].any()


@pytest.mark.parametrize(
    ("n", "size", "groups"), [(5, 64, 2), (3, 80, 1), (66, 128, 1)], ids=["few", "odd", "prompt"]
)
@pytest.mark.parametrize(("stored", "bound"), [("int8", 0.012), ("int4", 0.15)])
def test_quantized_keys_and_values(
    emulator: Emulator, n: int, size: int, groups: int, stored: KvFormat, bound: float
) -> None:
    """Appended and attended to: what is lost is the rounding of each token's key and value."""
    heads, held = 2 * groups, 40
    total = held + n
    qkv = random(total, (heads + 2 * groups) * size).bfloat16()
    qkv[:, heads * size :: size] *= 30  # one large number in each head, as models have
    shape = (groups, *row_nbytes(stored, size))
    cache = BlockedCache([shape], 256, UINT8, DEVICE)
    cache.reserve(total)
    q = torch.empty(total, heads, size, dtype=torch.bfloat16)
    plain: dict[str, Any] = {"cos": None, "sin": None, "q_norm": None, "k_norm": None, "eps": 1e-6}
    table = one_span(cache.addresses, total, DEVICE)
    rope_append(qkv, q, table, cache.layers[0], **plain, kv_format=stored)
    got = attend(
        q[held:],
        one_span(cache.addresses, n, DEVICE, held=held),
        cache.layers[0],
        torch.arange(held, total),
        scale=size**-0.5 / 30,
        window=None,
        softcap=None,
        kv_format=stored,
    )
    split = torch.split(qkv.double().view(total, -1, size), [heads, groups, groups], 1)
    queries, keys, values = split[0][held:], *(t.repeat_interleave(2, 1) for t in split[1:])
    scores = torch.einsum("nhe,lhe->nhl", queries, keys) * size**-0.5 / 30
    seen = torch.arange(total) <= torch.arange(held, total)[:, None]
    scores.masked_fill_(~seen[:, None], float("-inf"))
    wanted = torch.einsum("nhl,lhe->nhe", scores.softmax(-1), values)
    error = (got.double().view(wanted.shape) - wanted).square().mean().sqrt()
    assert error < bound * wanted.square().mean().sqrt()


@pytest.mark.parametrize("longest", [300, 5000, 90_000])
def test_what_runs_take_is_what_is_counted(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def counted(*shape: int, dtype: Dtype = FLOAT32, **options: Any) -> Any:
        taken[-1] += 4 * math.prod(shape) if dtype is FLOAT32 else 0
        return empty(*shape, dtype=dtype, **options)

    monkeypatch.setattr(attention, "empty", counted)
    heads, size, none = 8, 64, np.zeros(0, np.int64)
    place = LayerPlace(0, 0, 2, size, size)
    with noting({}):
        for rows in (1, 3, 17, 64, 65):
            taken.append(0)
            q, positions = random(rows, heads, size).bfloat16(), torch.arange(rows)
            table = one_span(none, rows, DEVICE, longest=longest)
            attend(q, table, place, positions, scale=1.0, window=None, softcap=None)
    assert max(taken) == scratch_nbytes(heads, size, longest)
    assert taken[-1] == 0  # a prompt's rows are not split
