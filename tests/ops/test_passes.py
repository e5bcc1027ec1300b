"""Rows in any cut, sequences in turn, batches, trees, replayed decode steps: the same bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from localrt.common.errors import CancelledError, CheckpointError
from localrt.models.decoder import Decoder
from localrt.models.layers.moe import SparseMlp
from localrt.quant.cpu import ops as native_ops
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.cpu.replay import ReplayedForward
from localrt.quant.methods.quantize import quantize, quantized_format
from localrt.quant.ops import states
from localrt.quant.ops.arrays import AFTER_LAST, Features
from localrt.quant.ops.hybrid_cache import states_of
from localrt.quant.ops.kv_formats import KV_FORMATS
from localrt.quant.ops.protocol import Batch, Span
from tests.conftest import needs_kernels
from tests.models.tiny import CONFIGS, load_ours, relative_error, tokens
from tests.ops.test_native_matmul import ISAS

pytestmark = needs_kernels

Tiny = Callable[[str], tuple[Path, Any]]
CAPACITY = 40
TREE = np.tril(np.ones((3, 3), np.bool_))
TREE[2, 1] = False  # two children of one token

# Plain, with windows, a mixture, latents, recurrent layers.
USUAL = ("qwen2", "gemma2", "gpt-oss", "deepseek-v3", "qwen3.5-moe")
# A kind of mixture, hybrid, attention or block each.
RECORDED = (
    *("falcon-h1", "gemma2", "gemma4-moe", "glm4-moe-lite", "gpt-oss", "granite-hybrid-moe"),
    *("kimi-linear", "lfm2-moe", "nemotron-h-moe", "qwen2", "qwen3-moe", "qwen3.5", "qwen3.5-moe"),
)


def slow_but(usual: tuple[str, ...], names: Iterable[str]) -> list[Any]:
    """``names``, of which others than the ``usual`` ones are slow."""
    slow = pytest.mark.slow
    return [pytest.param(n, marks=() if n in usual else slow, id=n) for n in sorted(names)]


def load(path: Path, kv_format: Any = "bf16", threads: int | None = 2) -> Decoder:
    return load_ours(path, NativeOps(threads=threads, kv_format=kv_format), context=CAPACITY)


def conversation(decoder: Decoder, forward: Any, seed: int) -> Iterator[np.ndarray]:
    """The logits of one sequence: a prompt, decode steps, trees, what is trimmed."""
    cache = decoder.cache(CAPACITY)
    yield forward(Batch.extend([(cache, tokens(5 + seed, seed=seed))]), rows=[4 + seed])
    for turn in range(3):
        for _ in range(2):
            yield forward(Batch.extend([(cache, tokens(1, seed=turn))]), rows=[0])
        tree = Batch.extend([(cache, tokens(3, seed=turn))])
        yield forward(Batch(tree.tokens, tree.positions - [0, 0, 1], (Span(cache, 3, TREE),)))
        cache.select(cache.length - 3, [0, 2])
        yield forward(Batch.extend([(cache, tokens(2, seed=turn))]), rows=[])
        cache.trim(cache.length - 1)


def alone(decoder: Decoder) -> list[np.ndarray]:
    """Of two sequences, one after the other."""
    both = zip(*(list(conversation(decoder, decoder.forward, n)) for n in (0, 1)), strict=True)
    return [each for pair in both for each in pair]


def in_turn(decoder: Decoder, forward: Any) -> list[np.ndarray]:
    both = zip(*(conversation(decoder, forward, n) for n in (0, 1)), strict=True)
    return [each for pair in both for each in pair]


def assert_same(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("name", slow_but(USUAL, {*CONFIGS, *RECORDED}))
def test_sequences_in_turn_and_replayed(
    name: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of each alone, also where threads change with every pass."""
    path, _ = tiny(name)
    kv_format = "int8" if name == "qwen2" else "bf16"
    decoder = load(path, kv_format)
    expected = alone(decoder)
    assert_same(in_turn(decoder, decoder.forward), expected)
    assert_same(in_turn(decoder, decoder.ops.graphed(decoder.forward)), expected)
    counts = itertools.cycle([3, 1, 2])
    monkeypatch.setattr(native_ops, "_RECHECK", 0.0)
    monkeypatch.setattr(native_ops, "default_threads", lambda: next(counts))
    other = load(path, kv_format, threads=None)
    assert_same(in_turn(other, other.ops.graphed(other.forward)), expected)


