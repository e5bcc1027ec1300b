"""Trains the body on the next token, and the MTP block on what the body says of the one after.

The block is unrolled as a draft head's training is: from its second level on, a row takes in what
the block itself gave for the row before. Levels join one after another.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.common.descent import Descent
from benchmarks.hybrid.model import EMBEDDING, HybridModel

_BATCH, _LENGTH = 8, 256  # pieces of a step, and their tokens
_RATE, _ADAMW = 0.02, 0.5  # Muon's rate; AdamW's, of that
_LEVELS = 3
_BLOCK_WEIGHT, _LEVEL_WEIGHT = 0.5, 0.8  # of the block's loss; of each deeper level's


class Trainer:
    """Takes ``total`` steps on random pieces of ``tokens`` (N,), which ``seed`` chooses."""

    def __init__(self, model: HybridModel, tokens: Tensor, *, total: int, seed: int) -> None:
        self.model, self._tokens, self._seed = model, tokens, seed
        self.descent = Descent(
            model.weights, total=total, rate=_RATE, by_adamw={EMBEDDING}, share=_ADAMW
        )

    def train(self) -> tuple[float, list[float]]:
        """One step: the body's loss, and the share of its likeliest tokens that each level guessed.

        The second half of the training begins with two levels, its last quarter with three.
        """
        model, tokens = self.model, self._choose()
        levels = min(_LEVELS, max(1, 4 * self.descent.step // self.descent.total))
        model.refresh()
        hidden = model.body(tokens[:, :-1])
        logits = model.logits(hidden)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        with torch.no_grad():
            truth = logits[:, 1:]
            wanted, best = truth.softmax(-1).flatten(0, 1), truth.argmax(-1)
        own, shares = torch.zeros(()), []
        for level, out in enumerate(model.unrolled(hidden[:, :-1], tokens[:, 1:-1], levels)):
            guessed = model.logits(out)
            own = own + _LEVEL_WEIGHT**level * F.cross_entropy(guessed.flatten(0, 1), wanted)
            shares.append(float((guessed.argmax(-1) == best).float().mean()))
        self.descent.take(loss + _BLOCK_WEIGHT * own)
        return float(loss.detach()), shares

    def _choose(self) -> Tensor:
        """The next step's pieces (B, T + 1)."""
        random = torch.Generator().manual_seed(self._seed * 1_000_003 + self.descent.step)
        starts = torch.randint(len(self._tokens) - _LENGTH - 1, (_BATCH, 1), generator=random)
        return self._tokens[starts + torch.arange(_LENGTH + 1)]


def export(model: HybridModel, folder: Path) -> None:
    """Write the model to ``folder`` as it is published, in bfloat16."""
    tensors = {name: weight.detach().bfloat16() for name, weight in model.weights.items()}
    save_file(tensors, folder / "new.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(model.config, indent=2) + "\n")
    (folder / "new.safetensors").replace(folder / "model.safetensors")
