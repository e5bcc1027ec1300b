"""Where a decoder's weights are: the protocol of passes, and of weight memory.

``WeightStore`` is what a decoder needs; its defaults are for weights that stay in memory, without
waiting or eviction: ``ResidentWeights``. ``offload/pipeline`` streams weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from localrt.models.config import DecoderConfig, Part
from localrt.models.layers.moe import Experts
from localrt.models.layers.parts import Head, PassState
from localrt.quant.ops.arrays import Vector, Weight
from localrt.quant.ops.kv import KVCache
from localrt.quant.ops.protocol import Batch, Check, Ops

Resource = Literal["ssd", "link", "cpu", "gpu"]


@dataclass(frozen=True, slots=True)
class PipelineCounts:
    """A pipeline's totals since it was made: bytes, and seconds by resource.

    ``clock_s`` is the current ``time.perf_counter``. ``decode_passes`` counts the passes of one
    row, ``decode_cpu_s`` the CPU's busy seconds in them. ``expert_uses`` counts requested experts,
    ``expert_hits`` those that were in memory. ``memory_note`` says which weights have moved since
    load, and why.
    """

    ssd_read_bytes: int
    link_bytes: int
    busy_s: Mapping[str, float]
    passes: int
    clock_s: float
    decode_passes: int = 0
    decode_cpu_s: float = 0.0
    expert_uses: int = 0
    expert_hits: int = 0
    memory_note: str = ""

    def since(self, before: PipelineCounts) -> PipelineCounts:
        """What was counted after ``before``."""
        busy = {name: s - before.busy_s.get(name, 0.0) for name, s in self.busy_s.items()}
        less = {name: getattr(self, name) - getattr(before, name) for name in _TOTALS}
        return replace(self, busy_s=busy, **less)


_TOTALS = (
    *("ssd_read_bytes", "link_bytes", "passes", "decode_passes", "decode_cpu_s"),
    *("expert_uses", "expert_hits"),
)


@dataclass(frozen=True, slots=True)
class PassTask:
    """One task on a resource, from ``start`` to ``end``."""

    resource: Resource
    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class GpuUse:
    """Bytes of a GPU that a model takes, with caches and kernels' scratch, and the most that it may
    ever take. ``leavable`` weights can leave it, ``missing`` ones have left and can come back.
    """

    used: int
    limit: int
    leavable: int = 0
    missing: int = 0


class WeightMemory:
    """The memory of weights; the defaults are for weights that always stay in memory.

    ``streams``: weights may be outside memory, and a budget is enforced.
    """

    streams = False

    @property
    def ram_nbytes(self) -> int:
        """Bytes of RAM that weights take, if they are counted."""
        return 0

    @property
    def spare(self) -> int:
        """Bytes of the budget that weights and caches do not take."""
        return 0

    @property
    def reclaimable(self) -> int:
        """Bytes of RAM that weights could give back."""
        return 0

    @property
    def lends(self) -> bool:
        """Whether other programs have memory of the budget."""
        return False

    def take(self, nbytes: int) -> None:
        """Reserve ``nbytes`` of the budget for other data; a negative number releases them.

        Raises:
            MemoryBudgetError: not enough; nothing changes.
        """

    def take_gpu(self, nbytes: int) -> None:
        """The same of the GPU's memory."""

    def set_budget(self, nbytes: int, note: str) -> None:
        """Set the RAM for weights and caches to ``nbytes``; ``note`` says so to a user.

        Raises:
            MemoryBudgetError: weights that cannot be streamed take more; nothing changes.
        """

    def set_gpu_budget(self, nbytes: int, note: str) -> None:
        """Use at most ``nbytes`` of a GPU: weights leave it for RAM, or return. Raises as above."""

    @property
    def gpu_use(self) -> GpuUse | None:
        """What streamed weights take of a GPU's memory."""
        return None


class WeightStore:
    """The weights of a decoder that computes with ``ops``; ``norm`` are the final norm's.

    A pass is ``begin``, the ``body`` (embedding and layers) and the ``head``, part after part, and
    ``end``; or ``abandon``, where any of them raises.
    """

    ops: Ops
    norm: Vector | None
    config: DecoderConfig
    body: Sequence[Part]
    experts: Sequence[Experts] = ()  # the experts of sparse layers
    memory = WeightMemory()

    @property
    def embedding_part(self) -> Part:
        """What looks up the batch's rows of the embedding, in passes of a draft head."""
        return self.body[0]

    @property
    def output_matrix(self) -> Weight | None:
        """The matrix of the head, if it is in memory as one."""
        return None

    @property
    def implementations(self) -> tuple[Ops, ...]:
        """All ``Ops`` that compute passes; none once the model is closed."""
        return (self.ops,) if hasattr(self, "ops") else ()

    @property
    def exact_rows(self) -> int:
        """See ``Ops``: what all processors together promise."""
        return min((ops.exact_rows for ops in self.implementations), default=1)

    # -- a pass ----------------------------------------------------------------------------------

    def begin(
        self, batch: Batch, logit_rows: npt.NDArray[np.intp], check: Check | None
    ) -> PassState:
        """Begin a pass that computes the logits of ``logit_rows``.

        Raises:
            MemoryBudgetError: the caches have outgrown what the budget leaves beside the weights.
            CheckpointError: a file has changed.
        """
        raise NotImplementedError

    def head(self, state: PassState) -> Sequence[Part]:
        """The parts after the body."""
        raise NotImplementedError

    def end(self, state: PassState, batch: Batch) -> None:
        """End the pass: the caches hold its rows."""

    def abandon(self) -> None:
        """Abandon the pass: the next one begins with the first part."""

    def relieve(self) -> bool:
        """Free memory after a pass ran out of it; returns False if none can be freed."""
        return False

    # -- caches ----------------------------------------------------------------------------------

    def cache(self, capacity: int) -> KVCache:
        """An empty KV cache for one sequence."""
        return self.ops.kv_cache(self.config.memory, capacity)

    def reserve(self, cache: KVCache, length: int) -> None:
        """Make room in ``cache`` for ``length`` tokens that do not come from a pass."""
        cache.reserve(length)

    # -- statistics ----------------------------------------------------------------------

    def counts(self) -> PipelineCounts | None:
        """Totals so far; None if nothing is counted."""
        return None

    def forget_counts(self) -> None:
        """Count from here on."""

    def tasks(self, keep: int | None = None) -> list[PassTask]:
        """The recorded tasks; ``keep`` sets how many to record from now on."""
        return []

    def close(self) -> None:
        """Free everything."""


class ResidentWeights(WeightStore):
    """Weights that stay in memory: parts are always ready."""

    def __init__(
        self, ops: Ops, config: DecoderConfig, body: Sequence[Part], head: Head, experts: Experts
    ) -> None:
        self.ops, self.config = ops, config
        self.body = body
        self.norm = head.norm
        self.experts = (experts,)
        self._head = (head,)

    @property
    def output_matrix(self) -> Weight | None:
        return self._head[0].weight

    def begin(
        self, batch: Batch, logit_rows: npt.NDArray[np.intp], check: Check | None
    ) -> PassState:
        return PassState(self.ops, self.ops.begin(batch), logit_rows=logit_rows, batch=batch)

    def head(self, state: PassState) -> Sequence[Part]:
        return self._head if len(state.logit_rows) else ()
