"""What the process of a loaded model will take of RAM, by what it is made to do.

An engine asks before caches grow and passes run; the figures are those of ``offload/account.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from localrt.models.checkpoints.base import Checkpoint
from localrt.models.config import DecoderConfig
from localrt.offload.account import (
    GROWTH_NBYTES,
    KERNEL_SCRATCH_NBYTES,
    MARGIN_NBYTES,
    TORCH_GROWTH_NBYTES,
    Account,
    activation_nbytes,
    logits_nbytes,
    weight_nbytes,
)
from localrt.offload.shapes import ModelShape, PassSizes
from localrt.quant.ops.protocol import Ops


@dataclass(frozen=True, slots=True, kw_only=True)
class RamForecast:
    """What the process of a loaded model will take of RAM, by what it is made to do.

    ``process`` is what it takes beside the model, ``weights`` what stays in memory, rings included.
    Of a streamed model ``room`` bounds weights, caches and logits together: it gives weights back
    before each pass. ``budget`` is that of one that cannot: its passes have as many rows as fit.
    """

    process: int
    weights: int
    sizes: PassSizes
    room: int | None = None
    budget: int | None = None

    def nbytes(self, *, kv: int, rows: int, logit_rows: int) -> int:
        """With caches of ``kv`` bytes after passes of at most ``rows`` rows, ``logit_rows`` of them
        with logits.
        """
        held = self.weights + kv + logits_nbytes(self.sizes.vocab, max(0, logit_rows - 1))
        if self.room is not None:
            held = min(held, self.room)
        return self.process + held + activation_nbytes(self.sizes, rows)

    def within(self, budget: int) -> RamForecast:
        """The same with another budget, where there is one."""
        if self.budget is None:
            return self
        return replace(self, budget=budget - MARGIN_NBYTES)

    def beside(self, nbytes: int) -> RamForecast:
        """The same where something else takes ``nbytes`` of the process."""
        room = None if self.room is None else max(0, self.room - nbytes)
        return replace(self, process=self.process + nbytes, room=room)

    def spare(self, kv: int) -> int | None:
        """Bytes that the budget leaves beside caches of ``kv`` bytes, for passes and more caches.

        None where that is seen to before each pass.
        """
        if self.budget is None:
            return None
        return max(0, self.budget - self.nbytes(kv=kv, rows=0, logit_rows=0))

    def logit_rows(self, kv: int) -> int | None:
        """Rows with logits that a pass may have beside caches of ``kv`` bytes; None: any number."""
        spare = self.spare(kv)
        if spare is None:
            return None
        row = activation_nbytes(self.sizes, 1) - activation_nbytes(self.sizes, 0)
        return spare // (row + logits_nbytes(self.sizes.vocab, 1))


def resident_forecast(
    checkpoint: Checkpoint, config: DecoderConfig, ops: Ops, *, rss: int, budget: int
) -> RamForecast:
    """Of a model that is loaded whole, into a process that takes ``rss`` bytes before, of
    ``budget``.
    """
    native = ops.name == "native"
    beside = KERNEL_SCRATCH_NBYTES + GROWTH_NBYTES if native else TORCH_GROWTH_NBYTES
    return RamForecast(
        process=rss + beside,
        weights=weight_nbytes(checkpoint, ops) if ops.free_memory() is None else 0,
        sizes=PassSizes.of_config(config),
        budget=budget - MARGIN_NBYTES if native else None,
    )


def placed_forecast(memory: Account, shape: ModelShape, budget: int) -> RamForecast:
    """Of a model that was placed within ``budget`` bytes, whose account is ``memory``."""
    streamed = ("weights", "keys and values", "activations")
    fixed = memory.total() - sum(memory.nbytes(what) for what in streamed)
    return RamForecast(
        process=fixed - MARGIN_NBYTES,
        weights=memory.nbytes("weights"),
        sizes=shape.pass_sizes,
        room=budget - fixed - memory.nbytes("activations"),
    )
