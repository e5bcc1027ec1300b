"""Made-up routing with the skew and the locality that was published of real models.

Each layer's experts have weights rank^-zipf; a token takes the best of log weight plus noise of
Gumbel's distribution, which draws experts in proportion to their weights, none twice. The noise is
correlated: over tokens, with a slow part (a topic) and a fast part (a phrase), and over layers,
through a vector that each token shares with all of them. Correlating it as a normal variable and
mapping it to Gumbel's keeps the skew exactly, whatever the locality. Tasks change after some
hundreds of tokens and bring an order of experts of their own, in part.

Every preset is labelled synthetic in the trace's header. It knows no policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from benchmarks.moe.routing_trace import RoutingTrace, TraceHeader
from localrt.errors import OptionError

__all__ = [
    "PRESETS",
    "Locality",
    "Preset",
    "find_preset",
    "synthetic_odds",
    "synthetic_trace",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Locality:
    """How routing repeats itself.

    ``zipf`` is the exponent of the weights over an expert's rank. ``task`` is the share of the
    order of ranks that is a task's own (0: one order for all); a task lasts ``phase`` tokens on
    average. ``slow`` and ``fast`` are the shares of the noise's variance that keep for about
    ``slow_tokens`` and ``fast_tokens``; of what remains, the share ``layers`` is common to all
    layers.
    """

    zipf: float
    task: float
    slow: float
    fast: float
    layers: float = 0.3
    phase: float = 300.0
    slow_tokens: float = 64.0
    fast_tokens: float = 4.0

    def __post_init__(self) -> None:
        for name in ("task", "slow", "fast", "layers"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be 0 to 1, is {getattr(self, name)}")
        if self.zipf < 0 or self.slow + self.fast > 1:
            raise ValueError("zipf must not be negative, nor slow + fast exceed 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A model's shape with the locality that its published figures are met by; see ``source``."""

    layers: int
    count: int
    used: int
    locality: Locality
    source: str


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "mixtral": Preset(
            layers=32,
            count=8,
            used=2,
            locality=Locality(zipf=0.2, task=0.5, slow=0.10, fast=0.10),
            source="HybriMoE (arXiv 2504.05897): 30 % hits of LRU at 25 % of the experts",
        ),
        "deepseek-v2-lite": Preset(
            layers=26,
            count=64,
            used=6,
            locality=Locality(zipf=0.6, task=0.5, slow=0.20, fast=0.15),
            source="HybriMoE (arXiv 2504.05897): 48 % hits of LRU at 25 % of the experts",
        ),
        "qwen2-57b": Preset(
            layers=28,
            count=64,
            used=8,
            locality=Locality(zipf=0.55, task=0.5, slow=0.17, fast=0.15),
            source="HybriMoE (arXiv 2504.05897): 45 % hits of LRU at 25 % of the experts",
        ),
        "qwen3-30b": Preset(
            layers=48,
            count=128,
            used=8,
            locality=Locality(zipf=0.8, task=0.6, slow=0.40, fast=0.30),
            source=(
                "a trace of Qwen3-30B-A3B (github.com/kekzl/imp, pull request 1359): 45 % of the "
                "selections repeat at the next token, 80 % within eight, LRU at 40 % of the "
                "experts hits 90 to 95 %"
            ),
        ),
        "gpt-oss-20b": Preset(
            layers=24,
            count=32,
            used=4,
            locality=Locality(zipf=0.55, task=0.5, slow=0.17, fast=0.15),
            source="nothing is published: the locality of qwen2-57b in another shape",
        ),
        "uniform": Preset(
            layers=48,
            count=128,
            used=8,
            locality=Locality(zipf=0.0, task=0.0, slow=0.0, fast=0.0, layers=0.0),
            source="no skew and no locality: what a cache gains here, it does not owe to either",
        ),
    }
)


def find_preset(name: str) -> Preset:
    """A preset by its name.

    Raises:
        OptionError: there is none of that name.
    """
    if name not in PRESETS:
        raise OptionError(f"no synthetic trace {name!r}: one of {', '.join(PRESETS)}")
    return PRESETS[name]


