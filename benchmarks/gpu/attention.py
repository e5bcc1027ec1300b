"""Checks of attention: with a window and a soft cap, with sinks, and latent.

Compares each with float64 torch on the CPU for a tree, and checks that a row has the same bits
alone and in a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.exchange import back, there
from benchmarks.gpu.timing import Check, Values
from localrt.quant.cuda.attention import attend
from localrt.quant.cuda.device import Device
from localrt.quant.cuda.driver import device_of
from localrt.quant.cuda.kv import BlockedCache, SpanTable, one_span
from localrt.quant.cuda.latent import attend_latent_rows
from localrt.quant.cuda.tensor import BFLOAT16, empty

BOUND = 0.02
ROPE, LATENT = 64, 512  # DeepSeek's sizes
# Takes and returns torch tensors on the CPU.
Attend = Callable[[torch.Tensor, int, torch.Tensor | None], torch.Tensor]


def check_attention(device: str) -> Iterator[Check]:
    """Check Gemma's heads, with a window and a soft cap; gpt-oss's, with a window and sinks; and
    DeepSeek's latent attention.
    """
    sinks = torch.linspace(-3, 6, 16)
    yield "attention", partial(heads_against_float64, device, 4, 100, softcap=20.0)
    yield "attention with sinks", partial(heads_against_float64, device, 16, 128, sinks=sinks)
    yield "latent attention", partial(latents, device)


def tree_of(n: int) -> torch.Tensor:
    """A binary tree: row i's parent is row (i - 1) // 2."""
    tree = torch.eye(n, dtype=torch.bool)
    for node in range(1, n):
        tree[node] |= tree[(node - 1) // 2]
    return tree


def heads_against_float64(
    device: str, heads: int, window: int, softcap: float | None = None, sinks: Any = None
) -> Values:
    """Compare a tree over 300 keys of two groups with float64."""
    size = 64
    n, groups, held, scale = 7, 2, 300, 0.125
    cache = random_cache(groups, 512, (size, size), device)
    k, v = (torch.cat([*map(back, parts)], 1) for parts in zip(*cache.parts(0), strict=True))
    gpu = device_of(device)
    sinks_there = None if sinks is None else there(sinks, gpu)

    def run(q: torch.Tensor, at: int, mask: torch.Tensor | None) -> torch.Tensor:
        place = at + (torch.arange(len(q)) if mask is None else mask.sum(1) - 1)
        return back(attend(
            there(q, gpu), table_of(cache, len(q), at, gpu, mask, longest=512), cache.layers[0],
            there(place, gpu), scale=scale, window=window, softcap=softcap, sinks=sinks_there,
        ))  # fmt: skip

    def exact(q: torch.Tensor, tree: torch.Tensor) -> torch.Tensor:
        keys, values = (
            t[:, : held + n].double().repeat_interleave(heads // groups, 0) for t in (k, v)
        )
        scores = torch.einsum("nhe,hle->nhl", q.double(), keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        places = held + tree.sum(1) - 1
        at = torch.cat([torch.arange(held), places])
        seen = places[:, None] - at < window
        seen[:, held:] &= tree
        scores.masked_fill_(~seen[:, None], float("-inf"))
        if sinks is not None:
            own = sinks.double()[None, :, None].expand(n, heads, 1)
            scores = torch.cat([scores, own], -1)
        shares = scores.softmax(-1)[..., : held + n]
        return torch.einsum("nhl,hle->nhe", shares, values).flatten(1)

    q = torch.randn(n, heads, size).bfloat16()
    return compared(device, q, held, run, exact)


def latents(device: str) -> Values:
    """A tree of DeepSeek's heads over 300 keys."""
    n, heads, held = 7, 16, 300
    gpu = device_of(device)
    cache = random_cache(1, 512, (ROPE + LATENT, 0), device)
    scale = (ROPE + LATENT) ** -0.5

    def run(q: torch.Tensor, at: int, mask: torch.Tensor | None) -> torch.Tensor:
        out = empty(len(q), heads, LATENT, dtype=BFLOAT16, device=gpu)
        attend_latent_rows(
            there(q, gpu),
            table_of(cache, len(q), at, gpu, mask, longest=512),
            cache.layers[0],
            there(at + torch.arange(len(q)), gpu),
            out,
            rope=ROPE,
            scale=scale,
        )
        return back(out).flatten(1)

    def exact(q: torch.Tensor, tree: torch.Tensor) -> torch.Tensor:
        rows = torch.cat([back(keys) for keys, _ in cache.parts(0)], 1)[0, : held + n].double()
        scores = torch.einsum("nhe,le->nhl", q.double(), rows) * scale
        seen = torch.cat([torch.ones(n, held, dtype=torch.bool), tree], 1)
        scores.masked_fill_(~seen[:, None], float("-inf"))
        return torch.einsum("nhl,le->nhe", scores.softmax(-1), rows[:, ROPE:]).flatten(1)

    q = torch.randn(n, heads, ROPE + LATENT).bfloat16()
    return compared(device, q, held, run, exact)


def compared(
    device: str, q: torch.Tensor, held: int, run: Attend, exact: Callable[..., Any]
) -> Values:
    """Compare a tree with float64, and each row of a chain alone with the same row in a batch."""
    tree = tree_of(len(q))
    got, wanted = run(q, held, tree), exact(q, tree)
    error = float((got.double() - wanted).abs().max() / wanted.abs().max())
    values: Values = {"relative_error": error, "bound": BOUND, "ok": error < BOUND}
    if device.startswith("cuda"):
        chain = run(q, held, None)
        alone = torch.cat([run(q[i : i + 1], held + i, None) for i in range(len(q))])
        values["rows_bitwise_equal"] = same = torch.equal(alone, chain)
        values["ok"] &= same
    return values


def random_cache(groups: int, length: int, sizes: tuple[int, int], device: str) -> BlockedCache:
    """A bf16 cache of one layer."""
    gpu = device_of(device)
    cache = BlockedCache([(groups, *sizes)], length, BFLOAT16, gpu)
    cache.reserve(length)
    for part in (part for parts in cache.parts(0) for part in parts):
        part.put(there(torch.randn(part.shape).bfloat16(), gpu))
    return cache


def table_of(
    cache: BlockedCache,
    rows: int,
    held: int,
    gpu: Device,
    mask: torch.Tensor | None = None,
    *,
    longest: int,
) -> SpanTable:
    """The table of ``rows`` new rows behind ``held`` tokens of a cache."""
    tree = None if mask is None else mask.numpy()
    return one_span(cache.addresses, rows, gpu, held=held, mask=tree, longest=longest)
