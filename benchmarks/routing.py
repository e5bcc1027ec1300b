"""How often experts are in caches of some sizes, as a trained mixture chooses them, by policy.

    python -m benchmarks.routing [--tokens 20000] [--json FILE]

The trace is that of ``tests/data/mixture``, a token a pass, half prose and half code. From an empty
cache: the product's policy, least recently used, and two that know the future: the experts that are
used most always, and the optimum, which evicts what is used again last.
"""

from __future__ import annotations

import heapq
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.command import ROOT, cited_command, make_parser
from benchmarks.common.record import Results, captioned, markdown_table
from localrt.offload.experts.cache import ExpertCache
from localrt.offload.experts.policy import Values

TRACE = ROOT / "tests/data/mixture/routing.npz"
SHARES = (0.25, 0.5, 0.75)
POLICIES = {"lru": "LRU", "localrt": "localrt", "static": "static", "optimum": "optimum"}


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


def with_the_future(trace: Trace, slots: int) -> tuple[float, float]:
    """The experts that are used most, always in the cache; and the optimum."""
    keys = [
        (layer, expert)
        for layer, experts, _ in trace.steps
        for expert in np.unique(experts[:, : trace.used]).tolist()
    ]
    most = Counter(keys).most_common(slots)
    following: list[int] = []
    later: dict[tuple[int, int], int] = {}
    for at, key in enumerate(reversed(keys)):
        following.append(len(keys) - later.get(key, -len(keys)))
        later[key] = at
    kept: dict[tuple[int, int], int] = {}
    queue: list[tuple[int, tuple[int, int]]] = []  # latest use first; some are out of date
    hits = 0
    for key, again in zip(keys, reversed(following), strict=True):
        hits += key in kept
        kept[key] = again
        heapq.heappush(queue, (-again, key))
        while len(kept) > slots:
            use, victim = heapq.heappop(queue)
            if kept.get(victim) == -use:
                del kept[victim]
    return sum(uses for _, uses in most) / len(keys), hits / len(keys)


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay the trace, print and save."""
    parser = make_parser(__doc__, results="routing")
    parser.add_argument("--tokens", type=int, default=20_000)
    args = parser.parse_args(arguments)
    if args.tokens < 2:
        parser.error("--tokens must be at least 2: half are of prose, half of code")
    trace = trained_trace(args.tokens)
    results = Results(args.json, cited_command("routing", arguments), "numpy")
    for share in SHARES:
        slots = round(share * trace.layers * trace.count)
        rates = (*hit_rates(trace, slots), *with_the_future(trace, slots))
        row = dict(zip(POLICIES, rates, strict=True))
        results.put({"name": f"{100 * share:.0f} %", "slots": slots, **row})
    print(routing_table(results.record))
    return 0


def routing_table(record: Mapping[str, Any]) -> str:
    """Hit rates by the share of the experts that the cache holds."""
    rows = [
        [row["name"], *(f"{100 * row[name]:.1f} %" for name in POLICIES)] for row in record["rows"]
    ]
    return captioned(
        record, markdown_table(["of the experts", *POLICIES.values()], rows), "hit rates"
    )


if __name__ == "__main__":
    sys.exit(main())
