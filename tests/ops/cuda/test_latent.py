"""Latent attention on the GPU: kernels against float64, tiny DeepSeeks against transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from localrt.quant.cuda import attention as latents
from localrt.quant.cuda.kv import one_span
from localrt.quant.ops.attention import AttentionTemperature
from tests.ops.cuda.emulator import Emulator
from tests.ops.cuda.target import DEVICE, by_torch, cache_of, kept, random

attend_latent_rows = by_torch(latents.attend_latent_rows)
latent_append = by_torch(latents.latent_append)

ALLOCATED = 512
TREE = np.eye(5, dtype=bool)
TREE[1:, 0] = TREE[3, 2] = TREE[4, 1] = True


def inputs(
    n: int, held: int, heads: int, rope: int, latent: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and a cache."""
    cache = random(ALLOCATED, rope + latent, seed=1).bfloat16()
    cache[held + n :] = float("nan")  # what an earlier sequence has left
    return random(n, heads, rope + latent).bfloat16(), cache


def attend(
    q: torch.Tensor, cache: torch.Tensor, held: int, rope: int, *,
    tree: bool = False, longest: int | None = None,
) -> torch.Tensor:  # fmt: skip
    positions = held + (torch.from_numpy(TREE.sum(1) - 1) if tree else torch.arange(len(q)))
    cached, mask = cache_of(cache[None], cache[None, :, :0]), TREE if tree else None
    table = one_span(cached.addresses, len(q), DEVICE, held=held, mask=mask, longest=longest)
    out = torch.empty(*q.shape[:2], q.shape[2] - rope, dtype=torch.bfloat16)
    attend_latent_rows(q, table, cached.layers[0], positions, out, rope=rope, scale=0.2)
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
def test_attention(
    emulator: Emulator, n: int, held: int, heads: int, rope: int, latent: int, tree: bool
) -> None:
    q, cache = inputs(n, held, heads, rope, latent)
    got = attend(q, cache, held, rope, tree=tree)
    seen = torch.ones(n, held + n, dtype=torch.bool)
    seen[:, held:] = torch.from_numpy(TREE) if tree else torch.ones(n, n).tril().bool()
    rows = cache[: held + n].double()
    scores = torch.einsum("nhe,le->nhl", q.double(), rows) * 0.2
    scores.masked_fill_(~seen[:, None], float("-inf"))
    wanted = torch.einsum("nhl,le->nhe", scores.softmax(-1), rows[:, rope:])
    torch.testing.assert_close(got.double(), wanted, rtol=1e-2, atol=8e-3)
    emulator.seed += 1  # another order of threads and blocks
    assert torch.equal(attend(q, cache, held, rope, tree=tree, longest=ALLOCATED), got)


@pytest.mark.parametrize("held", [3, 123, 126, 254])
@pytest.mark.parametrize("heads", [4, 20])
def test_tree_rows_have_the_bits_of_chains(emulator: Emulator, held: int, heads: int) -> None:
    """Of their ancestors and themselves, decoded one by one."""
    q, cache = inputs(5, held, heads, 16, 32)
    whole = attend(q, cache, held, 16, tree=True)
    for row, seen in enumerate(torch.from_numpy(TREE)):
        path = held + seen.nonzero()[:, 0]
        moved = cache.clone()
        moved[held : held + len(path)] = cache[path]
        alone = attend(q[row : row + 1], moved, held + len(path) - 1, 16)
        assert torch.equal(alone[0], whole[row]), row


def test_batch_invariance(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    n, held, rope = 70, 120, 16  # a prompt's rows, in two runs
    q, cache = inputs(n, held, 4, rope, 32)
    whole = attend(q, cache, held, rope)
    for first, stop in ((0, 1), (3, 8), (7, 8), (60, 70)):
        assert torch.equal(attend(q[first:stop], cache, held + first, rope), whole[first:stop])
    monkeypatch.setattr("localrt.quant.ops.attention._MOST_NBYTES", 10_000)
    assert torch.equal(attend(q, cache, held, rope), whole)  # a few rows at a time


@pytest.mark.parametrize("interleaved", [True, False])
def test_rows_are_turned_and_normed(emulator: Emulator, interleaved: bool) -> None:
    n, heads, nope, half, latent, held = 3, 2, 32, 8, 48, 254  # into the second block
    q, wide = random(n, heads, nope + 2 * half), random(n, 7 + latent + 2 * half)[:, 7:]
    angles, weight = random(n, half), random(latent)
    queries = torch.zeros(n, heads, 2 * half + latent, dtype=torch.bfloat16)
    empty = torch.zeros(1, 512, 2 * half + latent, dtype=torch.bfloat16)
    cached = cache_of(empty, empty[:, :, :0])
    latent_append(
        q, wide, queries, one_span(cached.addresses, n, DEVICE, held=held), cached.layers[0],
        cos=angles.cos(), sin=angles.sin(), norm=weight, eps=1e-6, interleaved=interleaved,
    )  # fmt: skip

    def turned(x: torch.Tensor) -> torch.Tensor:
        a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
        cos, sin = (t.view(n, *[1] * (x.dim() - 2), half) for t in (angles.cos(), angles.sin()))
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    close = {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(queries[..., : 2 * half].float(), turned(q[..., nope:]), **close)
    normed = torch.nn.functional.rms_norm(wide[:, :latent], (latent,), weight, 1e-6)
    wanted = torch.cat((turned(wide[:, latent:]), normed), -1)
    cache = kept(cached, 512)[0][0]
    torch.testing.assert_close(cache[held : held + n].float(), wanted, **close)
    assert not cache[:held].any()
    assert not cache[held + n :].any()

    grown, before = torch.ones_like(queries), queries.clone()
    positions, temperature = torch.tensor([0, 7, 100]), AttentionTemperature(0.5, 8, offset=1)
    latent_append(
        q, wide, grown, one_span(cached.addresses, n, DEVICE, held=held), cached.layers[0],
        cos=angles.cos(), sin=angles.sin(), norm=weight, eps=1e-6, interleaved=interleaved,
        positions=positions, temperature=temperature,
    )  # fmt: skip
    before[..., 2 * half :] = 1  # what was there
    factors = torch.from_numpy(temperature.factors(positions.numpy()))[:, None, None]
    torch.testing.assert_close(grown.float(), before.float() * factors, **close)
