"""A pipeline's graph of tasks without its work: kernels and copies take their time and do nothing.

``open_pipeline`` runs on it as it is: stores have sizes and no bytes, ``Ops`` give arrays that
nobody fills, the clock charges what each kernel would take. So prompts of models of any size are
scheduled for real, on a card that is not here. Experts are chosen at random, all equally often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.common.random_store import RandomStore
from localrt.models.checkpoints.store_manifest import StoredUnit
from localrt.models.timing import Mark, Resource
from localrt.offload.cards.clock import VirtualClock
from localrt.offload.cards.roofline import PACKED_ROWS, kernel_seconds
from localrt.offload.cards.virtual import VirtualAccelerator
from localrt.offload.planner.machine import GpuProfile, MachineProfile
from localrt.quant.ops.experts import Routing

__all__ = [
    "ChargedCard",
    "ChargedClock",
    "ChargedOps",
    "Charges",
    "EmptyStore",
    "Kernels",
    "card_kernels",
    "cpu_kernels",
]  # fmt: skip

_BF16 = 2  # bytes of an activation on a card


class EmptyStore(RandomStore):
    """Units of the right sizes; reading them does nothing."""

    def read_into(self, name: str, offset: int, out: np.ndarray) -> None:
        """See ``StoreFiles``."""

    def _content(self, unit: StoredUnit) -> np.ndarray:
        return np.empty(0, np.uint8)


@dataclass(slots=True)
class Charges:
    """What one processor's kernels take: ``seconds`` not charged yet, ``operations`` so far."""

    seconds: float = 0.0
    operations: float = 0.0

    def take(self) -> float:
        """The seconds since the last time."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class ChargedClock(VirtualClock):
    """Charges a task of a processor what its kernels take, and no time that passes here."""

    def __init__(self, charges: Mapping[str, Charges], keep: int = 0) -> None:
        super().__init__(keep)
        self._charges = charges

    def end(
        self,
        resource: Resource,
        name: str,
        started: float,
        *,
        after: Mark = None,
        cost_s: float | None = None,
    ) -> Mark:
        """See ``Clock``."""
        if resource in self._charges:
            cost_s = self._charges[resource].take()
        return super().end(resource, name, started, after=after, cost_s=cost_s or 0.0)


class ChargedCard(VirtualAccelerator):
    """Copies are charged and not made."""

    def _copy(self, source: Any, out: Any, after: Mark, there: Mark, wait: bool) -> Mark:
        return max(after or 0.0, there or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Seconds of a product of packed weights (bytes, weights, rows), of experts at once (bytes and
    weights of one, rows of each), of ``attention`` (multiply-accumulates, bytes), and of a byte
    that other steps read or write. ``call_s`` is for each step.
    """

    product: Callable[[float, float, int], float]
    experts: Callable[[float, float, Sequence[int]], float]
    attention: Callable[[float, float], float]
    byte_s: float
    call_s: float