# -- decode steps that are recorded and replayed ---------------------------------------------------


class Counted:
    """A decoder's ``forward`` that counts its calls."""

    def __init__(self, decoder: Decoder) -> None:
        self.forward, self.calls = decoder.forward, 0

    def __call__(self, batch: Batch, **options: Any) -> Any:
        self.calls += 1
        return self.forward(batch, **options)


def replaying(decoder: Decoder) -> tuple[Any, Counted]:
    """Its passes, whose decode steps are replayed from now on; and those that are not."""
    forward, cache = Counted(decoder), decoder.cache(CAPACITY)
    replayed: Any = ReplayedForward(decoder.ops, forward)  # type: ignore[arg-type]
    for token in (5, 5, 6):
        replayed(Batch.extend([(cache, [token])]))
    assert forward.calls == 3  # the second has the first one's token, and proves nothing
    return replayed, forward


def stopping(count: int) -> Callable[[], None]:
    """A check that ends a pass when it is called once more than ``count`` times."""
    calls = itertools.count()

    def check() -> None:
        if next(calls) == count:
            raise CancelledError("stop")

    return check


@pytest.mark.parametrize("name", slow_but(USUAL, RECORDED))
def test_replays(name: str, tiny: Tiny) -> None:
    """The bits of plain passes, also behind those that were cancelled anywhere."""
    decoder = load(tiny(name)[0])
    replayed, forward = replaying(decoder)
    caches = [decoder.cache(CAPACITY) for _ in range(2)]
    for number, token in enumerate(tokens(16, seed=1)):
        plain, own = (Batch.extend([(cache, [token])]) for cache in caches)
        with pytest.raises(CancelledError):
            replayed(own, rows=[0], check=stopping(number % 8))
        assert caches[1].length == number
        np.testing.assert_array_equal(replayed(own, rows=[0]), decoder.forward(plain))
    assert forward.calls == 3


