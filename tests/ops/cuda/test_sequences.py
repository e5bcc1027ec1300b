"""Sequences on the GPU: blocks of keys and values, latent attention, and several sequences in one
launch, of which each row gets the bits that it gets alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localrt.quant.cuda import attention
from localrt.quant.cuda.kv import BlockedCache, SpanNumbers, SpanTable, one_span, widest_mask
from localrt.quant.cuda.tensor import BFLOAT16, UINT8, upload
from localrt.quant.ops.kv_formats import KvFormat
from localrt.quant.ops.protocol import Span
from tests.ops.cuda.emulator import Emulator
from tests.ops.cuda.target import DEVICE, back, by_torch, cache_of, random, there
from tests.ops.layers import tree_mask

attend, rope_append = by_torch(attention.attend), by_torch(attention.rope_append)
attend_latents = by_torch(attention.attend_latent_rows)

HEADS, GROUPS, SIZE, ROPE = 6, 2, 32, 16
HELD = (0, 1, 254, 255, 256, 511, 600)


@dataclass(frozen=True, slots=True)
class Sequence:
    """``tree``: each new row's parent among those of this pass and of the last, -1 for none; the
    last of them are the ``rows``. ``picture``: the new rows see one another.
    """

    held: int
    rows: int
    tree: tuple[int, ...] = ()
    picture: bool = False

    def span(self, cache: BlockedCache) -> Span:
        mask = tree_mask(list(self.tree))[-self.rows :] if self.tree else None
        ahead = np.arange(self.rows, dtype=np.int32)[::-1].copy() if self.picture else None
        return Span(cache, self.rows, mask, ahead)

    def positions(self) -> torch.Tensor:
        if not self.tree:
            return self.held + torch.arange(self.rows)
        mask = tree_mask(list(self.tree))
        return torch.from_numpy(self.held - len(mask) + self.rows + mask.sum(1) - 1)[-self.rows :]


@st.composite
def sequences(draw: st.DrawFn) -> Sequence:
    held, rows = draw(st.sampled_from(HELD)), draw(st.integers(1, 6))
    kind = draw(st.sampled_from(["text", "text", "tree", "picture"]))
    if kind != "tree":
        return Sequence(held, rows, picture=kind == "picture")
    count = rows + draw(st.integers(0, min(3, held)))
    return Sequence(held, rows, tuple(draw(st.integers(-1, n - 1)) for n in range(count)))


def of_all(spans: list[Span], left: int, places: int) -> SpanTable:
    """The table of a pass, ``left`` rows of which repeat the last one, with more places."""
    rows = sum(span.rows for span in spans) + left
    room = max(len(span.cache.addresses) for span in spans)
    ahead = any(span.ahead is not None for span in spans)
    count = len(spans) + places + bool(left)
    columns = widest_mask(spans)
    numbers = SpanNumbers(count, rows, room + 1, columns and columns + 3, ahead=ahead)
    numbers.fill(spans)
    longest = max(span.cache.length + span.rows for span in spans)
    return numbers.table(upload(numbers.numbers, DEVICE), longest + 300)


def alone(span: Span) -> SpanTable:
    held, addresses = span.cache.length, span.cache.addresses
    return one_span(addresses, span.rows, DEVICE, held=held, mask=span.mask, ahead=span.ahead)


def filled(shape: tuple[int, int, int], dtype: Any, sequence: Sequence, seed: int) -> BlockedCache:
    """A cache with tokens, whose bytes are small numbers in any format."""
    cache = BlockedCache([shape], 1024, dtype, DEVICE)
    cache.reserve(sequence.held + sequence.rows)
    cache.advance(sequence.held)
    if dtype is BFLOAT16:
        for keys, values in cache.parts(0):
            for part in (keys, values):
                drawn = random(*part.shape, seed=seed).bfloat16()
                part.put(drawn.view(torch.uint16).numpy())
    return cache


def saved_blocks(cache: BlockedCache) -> np.ndarray:
    return cache.take_blocks(0, len(cache.addresses))


@given(
    chosen=st.lists(sequences(), min_size=1, max_size=5),
    left=st.integers(0, 4),
    places=st.integers(0, 3),
    window=st.sampled_from([None, 3, 300]),
    kv_format=st.sampled_from(["bf16", "int8", "int4"]),
)
@settings(
    max_examples=4 + settings().max_examples // 10,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_several_sequences(
    emulator: Emulator,
    chosen: list[Sequence],
    left: int,
    places: int,
    window: int | None,
    kv_format: KvFormat,
) -> None:
    """The rows that are left repeat the last one, and write what it writes."""
    sizes = (SIZE, SIZE) if kv_format == "bf16" else attention.row_nbytes(kv_format, SIZE)
    dtype = BFLOAT16 if kv_format == "bf16" else UINT8
    if chosen[-1].picture:
        left = 0  # passes with pictures are not filled up
    rows = sum(each.rows for each in chosen)
    qkv = random(rows, (HEADS + 2 * GROUPS) * SIZE).bfloat16()
    positions = torch.cat([each.positions() for each in chosen])
    qkv = torch.cat([qkv, qkv[-1:].expand(left, -1)])
    positions = torch.cat([positions, positions[-1:].expand(left)])
    plain: dict[str, Any] = {"cos": None, "sin": None, "q_norm": None, "k_norm": None, "eps": 1e-6}
    options: dict[str, Any] = {"scale": 0.2, "window": window, "softcap": None}

    def run(table: SpanTable, place: Any, part: slice) -> torch.Tensor:
        q = torch.empty(len(qkv[part]), HEADS, SIZE, dtype=torch.bfloat16)
        rope_append(qkv[part].clone(), q, table, place, **plain, kv_format=kv_format)
        given = q, table, place, positions[part].clone()
        found: torch.Tensor = attend(*given, **options, kv_format=kv_format)
        return found

    def caches() -> list[BlockedCache]:
        shape = (GROUPS, *sizes)
        return [filled(shape, dtype, each, seed) for seed, each in enumerate(chosen)]

    together, apart = caches(), caches()
    spans = [each.span(cache) for each, cache in zip(chosen, together, strict=True)]
    got = run(of_all(spans, left, places), together[0].layers[0], slice(None))
    first = 0
    for each, cache, other in zip(chosen, apart, together, strict=True):
        part = slice(first, first + each.rows)
        wanted = run(alone(each.span(cache)), cache.layers[0], part)
        assert torch.equal(got[part], wanted)
        assert np.array_equal(saved_blocks(cache), saved_blocks(other))
        first += each.rows
    assert all(torch.equal(row, got[rows - 1]) for row in got[rows:])


# A tree's rows are few, however many: 64 at a time.
@pytest.mark.parametrize("last", [Sequence(255, 3), Sequence(250, 66, (-1, *range(64), 3))])
def test_many_and_few_rows(emulator: Emulator, last: Sequence) -> None:
    """Those of prompts have a launch of their own."""
    chosen = [Sequence(10, 2), Sequence(30, 70), last]
    caches = [filled((GROUPS, SIZE, SIZE), BFLOAT16, each, n) for n, each in enumerate(chosen)]
    spans = [each.span(cache) for each, cache in zip(chosen, caches, strict=True)]
    q = random(sum(each.rows for each in chosen), HEADS, SIZE).bfloat16()
    positions = torch.cat([each.positions() for each in chosen])
    options: dict[str, Any] = {"scale": 0.2, "window": None, "softcap": None}
    got = attend(q, of_all(spans, 0, 0), caches[0].layers[0], positions, **options)
    first = 0
    for each, span, cache in zip(chosen, spans, caches, strict=True):
        part = slice(first, first + each.rows)
        given = q[part].clone(), alone(span), cache.layers[0], positions[part].clone()
        assert torch.equal(attend(*given, **options), got[part])
        first += each.rows


# -- latents ---------------------------------------------------------------------------------------

ALLOCATED = 512
TREE = np.eye(5, dtype=bool)
TREE[1:, 0] = TREE[3, 2] = TREE[4, 1] = True


def latent_inputs(
    n: int, held: int, heads: int, rope: int, latent: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and a cache."""
    cache = random(ALLOCATED, rope + latent, seed=1).bfloat16()
    cache[held + n :] = float("nan")  # what an earlier sequence has left
    return random(n, heads, rope + latent).bfloat16(), cache


