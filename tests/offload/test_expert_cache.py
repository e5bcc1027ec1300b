"""The expert cache: what it holds, what it never lets go, and what its policy keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from localrt.offload.experts.cache import ExpertCache, Key, Learned, Values

TRACE = Path(__file__).parents[1] / "data/mixture/routing.npz"


class Step(NamedTuple):
    """What one layer asked for in one pass: best first, the first ``used`` columns are chosen."""

    layer: int
    experts: NDArray[Any]  # (rows, width)
    scores: NDArray[Any]  # (rows, width)


@dataclass(frozen=True)
class Trace:
    """Every layer of every pass, in the order in which they were asked."""

    layers: int
    count: int
    used: int
    steps: tuple[Step, ...]


def trained_trace(tokens: int = 20_000, path: Path = TRACE) -> Trace:
    """The first tokens of prose and of code, as many of each; scores are saved as square roots, of
    twice as many experts as are chosen.
    """
    with np.load(path) as file:
        halves = [np.array_split(file[name], 2) for name in ("experts", "scores")]
    experts, roots = (np.concatenate([each[: tokens // 2] for each in half]) for half in halves)
    scores = (roots.astype(np.float32) / 255) ** 2
    steps = (
        Step(layer, experts[token, layer][None].astype(np.int32), scores[token, layer][None])
        for token in range(len(experts))
        for layer in range(experts.shape[1])
    )
    _, layers, width = experts.shape
    return Trace(layers, int(experts.max()) + 1, width // 2, tuple(steps))


class LRU:
    """The least recently used expert goes first, on one clock for all layers. Like ``Learned``."""

    def __init__(self, layers: int, count: int) -> None:
        self.value: Values = np.zeros((layers, count))
        self._clock = 0.0

    def touch(self, layer: int, chosen: NDArray[Any], *_: object) -> None:
        """See ``Learned``."""
        self._clock += 1.0
        self.value[layer, chosen] = self._clock


def replay(trace: Trace, cache: ExpertCache[Any]) -> float:
    """The share of hits, every miss being brought in if it is worth it."""
    for layer, experts, scores in trace.steps:
        demand = cache.touch(layer, experts, scores)
        for expert in demand.experts[~demand.resident].tolist():
            worth = float(cache.policy.value[layer, expert])
            if len(cache) < cache.capacity or (cache.room and worth >= cache.least):
                cache.admit(layer, expert)
        cache.release(layer)
    return cache.hits / cache.demands


def hit_rates(trace: Trace, slots: int) -> tuple[float, float]:
    """Least recently used, and the product's policy, from an empty cache."""
    sizes = (trace.layers, trace.count, trace.used, slots)
    policy: Any = LRU(*sizes[:2])
    lru = replay(trace, ExpertCache(*sizes, policy=policy))
    return lru, replay(trace, ExpertCache(*sizes))


def random_trace(
    *,
    layers: int = 3,
    count: int = 8,
    used: int = 2,
    passes: Sequence[int] = (1,) * 40,
    skew: float = 0.8,
    seed: int = 0,
) -> Trace:
    """``passes`` gives the rows of each; experts are drawn in proportion to rank^-skew."""
    random = np.random.default_rng(seed)
    tokens = sum(passes)
    logits = -skew * np.log(np.arange(1, count + 1)) + random.gumbel(size=(tokens, layers, count))
    experts = np.argsort(-logits, axis=-1)[..., : min(2 * used, count)]
    shares = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    scores = np.take_along_axis(shares, experts, -1)
    parts = np.split(np.arange(tokens), np.cumsum(passes)[:-1])
    steps = (
        Step(layer, experts[rows, layer], scores[rows, layer])
        for rows in parts
        for layer in range(layers)
    )
    return Trace(layers, count, used, tuple(steps))


traces = st.builds(
    random_trace,
    layers=st.integers(1, 4),
    count=st.integers(4, 10),
    used=st.integers(1, 4),
    passes=st.lists(st.integers(1, 5), min_size=1, max_size=12),
    skew=st.floats(0, 2),
    seed=st.integers(0, 1000),
)

policies = st.sampled_from([LRU, None])  # None: the product's


def cache_for(trace: Trace, capacity: int, policy: type[LRU] | None = None) -> ExpertCache:
    sizes = (trace.layers, trace.count, trace.used)
    made = policy and policy(*sizes[:2])
    return ExpertCache(*sizes, capacity, policy=made)  # type: ignore[arg-type]


def admit(cache: ExpertCache, layer: int, expert: int) -> Key | None:
    """Admit an expert; the one that lost its slot for it."""
    before = set(cache.keys())
    cache.admit(layer, expert)
    gone = before - set(cache.keys())
    assert len(gone) <= 1
    return next(iter(gone), None)


def resize(cache: ExpertCache, capacity: int) -> set[Key]:
    """Have so many slots; what had to go."""
    before = set(cache.keys())
    cache.resize(capacity)
    return before - set(cache.keys())


class Uses(LRU):
    """An expert is worth as much as it was used."""

    def touch(self, layer: int, chosen: np.ndarray, *_: object) -> None:
        self.value[layer, chosen] += 1


def route(*experts: int) -> tuple[np.ndarray, np.ndarray]:
    """One row's experts, best first, with falling scores."""
    return np.array([experts]), np.linspace(0.9, 0.1, len(experts))[None]


