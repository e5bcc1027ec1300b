"""Decode steps that are recorded and replayed: the same bits as passes that are not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localrt.common.errors import CancelledError
from localrt.models.decoder import Decoder
from localrt.quant.cpu import ops as native_ops
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.cpu.replay import ReplayedForward
from localrt.quant.ops.arrays import AFTER_LAST, Features
from localrt.quant.ops.protocol import Batch, Span
from tests.conftest import needs_kernels
from tests.models.tiny import CONFIGS, load_ours, tokens

pytestmark = needs_kernels

CAPACITY = 40
TREE = np.tril(np.ones((3, 3), np.bool_))
TREE[2, 1] = False  # two children of one token


def load(path: Path, kv_format: Any = "bf16", threads: int | None = 2) -> Decoder:
    return load_ours(path, NativeOps(threads=threads, kv_format=kv_format), context=CAPACITY)


class Counted:
    """A decoder's ``forward`` that counts its calls."""

    def __init__(self, decoder: Decoder) -> None:
        self.forward, self.calls = decoder.forward, 0

    def __call__(self, batch: Batch, **options: Any) -> Any:
        self.calls += 1
        return self.forward(batch, **options)


def conversations(decoder: Decoder, forward: Any) -> list[np.ndarray]:
    """The logits of two sequences in turn: prompts, decode steps, a tree, a batch, a trim."""
    first, second = decoder.cache(CAPACITY), decoder.cache(CAPACITY)
    found = [forward(Batch.extend([(first, tokens(9))]), rows=[8])]
    found += [forward(Batch.extend([(second, tokens(4, seed=1))]), rows=[])]
    for turn in range(3):
        for cache in (first, second, first):
            found.append(forward(Batch.extend([(cache, tokens(1, seed=turn))]), rows=[0]))
        tree = Batch.extend([(first, tokens(3, seed=turn))])
        span = Span(first, 3, TREE)
        found.append(forward(Batch(tree.tokens, tree.positions - [0, 0, 1], (span,))))
        first.select(first.length - 3, [0, 2])
        found.append(forward(Batch.extend([(first, tokens(1)), (second, tokens(2))])))
        second.trim(second.length - 1)
    return found


@pytest.mark.parametrize("kv_format", ["bf16", "int8"])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_same_bits(name: str, kv_format: Any, tiny: Callable[[str], tuple[Path, Any]]) -> None:
    path, _ = tiny(name)
    decoder = load(path, kv_format)
    replayed = conversations(decoder, decoder.ops.graphed(decoder.forward))
    for ours, plain in zip(replayed, conversations(decoder, decoder.forward), strict=True):
        assert np.array_equal(ours, plain)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_other_threads_every_pass(
    name: str, tiny: Callable[[str], tuple[Path, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = tiny(name)
    plain = load(path)
    counts = itertools.cycle([3, 1, 2])
    monkeypatch.setattr(native_ops, "_RECHECK", 0.0)
    monkeypatch.setattr(native_ops, "default_threads", lambda: next(counts))
    decoder = load(path, threads=None)
    followed = conversations(decoder, decoder.ops.graphed(decoder.forward))
    for ours, fixed in zip(followed, conversations(plain, plain.forward), strict=True):
        assert np.array_equal(ours, fixed)


def test_replays(tiny: Callable[[str], tuple[Path, Any]]) -> None:
    path, _ = tiny("llama")
    decoder = load(path)
    forward = Counted(decoder)
    replayed: Any = ReplayedForward(decoder.ops, forward)  # type: ignore[arg-type]
    cache = decoder.cache(CAPACITY)
    for count in (5, 1, 1, 1):
        replayed(Batch.extend([(cache, tokens(count))]), rows=[count - 1])
    assert forward.calls == 2  # the prompt, and the step that is recorded
    assert cache.length == 8

    def check() -> None:
        raise CancelledError("stop")

    with pytest.raises(CancelledError):
        replayed(Batch.extend([(cache, tokens(1))]), rows=[0], check=check)
    assert cache.length == 8


def test_other_results(tiny: Callable[[str], tuple[Path, Any]]) -> None:
    """A pass that does more than its calls say is not replayed."""
    path, _ = tiny("llama")
    decoder = load(path)

    def doubled(batch: Batch, **options: Any) -> Any:
        return 2 * decoder.forward(batch, **options)

    replayed = conversations(decoder, decoder.ops.graphed(doubled))
    for ours, plain in zip(replayed, conversations(decoder, doubled), strict=True):
        assert np.array_equal(ours, plain)


def test_features(tiny_folder: Path) -> None:
    decoder = load(tiny_folder)
    plain, width = Counted(decoder), decoder.config.hidden_size
    recorded = Counted(decoder)
    replayed = ReplayedForward(decoder.ops, recorded)
    caches = [decoder.cache(CAPACITY) for _ in range(2)]
    for turn, layers in enumerate(((0, 1, AFTER_LAST), (), (AFTER_LAST,), (1,), (0, AFTER_LAST))):
        seen = []
        for cache, forward in zip(caches, (plain, replayed), strict=True):
            rows = np.zeros((1, len(layers) * width), np.float32)
            features = Features(layers, rows) if layers else None
            batch = Batch.extend([(cache, tokens(1, seed=turn))])
            seen += [forward(batch, features=features, check=[None, list][turn % 2]), rows]
        np.testing.assert_array_equal(seen[0], seen[2])
        np.testing.assert_array_equal(seen[1], seen[3])
    assert plain.calls == 5
    assert recorded.calls == 1
