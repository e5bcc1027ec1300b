"""Steps that a training takes: Muon turns the matrices (Jordan et al. 2024), AdamW all else, and
the rate rises, then falls as a cosine does. What it takes to continue is one file.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_WARM_UP, _LEAST_RATE = 10, 0.05  # steps; share of the rate at the end
_CLIP = 1.0


class Descent:
    """Changes ``weights``; those that are no matrices, or in ``by_adamw``, by AdamW, at a ``share``
    of the ``rate``.

    ``total`` steps are planned; with more than a saved training had, its rate rises again.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        *,
        total: int,
        rate: float,
        by_adamw: Collection[str] = (),
        share: float = 1.0,
    ) -> None:
        self.weights, self.total, self.step = weights, total, 0
        self._rates = (rate, share * rate)
        matrices = {n: w for n, w in weights.items() if w.dim() == 2 and n not in by_adamw}
        others = [weight for name, weight in weights.items() if name not in matrices]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices.values(), lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    def take(self, loss: Tensor) -> float:
        """One step down the gradients of ``loss``, whose value it returns."""
        share = 0.5 * (1 + math.cos(math.pi * self.step / self.total))
        share = _LEAST_RATE + (1 - _LEAST_RATE) * share
        for optimizer, rate in zip(self.optimizers, self._rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, (self.step + 1) / _WARM_UP) * share
            optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.weights.values(), _CLIP)
        for optimizer in self.optimizers:
            optimizer.step()
        self.step += 1
        return float(loss.detach())

    def save(self, path: Path, **more: Tensor) -> None:
        """Write all that ``load`` needs to continue, and ``more``."""
        state = {
            "step": self.step,
            **more,
            "weights": {name: weight.detach() for name, weight in self.weights.items()},
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        new = path.with_suffix(".new")
        torch.save(state, new)
        new.replace(path)

    def load(self, path: Path) -> dict[str, Any]:
        """Continue from a file of ``save``; returns all of it."""
        state: dict[str, Any] = torch.load(path, weights_only=True)
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(state["weights"][name])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = state["step"]
        return state