@given(trace=traces, policy=policies, data=st.data())
def test_any_trace(trace: Trace, policy: type[LRU] | None, data: st.DataObject) -> None:
    """Never too full, nothing in use evicted, the counts right: whatever happens."""
    every = [(layer, e) for layer in range(trace.layers) for e in range(trace.count)]
    capacity = data.draw(st.integers(1, len(every) + 2))
    cache = cache_for(trace, capacity, policy)
    held: set[Key] = set()
    hits = demands = 0
    for step in trace.steps:
        demand = cache.touch(step.layer, step.experts, step.scores)
        wanted = set(step.experts[:, : trace.used].ravel().tolist())
        assert set(demand.experts.tolist()) == wanted
        assert demand.rows.sum() == step.experts[:, : trace.used].size
        using = {(step.layer, expert) for expert in wanted}
        hits, demands = hits + len(using & held), demands + len(using)
        for expert, resident in zip(demand.experts.tolist(), demand.resident, strict=True):
            key = (step.layer, expert)
            assert resident == (key in held)
            if resident or not cache.room:
                continue
            room = cache.room
            victim = admit(cache, *key)
            assert cache.room == room - 1
            assert (victim is None) == (len(held) < capacity)
            if victim is not None:
                assert victim in held
                assert victim not in using
                held.remove(victim)
            held.add(key)
        if data.draw(st.booleans()):
            cache.release(step.layer)
        assert set(cache.keys()) == held
        assert len(cache) == len(held) <= capacity
        assert set(np.flatnonzero(cache.resident(step.layer))) == {
            expert for layer, expert in held if layer == step.layer
        }
    assert (cache.hits, cache.demands) == (hits, demands)


@given(trace=traces, policy=policies, smaller=st.integers(1, 12))
def test_memory_pressure(trace: Trace, policy: type[LRU] | None, smaller: int) -> None:
    """Shrinking gives up just enough, the least worth first; growing makes room again."""
    cache = cache_for(trace, trace.layers * trace.count, policy)
    replay(trace, cache)
    before = set(cache.keys())
    worth = cache.policy.value
    gone = resize(cache, smaller)
    kept = set(cache.keys())
    assert kept | gone == before
    assert len(kept) == min(smaller, len(before))
    if gone:
        assert max(worth[key] for key in gone) <= min(worth[key] for key in kept)
    assert not resize(cache, len(before))


def test_candidate() -> None:
    """Of one layer, and of all the best first: each is worth more than what it evicts."""
    cache = ExpertCache(1, 4, 1, 1, policy=Uses(1, 4))
    assert cache.candidate(0) is not None  # there is room
    cache.admit(0, 0)
    cache.touch(0, *route(0, 1))
    cache.release(0)
    cache.touch(0, *route(1, 2))
    assert cache.candidate(0) is None  # one use each
    for _ in range(2):
        cache.touch(0, *route(1, 2))
    assert cache.candidate(0) == 1
    cache.admit(0, 1)
    cache.release(0)
    assert cache.candidate(0) is None
    cache = ExpertCache(2, 4, 1, 2, policy=Uses(2, 4))
    for layer, expert, times in ((0, 1, 5), (1, 2, 9), (1, 3, 1)):
        for _ in range(times):
            cache.touch(layer, *route(expert, 0))
            cache.release(layer)
    assert [*cache.candidates(1)] == [(1, 2)]
    brought = []
    for key in cache.candidates(8):
        brought.append(key)
        cache.admit(*key)
    assert brought == [(1, 2), (0, 1)]
    assert [*cache.candidates(8)] == []


def test_prompts_evict_their_own_layers() -> None:
    layers, count, used = 4, 16, 2
    cache = ExpertCache(layers, count, used, 32)
    for layer in range(layers):
        for expert in range(8):
            cache.admit(layer, expert)
    every = np.stack([np.roll(np.arange(count), n)[:4] for n in range(count)])
    scores = np.tile([0.4, 0.3, 0.2, 0.1], (count, 1))
    for layer in range(layers):
        demand = cache.touch(layer, every, scores)
        assert demand.resident.sum() == 8
        cache.finish(layer, range(count))
        for expert in demand.experts[~demand.resident].tolist():
            victim = admit(cache, layer, expert)
            assert victim is not None
            assert victim[0] <= layer
        cache.release(layer)


def learn(policy: object, layer: int, experts: np.ndarray, scores: np.ndarray, used: int) -> None:
    chosen, rows = np.unique(experts[:, :used], return_counts=True)
    policy.touch(layer, chosen, rows, experts, scores)  # type: ignore[attr-defined]


def test_layers_at_once() -> None:
    """A pass of one row is learned as layer by layer."""
    trace = random_trace(layers=3, count=16, used=4)
    each, both = Learned(3, 16, 4), Learned(3, 16, 4)
    for first in range(0, len(trace.steps), 3):
        steps = trace.steps[first : first + 3]
        for layer, experts, scores in steps:
            learn(each, layer, experts, scores, 4)
        layers, experts, scores = zip(*steps, strict=True)
        rows = np.concatenate(experts), np.concatenate(scores)
        both.touch_rows(np.array(layers), *rows, 4)
    assert np.allclose(each.value, both.value, rtol=1e-9)


def test_a_trained_mixture() -> None:
    """Caches of a quarter, half and three quarters of the experts, on prose and code."""
    trace = trained_trace(500)
    for slots, gain in ((96, 0.08), (192, 0.01), (288, -0.01)):
        lru, learned = hit_rates(trace, slots)
        assert lru + gain < learned
