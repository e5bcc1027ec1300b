"""Several sequences in one launch, on the CPU: each row gets the bits that it gets alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localrt.quant.cuda import attention
from localrt.quant.cuda import attention as latents
from localrt.quant.cuda.kv import BlockedCache, SpanNumbers, SpanTable, one_span, widest_mask
from localrt.quant.cuda.tensor import BFLOAT16, UINT8, upload
from localrt.quant.ops.kv_formats import KvFormat
from localrt.quant.ops.protocol import Span
from tests.ops.cuda.emulator import Emulator
from tests.ops.cuda.target import DEVICE, by_torch, random
from tests.ops.layers import tree_mask

attend, rope_append = by_torch(attention.attend), by_torch(attention.rope_append)
attend_latent_rows = by_torch(latents.attend_latent_rows)
latent_append = by_torch(latents.latent_append)

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


def contents(cache: BlockedCache) -> np.ndarray:
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
def test_attention(
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
        assert np.array_equal(contents(cache), contents(other))
        first += each.rows
    assert all(torch.equal(row, got[rows - 1]) for row in got[rows:])


FEW, TREES = ["attention", "attention_join"], ["attention", "attention", "attention_join"]


@pytest.mark.parametrize(
    ("last", "launches"),
    [
        ((Sequence(300, 66), Sequence(255, 3)), [*FEW, "attention", *FEW]),
        # A tree's rows are few, however many: 64 at a time.
        ((Sequence(250, 66, (-1, *range(64), 3)),), [*TREES, "attention", *TREES, *TREES]),
    ],
)
def test_many_and_few_rows(
    emulator: Emulator, last: tuple[Sequence, ...], launches: list[str]
) -> None:
    """Those of prompts have a launch of their own."""
    chosen = [Sequence(10, 2), Sequence(30, 70), *last]
    caches = [filled((GROUPS, SIZE, SIZE), BFLOAT16, each, n) for n, each in enumerate(chosen)]
    spans = [each.span(cache) for each, cache in zip(chosen, caches, strict=True)]
    q = random(sum(each.rows for each in chosen), HEADS, SIZE).bfloat16()
    positions = torch.cat([each.positions() for each in chosen])
    options: dict[str, Any] = {"scale": 0.2, "window": None, "softcap": None}
    got = attend(q, of_all(spans, 0, 0), caches[0].layers[0], positions, **options)
    names = [program.name for program in emulator.launches]
    assert names == launches
    first = 0
    for each, span, cache in zip(chosen, spans, caches, strict=True):
        part = slice(first, first + each.rows)
        given = q[part].clone(), alone(span), cache.layers[0], positions[part].clone()
        assert torch.equal(attend(*given, **options), got[part])
        first += each.rows


@pytest.mark.parametrize("left", [0, 3])
def test_latent_attention(emulator: Emulator, left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    latent, heads = 48, 3
    chosen = [Sequence(254, 4), Sequence(0, 1), Sequence(130, 3, (-1, 0, 0, 1)), Sequence(127, 2)]
    shape = (1, ROPE + latent, 0)

    def caches() -> list[BlockedCache]:
        return [filled(shape, BFLOAT16, each, seed) for seed, each in enumerate(chosen)]

    rows = sum(each.rows for each in chosen)
    again = [*range(rows), *[rows - 1] * left]
    q, wide = random(rows, heads, 32 + ROPE)[again], random(rows, latent + ROPE)[again]
    angles, positions = random(rows, ROPE // 2)[again], torch.cat([s.positions() for s in chosen])
    positions, norm = positions[again], random(latent)

    def run(table: SpanTable, place: Any, part: slice) -> torch.Tensor:
        turned = angles[part].cos(), angles[part].sin()
        queries = torch.zeros(len(q[part]), heads, ROPE + latent, dtype=torch.bfloat16)
        given = q[part].clone(), wide[part].clone(), queries, table, place
        turns: dict[str, Any] = dict(zip(("cos", "sin"), turned, strict=True))
        latent_append(*given, **turns, norm=norm, eps=1e-6, interleaved=True)
        out = torch.empty(len(queries), heads, latent, dtype=torch.bfloat16)
        at = positions[part].clone()
        attend_latent_rows(queries, table, place, at, out, rope=ROPE, scale=0.2)
        return out

    together, apart = caches(), caches()
    spans = [each.span(cache) for each, cache in zip(chosen, together, strict=True)]
    got = run(of_all(spans, left, 2), together[0].layers[0], slice(None))
    monkeypatch.setattr("localrt.quant.ops.attention._MOST_NBYTES", 10_000)
    few = run(of_all(spans, left, 2), together[0].layers[0], slice(None))
    assert torch.equal(few, got)  # a few rows at a time
    first = 0
    for each, cache, other in zip(chosen, apart, together, strict=True):
        part = slice(first, first + each.rows)
        assert torch.equal(got[part], run(alone(each.span(cache)), cache.layers[0], part))
        assert np.array_equal(contents(cache), contents(other))
        first += each.rows
    assert all(torch.equal(row, got[rows - 1]) for row in got[rows:])