def synthetic_trace(
    name: str, *, prompt: int = 0, tokens: int = 512, seed: int = 0, layers: int | None = None
) -> RoutingTrace:
    """A preset's trace: one pass of ``prompt`` tokens if any, then ``tokens`` passes of one.

    ``layers`` makes it of fewer layers than the model has.

    Raises:
        OptionError: no preset of that name.
    """
    preset, header = find_preset(name), _header(name, seed, layers)
    total = prompt + tokens
    experts = np.empty((total, header.layers, header.width), np.int16)
    scores = np.empty(experts.shape, np.float16)
    router = _Router(header, preset.locality, seed)
    for token in range(total):
        logits = router.next()  # (layers, count)
        best = np.argpartition(-logits, header.width - 1, axis=1)[:, : header.width]
        rank = np.argsort(-np.take_along_axis(logits, best, 1), axis=1, kind="stable")
        best = np.take_along_axis(best, rank, 1)
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        experts[token] = best
        scores[token] = np.take_along_axis(shares, best, 1)
    pass_of = np.maximum(0, np.arange(total) - prompt + (1 if prompt else 0)).astype(np.int32)
    return RoutingTrace(header, experts, scores, pass_of)


def synthetic_odds(
    name: str, *, tokens: int = 512, seed: int = 0, layers: int | None = None
) -> NDArray[np.float32]:
    """(tokens, layers, count): after each token, how the experts rank for the next one.

    For somebody who knows the weights, the task and the correlated noise, everything but the dice.
    No policy can know as much, so keeping the best of these is about the most that one can reach
    (no proof: it looks one token ahead); Belady's optimum knows the dice too.
    """
    header = _header(name, seed, layers)
    router = _Router(header, find_preset(name).locality, seed)
    odds = np.empty((tokens, header.layers, header.count), np.float32)
    for token in range(tokens):
        router.next()
        odds[token] = router.expected()
    return odds


def _header(name: str, seed: int, layers: int | None) -> TraceHeader:
    preset = find_preset(name)
    return TraceHeader(
        model=f"synthetic {name}",
        architecture="synthetic",
        fingerprint=f"synthetic:{name}:{seed}",
        layers=preset.layers if layers is None else layers,
        count=preset.count,
        used=preset.used,
    )


class _Router:
    """Logits of one token after another."""

    SHARED = 32  # entries of the vector that a token's layers share

    def __init__(self, header: TraceHeader, locality: Locality, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.locality = locality
        self.shape = (header.layers, header.count)
        self.ranks = np.log(np.arange(1, header.count + 1))
        self.common = self._order()
        rows = self.random.standard_normal((*self.shape, self.SHARED))
        self.directions = rows / np.linalg.norm(rows, axis=-1, keepdims=True)
        self.slow = self.random.standard_normal(self.shape)
        self.fast = self.random.standard_normal(self.shape)
        self.left = 0.0
        self.weights = self.common

    def next(self) -> NDArray[np.float64]:
        """(layers, count) of the next token."""
        locality, random = self.locality, self.random
        if self.left <= 0:
            self.left = float(random.exponential(locality.phase))
            self.weights = self._task()
        self.left -= 1
        self.slow = self._walk(self.slow, locality.slow_tokens)
        self.fast = self._walk(self.fast, locality.fast_tokens)
        shared = self.directions @ random.standard_normal(self.SHARED)
        own = np.sqrt(1 - locality.layers) * random.standard_normal(self.shape)
        token = np.sqrt(locality.layers) * shared + own
        normal = np.sqrt(locality.slow) * self.slow + np.sqrt(locality.fast) * self.fast
        normal += np.sqrt(max(0.0, 1 - locality.slow - locality.fast)) * token
        return self._logits(normal)

    def expected(self) -> NDArray[np.float64]:
        """(layers, count): of the token after, from what lasts."""
        locality = self.locality
        slow = np.sqrt(locality.slow) * np.exp(-1 / locality.slow_tokens) * self.slow
        fast = np.sqrt(locality.fast) * np.exp(-1 / locality.fast_tokens) * self.fast
        return self._logits(slow + fast)

    def _logits(self, normal: NDArray[np.float64]) -> NDArray[np.float64]:
        gumbel = -np.log(-np.log(np.clip(ndtr(normal), 1e-12, 1 - 1e-12)))
        return np.asarray(self.weights + gumbel, np.float64)

    def _walk(self, state: NDArray[np.float64], memory: float) -> NDArray[np.float64]:
        keep = np.exp(-1 / memory)
        return np.asarray(
            keep * state + np.sqrt(1 - keep**2) * self.random.standard_normal(self.shape)
        )

    def _order(self) -> NDArray[np.float64]:
        """(layers, count): the logarithms of ranks, shuffled in each layer."""
        return self.random.permuted(np.tile(self.ranks, (self.shape[0], 1)), axis=1)

    def _task(self) -> NDArray[np.float64]:
        """Log weights of a task: ranks mixed of the common order and one of its own."""
        own = self.locality.task
        mixed = (1 - own) * self.common + own * self._order()
        ranks = np.argsort(np.argsort(mixed, axis=1), axis=1)
        return np.asarray(-self.locality.zipf * np.log(ranks + 1.0), np.float64)
