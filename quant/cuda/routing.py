"""The choices of a layer where a card made them, for kernels that start before the host knows.

The host's side is read when it is first asked for: at once where nobody has begun to copy it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from localrt.quant.cuda.device import upload
from localrt.quant.ops.experts import Routing


class CudaRouting(Routing):
    """See ``Routing``; ``results`` are those of ``kernels.routing.choose``.

    ``chosen_there`` (R, K) int32 and ``weights_there`` (R, K) float32 are on the card.
    """

    def __init__(self, results: Tensor, rows: int, ranked: int, used: int) -> None:
        plane = rows * ranked
        self._results, self._shape = results, (rows, ranked, used)
        self.chosen_there = results[:plane].view(rows, ranked)[:, :used]
        self.weights_there = results[2 * plane :].view(torch.float32).view(rows, used)
        self._away = True
        self._copied: Any = None  # the event by which ``_host`` has them
        self._host: Tensor | None = None

    def copy_to(self, host: Tensor, copied: Any) -> None:
        """``host`` has the results once the event ``copied`` has happened; None: it has them."""
        self._host, self._copied = host, copied

    @property
    def results(self) -> Tensor:
        """All of them, on the card: (n,) int32."""
        return self._results

    @property
    def away(self) -> bool:
        return self._away

    @property
    def rows(self) -> int:
        return self._shape[0]

    @property
    def used(self) -> int:
        return self._shape[2]

    @property
    def experts(self) -> npt.NDArray[np.int32]:
        rows, ranked, _ = self._shape
        return self._read()[: rows * ranked].reshape(rows, ranked)

    @property
    def scores(self) -> npt.NDArray[np.float32]:
        rows, ranked, _ = self._shape
        plane = rows * ranked
        return self._read()[plane : 2 * plane].view(np.float32).reshape(rows, ranked)

    @property
    def weights(self) -> npt.NDArray[np.float32]:
        rows, ranked, used = self._shape
        return self._read()[2 * rows * ranked :].view(np.float32).reshape(rows, used)

    @property
    def chosen(self) -> npt.NDArray[np.int32]:
        return self.experts[:, : self.used]

    def _read(self) -> npt.NDArray[np.int32]:
        if self._away:
            if self._host is None:
                self._host = self._results.cpu()
            elif self._copied is not None:
                self._copied.synchronize()
            self._away = False
        assert self._host is not None
        values: npt.NDArray[np.int32] = self._host.numpy()
        return values


def on_card(routing: Routing, device: torch.device) -> CudaRouting:
    """``routing``, which may be the host's, where kernels read it."""
    if isinstance(routing, CudaRouting):
        return routing
    parts = routing.experts, routing.scores.view(np.int32), routing.weights.view(np.int32)
    flat = np.concatenate([part.reshape(-1) for part in parts])
    rows, ranked = routing.experts.shape
    return CudaRouting(upload(flat, device), rows, ranked, routing.used)