def attend_to(
    q: torch.Tensor, cache: torch.Tensor, held: int, rope: int, *,
    tree: bool = False, longest: int | None = None,
) -> torch.Tensor:  # fmt: skip
    positions = held + (torch.from_numpy(TREE.sum(1) - 1) if tree else torch.arange(len(q)))
    cached, mask = cache_of(cache[None], cache[None, :, :0]), TREE if tree else None
    table = one_span(cached.addresses, len(q), DEVICE, held=held, mask=mask, longest=longest)
    out = torch.empty(*q.shape[:2], q.shape[2] - rope, dtype=torch.bfloat16)
    attend_latents(q, table, cached.layers[0], positions, out, rope=rope, scale=0.2)
    return out


@pytest.mark.parametrize(
    ("n", "held", "heads", "rope", "latent", "tree"),
    [
        (1, 0, 4, 16, 32, False),
        (1, 300, 16, 64, 512, False),  # DeepSeek's sizes, several runs
        (5, 126, 20, 24, 80, False),  # new rows in two runs; no powers of two
        (5, 140, 4, 16, 32, True),
        (70, 126, 2, 16, 32, False),  # a prompt's rows
    ],
)
def test_latent_attention(
    emulator: Emulator, n: int, held: int, heads: int, rope: int, latent: int, tree: bool
) -> None:
    q, cache = latent_inputs(n, held, heads, rope, latent)
    got = attend_to(q, cache, held, rope, tree=tree)
    seen = torch.ones(n, held + n, dtype=torch.bool)
    seen[:, held:] = torch.from_numpy(TREE) if tree else torch.ones(n, n).tril().bool()
    rows = cache[: held + n].double()
    scores = torch.einsum("nhe,le->nhl", q.double(), rows) * 0.2
    scores.masked_fill_(~seen[:, None], float("-inf"))
    wanted = torch.einsum("nhl,le->nhe", scores.softmax(-1), rows[:, rope:])
    torch.testing.assert_close(got.double(), wanted, rtol=1e-2, atol=8e-3)
    emulator.seed += 1  # another order of threads and blocks
    assert torch.equal(attend_to(q, cache, held, rope, tree=tree, longest=ALLOCATED), got)


