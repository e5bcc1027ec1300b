"""Where a decoder's weights are: what a pass waits for, and what can be asked of their memory.

``WeightStore`` says what a decoder needs of it, with answers for weights that stay in memory, where
nothing is waited for and nothing can be evicted: ``ResidentWeights`` is that. Weights that are
streamed are ``offload/pipeline``'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from localrt.models.config import DecoderConfig, Part
from localrt.models.layers.moe import Experts, RoutingWatch
from localrt.models.layers.parts import Check as Check
from localrt.models.layers.parts import Head, PassState
from localrt.quant.ops.arrays import Vector
from localrt.quant.ops.kv import KVCache
from localrt.quant.ops.protocol import Batch, Ops

Resource = Literal["ssd", "link", "cpu", "gpu"]


@dataclass(frozen=True, slots=True)
class PipelineCounts:
    """What a pipeline has done since it was made: bytes, and seconds by resource.

    ``clock_s`` is the time now, as ``time.perf_counter`` has it. ``decode_passes`` counts the
    passes of one row, ``decode_cpu_s`` are the CPU's busy seconds in them. Of the experts that
    layers have asked for (``expert_uses``), ``expert_hits`` were in memory. ``memory_note`` says
    which weights are no longer where they were at load, and why.
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


@dataclass(frozen=True, slots=True)
class Task:
    """One task on a resource, from ``start`` to ``end``."""

    resource: Resource
    name: str
    start: float
    end: float


class WeightMemory:
    """What can be asked of the memory that weights take; of those that stay in it, nothing.

    ``streams``: they need not all be in memory, and a budget is kept.
    """

    streams = False

    @property
    def ram_nbytes(self) -> int:
        """Bytes of RAM that weights take, where it is kept count of them."""
        return 0

    @property
    def spare(self) -> int:
        """Bytes of the budget that weights and caches do not take."""
        return 0

    @property
    def reclaimable(self) -> int:
        """Bytes of RAM that weights could give back."""
        return 0

    def take(self, nbytes: int) -> None:
        """Something else needs ``nbytes`` of the budget from now on; below zero: no longer.

        Raises:
            MemoryBudgetError: so much cannot be given; nothing changes then.
        """

    def set_budget(self, nbytes: int, words: str) -> None:
        """From now on ``nbytes`` of RAM for weights and caches; ``words`` say so to people.

        Raises:
            MemoryBudgetError: what cannot be streamed takes more; nothing changes then.
        """

    def shrink_gpu(self, nbytes: int, words: str) -> int:
        """Have ``nbytes`` less of the GPU's memory; the bytes freed, 0 if none can be."""
        return 0

    @property
    def gpu(self) -> tuple[int, int] | None:
        """Bytes used of a GPU that weights are streamed to, and the most that may be."""
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
    experts: Sequence[Experts] = ()  # of the sparse layers
    memory = WeightMemory()

    @property
    def implementations(self) -> tuple[Ops, ...]:
        """All that compute passes."""
        return (self.ops,)

    # -- a pass ----------------------------------------------------------------------------------

    def begin(self, batch: Batch, wanted: npt.NDArray[np.intp], check: Check | None) -> PassState:
        """A pass begins that gives the logits of the rows ``wanted``.

        Raises:
            MemoryBudgetError: the caches have outgrown what the budget leaves beside the weights.
            CheckpointError: a file is no longer what it was.
        """
        raise NotImplementedError

    def head(self, state: PassState) -> Sequence[Part]:
        """The parts after the body."""
        raise NotImplementedError

    def end(self, state: PassState, batch: Batch) -> None:
        """The pass has ended, and its rows count as held."""

    def abandon(self) -> None:
        """The pass was given up: the next one begins with the first part."""

    def relieve(self) -> bool:
        """Memory ran out in a pass: give some back. False if there is none to give."""
        return False

    # -- caches ----------------------------------------------------------------------------------

    def cache(self, capacity: int) -> KVCache:
        """An empty KV cache for one sequence."""
        return self.ops.kv_cache(self.config.memory, capacity)

    def reserve(self, cache: KVCache, length: int) -> None:
        """Make room in ``cache`` for ``length`` tokens that do not come from a pass."""
        cache.reserve(length)

    # -- what passes report ----------------------------------------------------------------------

    def counts(self) -> PipelineCounts | None:
        """Totals so far; None where nothing is counted."""
        return None

    def tasks(self, keep: int | None = None) -> list[Task]:
        """The tasks that are remembered; ``keep`` says how many from now on."""
        return []

    def watch_routing(self, watch: RoutingWatch) -> None:
        """Tell ``watch`` of every choice of experts."""
        for experts in self.experts:
            experts.watch = watch

    def close(self) -> None:
        """Free everything."""


class ResidentWeights(WeightStore):
    """All weights stay in memory: parts are ready at all times."""

    def __init__(
        self,
        ops: Ops,
        config: DecoderConfig,
        body: Sequence[Part],
        head: Head,
        experts: Experts,
    ) -> None:
        self.ops, self.config = ops, config
        self.body = body
        self.norm = head.norm
        self.experts = (experts,)
        self._head = (head,)

    def begin(self, batch: Batch, wanted: npt.NDArray[np.intp], check: Check | None) -> PassState:
        """See ``WeightStore``: there is nothing to wait for."""
        return PassState(self.ops, self.ops.begin(batch), wanted=wanted, batch=batch)

    def head(self, state: PassState) -> Sequence[Part]:
        return self._head if len(state.wanted) else ()