@pytest.mark.parametrize("name", ["lfm2-moe", "qwen3.5"])
def test_kept_states(name: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Returns to earlier tokens behind replays, and the states that are saved."""
    monkeypatch.setattr(states, "_KEEP_EVERY", 4)
    decoder = load(tiny(name)[0])
    replayed, forward = replaying(decoder)
    caches = [decoder.cache(CAPACITY) for _ in range(2)]
    for back in (0, 1, 3, 6, 2):
        lengths = [cache.trim(max(0, cache.length - back)) for cache in caches]
        assert lengths[0] == lengths[1]
        for token in tokens(7, seed=back):
            plain, own = (Batch.extend([(cache, [token])]) for cache in caches)
            np.testing.assert_array_equal(replayed(own), decoder.forward(plain))
        saved = [states_of(cache).saved() for cache in caches]
        assert len(saved[0]) > 1
        for mine, other in zip(*saved, strict=True):
            assert (mine.position, mine.length) == (other.position, other.length)
            np.testing.assert_array_equal(mine.data, other.data)
    assert forward.calls == 3


class PackedOps(NativeOps):
    """Keeps a float model's matrices in four bits."""

    def weight(self, shape: tuple[int, int], blocks: Any) -> Any:
        rows = [np.asarray(block.data).view(np.float32).reshape(-1, shape[1]) for block in blocks]
        format_ = quantized_format("int4-g32m")
        return super().weight(shape, [quantize(each, format_).tensor for each in rows])


@pytest.mark.parametrize("name", ["gemma2", "qwen3-moe"])  # sizes in whole groups of columns
def test_threads_meet_three_times_a_layer(name: str, tiny: Tiny) -> None:
    """At most, in decode steps of packed weights, which have the bits of plain passes."""
    for threads, kv_format in enumerate(KV_FORMATS, 1):
        ops = PackedOps(threads=threads, kv_format=kv_format)
        decoder = load_ours(tiny(name)[0], ops, context=300)
        replayed, forward = replaying(decoder)
        caches = [decoder.cache(300) for _ in range(2)]
        decoder.forward(Batch.extend([(cache, tokens(270, seed=2)) for cache in caches]))
        for token in tokens(6, seed=1):
            plain, own = (Batch.extend([(cache, [token])]) for cache in caches)
            expected = decoder.forward(plain)
            before = ops.meetings()
            np.testing.assert_array_equal(replayed(own), expected)
            assert ops.meetings() - before <= 3 * decoder.config.layers + 1
        assert forward.calls == 3


def test_a_router_of_nan(tiny: Tiny) -> None:
    decoder = load(tiny("qwen3-moe")[0])
    replayed, _ = replaying(decoder)
    caches = [decoder.cache(CAPACITY) for _ in range(2)]
    layers = (getattr(part, "layer", None) for part in decoder.weights.body)
    norm: Any = [layer for layer in layers if isinstance(layer, SparseMlp)][1].router.norm
    kept = norm.values.copy()
    for token in (7, 8):
        plain, own = (Batch.extend([(cache, [token])]) for cache in caches)
        norm.values[3] = np.nan
        with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp: .*not numbers"):
            replayed(own)
        norm.values[:] = kept
        np.testing.assert_array_equal(replayed(own), decoder.forward(plain))


@pytest.mark.parametrize("name", ["qwen2", "qwen3.5-moe"])
def test_features(name: str, tiny: Tiny) -> None:
    decoder = load(tiny(name)[0])
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
        assert_same(seen[:2], seen[2:])
    assert plain.calls == 5
    assert recorded.calls == 2


# -- rows that see some behind them, as a picture's do ---------------------------------------------

LENGTH = 300
# Where pictures begin and end: within a block of keys, over its end, at the end of all.
PICTURES = ((3, 12), (250, 270), (290, 300))


def ahead() -> npt.NDArray[np.int32]:
    rows = np.zeros(LENGTH, np.int32)
    for begin, end in PICTURES:
        rows[begin:end] = end - 1 - np.arange(begin, end)
    return rows


def computed(decoder: Decoder, cuts: list[int], *, windows_only: bool) -> npt.NDArray[np.float32]:
    ids, seen, cache = np.asarray(tokens(LENGTH), np.int64), ahead(), decoder.cache(LENGTH)
    parts = []
    for begin, end in zip([0, *cuts], [*cuts, LENGTH], strict=True):
        span = Span(cache, end - begin, None, seen[begin:end], windows_only)
        batch = Batch(ids[begin:end], np.arange(begin, end), (span,))
        parts.append(decoder.forward(batch))
    return np.concatenate(parts)


@pytest.mark.parametrize("windows_only", [False, True])
@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_rows_see_those_ahead(name: str, windows_only: bool, tiny: Tiny) -> None:
    folder, _ = tiny(name)
    reference = load_ours(folder, context=LENGTH)
    expected = computed(reference, [], windows_only=windows_only)
    found = computed(load_ours(folder, NativeOps(), context=LENGTH), [], windows_only=windows_only)
    assert relative_error(found, expected) < 0.03
    # The picture's rows differ from what they would be if they saw nothing behind them.
    causal = reference.forward(Batch.extend([(reference.cache(LENGTH), tokens(LENGTH))]))
    same = windows_only and name == "qwen2"  # which has no windows
    assert np.array_equal(causal, expected) == same


@pytest.mark.parametrize("isa", ISAS)
def test_bits_do_not_depend_on_cuts(isa: str, tiny: Tiny) -> None:
    decoder = load_ours(tiny("gemma3")[0], NativeOps(isa=isa), context=LENGTH)
    whole = computed(decoder, [], windows_only=False)
    for cuts in ([3, 12], [250, 270], [2, 100, 249, 271, 290]):
        assert np.array_equal(computed(decoder, cuts, windows_only=False), whole)