@pytest.mark.parametrize(("held", "heads"), [(3, 4), (123, 20), (254, 4)])
def test_latent_trees_have_the_bits_of_chains(emulator: Emulator, held: int, heads: int) -> None:
    """Of their ancestors and themselves, decoded one by one."""
    q, cache = latent_inputs(5, held, heads, 16, 32)
    whole = attend_to(q, cache, held, 16, tree=True)
    for row, seen in enumerate(torch.from_numpy(TREE)):
        path = held + seen.nonzero()[:, 0]
        moved = cache.clone()
        moved[held : held + len(path)] = cache[path]
        alone = attend_to(q[row : row + 1], moved, held + len(path) - 1, 16)
        assert torch.equal(alone[0], whole[row]), row


def test_cuts_of_a_prompt(emulator: Emulator) -> None:
    n, held, rope = 70, 120, 16  # a prompt's rows, in two runs
    q, cache = latent_inputs(n, held, 4, rope, 32)
    whole = attend_to(q, cache, held, rope)
    for first, stop in ((0, 1), (3, 8), (7, 8), (60, 70)):
        assert torch.equal(attend_to(q[first:stop], cache, held + first, rope), whole[first:stop])


# -- blocks ----------------------------------------------------------------------------------------

SHAPES = [(2, 8, 8), (2, 8, 8), (0, 0, 0), (1, 24, 0), (3, 16, 4)]


@pytest.fixture
def cache() -> BlockedCache:
    return BlockedCache(SHAPES, 1000, BFLOAT16, DEVICE)


def contents(cache: BlockedCache, layer: int) -> list[torch.Tensor]:
    """Keys and values, (heads, allocated, size)."""
    return [
        torch.cat([back(part) for part in parts], 1)
        for parts in zip(*cache.parts(layer), strict=True)
    ]


def fill(cache: BlockedCache) -> list[list[torch.Tensor]]:
    """Put other numbers everywhere; returns a copy of them by layer."""
    for layer in range(len(SHAPES)):
        for number, parts in enumerate(cache.parts(layer)):
            for part in parts:
                part.put(there(random(*part.shape, seed=10 * layer + number).bfloat16()))
    return [contents(cache, layer) for layer in range(len(SHAPES))]


@pytest.mark.parametrize(
    ("first", "rows"),
    [(10, [0, 2, 5]), (250, [0, 1, 5, 6, 7, 9]), (254, [1, 300]), (250, list(range(1, 20)))],
)
def test_selected_rows(cache: BlockedCache, first: int, rows: list[int]) -> None:
    """Within a block, from one into another, and to where tokens lie that move too."""
    cache.reserve(600)
    before = fill(cache)
    cache.advance(600)
    cache.select(first, rows)
    assert cache.length == first + len(rows)
    for layer, parts in enumerate(before):
        for now, was in zip(contents(cache, layer), parts, strict=True):
            assert torch.equal(now[:, :first], was[:, :first])
            assert torch.equal(now[:, first : cache.length], was[:, [first + row for row in rows]])
