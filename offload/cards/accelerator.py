"""A card as the pipeline sees it: memory of a fixed size, copies, kernels, and marks to wait for.

Two implementations: a CUDA card (``cuda.py``) and a virtual one
(``virtual.py``), which computes on the CPU and takes its time from what a card would
need. The pipeline above does not know which it drives.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from localrt.models.timing import Mark
from localrt.quant.ops.protocol import Array, Ops

__all__ = ["Accelerator"]

Bytes = npt.NDArray[np.uint8]


class Accelerator(Protocol):
    """One card. ``copy_in`` may be called by several threads, the rest by one at a time."""

    @property
    def name(self) -> str:
        """The card's."""

    @property
    def ops(self) -> Ops:
        """Computes on its memory."""

    @property
    def capacity(self) -> int:
        """Bytes that may be allocated in all."""

    @property
    def used(self) -> int:
        """Bytes that are allocated."""

    @property
    def link_bytes(self) -> int:
        """Bytes copied to it so far."""

    def alloc(self, nbytes: int) -> Any:
        """Uninitialized memory of the card, to be sliced by bytes.

        Raises:
            MemoryBudgetError: it would exceed the capacity.
        """

    def free(self, memory: Any) -> None:
        """Give memory back."""

    def host_buffer(self, nbytes: int) -> Bytes:
        """RAM that copies are fast from: pinned, page-aligned."""

    def free_host(self, memory: Bytes) -> int:
        """Such RAM is no longer needed; returns its bytes."""

    def copy_in(
        self,
        name: str,
        source: Bytes,
        out: Any,
        after: Mark,
        there: Mark,
        *,
        wait: bool = True,
    ) -> Mark:
        """Copy to the card, not before ``after`` (memory is free) and ``there`` (data is there).

        Returns once the source may be changed, with the mark of the copy's end; at once without
        ``wait``, and then the source must stay as it is until that mark is ``settled``.
        """

    def settled(self, mark: Mark) -> None:
        """Return when a copy that was not waited for has ended."""

    def wait(self, mark: Mark) -> None:
        """Kernels started from now on wait for ``mark``."""

    def mark(self, ended: Mark) -> Mark:
        """The mark of all kernels started so far; ``ended`` is the clock's of the last."""

    def cost_s(self, nbytes: int, macs: int, rows: int) -> float | None:
        """Seconds that a unit's kernels take on a virtual card; None where they are real."""

    def to_card(self, x: Array, after: Mark) -> tuple[Array, Mark]:
        """Activations of the CPU's ``Ops`` as the card's."""

    def to_host(self, x: Array, after: Mark) -> tuple[Array, Mark]:
        """The card's activations as the CPU's."""

    def close(self) -> None:
        """Free everything."""
