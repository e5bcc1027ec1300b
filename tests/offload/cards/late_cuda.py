"""A card that does everything as late as it may, with CUDA's ``Ops``: kernels run on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from localrt.models.decoder import Decoder
from localrt.models.timing import Mark
from localrt.offload.cards.accelerator import Bytes
from localrt.offload.cards.clock import WallClock
from localrt.offload.placement import Where
from localrt.quant.ops.arrays import Array
from localrt.quant.ops.cuda.cuda_memory import CudaCopies
from localrt.quant.ops.cuda.ops import CudaOps
from tests.offload.cards.carded import place_on_card
from tests.offload.cards.late import LateAccelerator
from tests.offload.placed import MODE, PLENTY, Model, open_decoder

__all__ = ["on_late_card"]


class StepByStep(CudaOps):
    """Records nothing."""

    def recorder(self) -> None:  # type: ignore[override]
        return None


class LateCudaCard(LateAccelerator):
    """With the card's own ``Ops``, whose kernels run on the CPU."""

    def __init__(self, clock: WallClock, ops: CudaOps) -> None:
        super().__init__(clock, ops, capacity=PLENTY)
        self._cuda = CudaCopies(device="cpu")

    def to_card(self, x: Array, after: Mark) -> tuple[Array, Mark]:
        return self._cuda.to_card(x), after

    def to_host(self, x: Array, after: Mark) -> tuple[Array, Mark]:
        return self._cuda.to_host(x), after

    def mark(self, ended: Mark, *read: Any, last: bool = False) -> Mark:
        return super().mark(ended, *(memory.numpy() for memory in read), last=last)

    def free(self, memory: Any) -> None:
        super().free(memory.numpy())

    def _alloc(self, nbytes: int) -> Any:
        return torch.from_numpy(super()._alloc(nbytes))

    def _copy(self, source: Bytes, out: Any, after: Mark, there: Mark, wait: bool) -> Mark:
        return super()._copy(source, out.numpy(), after, there, wait)


@contextmanager
def on_late_card(
    model: Model,
    where: Mapping[str, Where],
    *,
    recorded: bool = True,
    slack: tuple[int, int] = (2, 2),
) -> Iterator[Decoder]:
    """The decoder that follows ``where``; not ``recorded``, it computes step by step."""
    clock = WallClock()
    card = LateCudaCard(clock, (CudaOps if recorded else StepByStep)(device="cpu"))
    placement = place_on_card(model.store, where, slack=slack)
    decoder = open_decoder(
        model.store,
        model.ops,
        model.config,
        placement,
        mode=MODE,
        budget=PLENTY,
        card=card,
        clock=clock,
    )
    try:
        yield decoder
    finally:
        decoder.close()
        assert card.used == 0
        assert not card.faults, card.faults[:3]