def card_kernels(card: GpuProfile) -> Kernels:
    """A card's, as ``quant/ops/cuda`` has them.

    More than 64 rows unpack a matrix and use bf16 products; experts unpack on the way, for 64 rows
    at a time. Attention computes what a causal mask lets through, and nothing else.
    """
    bytes_s, flops = card.bytes_s, card.flops

    def experts(nbytes: float, macs: float, rows: Sequence[int]) -> float:
        blocks = sum(-(-each // PACKED_ROWS) for each in rows)
        return max(blocks * nbytes / bytes_s, 2 * macs * sum(rows) / flops)

    return Kernels(
        product=lambda nbytes, macs, rows: kernel_seconds(
            nbytes, macs, rows, bytes_s=bytes_s, flops=flops
        ),
        experts=experts,
        attention=lambda macs, nbytes: max(nbytes / bytes_s, 2 * macs / flops),
        byte_s=1 / bytes_s,
        call_s=card.call_s or 1e-5,
    )


def cpu_kernels(machine: MachineProfile, format: str) -> Kernels:
    """A processor's, by its profile."""
    rate, attention = machine.kernel(format), machine.attention.seconds[-1]
    return Kernels(
        product=lambda nbytes, macs, rows: macs * rate.at(rows),
        experts=lambda nbytes, macs, rows: macs * sum(rate.at(each) for each in rows),
        attention=lambda macs, nbytes: max(nbytes / machine.ram_bytes_s, macs * attention),
        byte_s=0.0,
        call_s=machine.call_s,
    )


@dataclass(frozen=True, slots=True)
class _Weight:
    shape: tuple[int, int]
    nbytes: int

    @property
    def macs(self) -> int:
        return self.shape[0] * self.shape[1]


@dataclass(slots=True, eq=False)
class _Cache:
    """Counts tokens. See ``KVCache``."""

    capacity: int
    length: int = 0
    nbytes: int = 0

    def reserve(self, length: int) -> None:
        """There is room."""

    def advance(self, count: int) -> None:
        self.length += count

    def trim(self, length: int) -> int:
        self.length = length
        return length

    def select(self, first: int, rows: Sequence[int]) -> None:
        self.length = first + len(rows)


@dataclass(slots=True)
class _Table:
    """See ``ExpertTable``."""

    weights: dict[int, Any] = field(default_factory=dict)
    hostless: bool = False

    def put(self, expert: int, weights: Any) -> None:
        self.weights[expert] = weights

    def drop(self, expert: int) -> None:
        self.weights.pop(expert, None)

    def holds(self, expert: int) -> bool:
        return expert in self.weights


class ChargedOps:
    """See ``Ops``: charges each step to ``charges``. What it gives has a shape and no values."""

    name = compute_format = "charged"
    device = "none"
    adapters = None

    def __init__(self, kernels: Kernels, charges: Charges, *, seed: int = 0) -> None:
        self._kernels, self._charges = kernels, charges
        self._random = np.random.default_rng(seed)

    def scope(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def free_memory(self) -> int | None:
        return None

    def graphed(self, forward: Any) -> Any:
        return forward

    def recorder(self) -> None:
        return None

    def weight(self, shape: tuple[int, int], blocks: Iterable[Any]) -> _Weight:
        return _Weight(shape, sum(block.data.nbytes for block in blocks))

    def vector(self, values: np.ndarray) -> np.ndarray:
        return values

    def kv_nbytes(self, layers: Sequence[Any], length: int) -> int:
        return 0  # none is allocated

    def kv_cache(self, layers: Sequence[Any], capacity: int) -> _Cache:
        return _Cache(capacity)

    def begin(self, batch: Any) -> Any:
        return batch

    def embed(
        self, table: _Weight, step: Any, scale: float = 1.0, *, tokens: Any = None, each: int = 1
    ) -> Any:
        rows = len(step.tokens if tokens is None else tokens) * each
        self._moved(rows * table.shape[1])
        return np.empty((rows, table.shape[1]), np.float32)

    def adapt_tokens(self, x: Any, step: Any, scale: float) -> Any:
        return x

    def norm_qkv_rope_append(self, x: Any, weights: Any, spec: Any, step: Any, layer: int) -> Any:
        rows = weights.qkv.shape[0]
        self._moved(len(x) * (2 * x.shape[1] + 2 * rows))
        self._product(weights.qkv, len(x))
        return np.empty((len(x), spec.heads * spec.head_dim), np.float32)

    def attention_output(self, q: Any, weights: Any, spec: Any, step: Any, layer: int) -> Any:
        pairs = held = 0
        for span in step.spans:
            pairs += span.rows * span.cache.length + span.rows * (span.rows + 1) // 2
            held += span.cache.length + span.rows
        macs = 2 * spec.heads * spec.head_dim * pairs
        nbytes = _BF16 * (2 * spec.kv_heads * spec.head_dim * held + 2 * q.size)
        self._charge(self._kernels.attention(macs, nbytes), macs)
        self._product(weights.out, len(q))
        return np.empty((len(q), weights.out.shape[0]), np.float32)

    def norm_gated_mlp(self, x: Any, weights: Any, spec: Any) -> Any:
        self._moved(len(x) * (2 * x.shape[1] + 3 * weights.down.shape[1]))
        self._product(weights.gate_up, len(x))
        self._product(weights.down, len(x))
        return np.empty_like(x)

    def expert_table(self, count: int) -> _Table:
        return _Table()

    def norm_route(self, x: Any, weights: Any, spec: Any) -> tuple[Any, Routing]:
        self._moved(3 * len(x) * x.shape[1])
        self._product(weights.gate, len(x))
        order = np.argsort(self._random.random((len(x), spec.count), np.float32), axis=1)
        experts = order[:, : spec.ranked].astype(np.int32)
        scores = np.full(experts.shape, 1 / spec.count, np.float32)
        weights_ = np.full((len(x), spec.used), 1 / spec.used, np.float32)
        return np.empty_like(x), Routing(experts, scores, weights_)

    def expert_slots(self, normed: Any, routing: Routing) -> Any:
        return np.empty((len(normed) * routing.used, normed.shape[1]), np.float32)

    def run_experts(
        self, normed: Any, routing: Routing, table: _Table, spec: Any, slots: Any,
        experts: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        loads = routing.loads(int(routing.experts.max()) + 1)
        chosen = np.flatnonzero(loads).tolist() if experts is None else list(experts)
        rows = [int(loads[expert]) for expert in chosen]
        one = table.weights[chosen[0]]
        nbytes, macs = one.gate_up.nbytes + one.down.nbytes, one.gate_up.macs + one.down.macs
        self._moved(sum(rows) * (2 * normed.shape[1] + 3 * one.down.shape[1]))
        self._charge(self._kernels.experts(nbytes, macs, rows), macs * sum(rows))

    def put_slots(self, slots: Any, index: Any, rows: Any) -> Any:
        return slots

    def combine_experts(self, slots: Any, routing: Routing, shared: Any) -> Any:
        self._moved(slots.size)
        return np.empty((len(routing.experts), slots.shape[1]), np.float32)

    def add(self, x: Any, y: Any, scale: float = 1.0, total: float = 1.0) -> Any:
        self._moved(3 * x.size)
        return x

    def head(
        self,
        x: Any,
        rows: Any,
        norm: Any,
        eps: float,
        weight: _Weight,
        softcap: Any = None,
        first_row: int = 0,
    ) -> Any:
        self._product(weight, len(rows))
        return np.zeros((len(rows), weight.shape[0]), np.float32)

    # -- charges -----------------------------------------------------------------------------------

    def _product(self, weight: _Weight, rows: int) -> None:
        seconds = self._kernels.product(weight.nbytes, weight.macs, rows)
        self._charge(seconds, weight.macs * rows)

    def _moved(self, numbers: float) -> None:
        """Activations that steps beside the products read or write."""
        self._charge(_BF16 * numbers * self._kernels.byte_s, 0)

    def _charge(self, seconds: float, macs: float) -> None:
        self._charges.seconds += seconds + self._kernels.call_s
        self._charges.operations += 2 * macs
